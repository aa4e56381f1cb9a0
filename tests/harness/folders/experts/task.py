from typing import Any, TypedDict

input_t = Any
output_t = Any


class TestSpec(TypedDict):
    seed: int

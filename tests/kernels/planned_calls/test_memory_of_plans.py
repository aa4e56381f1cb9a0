"""Plans outlive the call they were made for, and keep none of its tensors: their memory is the caller's again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import backends

import cute_nvfp4 as nv

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]
ROWS, N, K = 48, 128, 128


def weight(count: int = 1) -> nv.PreparedWeight:
    drawn = torch.randn(count, N, K).bfloat16().to(backends.device())
    return nv.prepare_weight(*(nv.quantize(x, backend="reference") for x in drawn))


def compiled(x: torch.Tensor) -> torch.Tensor:
    prepared = weight()
    return torch.compile(lambda x: nv.gemm(x, prepared), backend="eager", fullgraph=True)(x)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gemm": lambda x: nv.gemm(x, weight()),
    "its operator": compiled,
    "gated_gemm": lambda x: nv.gated_gemm(x, weight(2)),
    "grouped_gemm": lambda x: nv.grouped_gemm([(x, weight()), (x[:8], weight())]),
    "quantize": nv.quantize,
    "quantize by rows": lambda x: nv.quantize(x, "fp8_e4m3"),
}


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What earlier tests keep, millions of objects, no collection below looks at."""
    gc.freeze()


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_the_first_call_are_given_back(name: str) -> None:
    # rows that no other test has: the call is planned here
    x = torch.randn(ROWS + 5 + list(CALLS).index(name), K).bfloat16().to(backends.device())
    out = CALLS[name](x)
    parts = out if isinstance(out, (list, tuple)) else [getattr(out, "data", out)]
    kept = [weakref.ref(x), *(weakref.ref(part) for part in parts)]
    del x, out, parts
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)

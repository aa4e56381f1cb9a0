"""FlashInfer-Bench's records that the harness reads and writes, with FlashInfer-Bench's names of their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

STATUSES = (
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_NUMERICAL",
    "INCORRECT_DTYPE",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
)
Name = Annotated[str, Field(min_length=1)]


class _Read(BaseModel):
    """A record that others wrote; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class Axis(_Read):
    """An axis of a definition. Its size is ``value``, or each workload gives it."""

    type: Literal["const", "var", "expr"]
    value: int | None = None
    expression: str | None = None


class TensorOf(_Read):
    """A tensor's axes by name (None for a scalar), and its dtype."""

    shape: list[str] | None
    dtype: str


class Definition(_Read):
    """A computation: axes, inputs, outputs, and the source of its reference function ``run``."""

    name: Name
    op_type: str = ""
    axes: dict[str, Axis]
    inputs: dict[str, TensorOf] = Field(min_length=1)
    outputs: dict[str, TensorOf] = Field(min_length=1)
    reference: Name
    constraints: list[str] | None = None


class SourceFile(_Read):
    """One source file of a solution."""

    path: Name
    content: str


class BuildSpec(_Read):
    """The language and the entry point of a solution."""

    language: str
    target_hardware: list[str] = []
    entry_point: str
    destination_passing_style: bool = True


class Solution(_Read):
    """A kernel for a definition."""

    name: Name
    definition: Name
    author: str = ""
    spec: BuildSpec
    sources: list[SourceFile] = Field(min_length=1)


class InputOf(_Read):
    """The source of an input of a workload."""

    type: Literal["random", "scalar", "safetensors"]
    value: int | float | bool | None = None
    path: str | None = None
    tensor_key: str | None = None


class Workload(BaseModel):
    """Sizes and inputs of one evaluation; the harness writes a workload as it read it."""

    model_config = ConfigDict(extra="allow")

    uuid: Name
    axes: dict[str, int]
    inputs: dict[str, InputOf]


class Correctness(BaseModel):
    """The largest errors of an evaluation."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    max_relative_error: float = 0.0
    max_absolute_error: float = 0.0
    extra: dict[str, Any] | None = None


class Performance(BaseModel):
    """Times in milliseconds; 0 where there are none."""

    latency_ms: float = 0.0
    reference_latency_ms: float = 0.0
    speedup_factor: float = 0.0


class Environment(BaseModel):
    """The hardware and the libraries of an evaluation."""

    hardware: Name
    libs: dict[str, str] = {}


class TraceEvaluation(BaseModel):
    """The result of a solution. correctness: for PASSED and INCORRECT_NUMERICAL; performance: for PASSED; else None."""

    status: Literal[STATUSES]
    environment: Environment
    timestamp: Name
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None


class BenchTrace(BaseModel):
    """The result of one solution on one workload of a definition."""

    definition: Name
    workload: dict[str, Any]
    solution: str | None = None
    evaluation: TraceEvaluation | None = None

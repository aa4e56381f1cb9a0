"""The support matrix, as the package itself answers: it checks and plans each call for each architecture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import (
    GroupedRows,
    dequantize,
    gated_gemm,
    gemm,
    gemv,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    quantize,
    rmsnorm_quantize,
    silu_mul_quantize,
    simulating,
)
from ..errors import CuteNvfp4Error
from ..runtime.kernel import planning_only

ARCHS = ("sm_100a", "sm_103a", "sm_90a", "sm_120a", "sm_121a")
FORMATS = ("nvfp4", "mxfp4", "mxfp8")
PLAIN = (*zip(FORMATS, FORMATS), ("mxfp8", "mxfp4"))
"""Formats of a and of b where both are plain block-scaled tensors."""
_FP8 = torch.float8_e4m3fn
_ROWS, _N, _K = 32, 256, 512


@dataclass(frozen=True)
class Question:
    """One way to call an operation. form: that way in words, for a reader; call: makes the call."""

    operation: str
    operands: str
    form: str
    call: Callable[[], Any]


@dataclass(frozen=True)
class Answer:
    """What the package says of a row on an architecture. reason: why no kernel takes the call, or an empty string."""

    reason: str = ""

    @property
    def runs(self) -> bool:
        """Whether a kernel takes the call."""
        return not self.reason


def _x(dtype: torch.dtype = torch.bfloat16, rows: int = _ROWS) -> torch.Tensor:
    """Activations that are not quantized."""
    return torch.ones(rows, _K, dtype=dtype)


@functools.cache
def _weight(format: str, *batch: int, rows: int = _N) -> Any:
    """A block-scaled operand of ones, made by torch."""
    return quantize(torch.ones(*batch, rows, _K), format, backend="reference")


def _times(a: str, b: str) -> str:
    """A product of two formats, as the table writes it."""
    return f"{a.upper()} × {b.upper()}"


def _products() -> Iterator[Question]:
    """Rows of ``gemm`` and ``gemv``."""
    for f in FORMATS:
        yield Question("gemv", f.upper(), "plain", lambda f=f: gemv(_weight(f), _weight(f, rows=1), backend="sim"))
    for f, g in PLAIN:
        yield Question("gemm", _times(f, g), "plain", lambda f=f, g=g: gemm(_weight(f), _weight(g), backend="sim"))
    for f in FORMATS:
        yield Question("gemm", f"bf16 × {f.upper()}", "plain", lambda f=f: gemm(_x(), _weight(f), backend="sim"))
    for f in FORMATS:
        yield Question("gemm", f"bf16 × {f.upper()}", "prepared", lambda f=f: gemm(_x(), _prepared(f), backend="sim"))
        yield Question("gemm", f"{f.upper()} × {f.upper()}", "prepared",
                  lambda f=f: gemm(_weight(f, rows=_ROWS), _prepared(f), backend="sim"))  # fmt: skip
        yield Question("gemm", f"FP8 × {f.upper()}", "prepared",
                  lambda f=f: gemm(_fp8_rows(), _prepared(f, _FP8), backend="sim"))  # fmt: skip


@functools.cache
def _fp8_rows() -> Any:
    """Activations in E4M3 with a scale for each row."""
    return quantize(_x(), "fp8_e4m3", backend="reference")


def _prepared(format: str, dtype: torch.dtype = torch.bfloat16, *batch: int, gated: bool = False) -> Any:
    """A prepared weight; gated: one of gate and up."""
    up = (_weight(format, *batch),) if gated else ()
    return prepare_weight(_weight(format, *batch), *up, dtype=dtype, backend="sim")


def _gated() -> Iterator[Question]:
    """Rows of ``gated_gemm``."""
    for f, g in PLAIN:
        for form, more in (("plain", {}), ("plain, quantized output", {"out_global_scale": 1.0})):
            if f != "nvfp4" and more:
                continue
            yield Question("gated_gemm", _times(f, g), form, lambda f=f, g=g, more=more: gated_gemm(
                _weight(f, rows=128), _weight(g), _weight(g), backend="sim", **more))  # fmt: skip
    for f in FORMATS:
        yield Question("gated_gemm", f"bf16 × {f.upper()}", "prepared",
                  lambda f=f: gated_gemm(_x(), _prepared(f, gated=True), backend="sim"))  # fmt: skip
        yield Question("gated_gemm", f"FP8 × {f.upper()}", "prepared",
                  lambda f=f: gated_gemm(_fp8_rows(), _prepared(f, _FP8, gated=True), backend="sim"))  # fmt: skip
    yield Question("gated_gemm", "bf16 × NVFP4", "prepared, quantized output", lambda: gated_gemm(
        _x(), _prepared("nvfp4", gated=True), out_global_scale=1.0, backend="sim"))  # fmt: skip


def _grouped() -> Iterator[Question]:
    """Rows of ``grouped_gemm`` (a list) and ``grouped_gemm_contiguous`` (experts' rows in one matrix)."""
    offsets = torch.tensor([0, 16, 32], dtype=torch.int32)
    for f, g in PLAIN:
        yield Question("grouped_gemm", _times(f, g), "plain",
                  lambda f=f, g=g: grouped_gemm([(_weight(f), _weight(g))] * 2, backend="sim"))  # fmt: skip
        yield Question("grouped_gemm_contiguous", _times(f, g), "plain", lambda f=f, g=g: grouped_gemm_contiguous(
            GroupedRows.of(_weight(f, rows=_ROWS), offsets), _weight(g, 2), backend="sim"))  # fmt: skip
    for f in FORMATS:
        for form, gate in (("prepared", ""), ("prepared, gated", "silu")):
            yield Question("grouped_gemm", f"bf16 × {f.upper()}", form, lambda f=f, gate=gate: grouped_gemm(
                [(_x(), _prepared(f, gated=bool(gate)))] * 2, gate=gate, backend="sim"))  # fmt: skip
            yield Question("grouped_gemm_contiguous", f"bf16 × {f.upper()}", form,
                      lambda f=f, gate=gate: grouped_gemm_contiguous(
                          _x(), _prepared(f, torch.bfloat16, 2, gated=bool(gate)), offsets=offsets, gate=gate,
                          backend="sim"))  # fmt: skip
    for f in ("nvfp4", "mxfp4"):
        yield Question("grouped_gemm", f"FP8 × {f.upper()}", "prepared",
                  lambda f=f: grouped_gemm([(_fp8_rows(), _prepared(f, _FP8))] * 2, backend="sim"))  # fmt: skip
        yield Question("grouped_gemm_contiguous", f"FP8 × {f.upper()}", "prepared",
                  lambda f=f: grouped_gemm_contiguous(
                      _fp8_rows(), _prepared(f, _FP8, 2), offsets=offsets, backend="sim"))  # fmt: skip


def _conversions() -> Iterator[Question]:
    """Rows of ``quantize``, of the kernels fused with it, and of ``dequantize``."""
    options: dict[str, dict[str, Any]] = {
        "rule `max`": {},
        "rule `four_six_mse`": {"rule": "four_six_mse"},
        "rule `optimal`": {"rule": "optimal"},
        "rule `hessian`": {"rule": "hessian", "hessian": torch.eye(_K)},
        "stochastic": {"rounding": "stochastic", "generator": 0},
        "rotated": {"hadamard": 0},
        "square tiles": {"block_2d": True},
        "transposed": {"transpose": True},
    }
    for form, more in options.items():
        yield Question(
            "quantize", "bf16 → NVFP4", form, lambda more=more: quantize(_x(), "nvfp4", backend="sim", **more)
        )
    for f in ("mxfp4", "mxfp8", "fp8_e4m3"):
        yield Question("quantize", f"bf16 → {f.upper()}", "rule `max`", lambda f=f: quantize(_x(), f, backend="sim"))
    for f in (*FORMATS, "fp8_e4m3"):
        given = {"global_scale": 1.0 if f == "nvfp4" else None, "format": f, "backend": "sim"}
        yield Question("rmsnorm_quantize", f"bf16 → {f.upper()}", "with a residual",
                  lambda given=given: rmsnorm_quantize(_x(), _x()[0], residual=_x(), **given))  # fmt: skip
        yield Question("silu_mul_quantize", f"bf16 → {f.upper()}", "",
                  lambda given=given: silu_mul_quantize(_x(), _x(), **given))  # fmt: skip
    for f in FORMATS:
        yield Question(
            "dequantize", f"{f.upper()} → bf16", "", lambda f=f: dequantize(_weight(f), torch.bfloat16, backend="sim")
        )


def rows() -> list[Question]:
    """Every row of the matrix, with the rows of an operation together."""
    found = [*_products(), *_gated(), *_grouped(), *_conversions()]
    operations = list(dict.fromkeys(row.operation for row in found))
    return sorted(found, key=lambda row: operations.index(row.operation))


def ask(row: Question, arch: str) -> Answer:
    """The package's answer to ``row`` on ``arch``. Nothing is compiled or launched."""
    with simulating(arch), planning_only():
        try:
            row.call()
        except CuteNvfp4Error as error:
            return Answer(reason=str(error))
    return Answer()


def matrix() -> list[tuple[Question, dict[str, Answer]]]:
    """Every row, with the package's answer on each architecture."""
    return [(row, {arch: ask(row, arch) for arch in ARCHS}) for row in rows()]

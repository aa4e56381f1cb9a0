"""The configurations and arguments of the kernels that quantize rows to E4M3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import explain
from ...runtime.signature import FLOAT32, INT32, INT64, PerConfig, Pointer, Scalar
from ...target import Architecture
from .config import WARP

VECTOR = 16
"""Elements that a thread takes at once: sixteen bytes of the result."""
MAX_THREADS, VECTORS = 1024, (1, 2, 4, 8)
MAX_K = MAX_THREADS * VECTORS[-1] * VECTOR
"""Most elements of a row: those that a CTA has registers for."""
WARP_VECTORS, CTA_ROWS = 4, 4
"""Most vectors of a lane where a warp takes a whole row, and the rows of a CTA there."""
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Fp8RowsConfig:
    """One variant: ``threads`` threads take a row, each up to ``vectors`` vectors of it. dtype: of x. rows: of a CTA,
    more than one where a warp takes each. early: whether the kernel may start while the launch before it still runs;
    that launch writes nothing that this kernel reads, and this kernel ends after it."""

    dtype: str
    threads: int
    vectors: int
    arch: Architecture
    rows: int = 1
    early: bool = False

    @property
    def warps(self) -> int:
        return self.threads // 32


def can_implement(c: Fp8RowsConfig) -> str:
    """Why no kernel can be made of ``c``; an empty string if one can."""
    if c.dtype not in DTYPES:
        return explain("dtype of x", got=c.dtype, expected=" or ".join(DTYPES))
    if c.threads % 32 or not 32 <= c.threads <= MAX_THREADS or c.vectors not in VECTORS:
        expected = f"a multiple of 32 up to {MAX_THREADS}, and one of {VECTORS}"
        return explain("threads and vectors", got=f"{c.threads} and {c.vectors}", expected=expected)
    if c.rows > 1 and (c.threads != WARP or c.rows * WARP > MAX_THREADS):
        return explain(
            "rows of a CTA", got=f"{c.rows} of {c.threads} threads", expected="one, or up to 32 of a warp each"
        )
    return ""


def rows_config(dtype: str, k: int, arch: Architecture) -> Fp8RowsConfig:
    """The variant for rows of ``k`` elements: few vectors for each thread, so that all loads are in flight at once."""
    vectors = -(-k // VECTOR)
    each = next(x for x in VECTORS if x * MAX_THREADS >= vectors and (x > 1 or vectors <= 32))
    threads = -(-vectors // each)
    return Fp8RowsConfig(dtype, min(-(-threads // 32) * 32, MAX_THREADS), each, arch)


def short_rows_config(dtype: str, k: int, arch: Architecture) -> Fp8RowsConfig:
    """The variant for rows of ``k`` elements, with several rows in a CTA where a warp is enough for each: an SM takes
    as long to start a CTA as to quantize such a row."""
    vectors = -(-k // VECTOR)
    each = next((x for x in VECTORS if x * WARP >= vectors and x <= WARP_VECTORS), None)
    return rows_config(dtype, k, arch) if each is None else Fp8RowsConfig(dtype, WARP, each, arch, CTA_ROWS)


class Fp8RowsArguments(NamedTuple):
    """Quantizes x (rows, k), rows ``stride`` bytes apart, to contiguous E4M3 data (rows, k) and scale (rows,)."""

    x: Pointer = Pointer("Uint8", 16)
    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Float32", 4)
    rows: Scalar = INT32
    k: Scalar = INT32
    stride: Scalar = INT64


@dataclass(frozen=True)
class Fp8ComputedConfig(Fp8RowsConfig):
    """One variant of the kernel that computes the rows that it quantizes. source: "silu_mul" or "rmsnorm"; residual,
    weighted: whether "rmsnorm" adds a residual first, and multiplies by a row of weights."""

    source: str = "silu_mul"
    residual: bool = False
    weighted: bool = False


class OtherRows(NamedTuple):
    """Rows in the dtype of x, ``stride`` bytes apart."""

    pointer: Pointer = Pointer("Uint8", 16)
    stride: Scalar = INT64


def _where(condition: Callable[[Any], bool], record: Any) -> PerConfig:
    return PerConfig(lambda c: record if condition(c) else None)


class Fp8ComputedArguments(NamedTuple):
    """Quantizes silu(x) · up, or rmsnorm(x + residual) · weight. eps: added to the mean of squares; inverse_k: 1 / K;
    residual_out: x + residual."""

    rows: Fp8RowsArguments = Fp8RowsArguments()
    up: OtherRows | None = _where(lambda c: c.source == "silu_mul", OtherRows())
    residual: OtherRows | None = _where(lambda c: c.residual, OtherRows())
    residual_out: OtherRows | None = _where(lambda c: c.residual, OtherRows())
    weight: Pointer | None = _where(lambda c: c.weighted, Pointer("Uint8", 16))
    eps: Scalar | None = _where(lambda c: c.source == "rmsnorm", FLOAT32)
    inverse_k: Scalar | None = _where(lambda c: c.source == "rmsnorm", FLOAT32)

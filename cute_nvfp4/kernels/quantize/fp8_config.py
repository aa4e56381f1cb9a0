"""The variants of the kernel that quantizes rows to E4M3, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import explain
from ...runtime.signature import FLOAT32, INT32, INT64, PerConfig, Pointer, Scalar
from ...target import Architecture
from .config import WARP

VECTOR = 16
"""Elements that a thread takes at a time: sixteen bytes of the result."""
MAX_THREADS, VECTORS = 1024, (1, 2, 4, 8)
MAX_K = MAX_THREADS * VECTORS[-1] * VECTOR
"""Elements of a row that a CTA has registers for."""
WARP_VECTORS, CTA_ROWS = 4, 4
"""Vectors of a lane up to which a warp takes a row, and how many a CTA has then."""
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Fp8RowsConfig:
    """One variant: ``threads`` threads take a row, each up to ``vectors`` vectors of it. dtype: of x. rows: of a CTA,
    more than one where a warp takes each. early: whether the kernel may start while the launch before it still runs,
    which writes nothing that it reads; it ends after that one."""

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
    """Why no kernel can be made of ``c``, or an empty string."""
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
    """The variant for rows of K: few vectors a thread, so that all loads are under way at once."""
    vectors = -(-k // VECTOR)
    each = next(x for x in VECTORS if x * MAX_THREADS >= vectors and (x > 1 or vectors <= 32))
    threads = -(-vectors // each)
    return Fp8RowsConfig(dtype, min(-(-threads // 32) * 32, MAX_THREADS), each, arch)


def short_rows_config(dtype: str, k: int, arch: Architecture) -> Fp8RowsConfig:
    """The variant for rows of K, of which a CTA has several where a warp is enough for each: it takes a multiprocessor
    as long to start a CTA as to quantize such a row."""
    vectors = -(-k // VECTOR)
    each = next((x for x in VECTORS if x * WARP >= vectors and x <= WARP_VECTORS), None)
    return rows_config(dtype, k, arch) if each is None else Fp8RowsConfig(dtype, WARP, each, arch, CTA_ROWS)


class Fp8RowsArguments(NamedTuple):
    """data (rows, k) in E4M3, contiguous, and scale (rows,) of x (rows, k), whose rows are ``stride`` bytes apart."""

    x: Pointer = Pointer("Uint8", 16)
    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Float32", 4)
    rows: Scalar = INT32
    k: Scalar = INT32
    stride: Scalar = INT64


@dataclass(frozen=True)
class Fp8ComputedConfig(Fp8RowsConfig):
    """One variant of the kernel that computes the rows it quantizes. source: "silu_mul", or "rmsnorm", which adds a
    ``residual`` first and multiplies with a ``weighted`` row, or not."""

    source: str = "silu_mul"
    residual: bool = False
    weighted: bool = False


class OtherRows(NamedTuple):
    """Rows of the dtype of x, ``stride`` bytes apart."""

    pointer: Pointer = Pointer("Uint8", 16)
    stride: Scalar = INT64


def _where(condition: Callable[[Any], bool], record: Any) -> PerConfig:
    return PerConfig(lambda c: record if condition(c) else None)


class Fp8ComputedArguments(NamedTuple):
    """Quantizes silu(x) · up, or rmsnorm(x + residual) · weight with ``eps`` added to the mean of squares; inverse_k:
    1 / K. residual_out: the new residual."""

    rows: Fp8RowsArguments = Fp8RowsArguments()
    up: OtherRows | None = _where(lambda c: c.source == "silu_mul", OtherRows())
    residual: OtherRows | None = _where(lambda c: c.residual, OtherRows())
    residual_out: OtherRows | None = _where(lambda c: c.residual, OtherRows())
    weight: Pointer | None = _where(lambda c: c.weighted, Pointer("Uint8", 16))
    eps: Scalar | None = _where(lambda c: c.source == "rmsnorm", FLOAT32)
    inverse_k: Scalar | None = _where(lambda c: c.source == "rmsnorm", FLOAT32)

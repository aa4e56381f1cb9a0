"""The variants of the kernel that quantizes rows to E4M3, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...errors import explain
from ...runtime.signature import INT32, INT64, Pointer, Scalar
from ...target import Architecture

VECTOR = 16
"""Elements that a thread takes at a time: sixteen bytes of the result."""
MAX_THREADS, MAX_VECTORS = 1024, 8
KINDS = {"bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Fp8RowsConfig:
    """One variant: a CTA of ``threads`` takes a row, each thread up to ``vectors`` vectors of it. dtype: of x."""

    dtype: str
    threads: int
    vectors: int
    arch: Architecture

    @property
    def warps(self) -> int:
        return self.threads // 32


def can_implement(c: Fp8RowsConfig) -> str:
    """Why no kernel can be made of ``c``, or an empty string."""
    if c.dtype not in KINDS:
        return explain("dtype of x", got=c.dtype, expected=" or ".join(KINDS))
    if c.threads % 32 or not 32 <= c.threads <= MAX_THREADS or not 1 <= c.vectors <= MAX_VECTORS:
        expected = f"a multiple of 32 up to {MAX_THREADS}, and 1 to {MAX_VECTORS}"
        return explain("threads and vectors", got=f"{c.threads} and {c.vectors}", expected=expected)
    return ""


class Fp8RowsArguments(NamedTuple):
    """data (rows, k) in E4M3, contiguous, and scale (rows,) of x (rows, k), whose rows are ``stride`` bytes apart."""

    x: Pointer = Pointer("Uint8", 16)
    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Float32", 4)
    rows: Scalar = INT32
    k: Scalar = INT32
    stride: Scalar = INT64

"""The public functions, one file an operation: validate, choose a backend and a variant, compile once, launch."""

from __future__ import annotations

from ._gated_gemm import compile_gated_gemm, gated_gemm, interleave
from ._gemm import compile_gemm, gemm
from ._gemv import compile_gemv, gemv
from ._grouped_gemm import grouped_gemm, grouped_gemm_contiguous
from ._grouped_launch import compile_grouped_gemm
from ._grouped_rows import GroupedRows
from ._quantize import compile_quantize

__all__ = [
    "GroupedRows",
    "compile_gated_gemm",
    "compile_gemm",
    "compile_gemv",
    "compile_grouped_gemm",
    "compile_quantize",
    "gated_gemm",
    "gemm",
    "gemv",
    "grouped_gemm",
    "grouped_gemm_contiguous",
    "interleave",
]

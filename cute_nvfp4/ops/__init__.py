"""The public functions, one file an operation: validate, choose a backend and a variant, compile once, launch."""

from __future__ import annotations

from ._gemm import compile_gemm, gemm
from ._gemv import compile_gemv, gemv

__all__ = ["compile_gemm", "compile_gemv", "gemm", "gemv"]

"""``nvfp4_gemm``: C = A Bᵀ with NVFP4 operands."""

from .reference import PROBLEM

__all__ = ["PROBLEM"]

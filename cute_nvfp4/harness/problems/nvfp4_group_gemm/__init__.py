"""``nvfp4_group_gemm``: Cᵢ = Aᵢ Bᵢᵀ for a list of problems with NVFP4 operands."""

from .reference import PROBLEM

__all__ = ["PROBLEM"]

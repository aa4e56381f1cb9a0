"""``nvfp4_gemv``: c = A b with NVFP4 operands."""

from .reference import PROBLEM

__all__ = ["PROBLEM"]

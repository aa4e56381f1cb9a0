"""The product of two quantized operands, by whichever backend is there."""

from __future__ import annotations

import torch

import cute_nvfp4
from cute_nvfp4.errors import TargetError, explain
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.reference import gemm_reference

__all__ = ["product"]


def product(a: BlockScaledTensor, b: BlockScaledTensor, out_dtype: torch.dtype, backend: str) -> torch.Tensor:
    """A · Bᵀ of a (M, K) and b (N, K): (M, N).

    backend: "reference" decodes and multiplies in float64; "auto" is that for CPU tensors (a simulated layer would
    take minutes) and ``cute_nvfp4.gemm`` for others; all other names are handed to ``cute_nvfp4.gemm``.
    """
    if backend == "reference" or (backend == "auto" and a.device.type == "cpu"):
        return gemm_reference(a, b, out_dtype=out_dtype)
    gemm = getattr(cute_nvfp4, "gemm", None)
    if gemm is None:
        raise TargetError(
            explain(
                "backend of a product",
                got=repr(backend),
                expected="'reference'",
                hint="This version has no cute_nvfp4.gemm.",
            )
        )
    return gemm(a, b, out_dtype=out_dtype, backend=backend)

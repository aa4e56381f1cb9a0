"""C = silu(A·B1ᵀ) · (A·B2ᵀ): the kernel of ``gemm`` with two accumulators."""

from __future__ import annotations

import cutlass.cute as cute


def gated(x: cute.TensorSSA, gate: cute.TensorSSA) -> cute.TensorSSA:
    """silu(x) · gate in fp32, where silu(x) = x / (1 + exp(−x))."""
    return x / (1.0 + cute.math.exp(-x)) * gate

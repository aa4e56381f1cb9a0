"""Exact oracles in plain torch, on any device: they decode, multiply, sum in float64, and round once.

Every product of two NVFP4 values is exact in float64. A sum of K of them is exact too while the products span less
than 53 bits, and otherwise has a relative error near 1e-16 of the sum of magnitudes: far below the last bit of any
output dtype. Operands are decoded a slab at a time, so a reference needs little memory besides its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from cute_nvfp4.errors import OperandTypeError
from cute_nvfp4.operand import BlockScaledTensor, check_pair

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    # torch's own functions add 1 to values near −1, and so lose small results
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_erf": lambda x: x * torch.special.ndtr(x),
    "relu": torch.relu,
    "identity": lambda x: x,
}
"""The gates of a gated GEMM, by name."""
# Elements of an operand decoded at once: 32 MiB of float64.
_SLAB_ELEMENTS = 1 << 22
_OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def gemv_reference(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    alpha: float | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    accumulate: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``alpha`` · A · b of a (L, M, K) and row 0 of b (L, N ≥ 1, K): (L, M), or (M,) if a has no batch.

    ``accumulate`` is float64, or float32 (products and sums in float32, in torch's order). ``alpha`` and the global
    scales multiply sums in float64, and the result is rounded once to ``out_dtype``. NaN and infinity propagate.
    """
    return gemm_reference(a, b, alpha=alpha, out_dtype=out_dtype, accumulate=accumulate, columns=1)[..., 0]


def gemm_reference(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    alpha: float | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    accumulate: torch.dtype = torch.float64,
    columns: int | None = None,
) -> torch.Tensor:
    """``alpha`` · A · Bᵀ of a (L, M, K) and b (L, N, K): (L, M, N), or (M, N) if a has no batch.

    columns: how many of the N columns to compute, from the first; None: all. Other arguments: as in ``gemv_reference``.
    """
    check_pair(a, b)
    columns = b.rows if columns is None else columns
    if accumulate not in (torch.float32, torch.float64):
        raise OperandTypeError.of("accumulate", got=accumulate, expected="torch.float64 or torch.float32")
    if out_dtype not in _OUT_DTYPES:
        raise OperandTypeError.of("out_dtype", got=out_dtype, expected=" or ".join(map(str, _OUT_DTYPES)))
    a_scale, b_scale = a.rowmajor_scale(), b.rowmajor_scale()
    a_data, b_data = (x.data if x.is_batched else x.data.unsqueeze(0) for x in (a, b))
    out = torch.empty((a.batch, a.rows, columns), dtype=out_dtype, device=a.device)
    slab = max(1, _SLAB_ELEMENTS // a.k)
    for index in range(a.batch):
        for n in range(0, columns, slab):
            n_rows = slice(n, min(n + slab, columns))
            right = b._decode(b_data[index, n_rows], b_scale[index, n_rows], accumulate).t()
            for m in range(0, a.rows, slab):
                m_rows = slice(m, m + slab)
                left = a._decode(a_data[index, m_rows], a_scale[index, m_rows], accumulate)
                total = times(left @ right, alpha, a.global_scale, b.global_scale)
                out[index, m_rows, n_rows] = _round_once(total, out_dtype)
    return out if a.is_batched else out[0]


def times(sums: torch.Tensor, *factors: float | torch.Tensor | None) -> torch.Tensor:
    """``sums`` times the factors that are not None, in float64.

    Global scales multiply after the sum. A value times a global scale has up to 30 bits, so products of such values
    would round, and terms that cancel would leave a remainder, which large factors could make infinite.
    """
    product: float | torch.Tensor = 1.0
    for factor in factors:
        if isinstance(factor, torch.Tensor):
            product = product * (factor.double().reshape(()) if factor.numel() == 1 else factor.double())
        elif factor is not None:
            product = product * factor
    return sums.double() * product


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up in float64, rounded once to the dtype of the gate."""
    wide = gate.double()
    return (wide / (1.0 + torch.exp(-wide)) * up.double()).to(gate.dtype)


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight in float64, rounded once to the dtype of x, (M, K)."""
    wide = x.double()
    # the sum and eps have the kernel's range, that of float32
    total = wide.square().sum(-1, keepdim=True).float().double()
    normed = wide * torch.rsqrt(total / x.shape[-1] + wide.new_full((), eps, dtype=torch.float32))
    return (normed if weight is None else normed * weight.double()).to(x.dtype)


def _round_once(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in ``dtype``, rounded to nearest even once.

    torch converts float64 to 16 bits by way of float32, which rounds twice. Rounding to odd in between makes that
    harmless (Boldo and Melquiond, "When double rounding is odd", 2005).
    """
    if x.dtype is not torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return x.to(dtype)
    nearest = x.to(torch.float32)
    inexact = (nearest.to(torch.float64) != x) & ~torch.isnan(x)
    bits = nearest.view(torch.int32)
    toward_zero = bits - (nearest.to(torch.float64).abs() > x.abs()).to(torch.int32)
    return torch.where(inexact, toward_zero | 1, bits).view(torch.float32).to(dtype)

"""A simulated GPU for whole programs, with operators that torch has on a GPU only and that the CPU computes here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ..formats import as_bytes, decode_e2m1, unpack_e2m1
from ..scale_layout import from_blocked
from ..sim import session
from ..target import DEFAULT_ARCH


def simulated_gpu(arch: str = DEFAULT_ARCH, **options: Any) -> AbstractContextManager[session.Session]:
    """``sim.session.simulated_gpu``, which also computes ``torch._scaled_mm`` of block-scaled operands."""
    operators = {torch.ops.aten._scaled_mm.default: scaled_mm}
    return session.simulated_gpu(arch, host_operators=operators, opener=__name__, **options)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """``torch._scaled_mm``: (M, K) × (K, N), with block scales in the 128×4 layout, as one dimension.

    A block has 16 elements for E4M3 scales and 32 for UE8M0. torch computes products with other scales.
    """
    if scale_a.dtype not in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return torch._scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    block = 16 if scale_a.dtype == torch.float8_e4m3fn else 32
    left, right = _decoded(a), _decoded(b.t())
    product = _scaled(left, scale_a, block) @ _scaled(right, scale_b, block).t()
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype or torch.bfloat16)


def _decoded(x: torch.Tensor) -> torch.Tensor:
    """The values (rows, K) in float64 of FP8 elements (rows, K), or of bytes of E2M1 pairs (rows, K/2)."""
    if x.dtype == torch.float4_e2m1fn_x2:
        return decode_e2m1(unpack_e2m1(as_bytes(x))).double()
    return x.to(torch.float64)


def _scaled(values: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    rows, k = values.shape
    scales = from_blocked(scale.flatten(), rows, -(-k // block))[0].double()
    return values * scales.repeat_interleave(block, dim=1)[:, :k]

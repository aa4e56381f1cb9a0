"""Operations that programs use as their reference, where torch's CPU has none or rounds more often than a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cute_nvfp4.formats import as_bytes, decode_e2m1, unpack_e2m1
from cute_nvfp4.scale_layout import from_blocked


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
    """``torch._scaled_mm``: (M, K) × (K, N); block scales are one dimension in the 128×4 layout, a block of 16 elements
    for E4M3 scales and of 32 for UE8M0. Other scales are left to torch."""
    if scale_a.dtype not in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return torch._scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    block = 16 if scale_a.dtype == torch.float8_e4m3fn else 32
    left, right = _decoded(a), _decoded(b.t())
    product = _scaled(left, scale_a, block) @ _scaled(right, scale_b, block).t()
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype or torch.bfloat16)


def _decoded(x: torch.Tensor) -> torch.Tensor:
    """(rows, K) values in binary64 of (rows, K) FP8 elements or (rows, K/2) bytes of E2M1 pairs."""
    if x.dtype == torch.float4_e2m1fn_x2:
        return decode_e2m1(unpack_e2m1(as_bytes(x))).double()
    return x.to(torch.float64)


def _scaled(values: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    rows, k = values.shape
    scales = from_blocked(scale.flatten(), rows, -(-k // block))[0].double()
    return values * scales.repeat_interleave(block, dim=1)[:, :k]


def _accumulating_wide(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``product`` of 16-bit floats with sums in binary32 and one rounding at the end, as cuBLAS does."""

    def wide(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = {a.dtype for a in _flat(args) if isinstance(a, torch.Tensor)}
        if len(found) != 1 or not found <= {torch.float16, torch.bfloat16} or kwargs:
            return product(*args, **kwargs)
        return product(*_widened(args)).to(found.pop())

    return wide


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _widened(values: Any) -> list[Any]:
    out = []
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.float()
        out.append(_widened(value) if isinstance(value, (list, tuple)) else value)
    return out


_PRODUCTS = (torch.matmul, torch.mm, torch.bmm, torch.einsum, torch.addmm, torch.baddbmm, torch.nn.functional.linear)
_METHODS = (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm)
CPU_VERSIONS: dict[Any, Any] = {torch._scaled_mm: scaled_mm} | {
    f: _accumulating_wide(f) for f in (*_PRODUCTS, *_METHODS)
}
"""Function of torch to what computes it here; called with host tensors."""

"""Operations that programs use as their reference, where torch's CPU rounds more often than a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


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
HOST_VERSIONS: dict[Any, Any] = {f: _accumulating_wide(f) for f in (*_PRODUCTS, *_METHODS)}
"""Function of torch to what computes it here, called with host tensors."""

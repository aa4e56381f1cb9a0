"""What planned calls have in common: new outputs, addresses, and alpha."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..operand import BlockScaledTensor
from .checks import number


def as_alpha(alpha: float | torch.Tensor | None) -> tuple[float, torch.Tensor | None]:
    """A number, and a tensor if it is one; its dtype and shape are known to be right."""
    return (1.0, alpha) if isinstance(alpha, torch.Tensor) else (1.0 if alpha is None else number("alpha", alpha), None)


def allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes tensors like a dense one that nobody uses: its memory is given back.

    ``torch.empty_like`` has only one argument to read, and so takes half the time of ``torch.empty``.
    """
    storage = like.untyped_storage()
    # memory of a simulated GPU, or of another allocator, may be for keeps
    if storage.resizable():
        storage.resize_(0)
    return functools.partial(torch.empty_like, like)


def addresses(*given: torch.Tensor | None) -> tuple[int, ...]:
    """The addresses of those tensors that there are."""
    return tuple([x.data_ptr() for x in given if x is not None])


def scalar_key(x: object) -> object:
    """What a plan depends on of a device scalar, a number or None."""
    if isinstance(x, torch.Tensor):
        return x.dtype, None if x.is_nested else x.shape, x.device, x.is_neg()
    return None if x is None else type(x)


def operand_key(x: object) -> object:
    """What a plan depends on of an operand that may be None."""
    return x.key if isinstance(x, BlockScaledTensor) else None if x is None else type(x)

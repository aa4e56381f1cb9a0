"""What planned calls have in common: new outputs, addresses, and alpha."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

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
    """The addresses of the tensors, without those that are None."""
    return tuple([x.data_ptr() for x in given if x is not None])

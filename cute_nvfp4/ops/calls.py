"""What calls of the operations have in common: keys to find a plan by, and what has to be looked at in every call.

An operation decides once, for a key, all that does not depend on addresses, and keeps that: a *call*. What it is given
later under the same key has passed the same checks. Addresses are read anew in each call, and so is whether the output
overlaps an input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import OperandTypeError
from ..operand import BlockScaledTensor
from ..row_scaled import RowScaledTensor
from .checks import number


def output_key(out: torch.Tensor | None) -> tuple | None:
    """All that a plan depends on of a given output."""
    if out is None:
        return None
    if not isinstance(out, Tensor):
        raise OperandTypeError.of("out", got=type(out).__name__, expected="torch.Tensor")
    return out.dtype, out.shape, out.stride(), out.device, out.data_ptr() & 15


def tensor_key(x: Any) -> tuple | type | None:
    """The same of an input that may be None or a number; numbers vary from call to call."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15
    return None if x is None else type(x)


def scalar_key(x: Any) -> tuple | type | None:
    """The same of a device scalar, a number or None."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.device
    return None if x is None else type(x)


def operand_key(x: Any) -> Any:
    """The same of an operand that may be None."""
    if isinstance(x, (BlockScaledTensor, RowScaledTensor)):
        return x.key
    return None if x is None else type(x)


def any_key(x: Any) -> Any:
    """The same of an operand, or of a tensor in its place."""
    return tensor_key(x) if isinstance(x, Tensor) else operand_key(x)


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

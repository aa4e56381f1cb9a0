"""Decides whether a call of a public function goes through torch's dispatcher, as an operator of ``ops.library``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..operand import BlockScaledTensor, is_wrapper
from ..runtime.simulating import current_session
from ..runtime.torch_private import dispatch_modes as modes
from ..runtime.torch_private import increment_versions


def by_operator(args: Sequence[Any], follows: bool = True) -> bool:
    """Whether a call goes through torch's dispatcher: torch records the call, or a gradient is wanted.

    args: arguments that torch may record: tensors, operands, lists of them. Others are ignored; the call checks them.
    follows: whether autograd follows arguments that require a gradient.
    """
    return recording() or _any_recorded(args, follows and is_grad_enabled())


def _any_recorded(args: Iterable[Any], follows: bool) -> bool:
    for x in args:
        if x is None:
            continue
        if isinstance(x, Tensor):
            if (follows and x.requires_grad) or is_wrapper(x):
                return True
        elif isinstance(x, (list, tuple)):
            if _any_recorded(x, follows):
                return True
        elif isinstance(data := getattr(x, "data", None), Tensor) and is_wrapper(data):
            return True
        elif follows and requires_grad([getattr(x, name, None) for name in ("global_scale", "up_global_scale")]):
            return True
    return False


def requires_grad(x: Any) -> bool:
    """Whether a tensor, or one in a list, requires a gradient."""
    return any(map(requires_grad, x)) if isinstance(x, (list, tuple)) else getattr(x, "requires_grad", False)


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether torch records what is done with ``tensor``."""
    return recording() or is_wrapper(tensor)


def recording() -> bool:
    """Whether torch records what is done with any tensor: it traces, or a dispatch mode is on."""
    if is_dynamo_compiling():
        return True
    count = modes()
    if not count:
        return False
    # the dispatch mode of a simulated session records nothing
    session = current_session()
    return count > (session is not None and session.dispatch.on)


def written_to(*outs: Any) -> None:
    """Raises the autograd version counters of these, so that autograd refuses values it saved before the kernel."""
    increment_versions(outs if all(type(x) is Tensor for x in outs) else tuple(_tensors(outs)))


def _tensors(outs: Iterable[Any]) -> Iterator[Tensor]:
    for x in outs:
        if x is None:
            continue
        if isinstance(x, Tensor):
            yield x
        else:
            yield from _tensors((x.data, x.scale, x.global_scale) if isinstance(x, BlockScaledTensor) else x)

"""When a call of a public function goes through torch's dispatcher, as an operator of ``ops.library``."""

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


def by_operator(operands: Sequence[Any], *others: Any) -> bool:
    """Whether a call goes through torch's dispatcher: where torch records it, or a gradient is asked for.

    operands: of the call. others: what else may require a gradient; numbers and None do not. Elsewhere the dispatcher
    would only cost time. What is no operand is for the call itself to refuse.
    """
    if is_dynamo_compiling() or (modes() and recording()):
        return True
    follows = is_grad_enabled()
    for x in operands:
        data = getattr(x, "data", None)
        if type(data) is not Tensor and isinstance(data, Tensor) and is_wrapper(data):
            return True
        if follows and (factor := getattr(x, "global_scale", None)) is not None and factor.requires_grad:
            return True
    for x in others:
        if type(x) is Tensor:
            if follows and x.requires_grad:
                return True
        elif x is not None and ((follows and requires_grad(x)) or (isinstance(x, Tensor) and is_wrapper(x))):
            return True
    return False


def is_plain(x: Any, out: Any, factor: Tensor | None) -> bool:
    """Whether ``by_operator`` is false, for a call of these alone, sooner than it says so; False where it may be true.

    x, factor: numbers, and a device scalar or None. out: what is written, or None.
    """
    if type(x) is not Tensor or (out is not None and type(out) is not Tensor) or is_dynamo_compiling() or modes():
        return False
    if not is_grad_enabled():
        return True
    return not (
        x.requires_grad or (out is not None and out.requires_grad) or (factor is not None and factor.requires_grad)
    )


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
    # that of a simulated session records nothing
    session = current_session()
    return count > (session is not None and session.dispatch.on)


def written_to(*outs: Any) -> None:
    """Tells autograd that a kernel wrote to these, so that what it had saved of them is not used."""
    increment_versions(outs if all(type(x) is Tensor for x in outs) else tuple(_tensors(outs)))


def _tensors(outs: Iterable[Any]) -> Iterator[Tensor]:
    for x in outs:
        if x is None:
            continue
        if isinstance(x, Tensor):
            yield x
        else:
            yield from _tensors((x.data, x.scale, x.global_scale) if isinstance(x, BlockScaledTensor) else x)

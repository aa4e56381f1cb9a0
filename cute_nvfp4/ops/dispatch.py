"""When a call of a public function goes through torch's dispatcher, as an operator of ``ops.library``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..operand import is_wrapper
from ..runtime.simulating import current_session


def by_operator(operands: Sequence[Any], *others: Any) -> bool:
    """Whether a call goes through torch's dispatcher: where torch records it, or a gradient is asked for.

    operands: of the call. others: what else may require a gradient; numbers and None do not. Elsewhere the dispatcher
    would only cost time. What is no operand is for the call itself to refuse.
    """
    if torch.compiler.is_dynamo_compiling() or (torch._C._len_torch_dispatch_stack() and _modes()):
        return True
    if torch.is_grad_enabled():
        for x in operands:
            factor = getattr(x, "global_scale", None)
            if factor is not None and factor.requires_grad:
                return True
        for x in others:
            if x is not None and (
                getattr(x, "requires_grad", False) or (type(x) is not torch.Tensor and requires_grad(x))
            ):
                return True
    for x in operands:
        data = getattr(x, "data", None)
        if type(data) is not torch.Tensor and isinstance(data, torch.Tensor) and is_wrapper(data):
            return True
    return False


def requires_grad(x: Any) -> bool:
    """Whether a tensor, or one in a list, requires a gradient."""
    return any(map(requires_grad, x)) if isinstance(x, (list, tuple)) else getattr(x, "requires_grad", False)


def is_recorded(tensor: torch.Tensor | None) -> bool:
    """Whether torch records what is done with ``tensor``, or in general: it traces, or a dispatch mode is on."""
    if torch.compiler.is_dynamo_compiling() or _modes():
        return True
    return tensor is not None and is_wrapper(tensor)


def _modes() -> int:
    """How many of torch's dispatch modes are on, that of a simulated session not counted: it records nothing."""
    count = torch._C._len_torch_dispatch_stack()
    session = current_session() if count else None
    return count - (session is not None and session.dispatch.on)


def written_to(*outs: Any) -> None:
    """Tells autograd that a kernel wrote to these, so that what it had saved of them is not used."""
    for out in outs:
        for x in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(x, torch.Tensor) and not x.is_inference():
                torch.autograd.graph.increment_version(x)

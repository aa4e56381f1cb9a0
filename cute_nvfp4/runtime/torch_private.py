"""Every private name of torch that a call of a kernel uses, and for each another way that gives the same and is slower.

torch promises nothing of these names, so each may go with a new torch: then the other way is taken.
``test_torch_private.py`` takes both; it has passed with torch 2.9.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _python_dispatch


class Guards(Protocol):
    """Says whether as many tensors are like those it was made of: type, dtype, device, sizes, strides, whether autograd
    follows them, and what torch's dispatcher tells apart."""

    def check(self, *tensors: Tensor) -> bool: ...


class PythonGuards:
    """``Guards`` by public attributes, in Python."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = [_kind(x) for x in tensors]

    def check(self, *tensors: Tensor) -> bool:
        return len(tensors) == len(self._kinds) and all(map(_is_of_kind, tensors, self._kinds))


def _kind(x: Tensor) -> tuple:
    # a tensor of inference mode lacks one of the dispatcher's keys, and the mode leaves out another one
    keys = x.is_conj(), x.is_neg(), x.is_inference() + torch.is_inference_mode_enabled()
    return type(x), x.dtype, x.device, x.layout, x.shape, x.stride(), x.requires_grad, keys


def _is_of_kind(x: Any, kind: tuple) -> bool:
    return isinstance(x, Tensor) and _kind(x) == kind


def _count_dispatch_modes() -> int:
    return len(_python_dispatch._get_current_dispatch_mode_stack())


def _raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    guards: Callable[[Sequence[Tensor]], Guards] = PythonGuards
else:

    def guards(tensors: Sequence[Tensor]) -> Guards:
        """Guards of distinct tensors, which dynamo's check in C++."""
        return TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[])


dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _count_dispatch_modes)
"""How many dispatch modes are on. No public name of torch says it; the other way makes a list of them first."""
increment_versions: Callable[[tuple[Tensor, ...]], None] = getattr(
    torch._C, "_increment_version", torch.autograd.graph.increment_version
)
"""Tells autograd that tensors were written to; those of inference mode are passed over. The public way first looks
whether it got a single one."""
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
"""The handle of torch's current stream on device ``index``. The public way makes a ``Stream`` object first, which takes
longer than a launch; inductor and Triton ask this way too."""

if hasattr(torch.compiler, "_is_exporting_flag"):

    def is_exporting() -> bool:
        """Whether ``torch.export`` traces. Dynamo of torch 2.9 takes the public function for true in every graph."""
        return torch.compiler._is_exporting_flag

else:
    is_exporting = torch.compiler.is_exporting

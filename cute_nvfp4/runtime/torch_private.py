"""The private names of torch that a call of a kernel uses, each with a slower public substitute.

torch promises nothing about these names; if a new torch lacks one, the substitute is used. ``test_torch_private.py``
tests both; it has passed with torch 2.9.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _python_dispatch


class Guards(Protocol):
    """Compares tensors with those it was made of: type, dtype, device, sizes, strides, whether autograd follows them,
    and the dispatcher's keys."""

    def check(self, *tensors: Tensor) -> bool: ...


class PythonGuards:
    """``Guards`` in Python, by public attributes."""

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
        """Guards of distinct tensors, in dynamo's C++."""
        return TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[])


dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _count_dispatch_modes)
"""The number of dispatch modes that are on. torch has no public name for it; the substitute lists the modes first."""
increment_versions: Callable[[tuple[Tensor, ...]], None] = getattr(
    torch._C, "_increment_version", torch.autograd.graph.increment_version
)
"""Raises the autograd version counters of tensors; skips tensors of inference mode. The public function first checks
whether it got a single tensor."""
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
"""The handle of torch's current stream on device ``index``. The public function makes a ``Stream`` object, which takes
longer than a launch; inductor and Triton use the private one, too."""

if hasattr(torch.compiler, "_is_exporting_flag"):

    def is_exporting() -> bool:
        """Whether ``torch.export`` traces. In dynamo of torch 2.9 the public function is true in every graph."""
        return torch.compiler._is_exporting_flag

else:
    is_exporting = torch.compiler.is_exporting

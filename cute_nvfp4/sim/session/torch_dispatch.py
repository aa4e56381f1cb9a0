"""Operators of torch below autograd: where results lie, which kernel computes them, and what a GPU refuses.

A ``TorchDispatchMode`` sees every computed operator. Unlike the function mode (``torch_device``), it also sees those of
backward passes and of calls from C++. A result on a new storage lies on the device of the inputs, unless
``place`` says otherwise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.session import torch_work
from cute_nvfp4.sim.session.memory import storage_key, tensors_in
from cute_nvfp4.sim.session.streams import StreamChecks

_TORCHS_OWN = ("aten", "prims", "prim", "c10d", "_c10d_functional")
_CUDA, _CPU = (torch._C.DispatchKeySet(key) for key in (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU))


class CudaDispatch(TorchDispatchMode):
    """Computes operators, places their results, and reports to ``streams`` what each one does to memory.

    ``operators`` maps overloads to the functions that replace them for CUDA tensors.
    ``inside`` makes the context in which kernels written in Python are called.
    ``direct`` returns whether C++ called the operator, and not a function of torch's Python API.
    ``count`` is called for each operator on CUDA tensors that is not a view.
    """

    supports_higher_order_operators = True

    def __init__(self, streams: StreamChecks, operators: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.memory, self.streams, self.operators = streams.memory, streams, operators
        self.inside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.direct: Callable[[], bool] = lambda: False
        self.count: Callable[[], None] = lambda: None
        self._here = threading.local()

    @property
    def placing(self) -> int | None:
        return getattr(self._here, "placing", None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: a session compiles nothing, and torch's compiler is slow to load."""
        return False

    @property
    def on(self) -> bool:
        """Whether the mode sees operators at present."""
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    @contextlib.contextmanager
    def place(self, index: int | None, *, quiet: bool = False) -> Iterator[None]:
        """Puts new results on CUDA device ``index`` inside the block (-1: the CPU, None: no change); with ``quiet``,
        the caller reports to ``streams``."""
        before = self.placing, getattr(self._here, "quiet", False)
        self._here.placing, self._here.quiet = before[0] if index is None else index, quiet or before[1]
        try:
            yield
        finally:
            self._here.placing, self._here.quiet = before

    @contextlib.contextmanager
    def backward(self, index: int) -> Iterator[None]:
        """Encloses a backward pass on device ``index`` (-1: the CPU), where C++ puts tensors that have no inputs."""
        before = getattr(self._here, "backward", -1)
        self._here.backward = index
        self.streams.gather()  # torch runs each step on the stream of its forward step, and orders them
        try:
            with self.place(None), self.inside():
                self._here.placing = None
                yield
        finally:
            self._here.backward = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace not in _TORCHS_OWN:
            return self._foreign(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            inputs = list(tensors_in((args, kwargs)))
            places = {self.memory.device_index(t) for t in inputs if t.dim()}
            index = max((i for t in inputs if (i := self.memory.device_index(t)) is not None), default=-1)
            if len(places) > 1 and self.placing is None:
                _refuse_mixed(func)
            target = index if self.placing is None else self.placing
            if not inputs and self.placing is None and self.direct():
                target = getattr(self._here, "backward", -1)
            if max(index, target) >= 0:
                torch_work.refuse_in_capture(self.streams, func)
            known = {storage_key(t) for t in inputs} if target >= 0 else None
            computed = self.operators.get(func, func) if index >= 0 else func
            result = computed(*args, **kwargs)
            if max(index, target) >= 0 and not getattr(func, "is_view", False):
                self.count()
            if known is not None:
                self._adopt(result, known, target)
            if not getattr(self._here, "quiet", False):
                torch_work.note(self.streams, func, args, kwargs, result, max(index, target) >= 0)
            return result

    def _foreign(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Computes an operator of another library with the kernel for the device of its tensors."""
        with torch._C.DisableTorchFunction():
            inputs = list(tensors_in((args, kwargs)))
            index = max((i for t in inputs if (i := self.memory.device_index(t)) is not None), default=-1)
            known = {storage_key(t) for t in inputs}
        name = func.name()
        with self.inside():
            if index < 0:
                return func.redispatch(_CPU, *args, **kwargs)
            result = func.redispatch(_CUDA if self._has_python_kernel(name) else _CPU, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._adopt(result, known, index)
        return result

    def _has_python_kernel(self, name: str) -> bool:
        """Returns whether an operator has a CUDA kernel in Python; raises ``TargetError`` if only a GPU can run it."""
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if f"{name.replace('::', '/')}/CUDA" in torch.library._impls:
            return True
        if has(name, "CUDA") and not has(name, "CPU"):
            raise TargetError(f"operator {name} has machine code for CUDA only, which a simulated session cannot run")
        return False

    def _adopt(self, result: Any, known: set[int | None], index: int) -> None:
        for tensor in tensors_in(result):
            if storage_key(tensor) not in known:
                self.memory.adopt(tensor, index)


_PRODUCTS = {f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv", "cat", "stack")}


def _refuse_mixed(func: Any) -> None:
    """Raises torch's error for tensors on GPU and CPU, if ``func`` is an operator that is known to raise it."""
    if func.name().partition(".")[0] in _PRODUCTS or torch.Tag.pointwise in func.tags:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(in {func.name()})"
        )

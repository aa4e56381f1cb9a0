"""Notices a submission that, in its own process, replaces the functions that time it.

Verdicts, findings and counts belong to the judge and the device, which a submission cannot reach. The functions that do
run beside it (on a GPU the clock, CUDA events, copies of tensors) are called through references that were taken before
the submission is imported, and a snapshot tells whether any of them was replaced since. A submission that rewrites the
memory of its process can still falsify its GPU times; the judge refuses impossible times (too long for the request, too
short for DRAM; docs/explanation/threat_model.md).
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._device import DeviceContext

from ..runtime.torch_private import dispatch_modes

# Named one by one: torch replaces some of its own functions when more of it is loaded (torch.compile does).
_TORCH = {
    torch: (
        "allclose", "as_strided", "clone", "empty", "empty_like", "equal", "eq", "frombuffer", "isclose", "isnan",
        "strided", "sum", "tensor", "zeros", "zeros_like", "Tensor",
    ),
    torch.testing: ("assert_close",),
    torch.cuda: ("Event", "Stream", "current_stream", "default_stream", "is_available", "stream", "synchronize"),
    torch.Tensor: (
        "bitwise_xor", "clone", "contiguous", "copy_", "cpu", "cuda", "data_ptr", "detach", "device", "dtype",
        "element_size", "equal", "fill_", "index_copy_", "index_select", "is_contiguous", "layout", "numel", "permute",
        "shape", "stride", "sum", "to", "untyped_storage", "view", "zero_",
    ),
}  # fmt: skip
_OPERATORS = (
    *("clone", "copy_", "detach", "empty_strided", "fill_.Scalar", "index_copy_", "index_select", "sum.IntList_out"),
    *("view",),
)
"""Operators that the worker calls after a call; through torch.library anyone may replace each of them."""
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_getprofile, _gettrace = sys.getprofile, sys.gettrace
_get_tool = getattr(getattr(sys, "monitoring", None), "get_tool", None)
_getsignal, _getitimer, _registered = signal.getsignal, signal.getitimer, torch._C._dispatch_dump
_function_modes, _function_mode = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_block, _collects, _collect, _collect_not = signal.pthread_sigmask, gc.isenabled, gc.enable, gc.disable
_EVENT = ("__new__", "elapsed_time", "query", "record", "synchronize", "wait")
_STREAM = ("__new__", "record_event", "synchronize", "wait_event", "wait_stream")


def _watched_modules() -> list[ModuleType]:
    own = [module for name, module in sorted(sys.modules.items()) if name.startswith("cute_nvfp4.harness")]
    main = sys.modules.get("__main__")  # the worker itself runs under this name
    return [time, *own, *([main] if main is not None else [])]


class Snapshot:
    """Remembers the callables that the worker relies on, and the form of ``objects``, which hold its state: their
    classes, and the names and classes of their attributes. :meth:`changed` names what was replaced since."""

    def __init__(self, *objects: object) -> None:
        self._entries: list[tuple[object, str, object]] = []
        self._forms = [(owner, _form(owner)) for owner in objects]
        for module in _watched_modules():
            for name, value in list(vars(module).items()):
                if callable(value):
                    self._entries.append((module, name, value))
                functions = [value] if isinstance(value, FunctionType) else []
                if isinstance(value, type) and value.__module__ == module.__name__:
                    own = {n: v for n, v in vars(value).items() if isinstance(v, FunctionType)}
                    self._entries += [(value, method, function) for method, function in own.items()]
                    functions += own.values()
                self._entries += [(function, "__code__", function.__code__) for function in functions]
        # a simulated GPU has its own events and streams
        for owner, names in {**_TORCH, torch.cuda.Event: _EVENT, torch.cuda.Stream: _STREAM}.items():
            self._entries += [(owner, name, getattr(owner, name)) for name in names]
        self._missing = object()

    def changed(self) -> list[str]:
        """The dotted names of everything that was replaced."""
        replaced = [
            f"{owner.__name__}.{name}"
            for owner, name, value in self._entries
            if getattr(owner, name, self._missing) is not value
        ]
        for owner, (kind, before) in self._forms:
            found, now = _form(owner)
            if found is not kind:
                replaced.append(kind.__name__)
            # an attribute that was None gets a value with the first request
            other = (name for name in before | now if before.get(name) not in (type(None), now.get(name)))
            replaced += [f"{kind.__name__}.{name}" for name in sorted(other)]
        return replaced


def _form(owner: object) -> tuple[type, dict[str, type]]:
    """The class of an object, and the class of each of its attributes."""
    return type(owner), {name: type(value) for name, value in object.__getattribute__(owner, "__dict__").items()}


class Hooks:
    """Notices hooks that would run a submission's code after its call has returned: tracing, signals, finalizers,
    torch's modes and operators. It is made before a submission is loaded."""

    def __init__(self) -> None:
        self._tracing, self._before = _tracing(), _hooks()
        self._signals = signal.valid_signals()
        self._mask: set[int] | None = None  # the signal mask to restore; None while the hooks are open
        self._collecting = False

    def close(self) -> str:
        """Blocks signals and the garbage collector until ``open``. Returns the name of a tracer, which it cannot block.

        The clock runs meanwhile; this takes some microseconds.
        """
        self._mask, self._collecting = _block(signal.SIG_BLOCK, self._signals), _collects()
        _collect_not()
        return "" if _same(self._tracing, _tracing()) else "a function that traces or profiles"

    def open(self) -> None:
        """Restores signals and garbage collection, if ``close`` was called."""
        if self._mask is None:
            return
        if self._collecting:
            _collect()
        _block(signal.SIG_SETMASK, self._mask)
        self._mask = None

    def left(self) -> str:
        """Names a hook that was not there before the submission; "" for none."""
        now = _hooks()
        return next((name for name, found in now.items() if not _same(self._before[name], found)), "")


def _tracing() -> list[Any]:
    tools = [_get_tool(number) for number in range(6)] if _get_tool is not None else []
    return [_getprofile(), _gettrace(), *tools]


def _hooks() -> dict[str, list[Any]]:
    modes = [_function_mode(index) for index in range(_function_modes())]
    return {
        "a function that the garbage collector calls": list(gc.callbacks),
        "a signal handler": [_getsignal(number) for number in sorted(signal.valid_signals())],
        "a timer": [_getitimer(timer)[0] > 0 for timer in _TIMERS],
        # torch.set_default_device is one of torch's modes
        "a mode of torch": [
            dispatch_modes(),
            DeviceContext.__torch_function__,
            *(mode for mode in modes if type(mode) is not DeviceContext),
        ],
        "an operator of torch in the place of torch's own": [hash(_registered(f"aten::{name}")) for name in _OPERATORS],
    }


def _same(before: list[Any], now: list[Any]) -> bool:
    """Whether both have the same objects or equal integers. It calls no method of a submission's object."""
    plain = (int, bool)
    return len(before) == len(now) and all(
        was is found or (type(was) in plain and type(found) in plain and was == found)
        for was, found in zip(before, now)
    )

"""Notices a submission that replaces what it is timed with, in its own process.

Verdicts, findings and counts are the judge's and the device's, which a submission cannot reach. What does run beside
it (on a GPU the clock, CUDA events, copies of tensors) is called through references taken before the submission is
imported, and this snapshot tells whether anything of it was replaced meanwhile. A submission that rewrites the memory
of its process can shade its GPU times; times that are not possible (too long for the request, too short for DRAM) are
refused by the judge (docs/explanation/threat_model.md).
"""

from __future__ import annotations

import sys
import time
from types import FunctionType, ModuleType

import torch

# Named one by one: torch replaces some of its own functions when it loads more of itself (torch.compile does).
_TORCH = {
    torch: (
        "allclose", "as_strided", "clone", "empty", "empty_like", "equal", "eq", "frombuffer", "isclose", "isnan",
        "strided", "sum", "zeros", "zeros_like", "Tensor",
    ),
    torch.testing: ("assert_close",),
    torch.cuda: ("Event", "Stream", "current_stream", "default_stream", "is_available", "stream", "synchronize"),
    torch.Tensor: (
        "clone", "contiguous", "copy_", "cpu", "cuda", "data_ptr", "detach", "device", "dtype", "element_size", "equal",
        "fill_", "is_contiguous", "layout", "numel", "permute", "shape", "stride", "sum", "to", "untyped_storage",
        "view", "zero_",
    ),
}  # fmt: skip
_EVENT = ("__new__", "elapsed_time", "query", "record", "synchronize", "wait")
_STREAM = ("__new__", "record_event", "synchronize", "wait_event", "wait_stream")


def _watched_modules() -> list[ModuleType]:
    own = [module for name, module in sorted(sys.modules.items()) if name.startswith("cute_nvfp4.harness")]
    main = sys.modules.get("__main__")  # the worker itself runs under this name
    return [time, *own, *([main] if main is not None else [])]


class Snapshot:
    """Remembers the callables that the worker relies on, and the form of ``objects``, which hold its state: their
    classes, their attributes' names and classes. :meth:`changed` names what was replaced since."""

    def __init__(self, *objects: object) -> None:
        self._entries: list[tuple[object, str, object]] = []
        self._forms = [(owner, _form(owner)) for owner in objects]
        for module in _watched_modules():
            for name, value in list(vars(module).items()):
                if callable(value):
                    self._entries.append((module, name, value))
                if isinstance(value, type) and value.__module__ == module.__name__:
                    own = ((n, v) for n, v in vars(value).items() if isinstance(v, FunctionType))
                    self._entries += [(value, method, function) for method, function in own]
        # a simulated GPU has events and streams of its own
        for owner, names in {**_TORCH, torch.cuda.Event: _EVENT, torch.cuda.Stream: _STREAM}.items():
            self._entries += [(owner, name, getattr(owner, name)) for name in names]
        self._missing = object()

    def changed(self) -> list[str]:
        """Dotted names of what is no longer what it was."""
        replaced = [
            f"{owner.__name__}.{name}"
            for owner, name, value in self._entries
            if getattr(owner, name, self._missing) is not value
        ]
        for owner, (kind, before) in self._forms:
            found, now = _form(owner)
            if found is not kind:
                replaced.append(kind.__name__)
            # what was None then gets a value with the first request
            other = (name for name in before | now if before.get(name) not in (type(None), now.get(name)))
            replaced += [f"{kind.__name__}.{name}" for name in sorted(other)]
        return replaced


def _form(owner: object) -> tuple[type, dict[str, type]]:
    """The class of an object, and that of each of its attributes."""
    return type(owner), {name: type(value) for name, value in object.__getattribute__(owner, "__dict__").items()}

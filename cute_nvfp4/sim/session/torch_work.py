"""What an operator of torch does to memory: which tensors it reads and writes, and whether the host waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from cute_nvfp4.sim.session.memory import storage_key, tensors_in
from cute_nvfp4.sim.session.streams import StreamChecks

_NO_WORK = ("lift_fresh", "detach", "alias", "_unsafe_view", "set_", "resize_", "record_stream", "is_pinned")
_WAITED_FOR = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COPIES = ("copy_", "_to_copy")


@dataclass(frozen=True)
class Operator:
    """The accesses of an operator."""

    name: str
    silent: bool  #: whether it accesses no memory
    free: bool  #: whether it needs no GPU at all: it is silent and allocates nothing
    shapes_only: bool  #: whether it reads none of its inputs
    written: frozenset[int | str]  #: positions and names of the arguments that it writes
    waited: bool  #: whether the host waits for its result

    def writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors among the arguments of a call that the operator writes."""
        named = [*enumerate(args), *kwargs.items()] if self.written else ()
        return [t for key, value in named if key in self.written for t in tensors_in(value)]


@cache
def operator(func: Any) -> Operator:
    """Returns the accesses of an overload, according to its schema, name and tags."""
    name = func.name().partition("::")[2].partition(".")[0]
    arguments = func._schema.arguments
    written = [a.name if a.kwarg_only else i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    allocates = "empty" in name or name == "resize_"
    silent = bool(getattr(func, "is_view", False)) or "empty" in name or name in _NO_WORK
    return Operator(
        name,
        silent,
        silent and not allocates,
        name.endswith("_like") or name.startswith("new_"),
        frozenset([*written, *(arguments[i].name for i in written if isinstance(i, int))]),
        any(tag in func.tags for tag in _WAITED_FOR),
    )


def refuse_in_capture(streams: StreamChecks, func: Any) -> None:
    """Raises ``TargetError`` if ``func`` would work on torch's current stream while that is being captured."""
    found = operator(func)
    if not found.free:
        streams.begin(f"torch's {found.name}")


def note(
    streams: StreamChecks, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, on_device: bool
) -> None:
    """Reports the accesses of a call of ``func`` to ``streams``: as work on torch's current stream if ``on_device``,
    else as work of the host, which matters only while memory is pinned."""
    found = operator(func)
    if found.silent or not (on_device or streams.memory.pins):
        return
    inputs, written = list(tensors_in((args, kwargs))), found.writes(args, kwargs)
    known = {storage_key(t) for t in inputs}
    writes = [*written, *(t for t in tensors_in(result) if storage_key(t) not in known)]
    reads = [] if found.shapes_only else [t for t in inputs if not any(t is w for w in written)]
    if not on_device:
        streams.host_worked(f"torch's {found.name}", reads, writes)
        return
    streams.worked(f"torch's {found.name}", reads, writes)
    if found.waited or (found.name in _COPIES and _blocks(streams, [*reads, *writes], args, kwargs)):
        streams.synchronize()


def _blocks(streams: StreamChecks, tensors: Iterable[torch.Tensor], args: Sequence[Any], kwargs: Mapping) -> bool:
    """Returns whether the host waits for a copy: always with pageable memory, with pinned memory if it is blocking."""
    asked = kwargs.get("non_blocking", any(a is True for a in args))
    pageable = any(streams.memory.entry(t) is None for t in tensors)
    pinned = any(streams.memory.is_pinned(t) for t in tensors)
    return pageable or (pinned and not asked)

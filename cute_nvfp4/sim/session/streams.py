"""The checks for races between streams: one stream writes memory that another uses, and nothing orders the two.

A session does work when it is issued, but the streams of a GPU run concurrently. So these checks compare every launch,
copy and torch operator with the earlier uses of the same bytes. They go by the order that the program establishes
(``order``), not by the order of execution in the session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from cute_nvfp4.sim.observe.touched import Touched
from cute_nvfp4.sim.session.memory import DeviceMemory
from cute_nvfp4.sim.session.order import LEGACY, Clock, Order, Timeline
from cute_nvfp4.sim.session.uses import Bytes, Use, Uses

_OURS = ("torch", "cutlass", "cute_nvfp4", "runpy")
Report = Callable[[str, str, str], None]


class StreamChecks:
    """Records the uses of memory, and reports those that race with earlier ones.

    ``on`` returns whether to check. ``stream`` returns the handle of torch's current stream. ``begin`` is called with
    the name of torch's work before it begins there. ``report`` is called with the text of a hazard, the name of the
    later work, and its place in the program.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory, self.order = memory, Order()
        self.on: Callable[[], bool] = lambda: True
        self.stream: Callable[[], int] = lambda: LEGACY
        self.begin: Callable[[str], None] = lambda what: None
        self.report: Report = lambda text, what, where: None

    def launched(self, what: str, where: str, touched: Touched, issued: tuple[Timeline, int, Clock]) -> None:
        """Checks and records the accesses of a launch, ``issued`` as (timeline, number, clock)."""
        timeline, number, clock = issued
        for region, write, runs in touched.runs():
            for uses in region.owner if isinstance(region.owner, list) else [region.owner]:
                if isinstance(uses, Uses):
                    self._use(
                        uses,
                        Use(timeline, number, write, Bytes.of_runs(runs), what, where),
                        clock,
                        region.name,
                        region.base,
                    )

    def worked(self, what: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Checks and records work of torch on its current stream."""
        self.begin(what)
        if not self.on():
            return
        timeline, number, clock = self.order.issue(self.stream())
        where = place(sys._getframe(2))
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                entry = self.memory.entry(tensor)
                found = Bytes.of_tensor(tensor) if entry is not None else None
                if found is not None:
                    self._use(
                        entry.uses, Use(timeline, number, write, found, what, where), clock, entry.label, entry.base
                    )

    def copied(self, what: str, at: Timeline, read: int, written: int, size: int) -> None:
        """Checks and records a copy of ``size`` bytes to address ``written`` from address ``read``, 0 for a fill."""
        if not self.on() or not size:
            return
        timeline, number, clock = self.order.issue(at)
        for address, write in ((read, False), (written, True)):
            if address and (found := self.memory.uses_at(address)) is not None:
                use = Use(timeline, number, write, Bytes.of_span(address, size), what, place(sys._getframe(2)))
                self._use(found.uses, use, clock, found.label, found.base)

    def host_worked(self, what: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Checks accesses of the host to pinned tensors; it records none, as all later work comes after them."""
        if not self.on():
            return
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                entry = self.memory.entry(tensor)
                found = Bytes.of_tensor(tensor) if entry is not None else None
                if found is not None:
                    use = Use("host", 0, write, found, what, place(sys._getframe(2)))
                    self._check(entry.uses, use, self.order.host, entry.label, entry.base)

    def synchronize(self) -> None:
        """Notes that the host has waited for torch's current stream."""
        self.order.synchronize(self.stream())

    def gather(self) -> None:
        """Orders later work on torch's current stream after all work issued so far."""
        self.order.gather(self.stream())

    def _use(self, uses: Uses, use: Use, clock: Clock, name: str, base: int) -> None:
        self._check(uses, use, clock, name, base)
        uses.add(use)

    def _check(self, uses: Uses, use: Use, clock: Clock, name: str, base: int) -> None:
        found = uses.unordered(use, clock)
        if found is None:
            return
        old, byte = found
        if use.timeline == "host":
            cure = "a synchronize of that stream, or of an event recorded on it,"
        else:
            cure = "an event that the second stream waits for (wait_stream, wait_event), or a synchronize,"
        self.report(
            f"byte {byte - base} of tensor {name!r}\n  is {_done(old)}\n  and {_done(use)},\n"
            f"  and nothing orders the two; {cure} would have to come between",
            use.what,
            use.where,
        )


def _done(use: Use) -> str:
    where = f", {use.where}" if use.where else ""
    return f"{'written' if use.write else 'read'} by {use.what} {_on(use.timeline)}{where}"


def _on(timeline: Timeline) -> str:
    if timeline == "host":
        return "on the host"
    if isinstance(timeline, tuple):
        return f"in a graph captured on stream {timeline[1]:#x}"
    return "on the default stream" if timeline == LEGACY else f"on stream {timeline:#x}"


def place(frame: FrameType | None) -> str:
    """Returns the file and line where the program called a library, or "" if no frame is the program's."""
    at: Any = frame
    while at is not None and at.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        at = at.f_back
    return f"{at.f_code.co_filename}:{at.f_lineno}" if at is not None else ""

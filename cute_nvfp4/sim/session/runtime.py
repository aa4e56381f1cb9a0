"""Streams, events and captures of a session. Its GPU has no clock, and every operation ends as it is issued."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.host.device import Device
from cute_nvfp4.sim.session.memory import DeviceMemory
from cute_nvfp4.sim.session.order import LEGACY, Timeline
from cute_nvfp4.sim.session.streams import StreamChecks

Work = Callable[[Timeline], None]
"""Work on a stream, called with its timeline: a graph has timelines of its own."""
Recorded = list[tuple[int, Work]]
"""The work of a capture or of a graph in its order, each with its captured stream."""
_LAUNCH, _OPERATOR, _INSTRUCTIONS = 100.0, 1.0, 1000.0
"""Counted work of a launch, counted work of a torch operator, and the warp instructions that count as 1."""

NO_TIME = "times between CUDA events are counted work, not times: 100 a launch, 1 for 1000 warp instructions"
"""The note that is printed when a program first asks for a time."""


@dataclass
class Runtime:
    """The state that torch.cuda, cuda.bindings and the launches of a session share.

    A stream in a capture records work instead of doing it, and so does a stream that waits for an event of the capture.
    ``order`` is the order between streams.
    """

    device: Device
    memory: DeviceMemory
    count: int = 1  #: number of devices
    current: int = 0  #: ordinal of the current device
    counted: float = 0.0  #: the work done so far, which events report instead of a time
    events: dict[int, float] = field(default_factory=dict)  #: ``counted`` when each event was recorded
    captures: dict[int, Recorded] = field(default_factory=dict)  #: the open capture of each stream that is in one
    graphs: dict[int, Recorded] = field(default_factory=dict)
    _captured: dict[int, Recorded] = field(default_factory=dict)  # the capture in which each event was recorded
    _handles: Any = field(default_factory=lambda: itertools.count(0x5100_0000, 0x10))
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.streams = StreamChecks(self.memory)
        self.order, self.streams.begin = self.streams.order, self._refuse_in_capture

    def handle(self) -> int:
        """Returns a number that no other stream, event, graph or context of the session has."""
        return next(self._handles)

    def submit(self, stream: int, work: Work) -> None:
        """Does ``work``, or records it if ``stream`` is being captured.

        Raises ``TargetError`` for the default stream while another stream is being captured.
        """
        if stream in self.captures:
            self.captures[stream].append((stream, work))
        else:
            self._refuse_default(stream)
            work(stream)

    def _refuse_default(self, stream: int) -> None:
        if self.captures and stream == LEGACY:
            raise TargetError("work on the default stream while another stream is being captured")

    def _refuse_in_capture(self, what: str) -> None:
        """Raises ``TargetError`` for work of torch on its current stream in a capture, which cannot record it."""
        if (stream := self.streams.stream()) in self.captures:
            raise TargetError(f"{what} on CUDA tensors cannot be captured in a simulated session")
        self._refuse_default(stream)

    def wait(self, stream: int, event: int) -> None:
        """Makes ``stream`` wait for ``event``; if the event is in an open capture, the stream joins that capture."""
        recorded = self._captured.get(event)
        if recorded is not None and any(recorded is open_ for open_ in self.captures.values()):
            self.captures.setdefault(stream, recorded)
        if stream in self.captures:
            self.captures[stream].append((stream, lambda at: self.order.wait(at, event)))
        else:
            self.order.wait(stream, event)

    def wait_stream(self, stream: int, other: int) -> None:
        """Makes ``stream`` wait for all work issued on ``other`` so far."""
        event = self.handle()
        self.record(event, other)
        self.wait(stream, event)
        self.events.pop(event)
        if event not in self._captured:
            self.order.events.pop(event)

    def begin_capture(self, stream: int) -> None:
        if stream in self.captures:
            raise TargetError("the stream is already being captured")
        self.captures[stream] = []

    def end_capture(self, stream: int) -> int:
        """Ends the capture of ``stream`` and returns the handle of its graph."""
        if stream not in self.captures:
            raise TargetError("the stream is not being captured")
        graph, recorded = self.handle(), self.captures[stream]
        self.captures = {s: work for s, work in self.captures.items() if work is not recorded}
        self.graphs[graph] = recorded
        return graph

    def replay(self, graph: int, stream: int = 0) -> None:
        """Does the work of ``graph``, which comes after earlier work on ``stream`` and before later work there."""
        branches = {captured: (graph, captured) for captured, _ in self.graphs[graph]}
        for branch in branches.values():
            self.order.follow(branch, stream)
        for captured, work in self.graphs[graph]:
            work(branches[captured])
        for branch in branches.values():
            self.order.follow(stream, branch)

    def count_launch(self, instructions: int) -> None:
        """Adds a launch of ``instructions`` warp instructions to the counted work."""
        self.counted += _LAUNCH + instructions / _INSTRUCTIONS

    def count_operator(self) -> None:
        """Adds an operator of torch to the counted work."""
        self.counted += _OPERATOR

    def record(self, event: int, stream: int = 0) -> None:
        """Records ``event`` on ``stream``, with the work counted so far."""
        self.events[event] = self.counted
        self._captured.pop(event, None)
        if stream in self.captures:
            self._captured[event] = self.captures[stream]
            self.captures[stream].append((stream, lambda at: self.order.record(event, at)))
        else:
            self.order.record(event, stream)

    def elapsed(self, start: int, end: int) -> float:
        """Returns the work counted between two events, at least 1, in place of the milliseconds.

        The same program always gets the same values. They are far larger than times on a GPU, so that a loop that
        measures until some time has passed ends soon.
        """
        self.say(NO_TIME)
        for event in (start, end):  # on a GPU, the call succeeds only when both have completed
            self.order.synchronize_event(event)
        return max(self.events.get(end, self.counted) - self.events.get(start, 0.0), _OPERATOR)

    def say(self, text: str) -> None:
        """Prints ``text`` to standard error, the first time only."""
        if text not in self._said:
            self._said.add(text)
            print(f"cute_nvfp4.sim: {text}", file=sys.stderr)

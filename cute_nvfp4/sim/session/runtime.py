"""Streams, events and captures of a session: one clock-less GPU on which every operation ends as it is issued."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.host.device import Device
from cute_nvfp4.sim.session.memory import DeviceMemory
from cute_nvfp4.sim.session.order import Timeline
from cute_nvfp4.sim.session.streams import StreamChecks

Work = Callable[[Timeline], None]
"""Work on a stream; it is told which, for a graph has streams of its own."""
Recorded = list[tuple[int, Work]]
_LAUNCH, _OPERATOR, _INSTRUCTIONS = 100.0, 1.0, 1000.0
"""Counted work of a launch, of an operator of torch, and the warp instructions that count as one."""


NO_TIME = "times between CUDA events are counted work, not times: 100 a launch, 1 for 1000 warp instructions"
"""Said once, where a program asks for a time."""


@dataclass
class Runtime:
    """What torch.cuda, cuda.bindings and the launches of a session share.

    A stream that is being captured collects work instead of doing it, and so does one that waits for it. ``order`` is
    the order between streams; ``counted`` is the work done so far: what events say instead of a time.
    """

    device: Device
    memory: DeviceMemory
    count: int = 1
    current: int = 0
    counted: float = 0.0
    events: dict[int, float] = field(default_factory=dict)
    captures: dict[int, Recorded] = field(default_factory=dict)
    graphs: dict[int, Recorded] = field(default_factory=dict)
    _captured: dict[int, Recorded] = field(default_factory=dict)
    _handles: Any = field(default_factory=lambda: itertools.count(0x5100_0000, 0x10))
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.streams = StreamChecks(self.memory)
        self.order = self.streams.order

    def handle(self) -> int:
        """A number that no other stream, event, graph or context of the session has."""
        return next(self._handles)

    def submit(self, stream: int, work: Work) -> None:
        """Does ``work``, or records it where ``stream`` is being captured."""
        if stream in self.captures:
            self.captures[stream].append((stream, work))
        elif self.captures and stream == 0:
            raise TargetError("work on the default stream while another stream is being captured")
        else:
            work(stream)

    def wait(self, stream: int, event: int) -> None:
        """The stream waits for an event; for one of a capture, it joins the capture."""
        recorded = self._captured.get(event)
        if recorded is not None and any(recorded is open_ for open_ in self.captures.values()):
            self.captures.setdefault(stream, recorded)
        if stream in self.captures:
            self.captures[stream].append((stream, lambda at: self.order.wait(at, event)))
        else:
            self.order.wait(stream, event)

    def wait_stream(self, stream: int, other: int) -> None:
        """The stream waits for all that is on another."""
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
        """Ends a capture; returns the handle of its graph."""
        if stream not in self.captures:
            raise TargetError("the stream is not being captured")
        graph, recorded = self.handle(), self.captures[stream]
        self.captures = {s: work for s, work in self.captures.items() if work is not recorded}
        self.graphs[graph] = recorded
        return graph

    def replay(self, graph: int, stream: int = 0) -> None:
        """Does the work of a graph on ``stream``: its own streams begin after it, and it goes on after them."""
        branches = {captured: (graph, captured) for captured, _ in self.graphs[graph]}
        for branch in branches.values():
            self.order.follow(branch, stream)
        for captured, work in self.graphs[graph]:
            work(branches[captured])
        for branch in branches.values():
            self.order.follow(stream, branch)

    def count_launch(self, instructions: int) -> None:
        """Counts a launch of so many warp instructions as work."""
        self.counted += _LAUNCH + instructions / _INSTRUCTIONS

    def count_operator(self) -> None:
        """Counts an operator of torch as work."""
        self.counted += _OPERATOR

    def record(self, event: int, stream: int = 0) -> None:
        """Notes the work done, and what is on the stream, when an event is recorded."""
        self.events[event] = self.counted
        self._captured.pop(event, None)
        if stream in self.captures:
            self._captured[event] = self.captures[stream]
            self.captures[stream].append((stream, lambda at: self.order.record(event, at)))
        else:
            self.order.record(event, stream)

    def elapsed(self, start: int, end: int) -> float:
        """Stands for the milliseconds between two events: the work counted between them, at least 1, not a time.

        The same program gives the same numbers. They are far larger than times on a GPU, so that a loop that measures
        until some time has passed ends soon.
        """
        self.say(NO_TIME)
        for event in (start, end):  # a time that is there says that both are over
            self.order.synchronize_event(event)
        return max(self.events.get(end, self.counted) - self.events.get(start, 0.0), _OPERATOR)

    def say(self, text: str) -> None:
        """A note to standard error, the first time only."""
        if text not in self._said:
            self._said.add(text)
            print(f"cute_nvfp4.sim: {text}", file=sys.stderr)

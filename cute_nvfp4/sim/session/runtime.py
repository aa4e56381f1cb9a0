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

Work = Callable[[], None]
_LAUNCH, _OPERATOR, _INSTRUCTIONS = 100.0, 1.0, 1000.0
"""Counted work of a launch, of an operator of torch, and the warp instructions that count as one."""


NO_TIME = "times between CUDA events are counted work, not times: 100 a launch, 1 for 1000 warp instructions"
"""Said once, where a program asks for a time."""


@dataclass
class Runtime:
    """What torch.cuda, cuda.bindings and the launches of a session share.

    Streams and events are handles only. A stream that is being captured collects work instead of doing it.
    ``counted`` is the work done so far: what events say instead of a time.
    """

    device: Device
    memory: DeviceMemory
    count: int = 1
    current: int = 0
    counted: float = 0.0
    events: dict[int, float] = field(default_factory=dict)
    captures: dict[int, list[Work]] = field(default_factory=dict)
    graphs: dict[int, list[Work]] = field(default_factory=dict)
    _handles: Any = field(default_factory=lambda: itertools.count(0x5100_0000, 0x10))
    _said: set[str] = field(default_factory=set)

    def handle(self) -> int:
        """A number that no other stream, event, graph or context of the session has."""
        return next(self._handles)

    def submit(self, stream: int, work: Work) -> None:
        """Does ``work``, or records it where ``stream`` is being captured."""
        if stream in self.captures:
            self.captures[stream].append(work)
        elif self.captures and stream == 0:
            raise TargetError("work on the default stream while another stream is being captured")
        else:
            work()

    def begin_capture(self, stream: int) -> None:
        if stream in self.captures:
            raise TargetError("the stream is already being captured")
        self.captures[stream] = []

    def end_capture(self, stream: int) -> int:
        """Ends a capture; returns the handle of its graph."""
        if stream not in self.captures:
            raise TargetError("the stream is not being captured")
        graph = self.handle()
        self.graphs[graph] = self.captures.pop(stream)
        return graph

    def replay(self, graph: int) -> None:
        for work in self.graphs[graph]:
            work()

    def count_launch(self, instructions: int) -> None:
        """Counts a launch of so many warp instructions as work."""
        self.counted += _LAUNCH + instructions / _INSTRUCTIONS

    def count_operator(self) -> None:
        """Counts an operator of torch as work."""
        self.counted += _OPERATOR

    def record(self, event: int) -> None:
        """Notes the work done when an event is recorded."""
        self.events[event] = self.counted

    def elapsed(self, start: int, end: int) -> float:
        """Stands for the milliseconds between two events: the work counted between them, at least 1, not a time.

        The same program gives the same numbers. They are far larger than times on a GPU, so that a loop that measures
        until some time has passed ends soon.
        """
        self.say(NO_TIME)
        return max(self.events.get(end, self.counted) - self.events.get(start, 0.0), _OPERATOR)

    def say(self, text: str) -> None:
        """A note to standard error, the first time only."""
        if text not in self._said:
            self._said.add(text)
            print(f"cute_nvfp4.sim: {text}", file=sys.stderr)

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

NO_TIME = float("nan")
"""What the time between two events is: the simulator does not model time, and a made-up number would be believed."""

Work = Callable[[], None]


@dataclass
class Runtime:
    """What torch.cuda, cuda.bindings and the launches of a session share.

    Streams and events are handles only. A stream that is being captured collects work instead of doing it.
    """

    device: Device
    memory: DeviceMemory
    count: int = 1
    current: int = 0
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

    def elapsed(self) -> float:
        """Milliseconds between two events: not a number, said once."""
        self.say("times between CUDA events are nan: the simulator does not model time")
        return NO_TIME

    def say(self, text: str) -> None:
        """A note to standard error, the first time only."""
        if text not in self._said:
            self._said.add(text)
            print(f"cute_nvfp4.sim: {text}", file=sys.stderr)

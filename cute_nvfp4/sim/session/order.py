"""The order that a program establishes between streams, the host and events, kept as vector clocks.

Work on a stream comes after earlier work on that stream, after all work that the host had waited for when it issued
this work, and after the events that the stream waits for. The default stream is CUDA's legacy one: its work comes after
earlier work of all blocking streams, and theirs after earlier work of the default stream. It does not order the
non-blocking streams that ``torch.cuda.Stream`` makes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

Timeline = Hashable
"""A sequence of work: the handle of a stream or, in a graph, (handle of the graph, captured stream)."""
Clock = dict[Timeline, int]
"""A vector clock: maps each timeline to the number of its last work that came before, by default 0."""

LEGACY, _LEGACY_TOO, PER_THREAD = 0, 1, 2  # handles of default streams (CU_STREAM_LEGACY is 1)


def _join(into: Clock, other: Clock) -> None:
    for timeline, number in other.items():
        if number > into.get(timeline, 0):
            into[timeline] = number


@dataclass
class Order:
    """The vector clocks of a session's streams, host and events."""

    host: Clock = field(default_factory=dict)  #: the work that the host knows to have ended
    events: dict[int, Clock] = field(default_factory=dict)  #: the work that each recorded event comes after
    blocking: set[Timeline] = field(default_factory=lambda: {PER_THREAD})  #: streams that the default stream orders
    _clocks: dict[Timeline, Clock] = field(default_factory=lambda: {LEGACY: {}})

    def at(self, timeline: Timeline) -> Clock:
        """Updates the clock of ``timeline`` and returns it: it has what comes before work that the host issues now."""
        timeline = LEGACY if timeline == _LEGACY_TOO else timeline
        clock = self._clocks.setdefault(timeline, {})
        if timeline == LEGACY:
            for other in self.blocking:
                _join(clock, self._clocks.get(other, {}))
        elif timeline in self.blocking:
            _join(clock, self._clocks[LEGACY])
        _join(clock, self.host)
        return clock

    def issue(self, timeline: Timeline) -> tuple[Timeline, int, Clock]:
        """Issues work on ``timeline``; returns its timeline, its number there, and the clock with this work in it."""
        timeline = LEGACY if timeline == _LEGACY_TOO else timeline
        clock = self.at(timeline)
        clock[timeline] = clock.get(timeline, 0) + 1
        return timeline, clock[timeline], clock

    def record(self, event: int, timeline: Timeline) -> None:
        """Records ``event``, which comes after all work issued on ``timeline`` so far."""
        self.events[event] = dict(self.at(timeline))

    def wait(self, timeline: Timeline, event: int) -> None:
        """Orders later work on ``timeline`` after ``event``; an event that was never recorded orders nothing."""
        _join(self.at(timeline), self.events.get(event, {}))

    def follow(self, timeline: Timeline, other: Timeline) -> None:
        """Orders later work on ``timeline`` after all work issued on ``other`` so far."""
        _join(self.at(timeline), self.at(other))

    def synchronize(self, timeline: Timeline | None = None) -> None:
        """Notes that the host has waited for ``timeline``, or for all of them."""
        for one in list(self._clocks) if timeline is None else [timeline]:
            _join(self.host, self.at(one))

    def synchronize_event(self, event: int) -> None:
        """Notes that the host has waited for ``event``."""
        _join(self.host, self.events.get(event, {}))

    def gather(self, timeline: Timeline) -> None:
        """Orders later work on ``timeline`` after all work issued on any timeline so far."""
        for other in list(self._clocks):
            self.follow(timeline, other)

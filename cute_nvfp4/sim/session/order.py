"""The order that a program makes between streams, the host and events: vector clocks over launches.

Work on a stream comes after what was issued there before, after what the host has waited for when it issues it, and
after the events that the stream waits for. The default stream is CUDA's legacy one: its work comes after that of all
blocking streams, and theirs after its own. ``torch.cuda.Stream`` makes non-blocking streams, which it does not order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

Timeline = Hashable
"""The handle of a stream, or (graph, stream of its capture)."""
Clock = dict[Timeline, int]
"""How much of each timeline has come before; what it does not name, nothing."""

LEGACY, _LEGACY_TOO, PER_THREAD = 0, 1, 2


def _join(into: Clock, other: Clock) -> None:
    for timeline, number in other.items():
        if number > into.get(timeline, 0):
            into[timeline] = number


@dataclass
class Order:
    """``host`` is what the host knows to be over, ``events`` what an event comes after."""

    host: Clock = field(default_factory=dict)
    events: dict[int, Clock] = field(default_factory=dict)
    blocking: set[Timeline] = field(default_factory=lambda: {PER_THREAD})
    _clocks: dict[Timeline, Clock] = field(default_factory=lambda: {LEGACY: {}})

    def at(self, timeline: Timeline) -> Clock:
        """What comes before work that the host issues on ``timeline`` now."""
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
        """Work is issued: its timeline, its number there, and what comes before it."""
        timeline = LEGACY if timeline == _LEGACY_TOO else timeline
        clock = self.at(timeline)
        clock[timeline] = clock.get(timeline, 0) + 1
        return timeline, clock[timeline], clock

    def record(self, event: int, timeline: Timeline) -> None:
        """The event comes after all that is on the stream."""
        self.events[event] = dict(self.at(timeline))

    def wait(self, timeline: Timeline, event: int) -> None:
        """What comes on the stream comes after the event; one that was never recorded orders nothing."""
        _join(self.at(timeline), self.events.get(event, {}))

    def follow(self, timeline: Timeline, other: Timeline) -> None:
        """What comes on the stream comes after all that is on the other."""
        _join(self.at(timeline), self.at(other))

    def synchronize(self, timeline: Timeline | None = None) -> None:
        """The host has waited for a stream, or for all of them."""
        for one in list(self._clocks) if timeline is None else [timeline]:
            _join(self.host, self.at(one))

    def synchronize_event(self, event: int) -> None:
        """The host has waited for an event."""
        _join(self.host, self.events.get(event, {}))

    def gather(self, timeline: Timeline) -> None:
        """What comes on the stream comes after all that was issued on any."""
        for other in list(self._clocks):
            self.follow(timeline, other)

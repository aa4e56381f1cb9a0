"""Reports how far a long launch has come, and how much longer it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.wave import Group, Wave

EVERY_S = 5.0
_STEPS = 0x3FF
"""A mask of the count of executed blocks: the clock is read once in 1024 blocks."""


class Heartbeat(Listener):
    """A client of any number of launches. It gives ``tell`` a line every ``every`` seconds of the clock ``now``."""

    def __init__(
        self, tell: Callable[[str], None], every: float = EVERY_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._every, self._now = tell, every, now
        self._run: object = None
        self._steps = 0

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        if wave.run is not self._run:
            self._run, self._begun = wave.run, self._now()
            self._next = self._begun + self._every
        return (self,)

    def block(self, g: Group, index: int) -> None:
        self._steps += 1
        if self._steps & _STEPS == 0 and self._now() >= self._next:
            self._next = self._now() + self._every
            self._tell(self._line(g.wave))

    def _line(self, wave: Wave) -> str:
        run, seconds = wave.run, self._now() - self._begun
        each = wave.count // wave.cluster_count
        total = run.clusters.count * each
        done = total - len(run.clusters_left) * each - int(wave.cta_alive.sum())
        line = f"{run.launch.title}: {done:,} of {total:,} CTAs done in {seconds:.0f} s"
        if done <= 0:
            return line
        left = seconds * (total - done) / done
        return f"{line}, about {left:.0f} s more" if left < 90 else f"{line}, about {left / 60:.0f} minutes more"

"""Observes a simulated GEMM: its launch, its counters, and the arrivals at each of its mbarriers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

import cute_nvfp4.sim
from cute_nvfp4.sim import Launch, Result
from cute_nvfp4.sim.machine.mbarrier import Mbarriers


@dataclass
class Observed:
    """What one launch of a single wave did; keys are (CTA, shared address of the barrier)."""

    launches: list[Launch] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    waves: list[Mbarriers] = field(default_factory=list)
    arrivals: Counter[tuple[int, int]] = field(default_factory=Counter)
    tx_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def barriers(self) -> Mbarriers:
        (wave,) = self.waves
        return wave

    def first(self) -> int:
        """The shared address of the first barrier."""
        return min(self.barriers.offset_of)

    def of(self, cta: int, word: int) -> tuple[int, int, int, int]:
        """(initial count, phases that have ended, arrivals, bytes) of barrier ``word`` of a CTA."""
        barriers, offset = self.barriers, self.first() + 8 * word
        slot = barriers.slot_of[offset]
        key = (cta, offset)
        return (
            int(barriers.count[cta, slot]),
            int(barriers.phase[cta, slot]),
            self.arrivals[key],
            self.tx_bytes[key],
        )


@contextlib.contextmanager
def observing() -> Iterator[Observed]:
    """Within this block, a simulated launch fills the yielded record."""
    seen = Observed()
    patch = pytest.MonkeyPatch()
    run, arrive, complete = cute_nvfp4.sim.run, Mbarriers.arrive, Mbarriers.complete_tx

    def running(program, launch, memory, **options):
        seen.launches.append(launch)
        seen.results.append(run(program, launch, memory, **options))
        return seen.results[-1]

    def arriving(self, where, cta, offset, count=1):
        # several arrivals at one barrier in one call come back here one by one
        before = seen.arrivals.copy()
        phase = arrive(self, where, cta, offset, count)
        seen.arrivals = before
        _add(seen.arrivals, cta, offset, count)
        if not any(w is self for w in seen.waves):
            seen.waves.append(self)
        return phase

    def completing(self, where, cta, offset, size):
        complete(self, where, cta, offset, size)
        _add(seen.tx_bytes, cta, offset, size)

    patch.setattr(cute_nvfp4.sim, "run", running)
    patch.setattr(Mbarriers, "arrive", arriving)
    patch.setattr(Mbarriers, "complete_tx", completing)
    try:
        yield seen
    finally:
        patch.undo()


def _add(counter: Counter, cta: np.ndarray, offset: np.ndarray, count: np.ndarray | int) -> None:
    for c, o, n in zip(cta.tolist(), offset.tolist(), np.broadcast_to(count, cta.shape).tolist()):
        counter[c, o] += n

"""What the launches of a call did of its work, as the device saw it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from ..sim import GlobalMemory, Result
from ..sim.execution import Uses
from ..sim.observe.touched import Runs
from .mapped import BASE, Mapped

PER_INSTRUCTION = 32 * 4
"""Multiply-adds that a warp instruction can do without tensor cores, at most: four in each lane."""


class Told(BaseModel):
    """``read`` bytes, each once; at most so many ``multiply_adds``; ``by_host`` says what was written into the GPU's
    memory by other means than launches, "" where that was not asked for or there is none."""

    read: int = 0
    multiply_adds: int = 0
    by_host: str = ""


class Work:
    """Counts it over the launches of a call. With the ``memory``, what lies there is compared before and after each
    launch with what launches left: all else was written by the host, by torch's operators above all."""

    def __init__(self, memory: Mapped | None = None) -> None:
        self._memory = memory
        self._mirror = None if memory is None else memory.copy()
        self._read: list[Runs] = []
        self._changed: list[tuple[str, np.ndarray]] = []
        self._multiply_adds, self._by_host = 0, ""

    def before(self, memory: GlobalMemory) -> None:
        """A launch is about to run on ``memory``."""
        if self._mirror is not None:
            found = [(region.name, self._differing(region.base - BASE, region.size)) for region in memory.regions]
            self._changed = [(name, places) for name, places in found if len(places)]

    def after(self, result: Result, touched: Uses) -> None:
        """It has run."""
        self._multiply_adds += PER_INSTRUCTION * result.instructions + sum(m.multiply_adds for m in result.mma)
        found = list(touched.runs())
        read = [runs for _, write, runs in found if not write]
        self._read += read
        if self._mirror is None:
            return
        for name, places in self._changed:
            count = sum(_inside(BASE + places, runs) for runs in read)
            if count and not self._by_host:
                self._by_host = f"a launch read {count} bytes of tensor {name!r} that no launch had written"
        for runs in (runs for _, write, runs in found if write):
            for first, last in zip((runs.first - BASE).tolist(), (runs.last - BASE).tolist()):
                self._mirror[first:last] = self._memory.bytes_at(first, last - first)

    def told(self, outputs: Sequence[tuple[int, int]]) -> dict:
        """What was seen; ``outputs`` (offset, size) must hold what launches left there."""
        if self._mirror is not None and not self._by_host:
            count = sum(len(self._differing(*place)) for place in outputs)
            self._by_host = f"{count} bytes of the outputs are not what launches wrote" if count else ""
        read = 0
        if self._read:
            runs = Runs.of(*(np.concatenate(parts) for parts in zip(*self._read)))
            read = int((runs.last - runs.first).sum())
        return Told(read=read, multiply_adds=self._multiply_adds, by_host=self._by_host).model_dump()

    def _differing(self, offset: int, size: int) -> np.ndarray:
        """Which of the arena's bytes from ``offset`` on are not what they were."""
        was = self._mirror[offset : offset + size]
        return offset + np.flatnonzero(self._memory.bytes_at(offset, size) != was)


def _inside(places: np.ndarray, runs: Runs) -> int:
    """How many of the places (in any order) lie in the runs."""
    at = np.searchsorted(runs.first, places, "right") - 1
    return int(((at >= 0) & (places < runs.last[at])).sum())

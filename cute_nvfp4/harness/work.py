"""The work that the launches of a call did, as the device sees it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from ..sim import GlobalMemory, Result
from ..sim.execution import Uses
from ..sim.observe.touched import Runs
from .mapped import BASE, Mapped

PER_INSTRUCTION = 32 * 4
"""Most multiply-adds of a warp instruction without tensor cores: four in each lane."""


class Told(BaseModel):
    """A summary of the work. read: bytes, each counted once; multiply_adds: at most so many; by_host: what was written
    to GPU memory by other means than launches, "" if nothing, or if nobody asked."""

    read: int = 0
    multiply_adds: int = 0
    by_host: str = ""


class Work:
    """Counts the work of a call's launches. With ``memory``, it compares memory before and after each launch with what
    launches left there: the host, mostly torch's operators, has written everything else."""

    def __init__(self, memory: Mapped | None = None) -> None:
        self._memory = memory
        self._mirror = None if memory is None else memory.copy()
        self._read: list[Runs] = []
        self._changed: list[tuple[str, np.ndarray]] = []
        self._multiply_adds, self._by_host = 0, ""

    def before(self, memory: GlobalMemory) -> None:
        """Compares memory with what launches left, before a launch runs on ``memory``."""
        if self._mirror is not None:
            found = [(region.name, self._differing(region.base - BASE, region.size)) for region in memory.regions]
            self._changed = [(name, places) for name, places in found if len(places)]

    def after(self, result: Result, touched: Uses) -> None:
        """Counts the work of a launch that has run, and remembers what it wrote."""
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
        """A summary, as a dictionary. outputs: (offset, size) of memory that must hold what launches wrote."""
        if self._mirror is not None and not self._by_host:
            count = sum(len(self._differing(*place)) for place in outputs)
            self._by_host = f"{count} bytes of the outputs are not what launches wrote" if count else ""
        read = 0
        if self._read:
            runs = Runs.of(*(np.concatenate(parts) for parts in zip(*self._read)))
            read = int((runs.last - runs.first).sum())
        return Told(read=read, multiply_adds=self._multiply_adds, by_host=self._by_host).model_dump()

    def _differing(self, offset: int, size: int) -> np.ndarray:
        """The offsets of bytes of the arena, from ``offset`` on, that differ from what launches left."""
        was = self._mirror[offset : offset + size]
        return offset + np.flatnonzero(self._memory.bytes_at(offset, size) != was)


def _inside(places: np.ndarray, runs: Runs) -> int:
    """The number of places (in any order) that lie in the runs."""
    at = np.searchsorted(runs.first, places, "right") - 1
    return int(((at >= 0) & (places < runs.last[at])).sum())

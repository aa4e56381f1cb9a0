"""Finds loops that never end: warps that come back to the same place with the same registers while nothing changes.

A warp may spin on memory for as long as another one needs to write it. When nobody writes any more, and every warp
that still runs has been seen in the same state before, the kernel hangs: execution is deterministic.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.machine.wave import Group, Wave

QUIET = 2048
"""Blocks executed without any effect on memory before states are compared: comparing costs time."""


class Livelock:
    """Watches one wave."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.effects, self.since = -1, 0
        self.seen: dict[tuple, int] = {}
        self.stuck: np.ndarray | None = None

    def hangs(self, group: Group, clock: int, live: list[int]) -> bool:
        """Called before ``group`` runs its block; whether it and all others that can run are caught in loops."""
        wave = self.wave
        now = wave.changes
        if now != self.effects:
            self.effects, self.since, self.stuck = now, clock, None
            return False
        if clock - self.since < QUIET:
            return False
        if self.stuck is None:
            self.seen, self.stuck = {}, np.zeros(wave.warps, bool)
        key = (group.block, group.warps.tobytes())
        state = hash((group.lanes().tobytes(), *(group.regs[s].tobytes() for s in live)))
        if self.seen.get(key) == state:
            self.stuck[group.warps] = True
        self.seen[key] = state
        return bool(self.stuck.any())

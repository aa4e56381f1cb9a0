"""Finds loops that never end: warps that return to the same block with the same registers while nothing changes.

A warp may spin on memory until another warp writes it. When nothing changes any more, and every warp that still runs
has been seen in the same state before, the kernel hangs, because execution is deterministic.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.machine.wave import Group, Wave

QUIET = 2048
"""Steps without a change in the wave after which states are compared, because comparing costs time."""


class Livelock:
    """The watch over the loops of one wave. ``stuck`` (warps,) marks warps that have returned to a state that they had
    after the last change; None until states are compared."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.effects, self.since = -1, 0
        self.seen: dict[tuple, int] = {}
        self.stuck: np.ndarray | None = None

    def hangs(self, group: Group, clock: int, live: list[int]) -> bool:
        """Notes the state of ``group``, which is about to run its block at step ``clock`` with the registers ``live``.
        Returns whether any warp is stuck."""
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

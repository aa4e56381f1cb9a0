"""A warp of each CTA that is held back: it goes on when nothing else can."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.machine.wave import Group, Wave

LONGEST = 4096
"""Blocks after which it goes on all the same: others may poll."""


class Held:
    """``back`` are the groups that wait. A schedule that holds nobody back has none."""

    def __init__(self, wave: Wave) -> None:
        schedule = wave.run.schedule
        self.wave, self.on = wave, schedule.warps == "held"
        self.number = schedule.seed % wave.warps_per_cta
        self.back: list[Group] = []
        self._goes = False

    def keep(self, ready: list[Group], clock: int, part: Callable[[Group, np.ndarray], Group]) -> list[Group]:
        """The groups that may go on, without the warps held back; ``part`` takes rows of a group."""
        if self._goes or clock % LONGEST == LONGEST - 1:
            ready, self.back, self._goes = ready + self.back, [], False
            return ready
        free: list[Group] = []
        for g in ready:
            held = self.wave.warp_in_cta[g.warps] == self.number
            for rows, where in ((held, self.back), (~held, free)):
                if rows.any():
                    where.append(part(g, np.flatnonzero(rows)))
        return free

    def let_go(self) -> bool:
        """Nothing else can go on: they may, for a block. Returns whether there are any."""
        self._goes = bool(self.back)
        return self._goes

"""The schedule that holds back one warp of each CTA: that warp goes on only when nothing else can."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.machine.wave import Group, Wave

LONGEST = 4096
"""Steps after which the held warps go on all the same, because other warps may poll for what they do."""


class Held:
    """The held warps of a wave: warp ``number`` of each CTA, if the schedule asks for it (``on``). ``back`` has the
    groups that are held back now."""

    def __init__(self, wave: Wave) -> None:
        schedule = wave.run.schedule
        self.wave, self.on = wave, schedule.warps == "held"
        self.number = schedule.seed % wave.warps_per_cta
        self.back: list[Group] = []
        self._goes = False

    def keep(self, ready: list[Group], clock: int, part: Callable[[Group, np.ndarray], Group]) -> list[Group]:
        """Returns the groups of ``ready`` without the held warps, which it keeps in ``back``, or with them if it is
        their turn. ``part`` returns the group of some rows of a group."""
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
        """Lets the held warps go on for a step, because nothing else can. Returns whether there are any."""
        self._goes = bool(self.back)
        return self._goes

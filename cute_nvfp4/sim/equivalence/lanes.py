"""Finds lanes that go on while other lanes of their warp wait: what they know then depends on the schedule.

The lanes of a warp share a clock, in the checks and in this proof: what one lane has waited for counts for all. That is
right under every schedule if all lanes wait, or if they meet afterwards at an instruction for all lanes of the warp.
Lanes that do not wait, and access memory, arrive, test or issue before they meet the others, know less under a schedule
in which they come first.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener, Mask, Values
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group, Wave

_SPACES = ("shared", "cluster", "global")


class Lanes(Listener):
    """Adds to ``doubts`` what lanes do before they have met other lanes of their warp that have waited.

    ``waited`` has the warps whose lanes have not all waited since they last met: by warp, what lanes have waited for,
    and a bit for each lane that has. ``polls`` has the identities of loads that are waits (``flags.flag_polls``).
    """

    def __init__(self, wave: Wave, doubts: set[str], polls: frozenset[int]) -> None:
        self.wave, self.doubts, self.polls = wave, doubts, polls
        self.waited: dict[int, dict[tuple, int]] = defaultdict(dict)
        self.group: Group | None = None
        self.quiet = False

    def block(self, g: Group, index: int) -> None:
        self.group = g
        block = g.wave.run.kernel.blocks[index]
        if self.waited and block.converge is not None:
            here = g.lanes() if block.converge < 0 else g.lanes() & self.wave.run.kernel.member_lanes(g, block)
            met = (here | ~self.wave.live[g.warps]).all(axis=1)
            for warp in g.warps[met].tolist():
                self.waited.pop(warp, None)

    # waits

    def mbarrier_asked(self, g: Group, i: Instruction, mask: Mask, cta, slot, phase) -> None:
        self._act(i.where(), g, g.lanes(mask), cta, slot)

    def mbarrier_passed(self, g: Group, i: Instruction, mask: Mask, done, cta, slot, acquire: bool) -> None:
        self._wait(i.where(), g, g.lanes(mask) & done, cta, slot, self.wave.mbarriers.phase[cta, slot])

    def cluster_waited(self, g: Group, lanes: np.ndarray) -> None:
        self._wait("a cluster barrier", g, lanes)

    def dependency_waited(self, g: Group, mask: Mask) -> None:
        self._wait("griddepcontrol.wait", g, g.lanes(mask))

    def group_waited(self, g: Group, lanes: np.ndarray, kind: str, until: np.ndarray, read: bool) -> None:
        self._wait(f"a wait_group of {kind}", g, lanes)

    def polled(
        self, g: Group, i: Instruction, host: np.ndarray, mask: Mask, flags: list[int], again: list[int]
    ) -> None:
        """Records that lanes have polled the addresses ``host``. ``flags`` are those of them that are set, ``again``
        those that have been written more than once, so that the lanes must know of the writes before."""
        lanes, host = g.lanes(mask), np.broadcast_to(host, (g.n, 32))
        self._act(i.where(), g, lanes & np.isin(host, again), host)
        self._wait(i.where(), g, lanes & np.isin(host, flags), host)

    def _wait(self, what: str, g: Group, lanes: np.ndarray, *key: np.ndarray) -> None:
        """Records that lanes (n, 32) have waited; ``key`` (n, 1 or 32) says for what. Repeated waits are numbered."""
        if g.mask is None and lanes.all() and not self.waited:
            return
        apart = (self.wave.live[g.warps] & ~lanes).any(axis=1)
        apart |= np.array([warp in self.waited for warp in g.warps.tolist()])
        for warp, lane, named in _each(g, lanes & apart[:, None], key):
            time, waited = 0, self.waited[warp]
            while waited.get((what, *named, time), 0) >> lane & 1:
                time += 1
            at = what, *named, time
            waited[at] = waited.get(at, 0) | 1 << lane

    # all else

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        if id(a.instruction) not in self.polls:
            self._use(g, a, space, mask)

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        self._use(g, a, space, mask)

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._use(g, a, space, mask)

    def mbarrier_arrives(self, g: Group, i: Instruction, rows, lanes, cta, offset: np.ndarray, release: bool) -> None:
        there = np.zeros((g.n, 32), bool)
        there[rows, lanes] = True
        self._act(i.where(), g, there)

    def issued(self, pending: Pending, queued: bool) -> None:
        self._act(pending.instruction.where(), self.group, self.group.lanes())

    def starts(self, pending: Pending) -> None:
        self.quiet = True

    def ended(self, pending: Pending) -> None:
        self.quiet = False

    def _use(self, g: Group, a: Access, space: str, mask: Mask) -> None:
        if space in _SPACES and not self.quiet:
            self._act(a.instruction.where(), g, g.lanes(mask))

    def _act(self, where: str, g: Group, lanes: np.ndarray, *key: np.ndarray) -> None:
        """Adds a doubt if lanes (n, 32) act and other lanes of their warps have waited for anything but ``key``."""
        if not self.waited or self.waited.keys().isdisjoint(g.warps.tolist()):
            return
        for warp, lane, named in _each(g, lanes, key):
            for (what, *name, _), waited in self.waited.get(warp, {}).items():
                if not waited >> lane & 1 and not (named and name[: len(named)] == named):
                    self.doubts.add(f"{where}: lanes of a warp that wait at {what} need not come before these")


def _each(g: Group, lanes: np.ndarray, key: tuple[np.ndarray, ...]) -> list[tuple[int, int, list[int]]]:
    """Returns (warp, lane, key) of each of the lanes (n, 32)."""
    rows, cols = np.nonzero(lanes)
    named = [np.broadcast_to(k, lanes.shape)[rows, cols].tolist() for k in key]
    return [(w, x, list(k)) for w, x, *k in zip(g.warps[rows].tolist(), cols.tolist(), *named)]

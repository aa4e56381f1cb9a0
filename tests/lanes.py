"""Lanes that use memory while others of their warp wait: how far they are then, the schedule decides.

Lanes of a warp share a clock, in the checks and in ``determined``: what one of them has waited for counts for all. That
is so under every schedule if all of them wait, or if they meet afterwards, at an instruction for all lanes of the warp.
Otherwise those that do not wait come early under another schedule, and know less. So between two meetings, each lane
that does anything (uses memory, arrives, asks, issues) must wait for all that any lane waits for, in whatever order
they happen to come.
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


def bits(lanes: np.ndarray) -> np.ndarray:
    """(n,) lanes (n, 32) as words."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)[:, 0]


class Lanes(Listener):
    """``acted`` (warps,): the lanes that have done anything since their warp met. ``waited``: of warps some lanes of
    which have waited since, what for, and which lanes. ``polls``: loads that are waits."""

    def __init__(self, wave: Wave, doubts: set[str], polls: frozenset[int]) -> None:
        self.wave, self.doubts, self.polls = wave, doubts, polls
        self.acted = np.zeros(wave.warps, np.uint32)
        self.waited: dict[int, dict[tuple, int]] = defaultdict(dict)
        self.group: Group | None = None
        self.quiet = False

    def block(self, g: Group, index: int) -> None:
        self.group = g
        block = g.wave.run.kernel.blocks[index]
        if block.converge is None:
            return
        need = self.wave.live[g.warps]
        here = g.lanes() if block.converge < 0 else g.lanes() & self.wave.run.kernel.member_lanes(g, block)
        self._meet(g.warps[(here | ~need).all(axis=1)])

    def finished(self) -> None:
        self._meet(np.arange(self.wave.warps))

    def _meet(self, warps: np.ndarray) -> None:
        for warp in self.waited.keys() & set(warps.tolist()) if self.waited else ():
            for (what, *_), lanes in self.waited.pop(warp).items():
                if int(self.acted[warp]) & ~lanes:
                    self.doubts.add(f"lanes of a warp wait at {what}, and others may do more before they have met")
        self.acted[warps] = 0

    # waits

    def mbarrier_asked(self, g: Group, i: Instruction, mask: Mask, cta, slot, phase) -> None:
        self._act(g, mask)

    def mbarrier_passed(self, g: Group, i: Instruction, mask: Mask, done, cta, slot, acquire: bool) -> None:
        self._wait(i.where(), g, g.lanes(mask) & done, cta, slot, self.wave.mbarriers.phase[cta, slot])

    def cluster_waited(self, g: Group, lanes: np.ndarray) -> None:
        self._wait("a cluster barrier", g, lanes)

    def dependency_waited(self, g: Group, mask: Mask) -> None:
        self._wait("griddepcontrol.wait", g, g.lanes(mask))

    def group_waited(self, g: Group, lanes: np.ndarray, kind: str, until: np.ndarray, read: bool) -> None:
        self._wait(f"a wait_group of {kind}", g, lanes)

    def _wait(self, what: str, g: Group, lanes: np.ndarray, *key: np.ndarray) -> None:
        """Lanes (n, 32) have waited; ``key`` (n, 1 or 32) says for what, and how often each has done so before."""
        if g.mask is None and lanes.all() and not self.waited:
            return
        keys = [np.broadcast_to(k, lanes.shape) for k in key]
        apart = (self.wave.live[g.warps] & ~lanes).any(axis=1)
        apart |= np.array([warp in self.waited for warp in g.warps.tolist()])
        for row, lane in zip(*(x.tolist() for x in np.nonzero(lanes & apart[:, None]))):
            named, time, waited = [int(k[row, lane]) for k in keys], 0, self.waited[int(g.warps[row])]
            while waited.get((what, *named, time), 0) >> lane & 1:
                time += 1
            at = what, *named, time
            waited[at] = waited.get(at, 0) | 1 << lane

    # all else

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        if id(a.instruction) not in self.polls:
            self._use(g, space, mask)

    def polled(
        self, g: Group, i: Instruction, host: np.ndarray, mask: Mask, flags: list[int], again: list[int]
    ) -> None:
        """Lanes have asked for flags. ``flags``: the answer was yes; ``again``: they must know what was before."""
        lanes, host = g.lanes(mask), np.broadcast_to(host, (g.n, 32))
        self._wait(i.where(), g, lanes & np.isin(host, flags), host)
        self._act(g, lanes & np.isin(host, again))

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        self._use(g, space, mask)

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._use(g, space, mask)

    def mbarrier_arrives(self, g: Group, i: Instruction, rows, lanes, cta, offset: np.ndarray, release: bool) -> None:
        np.bitwise_or.at(self.acted, g.warps[rows], np.left_shift(np.uint32(1), np.asarray(lanes, np.uint32)))

    def issued(self, pending: Pending, queued: bool) -> None:
        self._act(self.group, None)

    def starts(self, pending: Pending) -> None:
        self.quiet = True

    def ended(self, pending: Pending) -> None:
        self.quiet = False

    def _use(self, g: Group, space: str, mask: Mask) -> None:
        if space in _SPACES and not self.quiet:
            self._act(g, mask)

    def _act(self, g: Group, mask: Mask) -> None:
        if mask is None and g.mask is None:
            self.acted[g.warps] = 0xFFFFFFFF
        else:
            self.acted[g.warps] |= bits(g.lanes(mask))

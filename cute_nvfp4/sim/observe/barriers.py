"""The mbarriers of a launch as it used them: who arrives, who waits, with which counts, and what is left unfinished.

``seen = Barriers()``, ``run(program, launch, memory, others=(seen,))``, and ``seen.rings()`` has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.protocols import Wave


@dataclass(frozen=True)
class Ring:
    """Mbarriers that lie one after the other and are used alike. ``count``: arrivals of a phase, as initialised;
    ``tx_bytes``: bytes announced for one; ``arrive`` and ``wait``: which warps, or engines, do; ``phases``: how many
    of them all ended; ``pending``: arrivals that a begun phase of one of them still lacked at the end."""

    name: str
    stages: int
    count: int
    tx_bytes: int
    arrive: tuple[str, ...]
    wait: tuple[str, ...]
    phases: int
    pending: int
    where: str


@dataclass
class _Seen:
    """One mbarrier of the traced CTA."""

    count: int
    where: str
    tx_bytes: int = 0
    arrive: set[int] = field(default_factory=set)
    commits: set[int] = field(default_factory=set)
    wait: set[int] = field(default_factory=set)
    phases: int = 0

    @property
    def use(self) -> tuple[frozenset[int], ...]:
        """Who arrives, whose commits do, who waits."""
        return frozenset(self.arrive), frozenset(self.commits), frozenset(self.wait)

    def joins(self, ring: list[_Seen]) -> bool:
        """Whether its count is that of a ring, and nobody else arrives or waits: a barrier may be used in part."""
        if self.count != ring[0].count:
            return False
        whole = [frozenset().union(*uses) for uses in zip(*(other.use for other in ring))]
        arrive, wait = (whole[0] | whole[1], self.use[0] | self.use[1]), (whole[2], self.use[2])
        return all(not ours or not theirs or ours == theirs for theirs, ours in (arrive, wait))


class Barriers:
    """Hears a launch, one of ``run``'s ``others``; it keeps the mbarriers of the first CTA of the last launch."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._wave: Wave | None = None

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """The first wave of a launch is heard: it has the first CTA."""
        if wave.cta_name(0).startswith("CTA (0, 0, 0)"):
            self._seen, self._wave = {}, wave
            return (_Ears(wave, self._seen),)
        return ()

    def rings(self) -> list[Ring]:
        """Mbarriers in the order of their addresses; neighbours that are used alike are one ring."""
        groups: list[dict[int, _Seen]] = []
        for offset in sorted(self._seen):
            seen = self._seen[offset]
            if groups and max(groups[-1]) + 8 == offset and seen.joins(list(groups[-1].values())):
                groups[-1][offset] = seen
            else:
                groups.append({offset: seen})
        return [self._ring(group) for group in groups]

    def _ring(self, group: dict[int, _Seen]) -> Ring:
        first = min(group)
        seen = group[first]
        arrive = set().union(*(s.arrive for s in group.values()))
        commits = set().union(*(s.commits for s in group.values()))
        return Ring(
            name=f"mbarrier {first:#x}",
            stages=len(group),
            count=seen.count,
            tx_bytes=max(s.tx_bytes for s in group.values()),
            arrive=_warps(arrive) + tuple(f"tensor core, for {w}" for w in _warps(commits)),
            wait=_warps(set().union(*(s.wait for s in group.values()))),
            phases=sum(s.phases for s in group.values()),
            pending=max(self._missing(at, s) for at, s in group.items()),
            where=seen.where,
        )

    def _missing(self, offset: int, seen: _Seen) -> int:
        """Arrivals that a phase which has begun still lacks."""
        table = self._wave.mbarriers
        left = int(table.pending[0, table.slot_of[offset]])
        return left if left < seen.count else 0


class _Ears(Listener):
    """Hears one wave, of its first CTA."""

    def __init__(self, wave: Wave, seen: dict[int, _Seen]) -> None:
        self.wave, self.seen = wave, seen

    def _of_first(self, cta: np.ndarray, *others: np.ndarray) -> Iterable[tuple[int, ...]]:
        arrays = np.broadcast_arrays(cta, *others)
        mine = arrays[0] == 0
        return zip(*(a[mine].tolist() for a in arrays[1:]))

    def mbarrier_initialised(self, g, i, rows, lanes, cta, offset) -> None:
        for (at,) in self._of_first(cta, offset):
            slot = self.wave.mbarriers.slot_of[at]
            self.seen[at] = _Seen(int(self.wave.mbarriers.count[0, slot]), i.loc)

    def mbarrier_arrives(self, g, i, rows, lanes, cta, offset, release) -> None:
        table = self.wave.mbarriers
        for at, warp in self._of_first(cta, offset, g.warps[rows]):
            if at in self.seen:
                seen = self.seen[at]
                seen.arrive.add(warp)
                seen.tx_bytes = max(seen.tx_bytes, int(table.tx[0, table.slot_of[at]]))

    def mbarrier_asked(self, g, i, mask, cta, slot, phase) -> None:
        warps = np.broadcast_to(g.warps[:, None], np.broadcast_shapes(np.shape(cta), (len(g.warps), 1)))
        for number, warp in self._of_first(cta, slot, warps):
            at = self.wave.mbarriers.offset_of[number]
            if at in self.seen and int(self.wave.cta_of_warp[warp]) == 0:
                self.seen[at].wait.add(warp)

    def ended(self, pending: Pending) -> None:
        done = pending.completion
        if pending.engine == "tensor" and done.kind == "mbarrier":  # tcgen05.commit
            for at, issuer in self._of_first(done.cta, done.offset, pending.issuer):
                if at in self.seen:
                    self.seen[at].commits.add(int(pending.warps[issuer]))

    def phase_ended(self, cta, slot, phase) -> None:
        for (number,) in self._of_first(cta, slot):
            at = self.wave.mbarriers.offset_of[number]
            if at in self.seen:
                self.seen[at].phases += 1


def _warps(numbers: set[int]) -> tuple[str, ...]:
    """Runs of warps in words: "warp 3", "warps 0 to 2"."""
    runs: list[list[int]] = []
    for warp in sorted(numbers):
        if runs and runs[-1][-1] + 1 == warp:
            runs[-1].append(warp)
        else:
            runs.append([warp])
    return tuple(f"warp {r[0]}" if len(r) == 1 else f"warps {r[0]} to {r[-1]}" for r in runs)

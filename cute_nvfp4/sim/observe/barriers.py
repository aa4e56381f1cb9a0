"""How a launch uses its mbarriers: which warps arrive and wait, with which counts, and which phases stay unfinished.

Give ``seen = Barriers()`` to ``run(program, launch, memory, others=(seen,))``, and call ``seen.rings()`` afterwards.
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
    """Mbarriers that lie one after the other in shared memory and are used alike, such as those of a pipeline.

    name: contains the offset of the first mbarrier in shared memory.
    stages: the number of mbarriers.
    count: the arrivals that a phase needs, as mbarrier.init set them.
    tx_bytes: the largest tx-count that a phase had when a warp arrived.
    arrive: the warps that arrive, and the tensor cores.
    wait: the warps that wait.
    phases: the number of completed phases, of all mbarriers together.
    pending: the most arrivals that a begun phase of an mbarrier still lacked at the end.
    where: the file and line of the first mbarrier's mbarrier.init.
    """

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
    left: int = 0  # arrivals that the phase under way still lacks at the end

    @property
    def use(self) -> tuple[frozenset[int], ...]:
        """The warps that arrive, the warps whose commits arrive, and the warps that wait."""
        return frozenset(self.arrive), frozenset(self.commits), frozenset(self.wait)

    def joins(self, ring: list[_Seen]) -> bool:
        """Returns whether the mbarrier has the count of ``ring``, and the same warps arrive and wait. An mbarrier at
        which no warp arrives, or none waits, fits as well."""
        if self.count != ring[0].count:
            return False
        whole = [frozenset().union(*uses) for uses in zip(*(other.use for other in ring))]
        arrive, wait = (whole[0] | whole[1], self.use[0] | self.use[1]), (whole[2], self.use[2])
        return all(not ours or not theirs or ours == theirs for theirs, ours in (arrive, wait))


class Barriers:
    """A client of ``run`` (in ``others``) that keeps the mbarriers of the first CTA of the last launch."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """Hears only the first wave of a launch, which holds the first CTA."""
        if wave.cta_name(0).startswith("CTA (0, 0, 0)"):
            self._seen = {}
            return (_Ears(wave, self._seen),)
        return ()

    def rings(self) -> list[Ring]:
        """Returns the mbarriers in the order of their addresses; neighbours that are used alike form one ring."""
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
            pending=max(s.left if s.left < s.count else 0 for s in group.values()),
            where=seen.where,
        )


class _Ears(Listener):
    """Hears what the first CTA of one wave does."""

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

    def closed(self) -> None:
        table = self.wave.mbarriers
        for at, seen in self.seen.items():
            seen.left = int(table.pending[0, table.slot_of[at]])


def _warps(numbers: set[int]) -> tuple[str, ...]:
    """Returns runs of warps in words: "warp 3", "warps 0 to 2"."""
    runs: list[list[int]] = []
    for warp in sorted(numbers):
        if runs and runs[-1][-1] + 1 == warp:
            runs[-1].append(warp)
        else:
            runs.append([warp])
    return tuple(f"warp {r[0]}" if len(r) == 1 else f"warps {r[0]} to {r[-1]}" for r in runs)

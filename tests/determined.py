"""Whether a launch does the same under every schedule, read off one run of it.

A kernel whose warps meet at barriers and mbarriers only, and whose memory accesses are all ordered, is a net of
processes that may run in any order and give one result, if three things hold of what causes what (a vector clock of
all that is signalled, whether or not it orders memory):

* who asks for a phase of an mbarrier by its parity knows that the phase before has ended: an older phase of the same
  parity cannot be meant, however early the warp comes;
* the next phase cannot end before everybody who asks for this one has seen it: however late the warp comes, the parity
  still tells of this one;
* who arrives, or has bytes arrive, knows that the phase before has ended: the arrival counts in no other phase. So
  with named barriers.

Then any other run executes the same instructions with the same values. Say it is the first instruction that differs:
its warp has come there as in this run, and what it reads is the same, for all accesses to the same bytes are ordered
(the checks of this run say so); a wait sees the same phase, and a phase ends by the same arrivals. Nor can another run
stop: of the instructions that are left, one has only instructions before it that were executed, and nothing takes back
an arrival. What the checks find depends on that order alone, so they find the same. Lanes of a warp count as one, as
schedules have them. What decides more than that (atomics, polled memory, clocks, work handed out) is a doubt where it
is executed; allocation of tensor memory and of registers is not followed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from cute_nvfp4.sim import Schedule, adversarial
from cute_nvfp4.sim.machine.barriers import BARRIERS
from cute_nvfp4.sim.machine.engine import MemoryWait, Pending
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.wave import Wave

_UNDECIDED = re.compile(
    r"atom\b|red\b|multimem\b|clusterlaunchcontrol\b|cp\.reduce\b|cp\.async\.mbarrier\b|activemask\b"
    r"|(?:ld|st)\.(?:acquire|release|relaxed|volatile|mmio)\b|mbarrier\.(?:arrive_drop|expect_tx|complete_tx|inval)\b"
    r"|mbarrier\.(?:test|try)_wait(?!\S*parity)"
)
_CHANGING = re.compile(r"%(?:clock|globaltimer|smid|nsmid|warpid)")


FIRST = 1, 6, 5
"""Of the adversarial schedules those that come first: engines late, roles late, all at random. What the checks do not
see, they show; and where a kernel asks whether it must wait, the answer is no in one and yes in another."""


def schedules(count: int) -> list[Schedule]:
    """``adversarial``, those of ``FIRST`` first."""
    every = adversarial(count)
    first = [i for i in FIRST if i < count]
    return [every[i] for i in (*first, *(i for i in range(count) if i not in first))]


class Determined:
    """A client of the machine's events; ``doubts`` are the reasons why another schedule might do something else."""

    def __init__(self) -> None:
        self.doubts: set[str] = set()

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        return [_Causes(wave, self.doubts, _undecided(wave.run.kernel))]


@lru_cache(maxsize=8)
def _undecided(kernel: CompiledKernel) -> dict[int, str]:
    """Blocks with an instruction by which more than barriers decides, and the instruction."""
    found = {}
    for block in kernel.blocks:
        for i, _ in block.code:
            if _UNDECIDED.match(i.opcode) or _CHANGING.search(i.text):
                found[block.index] = i.where()
    return found


class _Causes(Listener):
    """What the warps of a wave know to have happened: passed waits of warps, generations of named barriers and phases
    of mbarriers, each a component of the cluster's clocks."""

    def __init__(self, wave: Wave, doubts: set[str], undecided: dict[int, str]) -> None:
        self.wave, self.doubts, self.undecided = wave, doubts, undecided
        self.size, self.per_cluster = wave.cluster_size, wave.cluster_size * wave.warps_per_cta
        self.first_named = self.per_cluster
        self.first = self.first_named + BARRIERS * self.size
        # (warps, components)
        self.known = np.zeros((wave.warps, self.first + 32 * self.size), np.int32)
        self.sent: dict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(self.known.shape[1], np.int32))
        self.told: dict[tuple, np.ndarray] = {}
        self.passed: dict[tuple, dict[int, int]] = defaultdict(dict)
        self.flying: dict[int, tuple[Pending, np.ndarray]] = {}
        self.generation: dict[tuple, int] = defaultdict(int)

    def block(self, g, index: int) -> None:
        if index in self.undecided:
            self.doubts.add(f"{self.undecided[index]} is executed")

    # mbarriers

    def mbarrier_asked(self, g, i, mask, cta, slot, phase) -> None:
        for warp, c, s, p in self._rows(g, mask, cta, slot, phase):
            component = self._component(c, s)
            if self.known[warp, component] < p:
                self.doubts.add(f"{i.where()} may ask before the phase before has ended")

    def mbarrier_passed(self, g, i, mask, done, cta, slot, acquire: bool) -> None:
        for warp, c, s, yes in self._rows(g, mask, cta, slot, done):
            if not yes:
                continue
            row = self.known[warp]
            if (c, s) in self.told:
                np.maximum(row, self._wide(self.told[c, s]), out=row)
            row[warp % self.per_cluster] += 1
            self.passed[c, s][warp] = int(row[warp % self.per_cluster])

    def mbarrier_arrives(self, g, i, rows, lanes, cta, offset, release: bool) -> None:
        self._arrive(i.where(), self.known[g.warps[rows]], cta, self.wave.mbarriers.slots(offset))

    def issued(self, pending: Pending, queued: bool) -> None:
        done = pending.completion
        if done.kind != "mbarrier":
            return
        by = _issuers(pending, len(done.cta))
        self.flying[id(pending)] = pending, self.known[pending.warps[by]]
        if not queued:
            self.starts(pending)

    def starts(self, pending: Pending) -> None:
        if id(pending) in self.flying:
            done, (_, rows) = pending.completion, self.flying.pop(id(pending))
            self._arrive(pending.instruction.where(), rows, done.cta, self.wave.mbarriers.slots(done.offset))

    def _arrive(self, where: str, rows: np.ndarray, cta: np.ndarray, slot: np.ndarray) -> None:
        """Rows of knowledge (k, components) come with arrivals."""
        for row, c, s in zip(rows, cta.tolist(), slot.tolist()):
            component = self._component(c, s)
            row = self._wide(row)
            if row[component] < self.wave.mbarriers.phase[c, s]:
                self.doubts.add(f"{where} may arrive before the phase before has ended")
            self.sent[c, s] = np.maximum(self._wide(self.sent[c, s]), row)

    def phase_ended(self, cta: np.ndarray, slot: np.ndarray, phase: np.ndarray) -> None:
        for c, s, p in zip(cta.tolist(), slot.tolist(), phase.tolist()):
            component = self._component(c, s)
            row = self.sent[c, s] = self._wide(self.sent[c, s])
            row[component] = p
            for warp, time in self.passed.pop((c, s), {}).items():
                if row[warp % self.per_cluster] < time:
                    self.doubts.add(f"{self.wave.mbarriers.name(c, s)} may end a phase before a warp has seen the last")
            self.told[c, s] = row.copy()

    # other barriers

    def barrier_arrived(self, warps: np.ndarray, ident: np.ndarray) -> None:
        for warp, n in zip(warps.tolist(), ident.tolist()):
            cta = int(self.wave.cta_of_warp[warp])
            if self.known[warp, self._named(cta, n)] < self.generation[cta, n]:
                self.doubts.add(f"named barrier {n}: a warp may arrive before the barrier has opened for the others")
            self.sent["named", cta, n] = np.maximum(self._wide(self.sent["named", cta, n]), self.known[warp])

    def barrier_opened(self, warps: np.ndarray, ident: np.ndarray) -> None:
        ctas = self.wave.cta_of_warp[warps]
        for cta, n in set(zip(ctas.tolist(), ident.tolist())):
            self.generation[cta, n] += 1
            row = self.sent["named", cta, n]
            row[self._named(cta, n)] = self.generation[cta, n]
            there = warps[(ctas == cta) & (ident == n)]
            self.known[there] = np.maximum(self.known[there], self._wide(row))

    def cluster_arrived(self, g, lanes: np.ndarray, release: bool) -> None:
        for warp in g.warps[lanes.any(axis=1)].tolist():
            key = self._met(warp)
            self.sent[key] = np.maximum(self._wide(self.sent[key]), self.known[warp])
            self.generation["cluster", warp] += 1

    def cluster_waited(self, g, lanes: np.ndarray) -> None:
        for warp in g.warps[lanes.any(axis=1)].tolist():
            self.generation["cluster", warp] -= 1
            key = self._met(warp)
            self.generation["cluster", warp] += 1
            self.known[warp] = np.maximum(self.known[warp], self._wide(self.sent[key]))

    def parked(self, g, i, wait) -> None:
        if isinstance(wait, MemoryWait):
            self.doubts.add(f"{i.where()} polls memory")

    # components

    def _met(self, warp: int) -> tuple:
        """The cluster barrier's phase that a warp arrives in next."""
        return "cluster", warp // self.per_cluster, self.generation["cluster", warp]

    def _named(self, cta: int, ident: int) -> int:
        return self.first_named + ident * self.size + cta % self.size

    def _component(self, cta: int, slot: int) -> int:
        at = self.first + slot * self.size + cta % self.size
        if at >= self.known.shape[1]:
            self.known = np.pad(self.known, ((0, 0), (0, at + 1 - self.known.shape[1])))
        return at

    def _wide(self, row: np.ndarray) -> np.ndarray:
        """A row of as many components as there are by now."""
        missing = self.known.shape[1] - len(row)
        return np.pad(row, (0, missing)) if missing else row

    def _rows(self, g, mask, *values: np.ndarray) -> Iterable[tuple[int, ...]]:
        """(warp, value …) of the threads that execute the instruction, each once a warp."""
        lanes = g.lanes(mask)
        if all(v.shape[1] == 1 for v in values):
            rows = np.flatnonzero(lanes.any(axis=1))
            return zip(g.warps[rows].tolist(), *(np.broadcast_to(v, (g.n, 1))[rows, 0].tolist() for v in values))
        rows, cols = np.nonzero(lanes)
        every = zip(g.warps[rows].tolist(), *(np.broadcast_to(v, (g.n, 32))[rows, cols].tolist() for v in values))
        return dict.fromkeys(every)


def _issuers(pending: Pending, count: int) -> np.ndarray:
    """Which of the issuing threads each of the completions is from."""
    if hasattr(pending, "issuer"):
        return pending.issuer
    if hasattr(getattr(pending, "targets", None), "source"):
        return pending.targets.source
    k = len(pending.warps)
    return np.arange(k) if count == k else np.repeat(np.arange(k), count // k)

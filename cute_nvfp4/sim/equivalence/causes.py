"""Follows what the warps of a wave know to have happened, and collects doubts about other schedules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cute_nvfp4.sim.equivalence.flags import FLAG_WRITE
from cute_nvfp4.sim.equivalence.lanes import Lanes
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.barriers import BARRIERS
from cute_nvfp4.sim.machine.engine import MemoryWait, Pending
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Wave


@dataclass
class _Flag:
    """The state of one flag."""

    column: int  # its component
    writes: int = 0  # the number of writes so far
    set: bool = False  # whether it is not zero
    told: np.ndarray | None = None  # what the last writer knew
    writer: int = -1  # the cluster of the last writer
    passed: dict[int, int] = field(default_factory=dict)  # the warps let through since then, and their clocks


class Causes(Listener):
    """Follows what the warps of a wave know, and adds to ``doubts`` what another schedule might do otherwise.

    ``known`` (warps, components) has vector clocks. A component is a warp of the cluster (its clock counts passed
    waits), a named barrier (generations), an mbarrier (phases) or a flag (writes). ``undecided`` and ``lanes.polls``
    are those of ``flags``.
    """

    def __init__(self, wave: Wave, doubts: set[str], undecided: dict[int, str], lanes: Lanes) -> None:
        self.wave, self.doubts, self.undecided, self.lanes = wave, doubts, undecided, lanes
        self.size, self.per_cluster = wave.cluster_size, wave.cluster_size * wave.warps_per_cta
        self.first_named = self.per_cluster
        self.first = self.first_named + BARRIERS * self.size
        width = self.first + 32 * self.size
        self.known = np.zeros((wave.warps, width), np.int32)
        # what arrivals have brought to a barrier so far, and what the last phase of an mbarrier told
        self.sent: dict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(width, np.int32))
        self.told: dict[tuple, np.ndarray] = {}
        # by mbarrier: the warps that have seen its last phase, and their clocks
        self.passed: dict[tuple, dict[int, int]] = defaultdict(dict)
        # by identity: operations in flight, and what their issuers knew
        self.flying: dict[int, tuple[Pending, np.ndarray]] = {}
        self.generation: dict[tuple, int] = defaultdict(int)
        self.columns: dict[tuple, int] = {}
        self.flags: dict[int, _Flag] = {}
        self.polls = lanes.polls

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
        """Records arrivals (k,) that bring ``rows`` of knowledge (k, components)."""
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

    def barrier_arrived(self, g, i: Instruction, ident: np.ndarray, count: np.ndarray) -> None:
        for warp, n in zip(g.warps.tolist(), ident.tolist()):
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
        if isinstance(wait, MemoryWait) and id(i) not in self.polls:
            self.doubts.add(f"{i.where()} polls memory")

    # flags

    def load(self, g, a: Access, space: str, host: np.ndarray, mask) -> None:
        if id(a.instruction) not in self.polls:
            return
        asked = {address: self._flag(address) for _, address in self._rows(g, mask, host)}
        there = [at for at, flag in asked.items() if flag.set]
        again = [at for at, flag in asked.items() if flag.writes > 1]
        self.lanes.polled(g, a.instruction, host, mask, there, again)
        for warp, address in self._rows(g, mask, host):
            flag = asked[address]
            if flag.set != self._is_set(address):
                self.doubts.add(f"{a.instruction.where()} asks for what others write")
            if not flag.set:
                continue
            row = self.known[warp]
            if row[flag.column] < flag.writes - 1:
                self.doubts.add(f"{a.instruction.where()} may ask before the flag was zero")
            if flag.told is not None:
                here = slice(None) if self._cluster(warp) == flag.writer else self._global()
                row[here] = np.maximum(row[here], self._wide(flag.told)[here])
            row[warp % self.per_cluster] += 1
            flag.passed[warp] = int(row[warp % self.per_cluster])

    def store(self, g, a: Access, space: str, host: np.ndarray, mask, values) -> None:
        release = FLAG_WRITE.fullmatch(a.instruction.opcode) is not None
        if space != "global" or not (release or (self.flags and a.total == 4)):
            return
        for warp, address, value in self._rows(g, mask, host, values[0]):
            if release or address in self.flags:
                self._write(a.instruction, warp, self._flag(address), bool(value), release)

    def _write(self, i: Instruction, warp: int, flag: _Flag, value: bool, release: bool) -> None:
        row = self.known[warp]
        if row[flag.column] < flag.writes:
            self.doubts.add(f"{i.where()} may come before the write before")
        if value == flag.set or (value and not release):
            self.doubts.add(f"{i.where()} writes a flag that is so, or does not release")
        for reader, time in flag.passed.items():
            if self._cluster(reader) != self._cluster(warp) or row[reader % self.per_cluster] < time:
                self.doubts.add(f"{i.where()} may come before a warp has seen the flag")
        flag.writes, flag.set, flag.passed = flag.writes + 1, value, {}
        row[flag.column] = flag.writes
        flag.told, flag.writer = row.copy(), self._cluster(warp)

    def _flag(self, address: int) -> _Flag:
        """Returns the flag at an address. A flag that is met for the first time counts as never written."""
        if address not in self.flags:
            if self.wave.count < math.prod(self.wave.grid):
                self.doubts.add("flags, and CTAs that run later")
            self.flags[address] = _Flag(self._column("flag", address), set=self._is_set(address))
        return self.flags[address]

    def _is_set(self, address: int) -> bool:
        first, rows = self.wave.run.memory.find(address).rows(4, 4)
        return bool(rows[(address - first) >> 2])

    def _cluster(self, warp: int) -> int:
        return warp // self.per_cluster

    def _global(self) -> list[int]:
        """Returns the components that all clusters share: those of flags."""
        return [flag.column for flag in self.flags.values()]

    # components

    def _met(self, warp: int) -> tuple:
        """Returns the key of the cluster barrier's phase in which a warp arrives next."""
        return "cluster", warp // self.per_cluster, self.generation["cluster", warp]

    def _named(self, cta: int, ident: int) -> int:
        return self.first_named + ident * self.size + cta % self.size

    def _component(self, cta: int, slot: int) -> int:
        return self._column(slot, cta % self.size)

    def _column(self, *key: object) -> int:
        """Returns the component named ``key``, a new one if need be."""
        at = self.columns.setdefault(key, self.first + len(self.columns))
        if at >= self.known.shape[1]:
            self.known = np.pad(self.known, ((0, 0), (0, 32)))
        return at

    def _wide(self, row: np.ndarray) -> np.ndarray:
        """Returns ``row``, padded to the present number of components."""
        missing = self.known.shape[1] - len(row)
        return np.pad(row, (0, missing)) if missing else row

    def _rows(self, g, mask, *values: np.ndarray) -> Iterable[tuple[int, ...]]:
        """Returns (warp, value …) of the threads that execute the instruction, each distinct tuple once."""
        lanes = g.lanes(mask)
        if all(v.shape[1] == 1 for v in values):
            rows = np.flatnonzero(lanes.any(axis=1))
            return zip(g.warps[rows].tolist(), *(np.broadcast_to(v, (g.n, 1))[rows, 0].tolist() for v in values))
        rows, cols = np.nonzero(lanes)
        every = zip(g.warps[rows].tolist(), *(np.broadcast_to(v, (g.n, 32))[rows, cols].tolist() for v in values))
        return dict.fromkeys(every)


def _issuers(pending: Pending, count: int) -> np.ndarray:
    """Returns the index of the issuing thread of each of ``count`` completions."""
    if hasattr(pending, "issuer"):
        return pending.issuer
    if hasattr(getattr(pending, "targets", None), "source"):
        return pending.targets.source
    k = len(pending.warps)
    return np.arange(k) if count == k else np.repeat(np.arange(k), count // k)

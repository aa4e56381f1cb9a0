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
schedules have them, where they wait for the same (``lanes``). What decides more than that (atomics, polled memory,
clocks, work handed out) is a doubt where it is executed; allocation of tensor memory and of registers is not followed.

A flag, a word of global memory that is zero or not, is such a barrier too where all that reads it is a loop that goes
round while it is zero (``flag_polls``): its writes are its phases. They turn it by turns, and each writer knows of the
write before; who is let through knows of the last zero, so that it can have meant no older write; who makes it zero
knows of all that were let through. One CTA's knowledge of barriers says nothing in another cluster: of what a flag
brings from there, flags alone are kept.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from lanes import Lanes

from cute_nvfp4.sim import Schedule, adversarial
from cute_nvfp4.sim.frontend.flow import Block, successors
from cute_nvfp4.sim.frontend.model import Imm, Instruction
from cute_nvfp4.sim.machine.barriers import BARRIERS
from cute_nvfp4.sim.machine.engine import MemoryWait, Pending
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Wave

_UNDECIDED = re.compile(
    r"atom\b|red\b|multimem\b|clusterlaunchcontrol\b|cp\.reduce\b|cp\.async\.mbarrier\b|activemask\b"
    r"|(?:ld|st)\.(?:acquire|release|relaxed|volatile|mmio)\b|mbarrier\.(?:arrive_drop|expect_tx|complete_tx|inval)\b"
    r"|mbarrier\.(?:test|try)_wait(?!\S*parity)"
)
_CHANGING = re.compile(r"%(?:clock|globaltimer|smid|nsmid|warpid)")
_FLAG_READ, _FLAG_WRITE = "ld.acquire.gpu.global.b32", "st.release.gpu.global.b32"


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
        lanes = Lanes(wave, self.doubts, flag_polls(wave.run.kernel))
        return [lanes, _Causes(wave, self.doubts, _undecided(wave.run.kernel), lanes)]


@lru_cache(maxsize=8)
def _undecided(kernel: CompiledKernel) -> dict[int, str]:
    """Blocks with an instruction by which more than barriers decides, and the instruction."""
    found, polls = {}, flag_polls(kernel)
    for block in kernel.blocks:
        for i, _ in block.code:
            if i.opcode != _FLAG_WRITE and id(i) not in polls:
                if _UNDECIDED.match(i.opcode) or _CHANGING.search(i.text):
                    found[block.index] = i.where()
    return found


@lru_cache(maxsize=8)
def flag_polls(kernel: CompiledKernel) -> frozenset[int]:
    """Identities of the loads that ask for a flag and do nothing with the answer but to ask again while it is zero: a
    loop of the load, a comparison and a branch, and the same before such a loop, which it leads to."""
    loops = {}
    for block in kernel.blocks:
        zero, other = _asked(block)
        if zero == block.index and len(block.code) == 3:
            loops[zero] = block.code[0][0].operands[1], other
    found = set()
    for block in kernel.blocks:
        zero, other = _asked(block)
        if zero in loops and loops[zero] == (block.code[-3][0].operands[1], other):
            if not any(kernel.blocks[k].live_in & _answer(block) for k in successors(block)):
                found.add(id(block.code[-3][0]))
    return frozenset(found)


def _asked(block: Block) -> tuple[int, int]:
    """Where a block that ends in a question about a flag leads while it is zero, and else; (-1, -1) of others."""
    if len(block.code) < 3 or block.control != "branch":
        return -1, -1
    load, compare, branch = (i for i, _ in block.code[-3:])
    if load.opcode != _FLAG_READ or load.guard or compare.guard or branch.guard is None or branch.guard.negated:
        return -1, -1
    if compare.opcode not in ("setp.eq.b32", "setp.ne.b32") or compare.operands[1:] != (load.operands[0], Imm(0)):
        return -1, -1
    if compare.operands[0] != branch.guard:
        return -1, -1
    taken, falls = block.targets[0], block.next
    return (taken, falls) if compare.opcode == "setp.eq.b32" else (falls, taken)


def _answer(block: Block) -> set[str]:
    """Registers that hold what the flag was."""
    return {block.code[-3][0].operands[0].name, block.code[-2][0].operands[0].name}


@dataclass
class _Flag:
    """A flag: how often it was written, whether it is set, what its last writer knew, and who was let through since,
    each at its own time."""

    column: int
    writes: int = 0
    set: bool = False
    told: np.ndarray | None = None
    writer: int = -1
    passed: dict[int, int] = field(default_factory=dict)


class _Causes(Listener):
    """What the warps of a wave know to have happened: passed waits of warps, generations of named barriers and phases
    of mbarriers, each a component of the cluster's clocks."""

    def __init__(self, wave: Wave, doubts: set[str], undecided: dict[int, str], lanes: Lanes) -> None:
        self.wave, self.doubts, self.undecided, self.lanes = wave, doubts, undecided, lanes
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
        release = a.instruction.opcode == _FLAG_WRITE
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
        """That of an address, as it is when it is first met: nobody has written it."""
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
        """Components that are not a cluster's own."""
        return [flag.column for flag in self.flags.values()]

    # components

    def _met(self, warp: int) -> tuple:
        """The cluster barrier's phase that a warp arrives in next."""
        return "cluster", warp // self.per_cluster, self.generation["cluster", warp]

    def _named(self, cta: int, ident: int) -> int:
        return self.first_named + ident * self.size + cta % self.size

    def _component(self, cta: int, slot: int) -> int:
        return self._column(slot, cta % self.size)

    def _column(self, *key: object) -> int:
        """The component of that name."""
        at = self.columns.setdefault(key, self.first + len(self.columns))
        if at >= self.known.shape[1]:
            self.known = np.pad(self.known, ((0, 0), (0, 32)))
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

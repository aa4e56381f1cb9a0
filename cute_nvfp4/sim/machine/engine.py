"""Asynchronous operations: what they are, where they queue, and how a warp waits for something.

A warp that issues an asynchronous instruction captures its operands in a ``Pending`` and goes on. The engines run the
pending operations later, when the schedule says so. Tensor-core operations of one CTA run in the order of their issue
(PTX ISA, "tcgen05 memory consistency: pipelined instructions"); copies run in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.protocols import Group, Wave

LAZINESS = 1024
"""Blocks after which a lazy engine does one operation all the same: a warp may poll for it."""
ENGINES = ("tma", "store", "tensor", "copy")


class Cells(NamedTuple):
    """Tensor memory: ``lanes`` a slice or (m,) array, ``columns`` (k, c)."""

    lanes: slice | np.ndarray
    columns: np.ndarray


class Spans(NamedTuple):
    """Global memory: ``length`` bytes from each address (k, m)."""

    address: np.ndarray
    length: int


@dataclass(frozen=True)
class Footprint:
    """What one operand of an operation touches.

    ``cta`` (k,) says whose memory it is. ``place``: in space "shared" (k, m) or (1, m) offsets of 16-byte chunks; in
    space "tensor" ``Cells``; in space "global" ``Spans``. ``rows`` (k,): which of the issuing threads each row belongs
    to, where it is not one row for each of them in order.
    """

    space: str
    write: bool
    cta: np.ndarray
    place: Any
    rows: np.ndarray | None = None


@dataclass(frozen=True)
class Completion:
    """How the end of an operation is observed.

    ``kind``: "mbarrier" (complete_tx on the barrier at ``offset`` (k,) of ``cta`` (k,)), "tensor" (tcgen05.commit),
    "bulk_group", "cp_async", "tmem_load", "tmem_store" or "none" (synchronous).
    """

    kind: str
    cta: np.ndarray | None = None
    offset: np.ndarray | None = None


class Pending:
    """One asynchronous operation issued by ``warps`` (k,), which belong to ``ctas`` (k,)."""

    engine = "tma"
    completion = Completion("none")

    def __init__(self, instruction: Instruction, wave: Wave, warps: np.ndarray) -> None:
        self.instruction = instruction
        self.warps = warps
        self.ctas = wave.cta_of_warp[warps]

    def run(self, wave: Wave) -> None:
        """Does what the operation does to memory, and signals its completion."""
        raise NotImplementedError

    def footprints(self, wave: Wave) -> list[Footprint]:
        """The footprints that the operation reads and writes, for the checks."""
        return []

    def joined(self, following: Pending) -> Pending | None:
        """One operation that does this one's work and then that of ``following``, or None."""
        return None

    def occupies(self, wave: Wave) -> np.ndarray:
        """CTAs whose other operations of this engine must keep their order with this one."""
        return self.ctas


class Wait:
    """Why a group is parked, row by row. ``ready()`` gives the rows (n,) that may go on."""

    def __init__(self, group: Group, instruction: Instruction) -> None:
        self.group, self.instruction = group, instruction

    def ready(self) -> np.ndarray:
        raise NotImplementedError

    def part(self, rows: np.ndarray, group: Group) -> Wait:
        """This wait for some rows only; ``group`` holds them."""
        raise NotImplementedError

    def passed(self, rows: np.ndarray, group: Group) -> None:
        """Called when ``rows`` go on, before they do."""

    def describe(self, row: int) -> str:
        """What the row waits for, for the picture of a deadlock."""
        return self.instruction.where()


class RowWait(Wait):
    """A wait whose test is a function of per-row arrays (n,)."""

    def __init__(
        self,
        group: Group,
        instruction: Instruction,
        test: Callable[..., np.ndarray],
        rows: tuple[np.ndarray, ...],
        say: Callable[..., str],
        then: Callable[..., None] | None = None,
    ) -> None:
        super().__init__(group, instruction)
        self._test, self._rows, self._say, self._then = test, rows, say, then

    def ready(self) -> np.ndarray:
        return self._test(*self._rows)

    def part(self, rows: np.ndarray, group: Group) -> RowWait:
        return RowWait(group, self.instruction, self._test, tuple(r[rows] for r in self._rows), self._say, self._then)

    def passed(self, rows: np.ndarray, group: Group) -> None:
        if self._then is not None:
            self._then(group, *(r[rows] for r in self._rows))

    def describe(self, row: int) -> str:
        return self._say(*(r[row] for r in self._rows))


class MemoryWait(Wait):
    """A loop that polls memory, and has seen it in a state in which it only goes round."""

    def __init__(self, group: Group, instruction: Instruction, seen: int) -> None:
        super().__init__(group, instruction)
        self._seen = seen

    def ready(self) -> np.ndarray:
        return np.full(self.group.n, self.group.wave.changes != self._seen)

    def part(self, rows: np.ndarray, group: Group) -> MemoryWait:
        return MemoryWait(group, self.instruction, self._seen)

    def describe(self, row: int) -> str:
        return "memory that another thread writes: it repeats a loop that changes nothing"


def issue_rows(g: Group, mask: np.ndarray | None, *operands: np.ndarray, once: bool = False):
    """(warps (k,), lanes (k,), [operand (k,), ...]) of the threads that execute the instruction.

    With ``once`` the lanes of a warp that bring the same operands count as one thread: the DSL emits bulk stores
    without electing a lane, and the hardware executes them once.
    """
    rows, cols = np.nonzero(g.lanes(mask))
    values = [np.broadcast_to(o, (g.n, 32))[rows, cols] for o in operands]
    if once and len(rows) > 1:
        first = np.ones(len(rows), bool)
        same = rows[1:] == rows[:-1]
        for v in values:
            same &= v[1:] == v[:-1]
        first[1:] = ~same
        rows, cols, values = rows[first], cols[first], [v[first] for v in values]
    return g.warps[rows], cols, values


class Engines:
    """The queues of one wave, and when they are worked off (``Schedule``)."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.queues: dict[str, list[Pending]] = {name: [] for name in ENGINES}
        self.policies = {name: wave.run.schedule.policy(name) for name in ENGINES}
        self.random = random.Random(wave.run.schedule.seed + 1)
        self.waiting = self.turns = 0

    def submit(self, pending: Pending) -> None:
        """Queues an operation; it is announced now, because now its operands are bound."""
        self.wave.events.issued(pending, True)
        self.queues[pending.engine].append(pending)
        self.waiting += 1

    def perform(self, pending: Pending) -> None:
        """Does an operation at once."""
        self.wave.events.issued(pending, False)
        pending.run(self.wave)

    def turn(self, idle: bool) -> None:
        """Called before each block; ``idle`` when no warp can go on, or when engines that wait for that must have a
        turn all the same."""
        if not self.waiting:
            return
        self.turns += 1
        for name, policy in self.policies.items():
            if not self.queues[name]:
                continue
            if policy == "eager" or (policy == "batch" and idle):
                self._all(name)
            elif policy == "random" and self.random.random() < 0.25:
                self._one(name, self.random.randrange(len(self.queues[name])))
            elif policy == "lazy" and self.turns % LAZINESS == 0:
                self._one(name, 0)

    def work(self) -> bool:
        """Nothing else can move: one operation of the engines that are lazy or random. Returns whether there was
        any."""
        names = [n for n, q in self.queues.items() if q]
        if not names:
            return False
        name = self.random.choice(names) if "random" in self.policies.values() else names[0]
        if self.policies[name] in ("lazy", "random"):
            pick = self.random.randrange(len(self.queues[name])) if self.policies[name] == "random" else 0
            self._one(name, pick)
        else:
            self._all(name)
        return True

    def drain(self) -> None:
        """Finishes everything: the kernel has ended."""
        while self.work():
            pass

    def _all(self, name: str) -> None:
        queue, self.queues[name] = self.queues[name], []
        self.waiting -= len(queue)
        for pending in queue:
            self.wave.events.completed(pending)
        for pending in fuse(queue) if name == "tensor" else queue:
            self._run(pending)

    def _one(self, name: str, index: int) -> None:
        """Runs one operation; of the tensor core's, the first one that no earlier one of its CTAs precedes."""
        queue = self.queues[name]
        if name == "tensor":
            # What precedes it may itself be preceded.
            while (before := self._precedes(queue, index)) is not None:
                index = before
        self.waiting -= 1
        pending = queue.pop(index)
        self.wave.events.completed(pending)
        self._run(pending)

    def _precedes(self, queue: list[Pending], index: int) -> int | None:
        """The first operation before ``index`` that shares a CTA with it."""
        mine = queue[index].occupies(self.wave)
        return next((j for j in range(index) if np.intersect1d(queue[j].occupies(self.wave), mine).size), None)

    def _run(self, pending: Pending) -> None:
        self.wave.events.starts(pending)
        pending.run(self.wave)
        self.wave.events.ended(pending)
        self.wave.progress += 1


def fuse(queue: list[Pending]) -> list[Pending]:
    """Lets neighbouring operations of the tensor core become one where that changes nothing but the time it takes."""
    out: list[Pending] = []
    for pending in queue:
        if out and (joined := out[-1].joined(pending)) is not None:
            out[-1] = joined
        else:
            out.append(pending)
    return out

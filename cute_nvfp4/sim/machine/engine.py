"""Asynchronous operations, the queues of the engines that run them, and the waits of warps.

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
"""Turns after which a lazy engine runs one operation all the same, because a warp may poll for it."""
ENGINES = ("tma", "store", "tensor", "copy")
"""The queues: copies to shared memory, copies to global memory, tcgen05 operations, cp.async."""


class Cells(NamedTuple):
    """Cells of tensor memory: every lane of ``lanes`` in each column of ``columns``, for k operations."""

    lanes: slice | np.ndarray  #: a slice, or the indices (m,)
    columns: np.ndarray  #: (k, c) column indices


class Spans(NamedTuple):
    """Spans of global memory: ``length`` bytes from each address, for k operations."""

    address: np.ndarray  #: (k, m) host addresses
    length: int


@dataclass(frozen=True)
class Footprint:
    """The memory that one operand of an operation reads or writes, in k rows."""

    space: str  #: "shared", "tensor" or "global"
    write: bool
    cta: np.ndarray  #: (k,) the CTA whose memory it is
    #: "tensor": ``Cells``; "global": ``Spans``; "shared": offsets of 16-byte chunks, (k, m), or (1, m) for all rows
    place: Any
    rows: np.ndarray | None = None  #: (k,) the issuing thread of each row; None: row k is of thread k


@dataclass(frozen=True)
class Completion:
    """The way in which threads observe the end of an operation."""

    #: "mbarrier" (complete_tx), "tensor" (tcgen05.commit), "bulk_group", "cp_async", "wgmma", "tmem_load",
    #: "tmem_store", or "none" for a synchronous operation
    kind: str
    cta: np.ndarray | None = None  #: (k,) the CTA of each mbarrier
    offset: np.ndarray | None = None  #: (k,) the shared address of each mbarrier


class Pending:
    """An asynchronous operation that ``warps`` (k,) of the CTAs ``ctas`` (k,) have issued with one instruction."""

    engine = "tma"
    completion = Completion("none")

    def __init__(self, instruction: Instruction, wave: Wave, warps: np.ndarray) -> None:
        self.instruction = instruction
        self.warps = warps
        self.ctas = wave.cta_of_warp[warps]

    def run(self, wave: Wave) -> None:
        """Applies the operation to memory, and signals its completion."""
        raise NotImplementedError

    def footprints(self, wave: Wave) -> list[Footprint]:
        """Returns the memory that the operation reads and writes."""
        return []

    def joined(self, following: Pending) -> Pending | None:
        """Returns one operation that does the work of this one and then of ``following``, or None if there is none."""
        return None

    def occupies(self, wave: Wave) -> np.ndarray:
        """Returns the CTAs whose operations on this engine must keep their order with this one."""
        return self.ctas


class Wait:
    """The reason why a group of n warps is parked; each row stands for a warp."""

    def __init__(self, group: Group, instruction: Instruction) -> None:
        self.group, self.instruction = group, instruction

    def ready(self) -> np.ndarray:
        """Returns which rows may go on, (n,) booleans."""
        raise NotImplementedError

    def part(self, rows: np.ndarray, group: Group) -> Wait:
        """Returns the same wait of the warps ``rows`` only, which ``group`` holds."""
        raise NotImplementedError

    def passed(self, rows: np.ndarray, group: Group) -> None:
        """Is called just before the warps ``rows``, which ``group`` holds, go on."""

    def describe(self, row: int) -> str:
        """Returns what the warp waits for, for the message of a deadlock."""
        return self.instruction.where()


class RowWait(Wait):
    """A wait that functions of the arrays ``rows``, each (n,), define. ``test`` returns which warps may go on, ``say``
    what one warp waits for; ``then`` is called with the group and the values of the warps that go on."""

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
    """The wait of a loop that polls memory, and would only repeat itself until the wave's ``changes`` differ from
    ``seen``, their count at the head of the loop."""

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
    """Returns (warps (k,), lanes (k,), [operand (k,), ...]) of the threads that execute an instruction.

    With ``once``, neighbouring active lanes of a warp with equal operands count as one thread: the DSL emits bulk
    stores without electing a lane, and the hardware executes them once.
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
    """The engines of one wave: their queues of pending operations, which they run as the ``Schedule`` says.

    ``waiting`` counts the queued operations, ``turns`` the calls of ``turn`` that found any.
    """

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.queues: dict[str, list[Pending]] = {name: [] for name in ENGINES}
        self.policies = {name: wave.run.schedule.policy(name) for name in ENGINES}
        self.random = random.Random(wave.run.schedule.seed + 1)
        self.waiting = self.turns = 0

    def submit(self, pending: Pending) -> None:
        """Queues an operation, and announces it, because its operands are bound now."""
        self.wave.events.issued(pending, True)
        self.queues[pending.engine].append(pending)
        self.waiting += 1

    def perform(self, pending: Pending) -> None:
        """Runs an operation at once."""
        self.wave.events.issued(pending, False)
        pending.run(self.wave)

    def turn(self, idle: bool) -> None:
        """Runs the operations that the schedule wants now; the executor calls it before each block. ``idle`` says that
        no warp can go on, or that the batch engines must have a turn all the same."""
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
        """Runs operations because no warp can go on: one of a lazy or random engine, or all of another engine.
        Returns whether any was queued."""
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
        """Runs all queued operations, at the end of the kernel."""
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
        """Runs operation ``index`` of a queue, or, of the tensor core's, the one that must come before it."""
        queue = self.queues[name]
        if name == "tensor":
            # An operation that must come before it may have to wait for another one in turn.
            while (before := self._precedes(queue, index)) is not None:
                index = before
        self.waiting -= 1
        pending = queue.pop(index)
        self.wave.events.completed(pending)
        self._run(pending)

    def _precedes(self, queue: list[Pending], index: int) -> int | None:
        """Returns the first operation before ``index`` that shares a CTA with it."""
        mine = queue[index].occupies(self.wave)
        return next((j for j in range(index) if np.intersect1d(queue[j].occupies(self.wave), mine).size), None)

    def _run(self, pending: Pending) -> None:
        self.wave.events.starts(pending)
        pending.run(self.wave)
        self.wave.events.ended(pending)
        self.wave.progress += 1


def fuse(queue: list[Pending]) -> list[Pending]:
    """Joins neighbouring operations of the tensor core that can run as one with the same effect, to save time."""
    out: list[Pending] = []
    for pending in queue:
        if out and (joined := out[-1].joined(pending)) is not None:
            out[-1] = joined
        else:
            out.append(pending)
    return out

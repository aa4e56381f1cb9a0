"""Named barriers of a CTA (PTX ISA, "barrier{.cta}" and "bar").

A barrier counts threads, not warps, as on sm_70 and later. A phase ends with the arrival that completes its thread
count, and later arrivals belong to the next phase. A barrier without a thread count waits for every thread of the CTA
that has not exited. Reductions (``bar.red``) combine the predicates of all threads that took part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.errors import BarrierMisuse
from cute_nvfp4.sim.frontend.flow import Block
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.wave import Group, Wave

BARRIERS = 16
"""The number of named barriers of a CTA."""


@dataclass
class Waiting:
    """A group that has come to a barrier instruction."""

    group: Group
    block: Block  #: the block that the barrier instruction ends
    ident: np.ndarray  #: (n,) the number of the barrier, for each warp
    count: np.ndarray  #: (n,) the thread count that each warp names, 0 for all threads of the CTA
    predicate: np.ndarray | None  #: the operand of bar.red, which broadcasts to (n, 32); None for other barriers


class Barriers:
    """The named barriers of every CTA of a wave.

    ``waiting`` has the groups that wait at a barrier. Three arrays (CTAs, 16) describe the phase under way of each
    barrier: ``came`` counts the threads that have arrived, waiting or not; ``count`` is the largest thread count that
    an arrival has named; ``everybody`` says whether an arrival has named no thread count.
    """

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.waiting: list[Waiting] = []
        self.came = np.zeros((wave.count, BARRIERS), np.int64)
        self.count = np.zeros_like(self.came)
        self.everybody = np.zeros(self.came.shape, bool)

    def arrive(self, group: Group, block: Block, operands: tuple, live: np.ndarray) -> list[Group]:
        """Counts the arrival of a group that has executed the barrier instruction at the end of ``block``.

        operands: the barrier's number and thread count, and the predicate of bar.red.
        live: (warps, 32) the threads of the wave that have not exited.

        Returns the groups that may go on. Raises ``BarrierMisuse`` for a barrier number that does not exist.
        """
        ident, count, *rest = operands
        ident, count = self._per_warp(group, ident), self._per_warp(group, count)
        instruction = block.code[-1][0]
        if ident.max() >= BARRIERS:
            raise BarrierMisuse(
                f"{instruction.where()}: barrier {int(ident.max())} does not exist, a CTA has {BARRIERS}"
            )
        comes = Waiting(group, block, ident, count, rest[0] if rest else None)
        if group.n == 1 or not self._too_many(comes, live):
            return self._take(comes, instruction, live)
        # A phase ends among these warps, so they arrive one after the other.
        parts = [self._part(comes, np.array([k])) for k in range(group.n)]
        return [g for part in parts for g in self._take(part, instruction, live)]

    def _too_many(self, comes: Waiting, live: np.ndarray) -> bool:
        """Returns whether more threads come to a barrier than its phase still wants."""
        at = (self.wave.cta_of_warp[comes.group.warps], comes.ident)
        came, count, everybody = self.came.copy(), self.count.copy(), self.everybody.copy()
        self._add(at, comes, came, count, everybody)
        return bool((came > self._wanted(count, everybody, live))[at].any())

    @staticmethod
    def _add(at: tuple, comes: Waiting, came: np.ndarray, count: np.ndarray, everybody: np.ndarray) -> None:
        """Adds the arrivals ``comes`` at the barriers ``at`` to the three arrays of the phases under way."""
        np.add.at(came, at, comes.group.lanes().sum(axis=1))
        np.maximum.at(count, at, comes.count)
        everybody[at] |= comes.count == 0

    def _wanted(self, count: np.ndarray, everybody: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Returns how many threads end the phase under way of each barrier, (CTAs, 16)."""
        return np.where(everybody, np.maximum(count, live.reshape(self.wave.count, -1).sum(axis=1)[:, None]), count)

    def _take(self, comes: Waiting, instruction: Instruction, live: np.ndarray) -> list[Group]:
        group, ident = comes.group, comes.ident
        self.wave.events.barrier_arrived(group, instruction, ident, comes.count)
        self._add((self.wave.cta_of_warp[group.warps], ident), comes, self.came, self.count, self.everybody)
        if "arrive" in instruction.mods:
            group.block = comes.block.next
            return [group, *self.release(live)]
        self.wave.events.parked(group, instruction, None)
        self.waiting.append(comes)
        return self.release(live)

    def _per_warp(self, group: Group, value: np.ndarray) -> np.ndarray:
        """Returns the operand of the first active lane of each warp, (n,)."""
        wide = np.broadcast_to(value.astype(np.int64), (group.n, 32))
        return wide[np.arange(group.n), group.lanes().argmax(axis=1)]

    def release(self, live: np.ndarray) -> list[Group]:
        """Ends the phase of every barrier whose threads have all arrived; returns the groups that waited there."""
        open_ = (self.came > 0) & (self.came >= self._wanted(self.count, self.everybody, live))
        if not open_.any():
            return []
        reduced = self._reduce(open_.shape)
        out, still = [], []
        for w in self.waiting:
            goes = open_[self.wave.cta_of_warp[w.group.warps], w.ident]
            if goes.any():
                out.append(self._part(w, np.flatnonzero(goes)))
                self._finish(out[-1], reduced)
            if not goes.all():
                still.append(self._part(w, np.flatnonzero(~goes)))
        for state in (self.came, self.count, self.everybody):
            state[open_] = 0
        self.waiting = still
        events = self.wave.events
        if out and events.hears("barrier_opened"):
            events.barrier_opened(*(np.concatenate(part) for part in zip(*((w.group.warps, w.ident) for w in out))))
        events.barrier_ended(*np.nonzero(open_))
        for w in out:
            events.resumed(w.group, w.block.code[-1][0])
        return [w.group for w in out]

    def _part(self, w: Waiting, rows: np.ndarray) -> Waiting:
        if len(rows) == w.group.n:
            return w
        group = w.group.some(rows, list(range(len(w.group.regs))))
        predicate = None if w.predicate is None else np.broadcast_to(w.predicate, (w.group.n, 32))[rows]
        return Waiting(group, w.block, w.ident[rows], w.count[rows], predicate)

    def _reduce(self, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each barrier, how many threads wait with a true predicate and how many with a predicate."""
        true, came = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for w in self.waiting:
            if w.predicate is not None:
                at = (self.wave.cta_of_warp[w.group.warps], w.ident)
                np.add.at(true, at, (np.broadcast_to(w.predicate, (w.group.n, 32)) & w.group.lanes()).sum(axis=1))
                np.add.at(came, at, w.group.lanes().sum(axis=1))
        return true, came

    def _finish(self, w: Waiting, reduced: tuple[np.ndarray, np.ndarray]) -> None:
        w.group.block = w.block.next
        if w.predicate is None:
            return
        instruction = w.block.code[-1][0]
        at = (self.wave.cta_of_warp[w.group.warps], w.ident)
        true, came = (count[at][:, None] for count in reduced)
        kind = next(m for m in instruction.mods if m in ("popc", "and", "or"))
        value = {"popc": true.astype(np.uint32), "and": true == came, "or": true > 0}[kind]
        w.group.regs[self.wave.run.kernel.slots[instruction.operands[0].name]] = value

"""mbarrier objects of every CTA of a wave (PTX ISA, "mbarrier").

An mbarrier counts pending arrivals and pending bytes (tx-count). Its phase ends when both are zero, and the next phase
expects as many arrivals again. ``try_wait.parity P`` passes when the phase of parity P is over, so a fresh mbarrier
passes parity 1. The opaque word in shared memory is not modelled: the state is kept here, by CTA and shared address.

Common arguments: ``where`` names the instruction in messages; ``cta`` (k,) has indices in the wave and ``offset`` (k,)
shared addresses without rank, one of each for every thread that names an mbarrier.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import MbarrierMisuse, OutOfBounds
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.machine.protocols import Wave

MAX_COUNT = (1 << 20) - 1
MAX_TX = (1 << 20) - 1


class Mbarriers:
    """The mbarriers of a wave, in arrays (CTAs, slots).

    ``slot_of`` maps a shared address to its slot, ``offset_of`` a slot to its address. ``valid`` marks initialised
    mbarriers. ``count`` is the number of arrivals that a phase expects, ``pending`` those of them still to come, ``tx``
    the bytes still to come, ``phase`` the number of the phase under way.
    """

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.slot_of: dict[int, int] = {}
        self.offset_of: list[int] = []
        self.valid = np.zeros((wave.count, 0), bool)
        self.count, self.pending, self.tx, self.phase = (np.zeros((wave.count, 0), np.int64) for _ in range(4))

    def _new_slots(self, offsets: np.ndarray) -> None:
        for offset in np.unique(offsets).tolist():
            if offset in self.slot_of:
                continue
            self.slot_of[offset] = len(self.offset_of)
            self.offset_of.append(offset)
            column = ((0, 0), (0, 1))
            self.valid = np.pad(self.valid, column)
            self.count, self.pending = np.pad(self.count, column), np.pad(self.pending, column)
            self.tx, self.phase = np.pad(self.tx, column), np.pad(self.phase, column)

    def slots(self, offset: np.ndarray) -> np.ndarray:
        """Returns the slots of shared addresses (k,), -1 where no CTA of the wave has ever initialised an mbarrier."""
        if not len(offset):
            return np.zeros(0, np.int64)
        first = int(offset.flat[0])
        if (offset == first).all():
            return np.full(offset.shape, self.slot_of.get(first, -1), np.int64)
        return np.array([self.slot_of.get(o, -1) for o in offset.tolist()], np.int64)

    def init(self, where: str, cta: np.ndarray, offset: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Executes mbarrier.init with expected arrivals ``count`` (k,); returns which mbarriers were valid before.

        Raises ``MbarrierMisuse`` for a count outside 1 .. 2^20 - 1 or a misaligned address, ``OutOfBounds`` outside
        shared memory.
        """
        bad = (count < 1) | (count > MAX_COUNT)
        if bad.any():
            raise MbarrierMisuse(
                f"{where}: mbarrier.init with a count of {int(count[bad][0])}, 1 to {MAX_COUNT} is allowed"
            )
        if (offset & 7).any():
            at = int(offset[(offset & 7) != 0][0])
            raise MbarrierMisuse(f"{where}: an mbarrier must be aligned to 8 bytes, not at shared address {at:#x}")
        bad = (offset < SHARED_BASE) | (offset + 8 > SHARED_BASE + self.wave.shared_bytes)
        if bad.any():
            k, size = int(bad.argmax()), self.wave.shared_bytes
            place = f"{int(offset[k]):#x} in the shared memory of {self.wave.cta_name(int(cta[k]))}"
            raise OutOfBounds(f"{where}: mbarrier.init at {place}, which has {size} bytes from {SHARED_BASE:#x} on")
        self._new_slots(offset)
        slot = self.slots(offset)
        again = self.valid[cta, slot]
        self.valid[cta, slot] = True
        self.count[cta, slot] = self.pending[cta, slot] = count
        self.tx[cta, slot] = 0
        # A new mbarrier goes on from an even phase number, which parities cannot tell from 0: the checks count phases.
        self.phase[cta, slot] += self.phase[cta, slot] & 1
        self.wave.progress += 1
        return again

    def invalidate(self, where: str, cta: np.ndarray, offset: np.ndarray) -> None:
        """Executes mbarrier.inval."""
        slot = self.find(where, cta, offset)
        self.valid[cta, slot] = False

    def find(self, where: str, cta: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Returns the slots (k,); raises ``MbarrierMisuse`` for an invalid mbarrier or one of a CTA that has exited."""
        slot = self.slots(offset)
        bad = slot < 0
        bad = bad | ~self.valid[cta, np.where(bad, 0, slot)] if self.valid.shape[1] else np.ones(len(slot), bool)
        if bad.any():
            k = int(bad.argmax())
            raise MbarrierMisuse(
                f"{where}: shared address {int(offset[k]):#x} of {self.wave.cta_name(int(cta[k]))} holds no mbarrier: "
                "mbarrier.init has not run there, or mbarrier.inval has"
            )
        exited = ~self.wave.cta_alive[cta]
        if exited.any():
            k = int(exited.argmax())
            raise MbarrierMisuse(f"{where}: {self.name(int(cta[k]), int(slot[k]))} belongs to a CTA that has exited")
        return slot

    def arrive(self, where: str, cta: np.ndarray, offset: np.ndarray, count: np.ndarray | int = 1) -> np.ndarray:
        """Counts ``count`` arrivals of each of k threads, which may name the same mbarrier.

        Returns the numbers (k,) of the phases that the arrivals belong to. Raises ``MbarrierMisuse`` for more arrivals
        than a phase expects.
        """
        slot = self.find(where, cta, offset)
        phase = self.phase[cta, slot].copy()
        np.subtract.at(self.pending, (cta, slot), count)
        low = self.pending[cta, slot] < 0
        if low.any():
            if len(cta) > 1 and len(np.unique(cta * len(self.offset_of) + slot)) < len(cta):
                # Several threads at one mbarrier may end more than one phase, so they arrive one after the other.
                np.add.at(self.pending, (cta, slot), count)
                each = np.broadcast_to(count, cta.shape)
                rows = [slice(k, k + 1) for k in range(len(cta))]
                return np.concatenate([self.arrive(where, cta[r], offset[r], each[r]) for r in rows])
            k = int(low.argmax())
            c, s = int(cta[k]), int(slot[k])
            raise MbarrierMisuse(
                f"{where}: too many arrivals at {self.name(c, s)} in phase {int(phase[k])}: it expects "
                f"{int(self.count[c, s])} a phase, this makes {int(self.count[c, s] - self.pending[c, s])}"
            )
        self._settle(cta, slot)
        return phase

    def expect_tx(self, where: str, cta: np.ndarray, offset: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Adds ``size`` (k,) expected bytes to the tx-counts; returns the slots (k,). Raises ``MbarrierMisuse`` for a
        tx-count out of range, as ``complete_tx`` does."""
        slot = self.find(where, cta, offset)
        np.add.at(self.tx, (cta, slot), size)
        self._overflow(where, cta, slot)
        return slot

    def complete_tx(self, where: str, cta: np.ndarray, offset: np.ndarray, size: np.ndarray | int) -> None:
        """Subtracts ``size`` arrived bytes from the tx-counts."""
        slot = self.find(where, cta, offset)
        np.subtract.at(self.tx, (cta, slot), size)
        self._overflow(where, cta, slot)
        self._settle(cta, slot)

    def _overflow(self, where: str, cta: np.ndarray, slot: np.ndarray) -> None:
        over = np.abs(self.tx[cta, slot]) > MAX_TX
        if over.any():
            c, s = int(cta[over][0]), int(slot[over][0])
            raise MbarrierMisuse(
                f"{where}: tx-count of {self.name(c, s)} is {int(self.tx[c, s])} bytes, outside -{MAX_TX} .. {MAX_TX}"
            )

    def _settle(self, cta: np.ndarray, slot: np.ndarray) -> None:
        """Ends the complete phases of the mbarriers ``slot`` (k,) of ``cta`` (k,)."""
        done = (self.pending[cta, slot] == 0) & (self.tx[cta, slot] == 0)
        if done.any():
            # An mbarrier that occurs several times ends one phase.
            key = np.unique(cta[done] * len(self.offset_of) + slot[done])
            c, s = key // len(self.offset_of), key % len(self.offset_of)
            self.phase[c, s] += 1
            self.pending[c, s] = self.count[c, s]
            self.wave.events.phase_ended(c, s, self.phase[c, s])
        self.wave.progress += 1

    def unfinished(self) -> list[tuple[int, int]]:
        """Returns (CTA, slot) of every valid mbarrier whose phase under way has arrivals or a tx-count other than 0."""
        part = self.valid & ((self.pending != self.count) | (self.tx != 0))
        return [(int(cta), int(slot)) for cta, slot in np.argwhere(part)]

    def name(self, cta: int, slot: int) -> str:
        return f"mbarrier at shared address {self.offset_of[slot]:#x} of {self.wave.cta_name(cta)}"

    def state(self, cta: int, slot: int) -> str:
        """Returns the phase and the counts in words, for messages."""
        came = int(self.count[cta, slot] - self.pending[cta, slot])
        text = f"phase {int(self.phase[cta, slot])}, {came} of {int(self.count[cta, slot])} arrivals"
        tx = int(self.tx[cta, slot])
        return text + (f", {tx} bytes still to come" if tx > 0 else f", {-tx} bytes more than expected" if tx else "")

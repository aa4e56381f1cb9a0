"""mbarrier objects of every CTA of a wave (PTX ISA, "mbarrier").

An mbarrier counts pending arrivals and pending bytes (tx-count); its phase ends when both are zero, and the arrivals
are loaded again. ``try_wait.parity P`` passes when the phase of parity P is over, so a fresh barrier passes parity 1.
The opaque word in shared memory is not modelled: the state lives here, by CTA and offset.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import MbarrierMisuse, OutOfBounds
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.machine.protocols import Wave

MAX_COUNT = (1 << 20) - 1
MAX_TX = (1 << 20) - 1


class Mbarriers:
    """State by (CTA of the wave, slot); ``slot_of`` maps an offset in shared memory to its slot."""

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
        """Slots of offsets (k,), -1 where no mbarrier was ever initialised."""
        if not len(offset):
            return np.zeros(0, np.int64)
        first = int(offset.flat[0])
        if (offset == first).all():
            return np.full(offset.shape, self.slot_of.get(first, -1), np.int64)
        return np.array([self.slot_of.get(o, -1) for o in offset.tolist()], np.int64)

    def init(self, where: str, cta: np.ndarray, offset: np.ndarray, count: np.ndarray) -> np.ndarray:
        """mbarrier.init; ``count`` is 1 .. 2^20 - 1. Returns which of the barriers were live before it."""
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
        # After mbarrier.inval phases go on from an even number, which nobody can tell from 0: the checks count them.
        self.phase[cta, slot] += self.phase[cta, slot] & 1
        self.wave.progress += 1
        return again

    def invalidate(self, where: str, cta: np.ndarray, offset: np.ndarray) -> None:
        """mbarrier.inval."""
        slot = self.find(where, cta, offset)
        self.valid[cta, slot] = False

    def find(self, where: str, cta: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Slots of valid barriers; raises ``MbarrierMisuse`` for the first that is not."""
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
        """Arrivals of k threads; rows may name the same barrier. Returns the phases they count in."""
        slot = self.find(where, cta, offset)
        phase = self.phase[cta, slot].copy()
        np.subtract.at(self.pending, (cta, slot), count)
        low = self.pending[cta, slot] < 0
        if low.any():
            if len(cta) > 1 and len(np.unique(cta * len(self.offset_of) + slot)) < len(cta):
                # Several rows at one barrier may end more than one phase: one after the other.
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
        """Adds bytes to wait for; returns slots."""
        slot = self.find(where, cta, offset)
        np.add.at(self.tx, (cta, slot), size)
        self._overflow(where, cta, slot)
        return slot

    def complete_tx(self, where: str, cta: np.ndarray, offset: np.ndarray, size: np.ndarray | int) -> None:
        """Bytes have arrived."""
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
        """Ends the phases that are complete."""
        done = (self.pending[cta, slot] == 0) & (self.tx[cta, slot] == 0)
        if done.any():
            # One barrier may stand in several rows: it ends one phase.
            key = np.unique(cta[done] * len(self.offset_of) + slot[done])
            c, s = key // len(self.offset_of), key % len(self.offset_of)
            self.phase[c, s] += 1
            self.pending[c, s] = self.count[c, s]
            self.wave.events.phase_ended(c, s, self.phase[c, s])
        self.wave.progress += 1

    def unfinished(self) -> list[tuple[int, int]]:
        """(CTA, slot) of every phase that some but not all have arrived in, or that still expects bytes."""
        part = self.valid & ((self.pending != self.count) | (self.tx != 0))
        return [(int(cta), int(slot)) for cta, slot in np.argwhere(part)]

    def name(self, cta: int, slot: int) -> str:
        return f"mbarrier at shared address {self.offset_of[slot]:#x} of {self.wave.cta_name(cta)}"

    def state(self, cta: int, slot: int) -> str:
        """Counts in words, for errors."""
        came = int(self.count[cta, slot] - self.pending[cta, slot])
        text = f"phase {int(self.phase[cta, slot])}, {came} of {int(self.count[cta, slot])} arrivals"
        tx = int(self.tx[cta, slot])
        return text + (f", {tx} bytes still to come" if tx > 0 else f", {-tx} bytes more than expected" if tx else "")

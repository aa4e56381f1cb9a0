"""Routing of up to 32 slots in registers: each lane of a warp has a slot and finds its row, without maps in memory.

The row of a slot is the number of slots before it in the order of ``maps``: those of smaller experts, and those of the
same expert with a lower index.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

NOBODY = 1 << 30
"""The expert of a lane without a slot, or whose slot has no row: it is larger than all others."""


class SlotIds(NamedTuple):
    """Ids (slots,) of experts. offset: the id of expert 0, of ``experts`` experts."""

    ids: Any
    slots: Int32
    experts: Int32
    offset: Int32

    def expert(self, lane: Int32) -> Int32:
        """The expert of the lane's slot, or ``NOBODY``."""
        mIds = cute.make_tensor(self.ids, cute.make_layout(self.slots))  # (SLOTS)
        chosen = mIds[cutlass.min(lane, self.slots - 1)] - self.offset
        here = (lane < self.slots) & (chosen >= 0) & (chosen < self.experts)
        return cutlass.select_(here, Int32(chosen), Int32(NOBODY))

    @cute.jit
    def place(self, expert: Int32, lane: Int32) -> Int32:
        """The place of the lane's slot in the order of experts: its row, if it has one. Places of lanes are distinct.
        All lanes of a warp call this together."""
        place = Int32(0)
        for slot in cutlass.range(self.slots, unroll=1):
            other = cute.arch.shuffle_sync(expert, slot)
            place += Int32((other < expert) | ((other == expert) & (slot < lane)))
        return cutlass.select_(lane < self.slots, place, lane)

    def row(self, lane: Int32) -> Int32:
        """The row of the lane's slot, or -1. All lanes of a warp call this together."""
        expert = self.expert(lane)
        return cutlass.select_(expert < NOBODY, self.place(expert, lane), Int32(-1))

"""Sums over the CTAs of a cluster that share a tile along K, through distributed shared memory.

Each stores its part of the tile's columns: the others send it their sums of them by st.async into slots of its own, and
it adds them in the order of the slots, so that results repeat bit for bit. A CTA has one tile: nothing is used twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....ptx import mbarrier
from ....ptx.cluster import remote_address, store_async
from ....ptx.memory import load_shared_floats
from .config import WARPGROUP, WgmmaConfig

QUAD_COLUMNS = 8
"""Columns of which a thread has four sums, two in each of two rows."""
QUAD_BYTES = 16


@dataclass(frozen=True)
class ClusterSums:
    """What a thread of a warpgroup needs: this CTA's ``part`` of K; shared addresses of the barrier and of the slots,
    fp32 (4, THREAD, QUAD, WARPGROUP, SLOT)."""

    config: WgmmaConfig
    part: Int32
    barrier: Int32
    slots: Int32
    group: Int32
    thread: Int32

    @property
    def quads(self) -> int:
        """Of a CTA's columns."""
        return self.config.tile_n // QUAD_COLUMNS // self.config.split_k

    def place(self, slot: Int32) -> Int32:
        """The thread's first sums in a slot."""
        row = slot * self.config.warpgroups + self.group
        return self.slots + (row * (self.quads * WARPGROUP) + self.thread) * QUAD_BYTES

    @cute.jit
    def announce(self):
        """One thread says how many bytes the others will send."""
        if (self.group == 0) & (self.thread == 0):
            mbarrier.expect_bytes(self.barrier, Int32(self.config.received_bytes))

    @cute.jit
    def exchange(self, acc: cute.Tensor):
        """Makes this CTA's columns of ``acc`` sums over all of K."""
        parts = self.config.split_k
        # the others have made their barriers
        cute.arch.cluster_wait()
        for part in cutlass.range_constexpr(parts):
            if part != self.part:
                self.send(acc, part)
        mbarrier.wait(self.barrier, Int32(0), cluster=True)
        for part in cutlass.range_constexpr(parts):
            if part == self.part:
                self.add(acc, part)

    def send(self, acc: cute.Tensor, part: int) -> None:
        """Sends the columns of CTA ``part`` to it: to slot 0 if this is the CTA after it, and so on."""
        slot = (self.part - part - 1) & (self.config.split_k - 1)
        target, barrier = remote_address(self.place(slot), Int32(part)), remote_address(self.barrier, Int32(part))
        for quad in range(self.quads):
            first = 4 * (part * self.quads + quad)
            values = [acc[first + i] for i in range(4)]
            store_async(target + quad * (WARPGROUP * QUAD_BYTES), values, barrier)

    def add(self, acc: cute.Tensor, part: int) -> None:
        """Adds what came for this CTA's columns."""
        for slot in range(self.config.split_k - 1):
            source = self.place(Int32(slot))
            for quad in range(self.quads):
                first = 4 * (part * self.quads + quad)
                for i, value in enumerate(load_shared_floats(source + quad * (WARPGROUP * QUAD_BYTES))):
                    acc[first + i] = acc[first + i] + value

"""Sums over the warpgroups of a cluster that share a tile along K, through distributed shared memory.

Each stores its part of the tile's columns: the others send it their sums of them by st.async into slots of its own, and
it adds them in the order of the slots, so that results repeat bit for bit. They come in pieces, each with a barrier of
its own: one is stored while the next are under way. A CTA has one tile: nothing is used twice.
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
    """What a thread of a warpgroup needs: its ``part`` of K, the ``k_groups`` of a CTA having consecutive ones; shared
    addresses of the first piece's barrier and of the slots, fp32 (4, THREAD, QUAD, WARPGROUP, SLOT)."""

    config: WgmmaConfig
    part: Int32
    barriers: Int32
    slots: Int32
    group: Int32
    thread: Int32

    def place(self, slot: Int32, group: Int32) -> Int32:
        """The thread's first sums in a slot of a warpgroup."""
        row = slot * self.config.warpgroups + group
        quads = self.config.part_columns // QUAD_COLUMNS
        return self.slots + (row * (quads * WARPGROUP) + self.thread) * QUAD_BYTES

    @cute.jit
    def announce(self):
        """One thread says how many bytes the others will send."""
        pieces = self.config.pieces
        if (self.group == 0) & (self.thread == 0):
            for piece in cutlass.range_constexpr(pieces):
                mbarrier.expect_bytes(self.barriers + 8 * piece, Int32(self.config.received_bytes // pieces))

    @cute.jit
    def send(self, acc: cute.Tensor):
        """Sends the others what is theirs of ``acc``."""
        # they have made their barriers
        cute.arch.cluster_wait()
        for part in cutlass.range_constexpr(self.config.k_parts):
            if part != self.part:
                self.send_to(acc, part)

    def send_to(self, acc: cute.Tensor, part: int) -> None:
        """Sends the warpgroup that has ``part`` its columns: to slot 0 if this one has the part after it, and so on."""
        cfg, columns = self.config, self.config.part_columns
        slot, group, barrier = (self.part - part - 1) & (cfg.k_parts - 1), self.group, self.barriers
        rank, k_group = part // cfg.k_groups, part % cfg.k_groups
        if cfg.k_groups > 1:
            group = group % cfg.row_groups + k_group * cfg.row_groups
            barrier = barrier + 8 * k_group * cfg.part_pieces
        target, barriers = remote_address(self.place(slot, group), Int32(rank)), remote_address(barrier, Int32(rank))
        for column in range(0, columns, QUAD_COLUMNS):
            first = (part * columns + column) // 2
            values = [acc[first + i] for i in range(4)]
            place = target + column * (WARPGROUP * QUAD_BYTES // QUAD_COLUMNS)
            store_async(place, values, barriers + column // self.config.piece_columns * 8)

    def receive(self, acc: cute.Tensor, begin: int) -> None:
        """Makes the piece of the warpgroup's columns that starts at column ``begin`` of the tile sums over all of K."""
        cfg, columns, piece = self.config, self.config.part_columns, self.config.piece_columns
        own = begin % columns
        k_group = begin // columns % cfg.k_groups
        mbarrier.wait(self.barriers + (k_group * cfg.part_pieces + own // piece) * 8, Int32(0), cluster=True)
        for slot in range(cfg.k_parts - 1):
            source = self.place(Int32(slot), self.group)
            for column in range(own, own + piece, QUAD_COLUMNS):
                first = (begin - own + column) // 2
                place = source + column * (WARPGROUP * QUAD_BYTES // QUAD_COLUMNS)
                for i, value in enumerate(load_shared_floats(place)):
                    acc[first + i] = acc[first + i] + value

"""Sums over the warpgroups of a CTA, and then over the CTAs of a cluster, that share a tile along K.

Each warpgroup stores some columns of the tile. The other CTAs send it their sums of these columns through distributed
shared memory, by st.async, into one slot each. It adds the slots in a fixed order, so that results repeat bit for bit.
Sums arrive by epilogue tile, each with its own barrier: a warpgroup stores one while the next ones are in flight. A CTA
has one work tile, so it uses no slot or barrier twice.

``sm100/reduction`` has slots of the same layout, in which a thread's sums are those of its row of the tile in tensor
memory, for each product. There all sums of a work tile arrive at one barrier, and since every work tile reuses the
slots, a second barrier says when they are empty. What both modules do with a slot is in ``ptx.cluster``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....ptx import mbarrier
from ....ptx.cluster import remote_address, store_async
from ....ptx.memory import load_shared_floats
from ..barriers import Ring
from .config import WARPGROUP, WgmmaConfig

QUAD_COLUMNS = 8
"""Columns of which a thread has four sums: two columns in each of two rows."""
QUAD_BYTES = 16
ALL_BARRIER = 6
"""The named barrier of all MMA warpgroups."""


@dataclass(frozen=True)
class ClusterSums:
    """The state with which a thread of a warpgroup adds and sends sums. part: the warpgroup's part of K; the
    ``k_groups`` of a CTA have consecutive parts. slots: the shared address of the slots, fp32 (4, THREAD, QUAD,
    WARPGROUP, SLOT). stages: the address of the first stage."""

    config: WgmmaConfig
    part: Int32
    ring: Ring | None
    slots: Int32
    stages: Int32
    group: Int32
    thread: Int32

    @property
    def rank(self) -> Int32:
        """The rank of the CTA in the cluster."""
        return self.part // self.config.k_groups if self.config.k_groups > 1 else self.part

    def place(self, slot: Int32) -> Int32:
        """The shared address of the thread's first sums in a slot."""
        return self.slots + self._quads(slot, self.group)

    def _quads(self, slot: Any, group: Int32) -> Int32:
        row = slot * self.config.warpgroups + group
        quads = self.config.part_columns // QUAD_COLUMNS
        return (row * (quads * WARPGROUP) + self.thread) * QUAD_BYTES

    @cute.jit
    def announce(self):
        """One thread announces at each barrier how many bytes the other CTAs will send."""
        if (self.group == 0) & (self.thread == 0):
            for index in cutlass.range_constexpr(self.config.epilogue_tiles):
                self.ring.announce(index)

    @cute.jit
    def join(self, acc: cute.Tensor):
        """Adds the sums of the CTA's other ``k_groups`` to ``acc``, in the columns that this warpgroup's k-group stores
        in any CTA of the cluster."""
        cfg = self.config
        if cutlass.const_expr(cfg.k_groups > 1):
            own = self.part % cfg.k_groups
            self.together()  # nobody reads a stage any more
            for part in cutlass.range_constexpr(cfg.k_parts):
                if part % cfg.k_groups != own:
                    group = self.group % cfg.row_groups + part % cfg.k_groups * cfg.row_groups
                    self.put(acc, part, self.stages + self._quads(part // cfg.k_groups, group))
            self.together()
            for part in cutlass.range_constexpr(cfg.k_parts):
                if part % cfg.k_groups == own:
                    self.add(acc, part * cfg.part_columns, self.stages + self._quads(part // cfg.k_groups, self.group))

    def together(self) -> None:
        """Synchronises all MMA warpgroups."""
        cute.arch.sync_warp()
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=WARPGROUP * self.config.warpgroups)

    def put(self, acc: cute.Tensor, part: int, place: Int32) -> None:
        """Writes the sums of a part's columns to shared memory."""
        first = part * self.config.part_columns // 2
        for i in range(self.config.part_columns // 2):
            address = place + i // 4 * (WARPGROUP * QUAD_BYTES)
            pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=QUAD_BYTES)
            cute.make_tensor(pointer, cute.make_layout(4))[i % 4] = acc[first + i]

    @cute.jit
    def send(self, acc: cute.Tensor):
        """Sends each other CTA the sums of the columns that it stores."""
        cfg = self.config
        # the other CTAs have initialised their barriers
        cute.arch.cluster_wait()
        for part in cutlass.range_constexpr(cfg.k_parts):
            if cutlass.const_expr(cfg.k_groups > 1):
                if (part != self.part) & (part % cfg.k_groups == self.part % cfg.k_groups):
                    self.send_to(acc, part)
            else:
                if part != self.part:
                    self.send_to(acc, part)

    def send_to(self, acc: cute.Tensor, part: int) -> None:
        """Sends the columns of ``part`` to the warpgroup that stores them: to slot 0 if this CTA's rank follows that of
        the receiver, to slot 1 if it is one further, and so on."""
        cfg, columns, rank = self.config, self.config.part_columns, part // self.config.k_groups
        slot, barrier = (self.rank - rank - 1) & (cfg.split_k - 1), self.ring.full()
        if cfg.k_groups > 1:
            barrier = barrier + 8 * (part % cfg.k_groups) * cfg.part_epilogue_tiles
        target, barriers = remote_address(self.place(slot), Int32(rank)), remote_address(barrier, Int32(rank))
        self._store(acc, part * columns, range(0, columns, QUAD_COLUMNS), target, barriers)

    def send_columns(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Sends the other of two CTAs columns ``begin`` to ``end`` of those that it stores, the second half of
        ``acc``."""
        peer, columns = 1 - self.rank, range(begin, end, QUAD_COLUMNS)
        target, barriers = remote_address(self.place(Int32(0)), peer), remote_address(self.ring.full(), peer)
        self._store(acc, self.config.part_columns, columns, target, barriers)

    def _store(self, acc: cute.Tensor, first: int, columns: range, target: Int32, barriers: Int32) -> None:
        for column in columns:
            values = [acc[(first + column) // 2 + i] for i in range(4)]
            place = target + column * (WARPGROUP * QUAD_BYTES // QUAD_COLUMNS)
            store_async(place, values, barriers + column // self.config.sums_columns * 8)

    def receive(self, acc: cute.Tensor, begin: int) -> None:
        """Waits for the epilogue tile at column ``begin`` of the work tile, and adds its sums from all other CTAs."""
        cfg, columns = self.config, self.config.part_columns
        own = begin % columns
        k_group = begin // columns % cfg.k_groups
        mbarrier.wait(
            self.ring.full(k_group * cfg.part_epilogue_tiles + own // cfg.sums_columns), Int32(0), cluster=True
        )
        for slot in range(cfg.split_k - 1):
            place = self.place(Int32(slot)) + own * (WARPGROUP * QUAD_BYTES // QUAD_COLUMNS)
            self.add(acc, begin, place, cfg.sums_columns)

    def add(self, acc: cute.Tensor, begin: int, place: Int32, columns: int = 0) -> None:
        """Adds ``columns`` (0: ``part_columns``) columns of sums at ``place`` to those of ``acc`` from ``begin`` on."""
        for column in range(0, columns or self.config.part_columns, QUAD_COLUMNS):
            first = (begin + column) // 2
            for i, value in enumerate(load_shared_floats(place + column * (WARPGROUP * QUAD_BYTES // QUAD_COLUMNS))):
                acc[first + i] = acc[first + i] + value

"""Sums over CTAs that share a tile along K, always in the same order, so that results repeat bit for bit.

split_k: each CTA of the cluster stores one slice of the tile's columns. The others send it their sums of that slice
by st.async into its shared memory; it adds them to its own in the order of the ring, starting with its own.

stream_k: a cluster that starts in the middle of a tile writes its sums to a workspace in global memory and raises a
flag; the one that has the tile's first k-tile adds those of the clusters after it, in order, and lowers their flags.

In both a slot of sums is fp32 (4, ROW, COLUMN / 4, PRODUCT), the first mode contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....ptx import mbarrier
from ....ptx.cluster import remote_address, store_async
from ....ptx.memory import load_flag, load_shared_floats, store_flag
from ..barriers import Ring
from ..config import CTA_ROWS, GemmConfig
from ..tile_scheduler import CtaPlace, StreamKScheduler
from .warp_roles import WARP

FLOATS = 4
"""fp32 numbers of a store or load of sixteen bytes."""


class Quad(NamedTuple):
    """Four columns of a thread's row: their product, their first register, and bytes from the start of a slot."""

    product: int
    first: int
    offset: Int32


@dataclass(frozen=True)
class Exchange:
    """This thread's row of sums, in slots of ``columns`` columns."""

    config: GemmConfig
    columns: int
    row: Int32
    warp: Int32

    @property
    def slot_bytes(self) -> int:
        return 4 * self.config.products * self.columns * CTA_ROWS

    def quads(self, column: int) -> list[Quad]:
        """Of the epilogue tile that starts at ``column``."""
        config = self.config
        return [
            Quad(p, j, ((p * self.columns + column + j) // FLOATS * CTA_ROWS + self.row) * (FLOATS * 4))
            for p in range(config.products)
            for j in range(0, config.epi_tile_n, FLOATS)
        ]


@dataclass(frozen=True)
class ClusterExchange(Exchange):
    """split_k: sums sent through distributed shared memory. received: shared address of the slots of the others."""

    ring: Ring
    received: Int32
    place: CtaPlace

    def slot(self, index: int) -> Int32:
        return self.received + index * self.slot_bytes

    def part_after(self, distance: int) -> Int32:
        """The CTA ``distance`` after this one along K."""
        return (self.place.part + distance) % self.config.split_k

    def rank(self, part: Int32) -> Int32:
        cm, cn = self.config.cluster
        return part * (cm * cn) + self.place.y * cm + self.place.x

    @cute.jit
    def announce(self):
        """One thread says how many bytes of partial sums this tile will bring."""
        if self.row == 0:
            self.ring.announce()

    def send(self, distance: int, column: int, values: list[cute.Tensor]) -> None:
        """Sends an epilogue tile of the slice of the CTA ``distance`` after this one; ``column``: from its start."""
        rank = self.rank(self.part_after(distance))
        # that CTA finds this one split_k - distance places after itself
        slot = self.slot(self.config.split_k - distance - 1)
        barrier = remote_address(self.ring.full(), rank)
        target = remote_address(slot, rank)
        for p, j, offset in self.quads(column):
            store_async(target + offset, [values[p][j + i] for i in range(FLOATS)], barrier)

    def add_received(self, column: int, values: list[cute.Tensor]) -> None:
        """Adds the sums of all other CTAs along K to an epilogue tile of this CTA's slice."""
        for index in range(self.config.split_k - 1):
            start = self.slot(index)
            for p, j, offset in self.quads(column):
                received = load_shared_floats(start + offset)
                for i in range(FLOATS):
                    values[p][j + i] = values[p][j + i] + received[i]

    @cute.jit
    def give_back(self):
        """Tells the other CTAs along K that their sums have been read; one thread of every warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for distance in cutlass.range_constexpr(1, self.config.split_k):
                mbarrier.arrive_at(self.ring.empty(), self.rank(self.part_after(distance)))


@dataclass(frozen=True)
class WorkspaceExchange(Exchange):
    """stream_k: sums through global memory. workspace, flags: addresses."""

    scheduler: StreamKScheduler
    workspace: Int64
    flags: Int64

    def cta(self, worker: Int32) -> Int64:
        """This CTA of cluster ``worker``, counted over all clusters."""
        return Int64(worker) * self.config.ctas + self.scheduler.place.v

    def slot(self, worker: Int32) -> Int64:
        """Address of the slot of this CTA's rows in cluster ``worker``."""
        return self.workspace + self.cta(worker) * self.slot_bytes

    def flag(self, worker: Int32) -> Int64:
        """Address of the flag that this warp of cluster ``worker`` raises."""
        return self.flags + (self.cta(worker) * (CTA_ROWS // WARP) + self.warp) * 4

    @cute.jit
    def raise_flag(self):
        """Says that this warp's rows of the workspace are written."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            store_flag(self.flag(self.scheduler.place.worker), Int32(1))

    @cute.jit
    def contributors(self, cursor: Int32, count: Int32):
        """How many clusters after this one have k-tiles of the work tile of which this one has the first ``count``."""
        scheduler = self.scheduler
        tile_end = cursor + scheduler.k_tiles
        others = Int32(0)
        first = cursor + count
        while first < tile_end:
            others = others + 1
            after = scheduler.share_of(scheduler.place.worker + others)
            first = after.first + after.count
        return others

    @cute.jit
    def wait_for_flags(self, others: Int32):
        """Waits until the next ``others`` clusters have written their sums, and lowers their flags."""
        for other in cutlass.range(1, others + 1, unroll=1):
            address = self.flag(self.scheduler.place.worker + other)
            raised = load_flag(address)
            while raised == 0:
                raised = load_flag(address)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                store_flag(address, Int32(0))

    def write(self, column: int, values: list[cute.Tensor]) -> None:
        """Writes an epilogue tile of this CTA's sums to its slot."""
        slot = self.slot(self.scheduler.place.worker)
        for p, j, offset in self.quads(column):
            target = _quad(slot + offset)
            for i in range(FLOATS):
                target[i] = values[p][j + i]

    @cute.jit
    def add(self, column: cutlass.Constexpr[int], others: Int32, values: list):
        """Adds an epilogue tile of the sums of the next ``others`` clusters."""
        for other in cutlass.range(1, others + 1, unroll=1):
            self._add_slot(self.slot(self.scheduler.place.worker + other), column, values)

    def _add_slot(self, slot: Int64, column: int, values: list[cute.Tensor]) -> None:
        for p, j, offset in self.quads(column):
            source = _quad(slot + offset)
            for i in range(FLOATS):
                values[p][j + i] = values[p][j + i] + source[i]


def _quad(address: Int64) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(FLOATS))

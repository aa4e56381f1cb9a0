"""Reductions over CTAs that share a tile along K, always in the same order, so that results are reproducible.

stream_k: a cluster that starts in the middle of a tile writes its sums to a workspace in global memory and raises a
flag. The cluster that has the tile's first k-tile adds the sums of the clusters after it, in order, and lowers their
flags. ``sm100/reduction`` reduces through distributed shared memory.

A slot of sums is fp32 (4, THREAD, COLUMN / 4, PRODUCT), the first mode contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...ptx.memory import load_flag, store_flag
from .config import GemmConfig, epilogue_threads
from .tile_scheduler import StreamKScheduler, WorkTile

WARP = 32
FLOATS = 4
"""fp32 values in a store or load of sixteen bytes."""


class Quad(NamedTuple):
    """Four columns of a thread's row: their product, their first register, and their offset in a slot in bytes."""

    product: int
    first: int
    offset: Int32


@dataclass(frozen=True)
class Exchange:
    """A thread's access to slots of sums, which have ``columns`` columns for each of ``threads`` threads: those of the
    thread's row of the tile in tensor memory, or all columns that it has in registers. row: index of the thread."""

    config: GemmConfig
    columns: int
    row: Int32
    warp: Int32

    @property
    def threads(self) -> int:
        return epilogue_threads(self.config)

    @property
    def slot_bytes(self) -> int:
        return 4 * self.config.products * self.columns * self.threads

    def quads(self, column: int) -> list[Quad]:
        """The quads of the epilogue tile that starts at ``column``."""
        config = self.config
        return [
            Quad(p, j, ((p * self.columns + column + j) // FLOATS * self.threads + self.row) * (FLOATS * 4))
            for p in range(config.products)
            for j in range(0, config.epi_tile_n, FLOATS)
        ]


@dataclass(frozen=True)
class WorkspaceExchange(Exchange):
    """The exchange of sums through global memory, for stream_k. workspace, flags: addresses."""

    scheduler: StreamKScheduler
    workspace: Int64
    flags: Int64

    def cta(self, worker: Int32) -> Int64:
        """The index, over the CTAs of all clusters, of this CTA's counterpart in cluster ``worker``."""
        return Int64(worker) * self.config.ctas + self.scheduler.place.v

    def slot(self, worker: Int32) -> Int64:
        """The address of the slot of this CTA's rows in cluster ``worker``."""
        return self.workspace + self.cta(worker) * self.slot_bytes

    def flag(self, worker: Int32) -> Int64:
        """The address of the flag that this warp's counterpart in cluster ``worker`` raises."""
        return self.flags + (self.cta(worker) * (self.threads // WARP) + self.warp) * 4

    @cute.jit
    def raise_flag(self):
        """Publishes that this warp's rows of the workspace are written."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            store_flag(self.flag(self.scheduler.place.worker), Int32(1))

    @cute.jit
    def contributors(self, cursor: Int32, count: Int32):
        """The number of clusters after this one that have k-tiles of the work tile at ``cursor``.

        count: the k-tiles of it that this cluster has, which are its first ones.
        """
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
        """Waits until each of the next ``others`` clusters has written its sums, and lowers its flag."""
        for other in cutlass.range(1, others + 1, unroll=1):
            address = self.flag(self.scheduler.place.worker + other)
            wait_for_flag(address)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                store_flag(address, Int32(0))

    def write(self, column: int, values: list[cute.Tensor]) -> None:
        """Writes an epilogue tile of this CTA's sums to its slot."""
        slot = self.slot(self.scheduler.place.worker)
        for p, j, offset in self.quads(column):
            store_quad(slot + offset, [values[p][j + i] for i in range(FLOATS)])

    @cute.jit
    def add(self, column: cutlass.Constexpr[int], others: Int32, values: list):
        """Adds the sums of the next ``others`` clusters to an epilogue tile."""
        for other in cutlass.range(1, others + 1, unroll=1):
            self._add_slot(self.slot(self.scheduler.place.worker + other), column, values)

    @cute.jit
    def finish(
        self,
        tile: WorkTile,
        cursor: Int32,
        columns: cutlass.Constexpr[range],
        read: Callable[[int], list[cute.Tensor]],
        write: Callable[[int, list[cute.Tensor]], None],
    ):
        """Writes the sums of a work tile that starts in another cluster to the workspace; finishes one that starts
        here.

        columns: the column of a slot at which each of the thread's epilogue tiles starts. read: the sums of an epilogue
        tile, by its index; write: sends them to the output.
        """
        if tile.k_first > 0:
            for number in cutlass.range_constexpr(len(columns)):
                self.write(columns[number], read(number))
            self.raise_flag()
        else:
            others = self.contributors(cursor, tile.k_count)
            self.wait_for_flags(others)
            for number in cutlass.range_constexpr(len(columns)):
                values = read(number)
                self.add(columns[number], others, values)
                write(number, values)

    def _add_slot(self, slot: Int64, column: int, values: list[cute.Tensor]) -> None:
        for p, j, offset in self.quads(column):
            source = quad(slot + offset)
            for i in range(FLOATS):
                values[p][j + i] = values[p][j + i] + source[i]


@cute.jit
def wait_for_flag(address: Int64):
    """Waits until a flag is raised. All sums that were stored before it are then visible."""
    raised = load_flag(address)
    while raised == 0:
        raised = load_flag(address)


def store_quad(address: Int64, values: list[Float32]) -> None:
    """Stores four neighbouring values of a slot."""
    target = quad(address)
    for i, value in enumerate(values):
        target[i] = value


def quad(address: Int64) -> cute.Tensor:
    """Four neighbouring values of a slot, as a tensor in global memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(FLOATS))

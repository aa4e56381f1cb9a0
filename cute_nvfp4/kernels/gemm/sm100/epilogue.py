"""The epilogue warps: they take a work tile's accumulators from tensor memory through a function to the output.

Each of 128 threads has one row of the tile, and takes an epilogue tile of ``config.epi_tile_n`` columns at a time, so
that its registers hold one epilogue tile of each product. :class:`Epilogue` is what all work tiles have in common.
:class:`WholeTile`, :class:`SplitK` and :class:`StreamK` differ by how K is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import tcgen05 as cute_tcgen05

from ....ptx import mbarrier, tcgen05
from ..arguments import PartialSums
from ..barriers import Barriers
from ..config import CTA_ROWS, GemmConfig
from ..epilogue import EpilogueFunction, OneResult, Position, Result
from ..group_source import GroupSource
from ..problem import Scheduler
from ..reduction import WorkspaceExchange
from ..shared_plan import OUT_STAGES
from ..tile_scheduler import CtaPlace, WorkTile
from .memory_plan import TensorPlan
from .operands import accumulator_layout, make_mma
from .output import Store
from .reduction import ClusterExchange
from .warp_roles import roles


@dataclass(frozen=True)
class Epilogue:
    """The state of one epilogue thread. values: registers for an epilogue tile of every product; thread, warp: its
    index in its group of four warps, and its warp's; group: index of that group, as groups take epilogue tiles in
    turn."""

    config: GemmConfig
    barriers: Barriers
    tensor_base: Int32
    place: CtaPlace
    function: EpilogueFunction
    store: Store
    values: list[cute.Tensor]
    thread: Int32
    warp: Int32
    group: Int32 | int

    def columns(self) -> range:
        """The first column of each epilogue tile of this CTA's slice."""
        return range(0, self.config.slice_n, self.config.epi_tile_n)

    def read(self, acc: Int32, column: Any) -> None:
        """Loads the epilogue tile at ``column`` of accumulator ``acc`` of every product to registers, and waits."""
        config, epi_tile = self.config, (CTA_ROWS, self.config.epi_tile_n)
        base = cute.make_ptr(Float32, self.tensor_base, cute.AddressSpace.tmem, assumed_align=16)
        tCtAcc = cute.make_tensor(
            base, accumulator_layout(config, make_mma(config))
        )  # (MMA, MMA_M, MMA_N, PRODUCT, STAGE)
        tiles = cute.flat_divide(tCtAcc[((None, None), 0, 0, 0, 0)], epi_tile)  # (EPI_TILE_M, EPI_TILE_N, 1, REST_N)
        repeat = cute_tcgen05.Repetition(config.epi_tile_n)
        atom = cute.make_copy_atom(cute_tcgen05.Ld32x32bOp(repeat, cute_tcgen05.Pack.NONE), Float32)
        copy = cute_tcgen05.make_tmem_copy(atom, tiles[None, None, 0, 0])
        part = copy.get_slice(self.thread)
        registers = cute.make_layout(part.partition_D(cute.make_identity_tensor(epi_tile)).shape)  # (LD, LD_M, LD_N)
        first = part.partition_S(tiles[None, None, 0, 0])  # (LD, LD_M, LD_N), at column 0 of the first accumulator
        for p in range(config.products):
            start = acc * TensorPlan(config).acc + p * config.tile_n + column
            source = cute.make_tensor(first.iterator + start, first.layout)
            cute.copy(copy, source, cute.make_tensor(self.values[p].iterator, registers))
        cute.arch.fence_view_async_tmem_load()

    def write(self, result: Result, at: Position, column: Any, number: int) -> None:
        """Applies the function to ``values``, which start at ``column`` of the work tile, and stores the outputs."""
        at = at._replace(column=at.column + column)
        outputs = self.function(self.values, result, at)
        self.store.write(outputs, at, result.out, number % OUT_STAGES, self.warp)

    @cute.jit
    def release(self, acc: Int32, last: Boolean | None):
        """Gives an accumulator back to the MMA warp: one thread of every warp arrives at the CTA that issues the MMAs.

        last: in a pair, whether this was the last work tile. The warp then has finished with tensor memory, and tells
        both CTAs so.
        """
        place = self.place
        tcgen05.fence_before()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            address = self.barriers.accumulators.empty(acc)
            if cutlass.const_expr(self.config.pair):
                cm, cn = self.config.cluster
                mbarrier.arrive_after_reads(address, (place.part * cn + place.y) * cm + place.x - place.v)
            else:
                mbarrier.arrive(address)
        if cutlass.const_expr(self.config.pair):
            if last:
                cute.arch.cluster_arrive_relaxed()


class TileSums(NamedTuple):
    """The sums of a work tile. acc: their accumulator; at, result: their place in the output; cursor: the scheduler's;
    phase: of the barriers of other CTAs' sums; last: as in ``Epilogue.release``."""

    tile: WorkTile
    at: Position
    result: Result
    acc: Int32
    cursor: Int32
    phase: Int32
    last: Boolean | None


@dataclass(frozen=True)
class WholeTile:
    """Stores a work tile whose K is undivided. The last epilogue tile frees the accumulator once it is in registers."""

    def store(self, e: Epilogue, sums: TileSums):
        columns, groups = e.columns(), roles(e.config).groups
        for number in range(0, len(columns), groups):
            column = columns[number] + e.group * e.config.epi_tile_n
            e.read(sums.acc, Int32(column))
            if number + groups == len(columns):
                e.release(sums.acc, sums.last)
            e.write(sums.result, sums.at, column, number)


@dataclass(frozen=True)
class SplitK(ClusterExchange):
    """Stores one slice of the columns in every CTA along K: each sends the others their slices, and adds theirs to its
    own.

    A CTA may exit once it has received the sums of its last work tile: the others waited for its arrival before they
    sent these, and nobody arrives at its barriers afterwards.
    """

    @cute.jit
    def store(self, e: Epilogue, sums: TileSums):
        slice_n, width, count = e.config.slice_n, e.config.epi_tile_n, len(e.columns())
        if sums.cursor != self.place.worker:
            self.give_back()  # the room of the work tile before
        mbarrier.wait(self.ring.empty(), sums.phase ^ 1, cluster=True)
        for distance in cutlass.range_constexpr(1, e.config.split_k):
            part = self.part_after(distance)
            for number in cutlass.range_constexpr(count):
                e.read(sums.acc, part * slice_n + number * width)
                self.send(distance, number * width, e.values)
        mbarrier.wait(self.ring.full(), sums.phase, cluster=True)
        own = self.place.part * slice_n
        for number in cutlass.range_constexpr(count):
            e.read(sums.acc, own + number * width)
            self.add_received(number * width, e.values)
            e.write(sums.result, sums.at, own + number * width, number)
        e.release(sums.acc, sums.last)


@dataclass(frozen=True)
class StreamK(WorkspaceExchange):
    """Stores work tiles whose K clusters share, through the workspace."""

    def store(self, e: Epilogue, sums: TileSums):
        columns = e.columns()

        def read(number: int) -> list[cute.Tensor]:
            e.read(sums.acc, Int32(columns[number]))
            return e.values

        def write(number: int, values: list[cute.Tensor]) -> None:
            e.write(sums.result, sums.at, columns[number], number)

        self.finish(sums.tile, sums.cursor, columns, read, write)
        e.release(sums.acc, sums.last)


DividedK = WholeTile | SplitK | StreamK


def divided_k(e: Epilogue, received: Int32, partials: PartialSums | None, scheduler: Scheduler) -> DividedK:
    """How K is divided, as an object that stores work tiles. received: shared address of other CTAs' partial sums."""
    config, own = e.config, (e.thread, e.warp)
    if config.split_k > 1:
        return SplitK(config, config.slice_n, *own, e.barriers.partials, received, scheduler.place)
    if partials is not None:
        addresses = partials.workspace.toint(), partials.flags.toint()
        return StreamK(config, config.tile_n, *own, scheduler, *addresses)
    return WholeTile()


@cute.jit
def store_tiles(
    config: cutlass.Constexpr[GemmConfig],
    e: Epilogue,
    divided: DividedK,
    results: OneResult | GroupSource,
    scheduler: Scheduler,
):
    """Runs the loop of the epilogue warps."""
    acc, partial_phase = e.barriers.accumulators.start(), Int32(0)
    cursor, end = scheduler.range()
    if cutlass.const_expr(config.pair):
        if cursor >= end:
            cute.arch.cluster_arrive_relaxed()  # as after a last work tile
    while cursor < end:
        tile = scheduler.tile(cursor, end)
        at = Position(tile.m * CTA_ROWS + e.thread, tile.n * config.tile_n, tile.batch)
        result = results.of(tile.batch)
        if cutlass.const_expr(config.split_k > 1):
            divided.announce()
        mbarrier.wait(e.barriers.accumulators.full(acc.stage), acc.phase)
        tcgen05.fence_after()
        last = scheduler.after(cursor, tile) >= end if config.pair else None
        divided.store(e, TileSums(tile, at, result, acc.stage, cursor, partial_phase, last))
        partial_phase = partial_phase ^ 1
        acc = e.barriers.accumulators.advance(acc)
        cursor = scheduler.after(cursor, tile)
    if cutlass.const_expr(config.store == "tma"):
        e.store.finish(e.warp)

"""The kernel of :mod:`.wgmma` where two CTAs share a tile along K, and sums travel while products are under way.

Each CTA stores half of the tile's columns, which come first in its stages and accumulators. It multiplies all columns
in its part of K but ``overlap`` k-tiles at the middle. Its sums of the others are done then: it sends them between the
products of the ``overlap`` k-tiles on either side of the middle, in which both CTAs multiply their own columns only. So
there are as many products as without, and sums of 32 to 64 KB, at 25 bytes a ns, hardly come after them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....ptx import mbarrier
from ..barriers import Ring
from ..operands import TmaCopy
from ..packed.decode import sum_factors
from ..packed.loaders import StageOrder, XSlices, partition
from ..packed.mainloop import Mainloop, OperandMemory
from ..stage_loader import Filled, OverwritingCopies, fill_tile
from ..tile_scheduler import CursorRange, StaticScheduler, WorkTile
from .arguments import WgmmaArguments
from .config import WARPGROUP, WgmmaConfig
from .epilogue import WarpgroupEpilogue
from .exchange import ClusterSums
from .wgmma import WgmmaGemm, WgmmaMemory


@dataclass(frozen=True)
class MiddleLast(StageOrder):
    """A CTA's part of K with the middle, where both CTAs multiply, at its end."""

    @property
    def middle(self) -> int:
        """Stages of the middle."""
        return 2 * self.config.overlap * self.config.k_tile_stages

    def steps(self, tile: WorkTile) -> CursorRange:
        """The part of K that is the CTA's alone, then the middle; the second CTA counts on beyond the end of K."""
        _, part, _ = cute.arch.block_idx()
        each, overlap = self.config.k_tile_stages, self.config.overlap
        first = tile.k_first + part * overlap
        return CursorRange(first * each, (first + tile.k_count + overlap) * each)

    def along_k(self, step: Int32, tile: WorkTile) -> Int32:
        _, part, _ = cute.arch.block_idx()
        each, count = self.config.k_tile_stages, tile.k_count
        beyond = (part > 0) & (step >= (tile.k_first + count) * each)
        return cutlass.select_(beyond, step - (count + self.config.overlap) * each, step)

    @cute.jit
    def before(self, step: Int32, end: Int32):
        """Meets the cluster where the middle begins, as the warps that multiply do: racecheck lets nobody go on from a
        cluster's barrier before all threads have come."""
        if step == end - self.middle:
            cute.arch.cluster_wait()


@dataclass(frozen=True)
class HalvesCopies:
    """The copies of x for a work tile: the columns that the CTA stores, and the others, which it does not need in the
    middle. part: of the CTA along K."""

    order: MiddleLast
    x: TmaCopy
    sX: cute.Tensor
    tile: WorkTile
    part: Int32

    def of_tile(self) -> OverwritingCopies:
        own, other = self.slices(0), self.slices(1)
        steps = self.order.steps(self.tile)
        start = partial(self.start, own, other, steps.end - self.order.middle)
        return OverwritingCopies(steps, start, lambda step: self.order.before(step, steps.end))

    def slices(self, half: int) -> XSlices:
        """The columns that the CTA stores (0), which go to where those of a tile begin, or the others (1)."""
        shape = (self.order.config.part_columns, self.order.config.stage_k)
        n = self.tile.n * 2 + (self.part ^ half)
        gX = cute.local_tile(self.x.tensor, shape, (n, None, self.tile.batch))  # (columns, stage_k, REST_K)
        sX = cute.local_tile(self.sX, shape, (half, 0, None))  # (columns, stage_k, STAGE)
        return partition(self.x, sX, gX)

    @cute.jit
    def start(self, own: XSlices, other: XSlices, middle: Int32, ring: Ring, stage: Int32, step: Int32):
        """Copies both for a stage, or only the CTA's own from step ``middle`` on."""
        num_bytes = self.order.config.x_bytes
        full, k = ring.full_pointer(stage), self.order.along_k(step, self.tile)
        with cute.arch.elect_one():
            announced = cutlass.select_(step < middle, Int32(num_bytes), Int32(num_bytes // 2))
            mbarrier.expect_bytes(full.toint(), announced)
        cute.copy(self.x.atom, own.tXgX[None, k], own.tXsX[None, stage], tma_bar_ptr=full)
        if step < middle:
            cute.copy(self.x.atom, other.tXgX[None, k], other.tXsX[None, stage], tma_bar_ptr=full)


class OverlappedWgmma(WgmmaGemm):
    """``WgmmaGemm`` of a configuration with ``overlap``; the tile of a cluster is its only one."""

    def __init__(self, config: WgmmaConfig) -> None:
        super().__init__(config)
        self.order = MiddleLast(config)

    @cute.jit
    def load_x(self, x: TmaCopy, memory: OperandMemory, scheduler: StaticScheduler):
        """The loop of the warp that loads x: the stages of one work tile."""
        cursor, end = scheduler.range()
        copies = HalvesCopies(self.order, x, memory.sX, scheduler.tile(cursor, end), scheduler.place.part)
        fill_tile(copies.of_tile(), memory.ring, Filled(Int32(0), memory.ring.start()))

    @cute.jit
    def multiply(
        self,
        arguments: WgmmaArguments,
        x_rows: Int32,
        memory: WgmmaMemory,
        scheduler: StaticScheduler,
        group: Int32,
        thread: Int32,
    ):
        """What a warpgroup does: multiply, send between products, add, store."""
        cfg, own, part = self.config, thread % WARPGROUP, scheduler.place.part
        columns, operands = cfg.part_columns, memory.operands
        products = self.products(operands, cfg.tile_n, group, thread)
        sums = ClusterSums(cfg, part, memory.barriers.partials, memory.received, operands.weights, group, own)
        factors = sum_factors(arguments, cfg.left_out)
        half = replace(cfg, tile_n=columns)
        epilogue = WarpgroupEpilogue(half, arguments, x_rows, factors, memory.epilogue, scheduler, group, own, sums)
        sums.announce()
        cursor, end = scheduler.range()
        tile = scheduler.tile(cursor, end)
        stored = tile._replace(n=tile.n * 2 + part)
        epilogue = epilogue.of_tile(stored)
        products.acc.fill(0.0)
        at = Mainloop(products).run(operands.ring.start(), tile.k_count - cfg.overlap)
        # the other CTA has made its barriers
        cute.arch.cluster_wait()
        # the middle: after each packed tile's products some columns are sent
        mine, each = products.of_columns(columns), columns // self.order.middle
        middle = Mainloop(mine, lambda tile: sums.send_columns(products.acc, tile * each, (tile + 1) * each))
        middle.run_last(at, 2 * cfg.overlap)
        epilogue.share_factors()
        for begin in cutlass.range_constexpr(0, columns, cfg.sums_columns):
            sums.receive(mine.acc, begin)
            epilogue.store_tile(mine.acc, stored, begin, begin + cfg.sums_columns)

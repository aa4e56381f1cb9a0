"""The kernel of :mod:`.wgmma` where two CTAs share a tile along K, and exchange sums while the tensor cores multiply.

Each CTA stores half of the tile's columns, which come first in its stages and accumulators. In its part of K it
multiplies all columns, except in the ``overlap`` k-tiles next to the middle of K. After that its sums of the other
CTA's columns are complete. It sends them between the products of the ``overlap`` k-tiles on either side of the middle,
in which both CTAs multiply only their own columns. So there are as many products as without overlap, and of the
exchange of 32 to 64 KB, at 25 bytes per ns, almost nothing is left after them.
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
    """The order of stages in which a CTA ends with the middle of K, where both CTAs multiply."""

    @property
    def middle(self) -> int:
        """Stages of the middle."""
        return 2 * self.config.overlap * self.config.k_tile_stages

    def steps(self, tile: WorkTile) -> CursorRange:
        """The steps that only this CTA multiplies, then the middle. Those of the second CTA go beyond the end of K."""
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
        """Waits for the cluster where the middle begins, as the MMA warps do: racecheck requires all threads to reach a
        cluster barrier before any goes on."""
        if step == end - self.middle:
            cute.arch.cluster_wait()


@dataclass(frozen=True)
class HalvesCopies:
    """The copies of x for a work tile: the columns that this CTA stores and, outside the middle, the other columns.
    part: the CTA's part of K."""

    order: MiddleLast
    x: TmaCopy
    sX: cute.Tensor
    tile: WorkTile
    part: Int32

    def of_tile(self) -> OverwritingCopies:
        """The copies of the stages of the tile, for ``fill_tile``."""
        own, other = self.slices(0), self.slices(1)
        steps = self.order.steps(self.tile)
        start = partial(self.start, own, other, steps.end - self.order.middle)
        return OverwritingCopies(steps, start, lambda step: self.order.before(step, steps.end))

    def slices(self, half: int) -> XSlices:
        """The columns that the CTA stores (``half`` 0), which go to the first columns of a stage, or the others (1)."""
        shape = (self.order.config.part_columns, self.order.config.stage_k)
        n = self.tile.n * 2 + (self.part ^ half)
        gX = cute.local_tile(self.x.tensor, shape, (n, None, self.tile.batch))  # (columns, stage_k, REST_K)
        sX = cute.local_tile(self.sX, shape, (half, 0, None))  # (columns, stage_k, STAGE)
        return partition(self.x, sX, gX)

    @cute.jit
    def start(self, own: XSlices, other: XSlices, middle: Int32, ring: Ring, stage: Int32, step: Int32):
        """Copies both halves of a stage; from step ``middle`` on, only the CTA's own half."""
        num_bytes = self.order.config.x_bytes
        full, k = ring.full_pointer(stage), self.order.along_k(step, self.tile)
        with cute.arch.elect_one():
            announced = cutlass.select_(step < middle, Int32(num_bytes), Int32(num_bytes // 2))
            mbarrier.expect_bytes(full.toint(), announced)
        cute.copy(self.x.atom, own.tXgX[None, k], own.tXsX[None, stage], tma_bar_ptr=full)
        if step < middle:
            cute.copy(self.x.atom, other.tXgX[None, k], other.tXsX[None, stage], tma_bar_ptr=full)


class OverlappedWgmma(WgmmaGemm):
    """``WgmmaGemm`` of a configuration with ``overlap``. A cluster has one work tile."""

    def __init__(self, config: WgmmaConfig) -> None:
        super().__init__(config)
        self.order = MiddleLast(config)

    @cute.jit
    def load_x(self, x: TmaCopy, memory: OperandMemory, scheduler: StaticScheduler):
        """Loads x for the stages of the one work tile."""
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
        """Runs a warpgroup: it multiplies, sends sums between products, adds the sums that it receives, and stores."""
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
        # the other CTA has initialised its barriers
        cute.arch.cluster_wait()
        # in the middle, some columns are sent after the products of each packed tile
        mine, each = products.of_columns(columns), columns // self.order.middle
        middle = Mainloop(mine, lambda tile: sums.send_columns(products.acc, tile * each, (tile + 1) * each))
        middle.run_last(at, 2 * cfg.overlap)
        epilogue.share_factors()
        for begin in cutlass.range_constexpr(0, columns, cfg.sums_columns):
            sums.receive(mine.acc, begin)
            epilogue.store_tile(mine.acc, stored, begin, begin + cfg.sums_columns)

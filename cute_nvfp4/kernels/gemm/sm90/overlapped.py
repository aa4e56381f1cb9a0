"""The kernel of :mod:`.wgmma` where two CTAs share a tile along K, and sums travel while products are under way.

Each CTA stores half of the tile's columns, which come first in its stages and accumulators. It multiplies all columns
in its part of K but ``overlap`` k-tiles at the middle. Its sums of the others are done then: it sends them between the
products of the ``overlap`` k-tiles on either side of the middle, in which both CTAs multiply their own columns only. So
there are as many products as without, and sums of 32 to 64 KB, at 25 bytes a ns, hardly come after them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from ....ptx import mbarrier
from ....weight_layout import STEPS
from ..operands import TmaCopy
from ..tile_scheduler import CursorRange, StaticScheduler, WorkTile
from .arguments import WgmmaArguments
from .config import STAGE_TILES, WARPGROUP
from .decode import product_alphas
from .epilogue import Epilogue
from .exchange import ClusterSums
from .ring import Position, advance
from .wgmma import Memory, Products, WgmmaGemm, make_mma


class HalfCopy(NamedTuple):
    """The copies of half of the columns of x: tXsX ((atom, rest), STAGE), tXgX ((atom, rest), REST_K)."""

    tXsX: cute.Tensor
    tXgX: cute.Tensor


class OverlappedWgmma(WgmmaGemm):
    """``WgmmaGemm`` of a configuration with ``overlap``; the tile of a cluster is its only one."""

    def stages_of(self, tile: WorkTile) -> CursorRange:
        """Of the part of K that is the CTA's alone, then the middle; the second CTA counts on beyond the end of K."""
        _, part, _ = cute.arch.block_idx()
        each, overlap = self.config.k_tile_stages, self.config.overlap
        first = tile.k_first + part * overlap
        return CursorRange(first * each, (first + tile.k_count + overlap) * each)

    def along_k(self, stage: Int32, tile: WorkTile) -> Int32:
        """Where one of them lies."""
        _, part, _ = cute.arch.block_idx()
        each, count = self.config.k_tile_stages, tile.k_count
        beyond = (part > 0) & (stage >= (tile.k_first + count) * each)
        return cutlass.select_(beyond, stage - (count + self.config.overlap) * each, stage)

    @cute.jit
    def before_stage(self, stage: Int32, after: Int32):
        """Meets the cluster where the middle begins, as the warps that multiply do: racecheck lets nobody go on from a
        cluster's barrier before all threads have come."""
        if stage == after - 2 * self.config.overlap * self.config.k_tile_stages:
            cute.arch.cluster_wait()

    @cute.jit
    def load_x(self, x: TmaCopy, memory: Memory, scheduler: StaticScheduler):
        """The loop of the warp that loads x; in the middle the CTA's own columns only."""
        cfg, at = self.config, Position(Int32(0), Int32(0))
        cursor, end = scheduler.range()
        tile = scheduler.tile(cursor, end)
        own, other = (self.half_copy(x, memory, tile, scheduler.place.part, half) for half in range(2))
        first, after = self.stages_of(tile)
        middle = after - 2 * cfg.overlap * cfg.k_tile_stages
        for step in cutlass.range(first, after, unroll=1):
            self.before_stage(step, after)
            mbarrier.wait_to_overwrite(memory.ring.empty + 8 * at.stage, at.phase ^ 1)
            full, k = memory.ring.full + 8 * at.stage, self.along_k(step, tile)
            with cute.arch.elect_one():
                mbarrier.expect_bytes(full, cutlass.select_(step < middle, Int32(cfg.x_bytes), Int32(cfg.x_bytes // 2)))
            pointer = cute.make_ptr(Int64, full, cute.AddressSpace.smem, assumed_align=8)
            cute.copy(x.atom, own.tXgX[None, k], own.tXsX[None, at.stage], tma_bar_ptr=pointer)
            if step < middle:
                cute.copy(x.atom, other.tXgX[None, k], other.tXsX[None, at.stage], tma_bar_ptr=pointer)
            at = advance(cfg, at)

    def half_copy(self, x: TmaCopy, memory: Memory, tile: WorkTile, part: Int32, half: int) -> HalfCopy:
        """Of the columns that the CTA stores (0), to where those of a tile begin, or of the others (1)."""
        shape = (self.config.part_columns, self.config.stage_k)
        n = tile.n * 2 + (part ^ half)
        gX = cute.local_tile(x.tensor, shape, (n, None, tile.batch))  # (columns, stage_k, REST_K)
        sX = cute.local_tile(memory.sX, shape, (half, 0, None))  # (columns, stage_k, STAGE)
        shared, tiles = cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        return HalfCopy(*cpasync.tma_partition(x.atom, 0, cute.make_layout(1), shared, tiles))

    @cute.jit
    def multiply(
        self,
        arguments: WgmmaArguments,
        x_rows: Int32,
        memory: Memory,
        scheduler: StaticScheduler,
        group: Int32,
        thread: Int32,
    ):
        """What a warpgroup does: multiply, send between products, add, store."""
        cfg, own, part = self.config, thread % WARPGROUP, scheduler.place.part
        columns, half = cfg.part_columns, replace(cfg, tile_n=cfg.part_columns)
        products = self.products(memory, cfg.tile_n, group, thread)
        sums = ClusterSums(cfg, part, memory.sums_barrier, memory.received, memory.weights, group, own)
        alphas = product_alphas(arguments, cfg.weights)
        epilogue = Epilogue(half, arguments, x_rows, alphas, memory.epilogue, scheduler, group, own, sums)
        sums.announce()
        cursor, end = scheduler.range()
        tile = scheduler.tile(cursor, end)
        at = self.sum_products(products, memory, Position(Int32(0), Int32(0)), tile.k_count - cfg.overlap)
        # the other CTA has made its barriers
        cute.arch.cluster_wait()
        acc = self.send_and_multiply(products, memory, at, sums)
        stored = tile._replace(n=tile.n * 2 + part)
        for begin in cutlass.range_constexpr(0, columns, cfg.piece_columns):
            sums.receive(acc, begin)
            epilogue.store_tile(acc, stored, begin, begin + cfg.piece_columns)

    @cute.jit
    def send_and_multiply(self, products: Products, memory: Memory, at: Position, sums: ClusterSums) -> cute.Tensor:
        """The middle: after each packed tile's products some columns are sent. Returns its own (MMA, MMA_M, MMA_N)."""
        cfg, ring = self.config, memory.ring
        mma = make_mma(replace(cfg, tile_n=cfg.part_columns))
        part = mma.get_slice(products.thread)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        sX = cute.local_tile(memory.sX, (cfg.part_columns, cfg.stage_k), (0, 0, None))  # (columns, stage_k, STAGE)
        tCrX = mma.make_fragment_B(part.partition_B(sX))  # (MMA, MMA_N, MMA_K, STAGE)
        own = cute.make_rmem_tensor(part.partition_shape_C((cfg.tile_m, cfg.part_columns)), Float32)
        acc = cute.make_tensor(products.acc.iterator, own.layout)  # (MMA, MMA_M, MMA_N)
        stages = 2 * cfg.overlap * cfg.k_tile_stages
        columns, last = cfg.part_columns // stages, at.stage
        mbarrier.wait(ring.full + 8 * at.stage, at.phase)
        packed = self.load_stage(memory, at.stage, products)
        for i in cutlass.range_constexpr(stages):
            fragment = products.fragments[i % STAGE_TILES]
            self.decode(fragment, packed[0])
            warpgroup.fence()
            for step in cutlass.range_constexpr(STEPS):
                cute.gemm(mma, acc, fragment[None, None, step], tCrX[None, None, step, at.stage], acc)
            warpgroup.commit_group()
            sums.send_columns(products.acc, i * columns, (i + 1) * columns)
            following = advance(cfg, at)
            if cutlass.const_expr(i + 1 < stages):
                mbarrier.wait(ring.full + 8 * following.stage, following.phase)
                packed = self.load_stage(memory, following.stage, products)
            warpgroup.wait_group(1)
            if cutlass.const_expr(i > 0):
                self.release(ring, last, products.thread)
            last, at = at.stage, following
        warpgroup.wait_group(0)
        return acc

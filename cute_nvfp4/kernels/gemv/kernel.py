"""NVFP4 GEMV: c = alpha · (A · b), one source for Hopper and Blackwell.

Memory bandwidth bounds it: each element of A is half a byte, read once. The arithmetic must only hide behind the loads.

Work distribution. A warp takes a *tile* of 16 rows and walks K in *slices* of 256. In a slice a quad of four lanes has
two of the rows. Lane q of the quad has their elements 64q … 64q+63, 32 contiguous bytes of a row (one 256-bit load on
sm_120a, two 128-bit copies elsewhere), so that a warp's load touches whole 128-byte lines. The four blocks of 64
elements have exactly the four scale factors that a row has in one scale atom. The 16 rows of a tile are r, r+32, r+64
and r+96 for four consecutive r: in the blocked layout their scales are 64 contiguous bytes of each atom, whole sectors,
and a lane reads those of its two rows (r, r+32) in one 64-bit load.

Reasons:

* A bypasses L1 (``L1::no_allocate``) and leaves L2 first (``L2::evict_first``): nobody reads it again.
* A CTA decodes b once, into shared memory, in the order in which lanes read it, for all of its rows. Decoding b again
  for every row, from L1, would cost half as much as decoding A.
* A warp keeps ``stages`` slices of A in flight, across tiles, and loads the first before b is decoded. The stream has
  neither barriers nor a producer warp: no warp waits for another.
* The products of a block are summed unscaled, where the sum is exact (:mod:`.dot`). The sum is then scaled in fp32 by
  the product of both scales, which is exact too: E4M3 · E4M3 · 2⁻⁶ has eight significant bits and lies in f16's range,
  subnormals included. Only the fp32 sum over blocks rounds.
* ``warps_k`` warps share the rows of a tile along K, so that short problems fill the GPU. Their sums meet in shared
  memory at the end, always in the same order, so that results are reproducible.
* The CTAs of a cluster share tiles in the same way, where tiles do not divide evenly among SMs: 448 tiles on 132 SMs
  leave some with four and most with three, but 64 pairs of SMs have seven halves each. The first CTA of a cluster gets
  the sums of the others through distributed shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ...ptx.async_copy import commit_group, wait_group
from ...ptx.memory import load_shared, store_shared
from ..arith import ceil_div, div, mod
from .arguments import GemvArguments
from .config import SLICE_BYTES, SLICE_SCALE_BYTES, TILE_LAST_ROW, GemvConfig, count_tiles
from .dot import BLOCK_K, LANE_BLOCKS, QUAD, SLICE_BLOCKS, SLICE_K, dot_engine
from .epilogue import Epilogue, Mailbox
from .operands import (
    Cursor,
    Fragment,
    MatrixA,
    Offset,
    Rest,
    SharedB,
    Span,
    Thread,
    VectorB,
    matrix_a,
    slice_scale_bytes,
    tile_offset,
    tile_row,
    vector_b,
)
from .register_loader import RegisterLoader, RegisterStages
from .ring_loader import RingLoader, RingStages
from .scales import load_b_block, scale_products, shifted_scale


class TileShare(NamedTuple):
    """The division of tiles among clusters: ``each`` tiles, and one more for the first ``rest`` clusters."""

    each: Int32
    rest: Int32


class BlocksOfB(NamedTuple):
    """Registers of the blocks of b that a thread has loaded, one block in each column."""

    words: cute.Tensor  # (WORDS, BLOCKS)
    scales: cute.Tensor  # (BLOCKS)


class Work(NamedTuple):
    """What a thread works on in one chunk of K: its operands, its indices, and the spans of its CTA."""

    a: MatrixA
    b: VectorB
    shared_b: SharedB
    stages: RegisterStages | RingStages
    sums: cute.Tensor  # (LANES, ROW_OF_LANE, WARPS_K, TILES)
    thread: Thread
    tiles: Span
    slices: Span
    mailbox: Mailbox | None = None

    @property
    def first_slice(self) -> Int32:
        """The chunk's first slice that belongs to this warp; its next ones are ``warps_k`` apart."""
        return self.slices.first + self.thread.warp_k


class Gemv:
    """The host function and the kernel of one :class:`GemvConfig`."""

    def __init__(self, config: GemvConfig) -> None:
        self.config = config
        self.engine = dot_engine(config.arch, config.dot)
        # blocks of b that each thread loads first; more would cost registers
        self.first_blocks = min(-(-config.capacity // (BLOCK_K * config.threads)), 4)
        self.epilogue = Epilogue(config, self.engine.factor)
        self.loader = (RingLoader if config.shared_stages else RegisterLoader)(config)

    @cute.jit
    def __call__(self, arguments: GemvArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs for each matrix, which divide its tiles evenly, at most ``tiles`` each."""
        cfg = self.config
        total_tiles, clusters = count_tiles(arguments.m, cutlass.min), arguments.ctas // cfg.cluster
        share = TileShare(total_tiles // clusters, total_tiles % clusters)
        # arguments that only the host uses do not become kernel parameters
        self.kernel(arguments._replace(batch=None, ctas=share)).launch(
            grid=(arguments.ctas, arguments.batch, 1),
            block=(cfg.threads, 1, 1),
            cluster=(cfg.cluster, 1, 1) if cfg.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=cfg.min_blocks,
            # L1 holds nothing, so all of it may be shared memory (and the DSL need not query a device)
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, arguments: GemvArguments):
        cfg, share = self.config, arguments.ctas
        k = arguments.k
        if cutlass.const_expr(cfg.k > 0):
            k = Int32(cfg.k)
        index, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(div(index, 32))
        lane = mod(index, 32)
        thread = Thread(index, lane, warp_k=mod(warp, cfg.warps_k), warp_m=div(warp, cfg.warps_k))

        smem = SmemAllocator()
        shared_b = self.allocate_b(smem)
        sums_layout = cute.make_layout((32, 2, cfg.warps_k, cfg.tiles))  # (LANES, ROW_OF_LANE, WARPS_K, TILES)
        sums = smem.allocate_tensor(Float32, sums_layout, byte_alignment=16)
        stages = self.loader.allocate(smem, warp, lane)

        # the tiles of this cluster; this warp's are first + warp_m, first + warp_m + warps_m, …
        group, rank = div(cta, cfg.cluster), mod(cta, cfg.cluster)
        tiles = Span(group * share.each + cutlass.min(group, share.rest), share.each + Int32(group < share.rest))
        a, b = matrix_a(cfg, arguments, batch, k), vector_b(arguments, batch)
        slices = Span(Int32(0), ceil_div(k, SLICE_K))
        mailbox = self.epilogue.allocate(smem, rank)
        if cutlass.const_expr(cfg.cluster > 1):
            each = ceil_div(slices.count, cfg.cluster)
            slices = Span(rank * each, cutlass.min(each, slices.count - rank * each))
        work = Work(a, b, shared_b, stages, sums, thread, tiles, slices, mailbox)
        scales = self.epilogue.global_scales(arguments)
        if cutlass.const_expr(cfg.chunked):
            end = slices.first + slices.count
            for first_slice in cutlass.range(slices.first, end, cfg.capacity_slices, unroll=1):
                chunk = Span(first_slice, cutlass.min(end - first_slice, cfg.capacity_slices))
                self.add_chunk(work._replace(slices=chunk), first_slice > slices.first)
        else:
            self.add_chunk(work, None)
        self.epilogue.finish(arguments, sums, mailbox, tiles, index, batch, scales)

    def allocate_b(self, smem: SmemAllocator) -> SharedB:
        """Allocates shared memory for a chunk of b: its values, the engine's constants, and its scales."""
        slices, constant_words = self.config.capacity_slices, max(self.engine.constant_words, 1)
        values = smem.allocate_array(cutlass.Uint8, slices * self.engine.slice_bytes, byte_alignment=128)
        constants = smem.allocate_array(cutlass.Uint32, constant_words, byte_alignment=128)
        scales_layout = cute.make_layout(slices * SLICE_BLOCKS)  # (CAPACITY / 16)
        scales = smem.allocate_tensor(cutlass.Uint16, scales_layout, byte_alignment=16)
        return SharedB(values.toint(), constants.toint(), scales, scales.iterator.toint())

    @cute.jit
    def add_chunk(self, work: Work, later: Boolean | None):
        """Adds the products over one chunk of K, as much of b as shared memory holds, to ``work.sums``.

        later: whether another chunk came before; None where K is one chunk.
        """
        cfg = self.config
        if cutlass.const_expr(cfg.chunked):
            cute.arch.sync_threads()  # the chunk before this one has been used: its b, and the stages of the warps
        quad_lane = mod(work.thread.lane, QUAD)
        tile = work.tiles.first + work.thread.warp_m
        # steps of this warp: its slices of the chunk, once for each of its tiles
        steps = ceil_div(work.slices.count - work.thread.warp_k, cfg.warps_k)
        warp_tiles = cute.ceil_div(cutlass.max(work.tiles.count - work.thread.warp_m, 0), cfg.warps_m)
        if cutlass.const_expr(cfg.shared_stages):
            self.walk_ring(work, tile, quad_lane, steps, steps * warp_tiles, later)
        else:
            self.walk_registers(work, tile, quad_lane, steps, steps * warp_tiles, later)

    def start(self, work: Work, tile: Int32):
        """The cursor at the warp's first slice, and the first blocks of b, whose loads it starts."""
        offset = tile_offset(self.config, work.a, tile)
        addresses = self.loader.addresses(work.a, work.thread.lane, work.first_slice)
        # (WORDS, BLOCKS) and (BLOCKS)
        words = cute.make_rmem_tensor((2, self.first_blocks), cutlass.Uint32)
        blocks = BlocksOfB(words, cute.make_rmem_tensor(self.first_blocks, cutlass.Uint32))
        for i in range(self.first_blocks):
            self.ask_b(work, work.thread.index + i * self.config.threads, blocks, i)
        return Cursor(addresses.advanced(offset), tile, Int32(0), offset), blocks

    @cute.jit
    def decode_b(self, work: Work, blocks: BlocksOfB, later: Boolean | None):
        """Decodes the chunk of b into shared memory, and waits for all threads of the CTA."""
        cfg, thread = self.config, work.thread
        if cutlass.const_expr(cfg.cluster > 1):
            if cutlass.const_expr(later is None):
                self.epilogue.open(work.mailbox, work.tiles, thread.index)
            elif ~later:
                self.epilogue.open(work.mailbox, work.tiles, thread.index)
        self.put_constants(work.shared_b.constants, thread.index)
        for i in cutlass.range_constexpr(self.first_blocks):
            self.store_b(work, thread.index + i * cfg.threads, blocks, i)
        if cutlass.const_expr(self.first_blocks * cfg.threads < cfg.capacity_slices * SLICE_BLOCKS):
            next_block = thread.index + self.first_blocks * cfg.threads
            for block in cutlass.range(next_block, work.slices.count * SLICE_BLOCKS, cfg.threads, unroll=1):
                self.ask_b(work, block, blocks, 0)
                self.store_b(work, block, blocks, 0)
        cute.arch.sync_threads()

    @cute.jit
    def walk_ring(self, work: Work, tile: Int32, quad_lane: Int32, steps: Int32, total: Int32, later: Boolean | None):
        """Walks the warp's slices of the chunk, one tile after the other, and stores the sums of each tile.

        One loop starts copies, decodes b once the first copies are in flight, and multiplies. That is less code than a
        loop with a prologue, and as fast.
        """
        cfg, thread, ahead = self.config, work.thread, self.loader.ahead
        cursor, blocks = self.start(work, tile)
        lane_b = self.engine.lane_state(work.shared_b.values, work.shared_b.constants, thread.lane)
        # a lane's four scales of a slice are one 64-bit load
        scale_address = work.shared_b.scale_address + thread.warp_k * SLICE_SCALE_BYTES + quad_lane * (2 * LANE_BLOCKS)
        sum0, sum1 = Float32(0.0), Float32(0.0)
        tile_of_cta, step = thread.warp_m, Int32(0)
        stage, free_stage = Int32(0), Int32(0)
        for i in cutlass.range(0, total + ahead, unroll=1):
            wait_group(cfg.stages - 2)
            # the copies of all lanes become visible to each, and all lanes have read the stage that is overwritten next
            cute.arch.sync_warp()
            if i < total:
                self.fetch(work, cursor, free_stage)
                cursor = self.step(work, cursor, steps)
                free_stage = cutlass.select_(free_stage == cfg.stages - 1, Int32(0), free_stage + 1)
            commit_group()
            if i == ahead - 1:
                self.decode_b(work, blocks, later)
            if i >= ahead:
                fragment = self.loader.take(work.stages, stage)
                stage = cutlass.select_(stage == cfg.stages - 1, Int32(0), stage + 1)
                b_scales = load_shared(scale_address + step * (cfg.warps_k * SLICE_SCALE_BYTES), 8)
                slice_of_chunk = thread.warp_k + step * cfg.warps_k
                sum0, sum1 = self.accumulate(sum0, sum1, fragment, b_scales, lane_b, slice_of_chunk)
                step += 1
                if step == steps:
                    self.put_sums(work, sum0, sum1, tile_of_cta, later)
                    sum0, sum1, step = Float32(0.0), Float32(0.0), Int32(0)
                    tile_of_cta += cfg.warps_m

    @cute.jit
    def walk_registers(
        self, work: Work, tile: Int32, quad_lane: Int32, steps: Int32, total: Int32, later: Boolean | None
    ):
        """Walks the warp's slices as :meth:`walk_ring` does, with stages in registers, which need constant indices."""
        cfg, thread = self.config, work.thread
        ahead, unroll = self.loader.ahead, self.loader.unroll
        cursor, blocks = self.start(work, tile)
        for i in cutlass.range_constexpr(ahead):
            if i < total:
                self.fetch(work, cursor, i)
                cursor = self.step(work, cursor, steps)
        self.decode_b(work, blocks, later)
        lane_b = self.engine.lane_state(work.shared_b.values, work.shared_b.constants, thread.lane)
        scale_address = work.shared_b.scale_address + thread.warp_k * SLICE_SCALE_BYTES + quad_lane * (2 * LANE_BLOCKS)
        sum0, sum1 = Float32(0.0), Float32(0.0)
        tile_of_cta, step = thread.warp_m, Int32(0)
        for first in cutlass.range(0, total, unroll, unroll=1):
            for i in cutlass.range_constexpr(unroll):
                if first + i < total:
                    fragment = self.loader.take(work.stages, i)
                    b_scales = load_shared(scale_address + step * (cfg.warps_k * SLICE_SCALE_BYTES), 8)
                    slice_of_chunk = thread.warp_k + step * cfg.warps_k
                    sum0, sum1 = self.accumulate(sum0, sum1, fragment, b_scales, lane_b, slice_of_chunk)
                    if first + i + ahead < total:
                        self.fetch(work, cursor, i)
                        cursor = self.step(work, cursor, steps)
                    step += 1
                    if step == steps:
                        self.put_sums(work, sum0, sum1, tile_of_cta, later)
                        sum0, sum1, step = Float32(0.0), Float32(0.0), Int32(0)
                        tile_of_cta += cfg.warps_m

    @cute.jit
    def put_constants(self, shared_constants: Int32, thread: Int32):
        """Writes the engine's constants to shared memory."""
        words = self.engine.constant_words
        for i in cutlass.range_constexpr(-(-words // self.config.threads)):
            index = thread + i * self.config.threads
            if index < words:
                store_shared(shared_constants + index * 4, [self.engine.constant(index)])

    @cute.jit
    def put_sums(self, work: Work, sum0: Float32, sum1: Float32, tile_of_cta: Int32, later: Boolean | None):
        """Stores a tile's sums over this warp's slices of the chunk, or adds them to the sums of earlier chunks."""
        sums, lane, warp_k = work.sums, work.thread.lane, work.thread.warp_k
        if cutlass.const_expr(self.config.chunked):
            if later:
                sum0 = sum0 + sums[lane, 0, warp_k, tile_of_cta]
                sum1 = sum1 + sums[lane, 1, warp_k, tile_of_cta]
        sums[lane, 0, warp_k, tile_of_cta] = sum0
        sums[lane, 1, warp_k, tile_of_cta] = sum1

    @cute.jit
    def step(self, work: Work, cursor: Cursor, steps: Int32):
        """The cursor one step further: along K, or at the warp's first slice of its next tile."""
        cfg = self.config
        tile, step = cursor.tile, cursor.step
        data_offset, scale_offset = cursor.offset
        data_step = Int64(cfg.warps_k * SLICE_BYTES)
        scale_step = Int64(cfg.warps_k * slice_scale_bytes(cfg))
        step += 1
        if step == steps:
            tile += cfg.warps_m
            step = Int32(0)
            # the distance to the new tile, less the steps along K in the old one
            new = tile_offset(cfg, work.a, tile)
            data_step, data_offset = new.data - data_offset - (steps - 1) * data_step, new.data
            scale_step, scale_offset = new.scale - scale_offset - (steps - 1) * scale_step, new.scale
        addresses = cursor.addresses.advanced(Offset(data_step, scale_step))
        return Cursor(addresses, tile, step, Offset(data_offset, scale_offset))

    def accumulate(self, sum0, sum1, fragment: Fragment, b_scales: list, lane_b, slice_of_chunk: Int32):
        """Adds the lane's four scaled blocks of each row to the sums of the two rows."""
        products = scale_products(fragment.scales, b_scales)
        blocks = self.engine.block_sums(fragment.rows, lane_b, slice_of_chunk)
        for i in range(LANE_BLOCKS):
            sum0 = sum0 + blocks[0][i] * products[0][i]
            sum1 = sum1 + blocks[1][i] * products[1][i]
        return sum0, sum1

    @cute.jit
    def fetch(self, work: Work, cursor: Cursor, stage: Int32):
        """Loads the slice at the cursor. A row's last slice may be shorter, and the last tile may have fewer rows."""
        fetch, a = self.loader.fetch, work.a
        if cutlass.const_expr(self.config.ragged):
            rows_left = a.m - tile_row(cursor.tile, 0, 0)
            slice_index = work.first_slice + cursor.step * self.config.warps_k
            blocks_left = div(a.k, BLOCK_K) - slice_index * SLICE_BLOCKS
            if rows_left >= TILE_LAST_ROW + 1 and blocks_left >= SLICE_BLOCKS:
                fetch(a, cursor.addresses, None, work.stages, stage)
            else:
                fetch(a, cursor.addresses, Rest(rows_left, blocks_left), work.stages, stage)
        else:
            fetch(a, cursor.addresses, None, work.stages, stage)

    def ask_b(self, work: Work, block: Int32, into: BlocksOfB, i: int):
        """Loads ``block`` of the chunk of b, and its scale, into registers; zeros beyond the chunk and beyond K."""
        slices = work.slices
        column = slices.first * SLICE_BLOCKS + block
        end = cutlass.min(div(work.a.k, BLOCK_K), (slices.first + slices.count) * SLICE_BLOCKS)
        words, into.scales[i] = load_b_block(self.config, work.b, work.a.k, column, Int32(column < end))
        into.words[0, i], into.words[1, i] = words

    @cute.jit
    def store_b(self, work: Work, block: Int32, loaded: BlocksOfB, i: cutlass.Constexpr):
        """Decodes what :meth:`ask_b` has loaded into shared memory."""
        if block < work.slices.count * SLICE_BLOCKS:
            self.engine.stage_block(work.shared_b.values, block, [loaded.words[0, i], loaded.words[1, i]])
            work.shared_b.scales[block] = shifted_scale(loaded.scales[i])

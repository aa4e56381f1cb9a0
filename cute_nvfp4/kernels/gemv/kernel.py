"""NVFP4 GEMV: c = alpha · (A · b), one source for Hopper and Blackwell.

Bytes decide: each element of A is half a byte, read once. The arithmetic only has to stay out of the way.

Who does what. A warp takes a *tile* of 16 rows and walks K in *slices* of 256. In a slice a quad of four lanes has
two of the rows; lane q of the quad has their elements 64q … 64q+63: 32 contiguous bytes a row (one 256-bit load on
sm_100a, two 128-bit loads on sm_90a), so that a warp's load touches whole 128-byte lines. The four blocks of 64
elements have exactly the four scales that a row has in one scale atom. The 16 rows of a tile are r, r+32, r+64 and
r+96 for four consecutive r: in the blocked layout their scales are 64 contiguous bytes of each atom, whole sectors,
and a lane reads those of its two rows (r, r+32) in one 64-bit load.

Why so:

* A streams past L1 (``L1::no_allocate``) and leaves L2 first (``L2::evict_first``): nobody reads it again.
* b is decoded once a block of threads, into shared memory, in the order in which lanes read it; every row of the
  block shares it. Decoding b again for every row, from L1, would cost half as much as decoding A.
* A lane keeps ``stages`` slices of A in flight in registers, across tiles; the first are asked for before b is
  decoded. No barrier and no copy engine in the stream: a warp waits for nobody.
* The products of a block are summed unscaled, where the sum is exact (:mod:`.gemv_dot`), and then scaled in fp32 by the
  product of both scales, exact too: E4M3 · E4M3 · 2⁻⁶ has eight significant bits and lies in f16's range with its
  subnormals. Only the fp32 sum over blocks rounds.
* ``warps_k`` warps share the rows of a tile along K, so that short problems fill the machine; their sums meet
  in shared memory at the end, always in the same order: results repeat bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ...ptx.async_copy import commit_group, wait_group
from ...ptx.memory import load_shared, store_shared
from ...ptx.warp import sum_lanes
from ..arith import ceil_div, div, mod
from . import register_loader as gemv_registers
from . import ring_loader as gemv_ring
from .arguments import GemvArguments
from .config import SLICE_BYTES, SLICE_SCALE_BYTES, TILE_LAST_ROW, TILE_ROWS, GemvConfig, count_tiles
from .dot import BLOCK_K, LANE_BLOCKS, QUAD, SLICE_BLOCKS, SLICE_K, dot_engine
from .scales import (
    SCALE_SHIFT,
    advance,
    load_b_block,
    scale_products,
    shifted_scale,
    slice_bytes,
    tile_offsets,
    tile_row,
)

OUT_TYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}


class TileShare(NamedTuple):
    """Tiles of a CTA: ``each``, and one more for the first ``rest`` CTAs."""

    each: Int32
    rest: Int32


class Gemv:
    """The kernel of one :class:`GemvConfig`."""

    def __init__(self, config: GemvConfig) -> None:
        self.config = config
        self.engine = dot_engine(config.arch, config.dot)
        # blocks of b that each thread asks for first; more would cost registers
        self.first_blocks = min(-(-config.capacity // (BLOCK_K * config.threads)), 4)
        self.loader = gemv_ring if config.shared_stages else gemv_registers

    @cute.jit
    def __call__(self, arguments: GemvArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs for each matrix, which divide its tiles evenly: at most ``tiles`` each."""
        cfg = self.config
        total_tiles = count_tiles(arguments.m, cutlass.min)
        share = TileShare(total_tiles // arguments.ctas, total_tiles % arguments.ctas)
        # what only the host uses does not become a parameter of the kernel
        self.kernel(arguments._replace(batch=None, ctas=None), share).launch(
            grid=(arguments.ctas, arguments.batch, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=cfg.min_blocks,
            # nothing lives in L1: all of it can be shared memory (and the DSL need not ask a device what it has)
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, arguments: GemvArguments, share: TileShare):
        cfg = self.config
        m, k = arguments.m, arguments.k
        if cutlass.const_expr(cfg.k > 0):
            k = Int32(cfg.k)
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(div(thread, 32))
        lane = mod(thread, 32)
        warp_k, warp_m = mod(warp, cfg.warps_k), div(warp, cfg.warps_k)

        smem = SmemAllocator()
        b_bytes = cfg.capacity_slices * self.engine.slice_bytes
        # [values of b of a chunk | constants of the engine | f16 scales of b]
        shared_b = smem.allocate_array(cutlass.Uint8, b_bytes, byte_alignment=128).toint()
        constant_words = self.engine.constant_words
        constants = smem.allocate_tensor(cutlass.Uint32, cute.make_layout(max(constant_words, 1)), byte_alignment=128)
        scale_bytes = cfg.capacity_slices * SLICE_SCALE_BYTES
        shared_scale = smem.allocate_array(cutlass.Uint8, scale_bytes, byte_alignment=16).toint()
        # (LANES, ROW_OF_LANE, WARPS_K, TILES)
        sums_layout = cute.make_layout((32, 2, cfg.warps_k, cfg.tiles))
        sums = smem.allocate_tensor(Float32, sums_layout, byte_alignment=16)
        if cutlass.const_expr(cfg.shared_stages):
            ring_bytes = cfg.stages * cfg.stage_bytes
            ring = smem.allocate_array(cutlass.Uint8, cfg.warps_m * cfg.warps_k * ring_bytes, byte_alignment=128)
            store = (ring.toint() + warp * ring_bytes, lane)
        else:
            # (WORDS, ROWS, STAGES) and (ROWS, STAGES)
            data = cute.make_rmem_tensor((8, 2, cfg.stages), cutlass.Uint32)
            store = (data, cute.make_rmem_tensor((2, cfg.stages), cutlass.Uint32), lane)

        # tiles of this block of threads, and of this warp: first_tile + warp_m, + warps_m, …
        first_tile = block * share.each + cutlass.min(block, share.rest)
        tiles = share.each + Int32(block < share.rest)
        # contiguous rows if K is compiled in
        a_row = Int64(cfg.k // 2) if cfg.k else arguments.a_strides.row
        a_address = arguments.a.toint() + Int64(batch) * arguments.a_strides.batch
        sfa_address = arguments.sfa.toint() + Int64(batch) * arguments.sfa_strides.batch
        operand_a = (a_address, a_row, sfa_address, arguments.sfa_strides.row)
        b_address = arguments.b.toint() + Int64(batch) * arguments.b_batch
        sfb_address = arguments.sfb.toint() + Int64(batch) * arguments.sfb_batch
        slices = ceil_div(k, SLICE_K)
        b_places = (b_address, sfb_address, shared_b, constants.iterator.toint(), shared_scale)
        who = (thread, lane, warp_k, warp_m)
        if cutlass.const_expr(cfg.chunked):
            for first_slice in cutlass.range(0, slices, cfg.capacity_slices, unroll=1):
                chunk_slices = cutlass.min(slices - first_slice, cfg.capacity_slices)
                slice_range = (first_slice, chunk_slices)
                self.chunk(operand_a, b_places, (store, sums), who, (first_tile, tiles), slice_range, (m, k))
        else:
            self.chunk(operand_a, b_places, (store, sums), who, (first_tile, tiles), (Int32(0), slices), (m, k))
        cute.arch.sync_threads()

        factor = arguments.alpha * Float32(SCALE_SHIFT * self.engine.factor)
        if cutlass.const_expr(cfg.a_global):
            factor = factor * cute.make_tensor(arguments.a_global, cute.make_layout(1))[0]
        if cutlass.const_expr(cfg.b_global):
            factor = factor * cute.make_tensor(arguments.b_global, cute.make_layout(1))[0]
        # (M) of this batch
        out = cute.make_tensor(
            arguments.c + Int64(batch) * arguments.c_strides.batch, cute.make_layout(m, stride=arguments.c_strides.row)
        )
        # four threads a row, one for each lane of the quad that summed it
        for output in cutlass.range(thread, tiles * TILE_ROWS * QUAD, cfg.threads, unroll=1):
            row_of_tile = mod(div(output, QUAD), TILE_ROWS)
            tile_of_block = div(output, TILE_ROWS * QUAD)
            lane_row, row_of_lane = mod(row_of_tile, 8), div(row_of_tile, 8)
            total = Float32(0.0)
            for w in cutlass.range_constexpr(cfg.warps_k):
                total = total + sums[lane_row * QUAD + mod(output, QUAD), row_of_lane, w, tile_of_block]
            total = sum_lanes(total, QUAD)
            row = tile_row(first_tile + tile_of_block, lane_row, row_of_lane)
            if row < m and mod(output, QUAD) == 0:
                out[row] = (total * factor).to(OUT_TYPES[cfg.out])

    @cute.jit
    def chunk(self, operand_a, b_places, stores, who, tile_range, slice_range, shape):
        """Adds the products over one chunk of K, as much of b as shared memory holds, to ``sums``."""
        cfg = self.config
        _, _, shared_b, shared_constants, shared_scale = b_places
        store, sums = stores
        thread, lane, warp_k, warp_m = who
        first_slice, chunk_slices = slice_range
        m, k = shape
        quad_lane = mod(lane, QUAD)
        addresses, take = self.loader.addresses, self.loader.take

        if cutlass.const_expr(cfg.chunked):
            cute.arch.sync_threads()  # the chunk before this one has been used: its b, and the stages of the warps
        first_tile, tiles = tile_range
        tile = first_tile + warp_m
        # slices of the chunk that are this warp's: warp_k, warp_k + warps_k, …; all of them for each of its tiles
        units = ceil_div(chunk_slices - warp_k, cfg.warps_k)
        total = units * cute.ceil_div(cutlass.max(tiles - warp_m, 0), cfg.warps_m)
        # where the next slice to ask for is: addresses, tile, unit, and bytes from tile 0 to the tile
        offset = tile_offsets(cfg, operand_a, m, k, tile)
        address = advance(addresses(cfg, operand_a, lane, first_slice + warp_k), offset[0], offset[1])
        cursor = (address, tile, Int32(0), offset[0], offset[1])
        # in shared memory a stage is written again only after the slice it held has been used up
        ahead = cfg.stages - 1 if cfg.shared_stages else cfg.stages
        b_words = cute.make_rmem_tensor((2, self.first_blocks), cutlass.Uint32)
        b_scale = cute.make_rmem_tensor(self.first_blocks, cutlass.Uint32)
        for j in cutlass.range_constexpr(self.first_blocks):
            self.ask_b(b_places, thread + j * cfg.threads, slice_range, k, b_words, b_scale, j)
        for i in cutlass.range_constexpr(ahead):
            if i < total:
                self.fetch(cursor, store, i, first_slice + warp_k, operand_a, (m, k))
                cursor = self.step(cursor, operand_a, units, (m, k))
            if cutlass.const_expr(cfg.shared_stages):
                commit_group()

        self.put_constants(shared_constants, thread)
        for i in cutlass.range_constexpr(self.first_blocks):
            self.store_b(b_places, thread + i * cfg.threads, slice_range, b_words, b_scale, i)
        if cutlass.const_expr(self.first_blocks * cfg.threads < cfg.capacity_slices * SLICE_BLOCKS):
            next_block = thread + self.first_blocks * cfg.threads
            for block in cutlass.range(next_block, chunk_slices * SLICE_BLOCKS, cfg.threads, unroll=1):
                self.ask_b(b_places, block, slice_range, k, b_words, b_scale, 0)
                self.store_b(b_places, block, slice_range, b_words, b_scale, 0)
        cute.arch.sync_threads()

        lane_b = self.engine.lane_state(shared_b, shared_constants, lane)
        scale_address = shared_scale + warp_k * SLICE_SCALE_BYTES + quad_lane * 8
        sum0, sum1 = Float32(0.0), Float32(0.0)
        slot, unit = warp_m, Int32(0)
        stage, free_stage = Int32(0), Int32(cfg.stages - 1)
        # stages in registers need constant indices, hence a round of them an iteration
        round_stages = 1 if cfg.shared_stages else cfg.stages
        for first in cutlass.range(0, total, round_stages, unroll=1):
            for i in cutlass.range_constexpr(round_stages):
                if first + i < total:
                    if cutlass.const_expr(cfg.shared_stages):
                        wait_group(cfg.stages - 2)
                        gemv_ring.synchronize()
                    rows, scales = take(cfg, store, stage if cfg.shared_stages else i)
                    if cutlass.const_expr(cfg.shared_stages):
                        if first + ahead < total:
                            self.fetch(cursor, store, free_stage, first_slice + warp_k, operand_a, (m, k))
                            cursor = self.step(cursor, operand_a, units, (m, k))
                        commit_group()
                        free_stage = stage
                        stage = cutlass.select_(stage == cfg.stages - 1, Int32(0), stage + 1)
                    b_scales = load_shared(scale_address + unit * (cfg.warps_k * SLICE_SCALE_BYTES), 8)
                    local_slice = warp_k + unit * cfg.warps_k
                    sum0, sum1 = self.accumulate(sum0, sum1, rows, scales, b_scales, lane_b, local_slice)
                    if cutlass.const_expr(not cfg.shared_stages):
                        if first + i + ahead < total:
                            self.fetch(cursor, store, i, first_slice + warp_k, operand_a, (m, k))
                            cursor = self.step(cursor, operand_a, units, (m, k))
                    unit += 1
                    if unit == units:
                        self.put_sums(sums, sum0, sum1, lane, warp_k, slot, first_slice)
                        sum0, sum1, unit = Float32(0.0), Float32(0.0), Int32(0)
                        slot += cfg.warps_m

    @cute.jit
    def put_constants(self, shared_constants: Int32, thread: Int32):
        """Writes the engine's constants to shared memory."""
        words = self.engine.constant_words
        for i in cutlass.range_constexpr(-(-words // self.config.threads)):
            index = thread + i * self.config.threads
            if index < words:
                store_shared(shared_constants + index * 4, [self.engine.constant(index)])

    @cute.jit
    def put_sums(self, sums, sum0: Float32, sum1: Float32, lane: Int32, warp_k: Int32, slot: Int32, first_slice: Int32):
        """Stores a tile's sums over this warp's slices of the chunk, or adds them to those of the chunks before."""
        if cutlass.const_expr(self.config.chunked):
            if first_slice > 0:
                sum0 = sum0 + sums[lane, 0, warp_k, slot]
                sum1 = sum1 + sums[lane, 1, warp_k, slot]
        sums[lane, 0, warp_k, slot] = sum0
        sums[lane, 1, warp_k, slot] = sum1

    @cute.jit
    def step(self, cursor, operand_a, units: Int32, shape):
        """The cursor one unit further: along K, or to the first of the warp's slices of its next tile."""
        cfg = self.config
        address, tile, unit, data_offset, scale_offset = cursor
        data_step = Int64(cfg.warps_k * SLICE_BYTES)
        scale_step = Int64(cfg.warps_k * slice_bytes(cfg))
        unit += 1
        if unit == units:
            tile += cfg.warps_m
            unit = Int32(0)
            # the new tile, less what was walked along K in the old one
            offset = tile_offsets(cfg, operand_a, shape[0], shape[1], tile)
            data_step, data_offset = offset[0] - data_offset - (units - 1) * data_step, offset[0]
            scale_step, scale_offset = offset[1] - scale_offset - (units - 1) * scale_step, offset[1]
        return advance(address, data_step, scale_step), tile, unit, data_offset, scale_offset

    def accumulate(self, sum0, sum1, rows, scales, b_scales, lane_b, local_slice):
        """Adds the lane's four blocks of each row, scaled, to the sums of the two rows."""
        products = scale_products(scales, b_scales)
        blocks = self.engine.block_sums(rows, lane_b, local_slice)
        for i in range(LANE_BLOCKS):
            sum0 = sum0 + blocks[0][i] * products[0][i]
            sum1 = sum1 + blocks[1][i] * products[1][i]
        return sum0, sum1

    @cute.jit
    def fetch(self, cursor, store, stage, first_slice: Int32, operand_a, shape):
        """Asks for the slice at the cursor, of which the last may be shorter, and the last tile may lack rows."""
        fetch = self.loader.fetch
        address, tile, unit, _, _ = cursor
        _, a_row, _, _ = operand_a
        if cutlass.const_expr(self.config.ragged):
            rows_left = shape[0] - tile_row(tile, 0, 0)
            blocks_left = div(shape[1], BLOCK_K) - (first_slice + unit * self.config.warps_k) * SLICE_BLOCKS
            if rows_left >= TILE_LAST_ROW + 1 and blocks_left >= SLICE_BLOCKS:
                fetch(self.config, address, a_row, None, store, stage)
            else:
                fetch(self.config, address, a_row, (rows_left, blocks_left), store, stage)
        else:
            fetch(self.config, address, a_row, None, store, stage)

    def ask_b(self, b_places, block: Int32, slice_range, k: Int32, words, scale, i: int):
        """Loads ``block`` of a chunk of b and its scale into registers; zeros past the chunk and past K."""
        b_address, sfb_address, _, _, _ = b_places
        first_slice, chunk_slices = slice_range
        column = first_slice * SLICE_BLOCKS + block
        end = cutlass.min(div(k, BLOCK_K), (first_slice + chunk_slices) * SLICE_BLOCKS)
        exists = Int32(column < end)
        pair, scale[i] = load_b_block(self.config, b_address, sfb_address, column, exists, k)
        words[0, i], words[1, i] = pair

    @cute.jit
    def store_b(self, b_places, block: Int32, slice_range, words, scale, i: cutlass.Constexpr):
        """Decodes what :meth:`ask_b` loaded into shared memory."""
        _, _, shared_b, _, shared_scale = b_places
        _, chunk_slices = slice_range
        # (CAPACITY / 16)
        scale_pointer = cute.make_ptr(cutlass.Uint16, shared_scale, cute.AddressSpace.smem, assumed_align=2)
        scales = cute.make_tensor(scale_pointer, cute.make_layout(self.config.capacity // BLOCK_K))
        stage_block = self.engine.stage_block
        if block < chunk_slices * SLICE_BLOCKS:
            stage_block(shared_b, block, [words[0, i], words[1, i]])
            scales[block] = shifted_scale(scale[i])

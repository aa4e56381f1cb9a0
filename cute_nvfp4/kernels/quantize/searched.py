"""The rule ``optimal`` for large matrices: rows of bfloat16, with the error table of :mod:`.block.error_table`.

Work tiles are those of :mod:`.row`. The differences are:

* The table fills half of shared memory, so that an SM has one CTA. Once the table is written, its warps are
  independent: each walks every ``ctas * warps``-th work tile, so that all CTAs share what is left at the end. A warp
  has two rows in shared memory, which is enough: quantizing a row takes it some microseconds.
* Lanes 4 to 7 of each eight read the second half of their blocks first, so that eight lanes read from all banks. The
  order within a block matters only for its codes, whose two words are exchanged.
* Blocks that the estimates leave undecided are read again after the work tile and searched by the definition: few lanes
  have one, and the search needs all registers.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.memory import SmemAllocator

from ...ptx import mbarrier
from ...ptx.memory import load_shared
from ..arith import div, mod
from .arguments import QuantizeArguments
from .block.quantize_block import estimated_block, searched_block
from .block.records import BlockContext
from .config import ROW_STEP, WARP, WARP_ROWS
from .kernel import Matrices, address_of
from .row import QuantizeRow, WarpRows, with_byte


class WarpTile(NamedTuple):
    """The rows of a work tile, and the index of its 32 blocks in each row."""

    rows: WarpRows
    chunk: Int32


class QuantizeSearched(QuantizeRow):
    """The kernel with the error table."""

    @cute.kernel
    def kernel(self, arguments: QuantizeArguments):
        self.quantize_work_tiles(arguments)

    @cute.jit
    def quantize_work_tiles(self, arguments: QuantizeArguments):
        """Quantizes all work tiles of this CTA."""
        cfg, walk = self.config, arguments.walk
        thread, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(div(thread, WARP))
        lane = mod(thread, WARP)
        smem = SmemAllocator()
        ring = self.make_ring(smem, warp)
        matrices = self.matrices(arguments, batch)

        first, step = warp * ctas + cta, ctas * cfg.warps
        here = self.work_tile(first, walk.inner)
        source = self.source(matrices, here.rows, here.chunk)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(cfg.ring_rows):
                mbarrier.initialise(ring.barriers + 8 * i, 1)
            mbarrier.fence_initialised()
            if first < walk.count:
                for i in cutlass.range_constexpr(cfg.ring_rows):
                    self.fetch(source, matrices, ring, i)
        cute.arch.sync_warp()
        context = self.context(arguments, smem, thread, cta + batch)

        exchanged = self.second_half_first(lane) != 0
        for tile in cutlass.range(first, walk.count, step, unroll=1):
            here = self.work_tile(tile, walk.inner)
            rows, column = here.rows, here.chunk * WARP + lane
            codes = self.target(matrices, rows, here.chunk, lane).codes
            # scales of the lane's column, one byte for each row; and one bit for each row with an undecided block
            scales, undecided = Uint32(0), Int32(0)
            for i in cutlass.range(WARP_ROWS, unroll=1):
                stage, ahead = mod(i, cfg.ring_rows), i + cfg.ring_rows
                mbarrier.wait(ring.barriers + 8 * stage, div(i, cfg.ring_rows))
                words = self.take(ring.stages + stage * self.stage_bytes, lane, matrices.columns - here.chunk * WARP)
                cute.arch.sync_warp()
                if ahead == WARP_ROWS:
                    following = self.work_tile(tile + step, walk.inner)
                    source = self.source(matrices, following.rows, following.chunk)
                if (ahead < WARP_ROWS) | (tile + step < walk.count):
                    with cute.arch.elect_one():
                        self.fetch(source, matrices, ring, stage, mod(ahead, WARP_ROWS))
                found = estimated_block(cfg, words, context)
                out = tuple(cutlass.select_(exchanged, b, a) for a, b in zip(found.words, found.words[::-1]))
                code, exists = found.code, matrices.has(rows.base + i * ROW_STEP, column)
                code = self.store_block(codes, code, out, exists)
                undecided = undecided | cutlass.select_(found.decided, Int32(0), Int32(1) << i)
                scales = scales + code * (Uint32(1) << Uint32(8 * i))
                codes = codes + ROW_STEP * arguments.data_strides.row
            scales = self.search(matrices, rows, column, context, undecided, scales)
            word = self.transpose_scales(scales, lane)
            self.store_scales(matrices, rows, column, self.target(matrices, rows, here.chunk, lane).scales, word)

    @cute.jit
    def search(
        self,
        matrices: Matrices,
        rows: WarpRows,
        column: Int32,
        context: BlockContext,
        undecided: Int32,
        scales: Uint32,
    ) -> Uint32:
        """Searches by the definition the blocks of rows whose bit in ``undecided`` is set; returns the new scales."""
        cfg = self.config
        if cute.arch.vote_any_sync(undecided != 0):
            for i in cutlass.range(WARP_ROWS, unroll=1):
                row = rows.base + i * ROW_STEP
                mine = (((undecided >> i) & 1) != 0) & matrices.has(row, column)
                if cute.arch.vote_any_sync(mine):
                    words = self.load(address_of(matrices.mX, (row, column)), mine)
                    found = searched_block(cfg, words, context, mine)
                    if mine:
                        self.store(address_of(matrices.mData, (row, column * cfg.out_bytes)), found.words)
                        scales = with_byte(scales, i, found.code)
        return scales

    def work_tile(self, index: Int32, inner: Int32) -> WarpTile:
        """Work tile ``index``, along an atom's rows first, whose scales then fill whole lines at about one time."""
        place = div(index, ROW_STEP)
        return WarpTile(WarpRows(place // inner, mod(index, ROW_STEP)), place % inner)

    def second_half_first(self, lane: Int32) -> Int32:
        """1 for a lane that reads the second half of its block first, else 0."""
        return mod(div(lane, 4), 2)

    def take(self, stage: Int32, lane: Int32, columns: Int32) -> list[Uint32]:
        """The words of the lane's block in ``stage``, its halves possibly exchanged; another block if it has none."""
        mine = cutlass.min(lane, columns - 1) if self.config.ragged else lane
        start = stage + mine * self.config.block_bytes + 16 * self.second_half_first(lane)
        return [*load_shared(start, 16), *load_shared(start ^ 16, 16)]

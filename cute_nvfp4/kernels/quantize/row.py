"""Quantization to block-scaled formats in one pass over x, one source for Hopper and Blackwell.

Memory bandwidth bounds it: x is read once, and a little more than a quarter of its bytes (bf16) is written. A thread
quantizes whole blocks in registers, so that scales, codes and searches need no barriers.

Work distribution. A warp's *work tile* is four rows of 32 blocks each: rows r, r + 32, r + 64 and r + 96 of a scale
atom. The warp takes them one after the other; lane l takes block l. In the blocked layout the scales of four
neighbouring blocks of these rows are sixteen contiguous bytes. After the four rows a lane holds the four scales of its
column; a quad of lanes exchanges them (two shuffles), and each lane stores four scales of one row as a word. The warps
of a CTA take consecutive r (a *row group*), so that their words fill whole lines of the scales.

As many CTAs as fit on the device walk the work tiles. One bulk copy (``cp.async.bulk``) brings a row of a work tile, up
to a contiguous kilobyte of bf16, to shared memory, four rows ahead: bytes in flight cost no registers, and each sector
is requested once. Where x is not aligned to sixteen bytes, each lane loads its own block.

Where the fast path of 4/6 leaves a block undecided, the kernel goes on. After the work tile it reads undecided blocks
from global memory and quantizes them again by the definition: a few blocks of a row by the whole warp, one after the
other, or many blocks each by its own lane. The four rows of a work tile therefore are code without branches, with a
barrier for each two rows.

Rows and blocks that only pad the blocked layout are walked like others: nothing is read for them, no data is stored,
and their scales are zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32, Uint64
from cutlass.memory import SmemAllocator

from ...ptx import mbarrier
from ...ptx.async_copy import copy_bulk
from ...ptx.memory import load_shared, store_global, store_global_byte
from ...ptx.move import opaque, prmt
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS
from ..arith import div, mod
from .arguments import QuantizeArguments
from .block.four_six_by_warp import by_whole_warp
from .block.four_six_fast_path import four_six
from .block.optimal_definition import lowest_bit
from .block.quantize_block import quantize_block
from .block.records import BlockContext
from .config import ROW_STEP, WARP, WARP_ROWS, QuantizeConfig
from .kernel import Matrices, QuantizeKernel, address_of

# undecided blocks of a row up to which the whole warp takes each; above, each lane takes its own block
_FEW = 4


class WarpRows(NamedTuple):
    """The rows of a warp's work tile: ``first``, first + 32, first + 64 and first + 96 of scale atom ``atom``."""

    atom: Int32
    first: Int32

    @property
    def base(self) -> Int32:
        """The first of these rows, counted in the matrix."""
        return self.atom * ATOM_ROWS + self.first


class Source(NamedTuple):
    """Sources of bulk copies. starts: the address of the work tile's first row in each input; size: bytes of a row in
    one input; rows: rows of the matrix from the first one on."""

    starts: tuple[Int64, ...]
    size: Int32
    rows: Int32


class Target(NamedTuple):
    """The addresses of the lane's codes of its next row, and of its word of four scales."""

    codes: Int64
    scales: Int64

    def advanced(self, config: QuantizeConfig, row: Int64) -> Target:
        """The target after a work tile's last row, moved to the next work tile of its rows. row: bytes of its codes."""
        column_bytes = ATOM_BYTES // ATOM_COLS if config.layout == "blocked" else 1
        codes = self.codes + (WARP * config.out_bytes - WARP_ROWS * ROW_STEP * row)
        return Target(codes, self.scales + WARP * column_bytes)


class RowRing(NamedTuple):
    """A warp's stages in shared memory, each with a row of every input, and their barriers.

    stages: the address of (ROW_BYTES, INPUTS, RING_ROWS). barriers: the address of (RING_ROWS / rows_together)
    mbarriers. Stages as a tensor change the PTX: additions of addresses change places, and with them the machine code
    of 4/6.
    """

    stages: Int32
    barriers: Int32


class QuantizeRow(QuantizeKernel):
    """The kernel that reads x row by row.

    A subclass may read several inputs of x's shape (``inputs``), from which ``prepared`` makes the elements.
    """

    # the number of ``inputs``
    input_count = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one input's row of a work tile in shared memory."""
        return self.config.block_bytes * WARP if self.config.bulk else 16

    @property
    def stage_bytes(self) -> int:
        """Bytes of all inputs' rows of a work tile in shared memory, for one row of the work tile."""
        return self.input_count * self.row_bytes

    def extended(self, matrices: Matrices, extra: Any) -> Matrices:
        """``matrices`` with the tensors in ``extra``."""
        return matrices

    def inputs(self, matrices: Matrices) -> tuple[cute.Tensor, ...]:
        """The tensors that the kernel reads."""
        return (matrices.mX,)

    def prepared(
        self, matrices: Matrices, words: list[Uint32], row: Int32, column: Int32, exists: Boolean
    ) -> Sequence[Uint32]:
        """The elements of a block, from its words in each input."""
        return words

    @cute.kernel
    def kernel(self, arguments: QuantizeArguments):
        self.quantize_rows(arguments, None)

    @cute.jit
    def quantize_rows(self, arguments: QuantizeArguments, extra: Any):
        """Quantizes the work tiles of this CTA. extra: arguments of a subclass, for ``extended``."""
        cfg, walk = self.config, arguments.walk
        thread, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(div(thread, WARP))
        lane = mod(thread, WARP)
        smem = SmemAllocator()
        ring = self.make_ring(smem, warp)
        matrices = self.extended(self.matrices(arguments, batch), extra)

        # work tiles are counted along K first; a CTA's work tiles follow one another, or are ``ctas`` apart
        first, end, step = cta, walk.count, ctas
        if cutlass.const_expr(cfg.in_runs):
            walker = warp * ctas + cta if cutlass.const_expr(cfg.runs_of_warps) else cta
            first, step = walker * walk.each + cutlass.min(walker, walk.rest), Int32(1)
            end = first + walk.each + Int32(walker < walk.rest)
        group, chunk = first // walk.inner, first % walk.inner
        rows = self.warp_rows(group, warp)
        if cutlass.const_expr(cfg.bulk):
            source = self.source(matrices, rows, chunk)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(WARP_ROWS // cfg.rows_together):
                    mbarrier.initialise(ring.barriers + 8 * i, 1)
                mbarrier.fence_initialised()
                for i in cutlass.range_constexpr(WARP_ROWS // cfg.rows_together):
                    self.fetch(source, matrices, ring, i)
            cute.arch.sync_warp()
        context = self.context(arguments, smem, thread, cta + batch)

        parity = Int32(0)
        target = self.target(matrices, rows, chunk, lane)
        for tile in cutlass.range(first, end, step, unroll=1):
            rows = self.warp_rows(group, warp)
            next_group, next_chunk = group, chunk + 1
            if cutlass.const_expr(cfg.in_runs):
                if cutlass.const_expr(cfg.bulk):
                    source = self.advanced(source, matrices, next_chunk)
                if next_chunk == walk.inner:
                    next_group, next_chunk = group + 1, Int32(0)
                    if cutlass.const_expr(cfg.bulk):
                        source = self.source(matrices, self.warp_rows(next_group, warp), next_chunk)
            else:
                target = self.target(matrices, rows, chunk, lane)
                next_group, next_chunk = group + walk.outer_step, chunk + walk.inner_step
                if next_chunk >= walk.inner:
                    next_group, next_chunk = next_group + 1, next_chunk - walk.inner
                if cutlass.const_expr(cfg.bulk):
                    source = self.source(matrices, self.warp_rows(next_group, warp), next_chunk)
            column = chunk * WARP + lane
            # scales of the lane's column, one byte for each row; and one bit for each row with an undecided block
            scales, undecided = Uint32(0), Int32(0)
            more = tile + step < end
            for i in cutlass.range(WARP_ROWS, unroll_full=cfg.defers_undecided, unroll=1):
                row = rows.base + i * ROW_STEP
                exists = matrices.has(row, column)
                if cutlass.const_expr(cfg.bulk):
                    phase = div(i, cfg.rows_together)
                    if mod(i, cfg.rows_together) == 0:
                        mbarrier.wait(ring.barriers + 8 * phase, parity)
                    words = self.take(ring.stages + i * self.stage_bytes, lane, matrices.columns - chunk * WARP)
                    if mod(i + 1, cfg.rows_together) == 0:
                        cute.arch.sync_warp()
                        if more:
                            with cute.arch.elect_one():
                                self.fetch(source, matrices, ring, phase)
                else:
                    words = self.load(address_of(matrices.mX, (row, column)), exists)
                words = self.prepared(matrices, words, row, column, exists)
                if cutlass.const_expr(cfg.defers_undecided):
                    found = four_six(cfg, words, context)
                    code, out = found.code, found.words
                    undecided = undecided | cutlass.select_(found.decided, Int32(0), Int32(1) << i)
                else:
                    index = Int64(0)
                    if cutlass.const_expr(cfg.stochastic):
                        line = Int64(batch) * Int64(matrices.rows) + Int64(row)
                        index = (line * Int64(matrices.columns) + Int64(column)) * cfg.block
                    code, out = quantize_block(cfg, words, context, index)
                code = self.store_block(target.codes, code, out, exists)
                scales = scales + code * (Uint32(1) << Uint32(8 * i))
                target = target._replace(codes=target.codes + ROW_STEP * arguments.data_strides.row)
            if cutlass.const_expr(cfg.defers_undecided):
                scales = self.decide(matrices, rows, column, context, undecided, scales)
            word = self.transpose_scales(scales, lane)
            if cutlass.const_expr(cfg.in_runs):
                self.store_scales(matrices, rows, column, target.scales, word)
                target = target.advanced(cfg, arguments.data_strides.row)
                if next_chunk == 0:
                    target = self.target(matrices, self.warp_rows(next_group, warp), next_chunk, lane)
            else:
                self.store_scales(matrices, rows, column, self.target(matrices, rows, chunk, lane).scales, word)
            group, chunk = next_group, next_chunk
            parity = parity ^ 1

    @cute.jit
    def store_block(self, address: Int64, code: Uint32, words: tuple[Uint32, ...], exists: Boolean) -> Uint32:
        """Stores the codes of a block that exists, and returns its scale, or 0."""
        if cutlass.const_expr(self.config.ragged):
            code = cutlass.select_(exists, code, Uint32(0))
            if exists:
                self.store(address, words)
        else:
            self.store(address, words)
        return code

    @cute.jit
    def decide(
        self,
        matrices: Matrices,
        rows: WarpRows,
        column: Int32,
        context: BlockContext,
        undecided: Int32,
        scales: Uint32,
    ) -> Uint32:
        """Quantizes by the definition the blocks of rows whose bit in ``undecided`` is set; returns the new scales."""
        slow = dataclasses.replace(self.config, fast_path=False)
        lane = mod(column, WARP)
        if cute.arch.vote_any_sync(undecided != 0):
            for i in cutlass.range(WARP_ROWS, unroll=1):
                row = rows.base + i * ROW_STEP
                mine = (((undecided >> i) & 1) != 0) & matrices.has(row, column)
                left = Uint32(cute.arch.vote_ballot_sync(mine))
                if cute.arch.popc(left) > _FEW:
                    left = Uint32(0)
                    if mine:
                        words = self.load(address_of(matrices.mX, (row, column)), Boolean(True))
                        code, out = quantize_block(slow, words, context)
                        self.store(address_of(matrices.mData, (row, column * slow.out_bytes)), out)
                        scales = with_byte(scales, i, code)
                while left != Uint32(0):
                    owner = lowest_bit(left)
                    block = column - lane + owner
                    found = by_whole_warp(slow, address_of(matrices.mX, (row, block)), lane, context.factor)
                    if lane == owner:
                        self.store(address_of(matrices.mData, (row, block * slow.out_bytes)), found.words)
                        scales = with_byte(scales, i, found.code)
                    left = left & (left - Uint32(1))
        return scales

    def warp_rows(self, group: Int32, warp: Int32) -> WarpRows:
        """The rows of a warp in row group ``group``; with runs of warps, a group is one row of 32."""
        if self.config.runs_of_warps:
            return WarpRows(div(group, ROW_STEP), mod(group, ROW_STEP))
        groups = ROW_STEP // self.config.warps
        return WarpRows(div(group, groups), mod(group, groups) * self.config.warps + warp)

    def make_ring(self, smem: SmemAllocator, warp: Int32) -> RowRing:
        """Allocates the stages and barriers of all warps, and returns those of ``warp``."""
        cfg, warps = self.config, self.config.warps
        ring_bytes, phases = self.stage_bytes * cfg.ring_rows, cfg.ring_rows // cfg.rows_together
        # (STAGE_BYTES, RING_ROWS, WARPS) and (RING_ROWS / rows_together, WARPS)
        stages = smem.allocate_array(Uint8, ring_bytes * warps, byte_alignment=128)
        barriers = smem.allocate_array(Uint64, phases * warps, byte_alignment=8)
        return RowRing(stages.toint() + warp * ring_bytes, barriers.toint() + warp * (8 * phases))

    def source(self, matrices: Matrices, rows: WarpRows, chunk: Int32) -> Source:
        """The source of the work tile of ``rows`` and of the ``chunk``-th 32 blocks."""
        # opaque keeps the addresses: the compiler would multiply rows by the stride again for each copy
        place = rows.base, chunk * WARP
        starts = tuple(opaque(address_of(tensor, place)) for tensor in self.inputs(matrices))
        return Source(starts, self.source_bytes(matrices, chunk), matrices.rows - rows.base)

    def source_bytes(self, matrices: Matrices, chunk: Int32) -> Int32:
        """Bytes of a row in the ``chunk``-th 32 blocks."""
        columns = cutlass.min(matrices.columns - chunk * WARP, WARP) if self.config.ragged else Int32(WARP)
        return columns * self.config.block_bytes

    def advanced(self, source: Source, matrices: Matrices, chunk: Int32) -> Source:
        """The source of the same rows in ``chunk``, which follows that of ``source``."""
        starts = tuple(start + self.config.block_bytes * WARP for start in source.starts)
        return Source(starts, self.source_bytes(matrices, chunk), source.rows)

    def target(self, matrices: Matrices, rows: WarpRows, chunk: Int32, lane: Int32) -> Target:
        """The addresses of the lane's results of a work tile."""
        column, row_of_four = chunk * WARP + lane, mod(lane, ATOM_COLS)
        codes = address_of(matrices.mData, (rows.base, column * self.config.out_bytes))
        if self.config.layout == "blocked":
            scales = matrices.blocked_scale((rows.first, row_of_four), rows.atom, div(column, ATOM_COLS))
        else:
            place = rows.base + row_of_four * ROW_STEP, column - mod(column, ATOM_COLS)
            scales = address_of(matrices.mScale, place)
        if self.config.in_runs:
            # opaque keeps the addresses: the compiler would compute them again for each work tile
            codes, scales = opaque(codes), opaque(scales)
        return Target(codes, scales)

    def fetch(self, source: Source, matrices: Matrices, ring: RowRing, phase: Any, first_row: Any = None) -> None:
        """Starts the copies of the rows that share barrier ``phase`` into their stages. One thread calls it.

        first_row: the first of these rows in the work tile; None where the rows have the order of the stages.
        """
        together = self.config.rows_together
        barrier = ring.barriers + 8 * phase
        mbarrier.expect_bytes(barrier, source.size * (together * self.input_count))
        for i in range(together):
            row = (phase * together if first_row is None else first_row) + i
            # a row that does not exist is replaced by the last one, of which nothing is kept
            mine = cutlass.min(row * ROW_STEP, source.rows - 1) if self.config.ragged else row * ROW_STEP
            stage = ring.stages + (phase * together + i) * self.stage_bytes
            for n, (start, tensor) in enumerate(zip(source.starts, self.inputs(matrices))):
                address = start + Int64(mine) * tensor.stride[0]
                copy_bulk(stage + n * self.row_bytes, address, source.size, barrier)

    def take(self, stage: Int32, lane: Int32, columns: Int32) -> list[Uint32]:
        """The words of the lane's block in ``stage``, of each input; of another block if the lane has none."""
        cfg = self.config
        mine = cutlass.min(lane, columns - 1) if cfg.ragged else lane
        start = stage + mine * cfg.block_bytes
        offsets = [n * self.row_bytes + i for n in range(self.input_count) for i in range(0, cfg.block_bytes, 16)]
        return [word for offset in offsets for word in load_shared(start + offset, 16)]

    @cute.jit
    def transpose_scales(self, scales: Uint32, lane: Int32) -> Uint32:
        """The scales of four columns of row lane % 4, from a word of the scales of one column and four rows."""
        odd, upper = mod(lane, 2), mod(div(lane, 2), 2)
        other = cute.arch.shuffle_sync_bfly(scales, offset=1)
        pairs = prmt(scales, other, cutlass.select_(odd == 0, Uint32(0x6240), Uint32(0x3715)))
        other = cute.arch.shuffle_sync_bfly(pairs, offset=2)
        return prmt(pairs, other, cutlass.select_(upper == 0, Uint32(0x5410), Uint32(0x3276)))

    @cute.jit
    def store_scales(self, matrices: Matrices, rows: WarpRows, column: Int32, address: Int64, word: Uint32):
        """Stores the lane's four scales at ``address``: row lane % 4 of the four rows, and the columns of its quad."""
        cfg = self.config
        row = rows.base + mod(column, ATOM_COLS) * ROW_STEP
        column = column - mod(column, ATOM_COLS)
        if cutlass.const_expr(not cfg.ragged):
            store_global(address, [word])
        elif cutlass.const_expr(cfg.layout == "blocked"):
            if column < matrices.columns:
                store_global(address, [word])
        elif cutlass.const_expr(cfg.scale_word):
            if matrices.has(row, column):
                store_global(address, [word])
        else:
            for i in cutlass.range_constexpr(ATOM_COLS):
                if matrices.has(row, column + i):
                    store_global_byte(address + i, word >> Uint32(8 * i))


def with_byte(word: Uint32, i: Int32, byte: Uint32) -> Uint32:
    """``word`` with its byte ``i`` replaced."""
    return word & ~(Uint32(0xFF) << Uint32(8 * i)) | byte << Uint32(8 * i)

"""Quantization to block-scaled formats in one pass over x, one source for Hopper and Blackwell.

Bytes decide: x is read once, and a little more than a quarter (bf16) is written. A thread quantizes whole blocks in
registers, so that scales, codes and searches need no barriers.

Who does what. A *unit* is four rows of 32 blocks each: rows r, r + 32, r + 64 and r + 96 of a scale atom. A warp takes
them one after the other, lane l block l. In the blocked layout the scales of four neighbouring blocks of these rows
are sixteen contiguous bytes; after the four rows a lane holds the four scales of its column, quads of lanes exchange
them (two shuffles), and a lane stores four scales of one row in one word. The warps of a block of threads take
consecutive r, so that their words fill whole lines of the scales.

As many blocks of threads as fit on the device walk the units. A row of a unit, up to a kilobyte of bf16 that is
contiguous in memory, comes to shared memory by one bulk copy (``cp.async.bulk``), four rows ahead: bytes in flight
cost no registers, and each sector is asked for once. Where x is not aligned to sixteen bytes each lane loads its own
block.

Where the usual way of 4/6 is not certain of a block, it goes on; after the unit such blocks are quantized again the
exact way, read from global memory: a few of a row by the whole warp, one after the other, many by their own lanes. So
the four rows of a unit are one stretch of code without branches, fetched and waited for two at a time.

Rows and blocks that do not exist but that the blocked layout pads to are walked like others: nothing is read for
them, no data is stored, and their scales are zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx import mbarrier
from ...ptx.arithmetic import div_rn, rcp_rn
from ...ptx.async_copy import copy_bulk
from ...ptx.memory import load_global_if, load_shared, store_global, store_global_byte
from ...ptx.mma import MINUS_ONE_F16, diagonal
from ...ptx.move import f32_bits, f32_from_bits, opaque, prmt
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, ATOM_STRIDE
from ..arith import ceil_div, div, mod
from .arguments import QuantizeArguments
from .block.by_warp import quantize_alone
from .block.fast_path import units_of
from .block.optimal import optimal_entries
from .block.reciprocal_table import fill_table, is_usable, largest_wanted, table_bytes
from .block.rules import quantize_block, quantize_unless_doubtful
from .config import ROW_STEP, WARP, WARP_ROWS, QuantizeConfig

# doubtful blocks of a row that a warp takes one after the other, rather than each lane its own
_FEW = 4
# what ``cute_nvfp4.quantization.blocks`` accepts
SMALLEST_GLOBAL_SCALE, LARGEST_GLOBAL_SCALE = 2.0**-100, 2.0**118


class Quantize:
    """The kernel of one :class:`QuantizeConfig`; also how those of its subclasses are launched."""

    # per cent of a multiprocessor's memory that is to be shared memory, not L1
    smem_carveout = 100

    def __init__(self, config: QuantizeConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: QuantizeArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs for each matrix."""
        # what only the host uses does not become a parameter of the kernel
        self.kernel(arguments._replace(batch=None, ctas=None)).launch(
            grid=(arguments.ctas, arguments.batch, 1),
            block=(WARP * self.config.warps, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=self.smem_carveout,
        )

    @cute.kernel
    def kernel(self, arguments: QuantizeArguments):
        cfg = self.config
        x, data, scale, global_in, global_out = arguments[:5]
        rows, columns, powers = arguments.rows, arguments.columns, arguments.powers
        x_strides, data_strides, scale_strides = (arguments.x_strides, arguments.data_strides, arguments.scale_strides)
        seed, steps = (*arguments.seed, arguments.signs), arguments.walk
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(div(thread, WARP))
        lane = mod(thread, WARP)
        smem = SmemAllocator()
        # (ROW_BYTES, WARP_ROWS, WARPS) and (WARP_ROWS / rows_together, WARPS)
        phases = WARP_ROWS // cfg.rows_together
        stage_bytes = cfg.block_bytes * WARP if cfg.bulk else 16
        rings = smem.allocate_array(cutlass.Uint8, stage_bytes * WARP_ROWS * cfg.warps, byte_alignment=128)
        barriers = smem.allocate_array(cutlass.Uint64, phases * cfg.warps, byte_alignment=8)
        table = smem.allocate_array(cutlass.Uint8, table_bytes(cfg), byte_alignment=16)
        flags = smem.allocate_array(cutlass.Uint32, cfg.warps, byte_alignment=16)
        ring = rings.toint() + warp * (stage_bytes * WARP_ROWS)
        barrier = barriers.toint() + warp * (8 * phases)

        # units are counted along K first; those of a block of threads are ``blocks`` apart
        chunks, units, group_step, chunk_step = steps
        group, chunk = block // chunks, block % chunks
        x_address = x.toint() + Int64(batch) * x_strides[1]
        data_address = data.toint() + Int64(batch) * data_strides[1]
        scale_address = scale.toint() + Int64(batch) * scale_strides[1]
        if cutlass.const_expr(cfg.bulk):
            source = self.source(x_address, x_strides[0], (group, chunk, warp), (rows, columns))
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(phases):
                    mbarrier.initialise(barrier + 8 * i, 1)
                mbarrier.fence_initialised()
                for i in cutlass.range_constexpr(phases):
                    self.fetch(source, x_strides[0], ring, barrier, i)
            cute.arch.sync_warp()
        factor, valid = self.global_factor(global_in, global_out, thread, block + batch)
        tied, usable = Int32(0), is_usable(factor[0], valid)
        if cutlass.const_expr(cfg.has_usual_way):
            tied = fill_table(cfg, table.toint(), flags.toint(), factor[0], usable, thread)
        quick = (table.toint(), largest_wanted(usable), units_of(cfg, powers), tied)
        if cutlass.const_expr(cfg.defers):
            quick = (*quick, diagonal(MINUS_ONE_F16, lane))
        elif cutlass.const_expr(cfg.searches):
            quick = (*quick, optimal_entries(cfg, factor[0], lane))

        parity = Int32(0)
        for unit in cutlass.range(block, units, blocks, unroll=1):
            next_group, next_chunk = group + group_step, chunk + chunk_step
            if next_chunk >= chunks:
                next_chunk = next_chunk - chunks
                next_group = next_group + 1
            if cutlass.const_expr(cfg.bulk):
                source = self.source(x_address, x_strides[0], (next_group, next_chunk, warp), (rows, columns))
            atom, first, base = self.place(group, warp)
            column = chunk * WARP + lane
            out_address = data_address + Int64(base) * data_strides[0] + Int64(column * cfg.out_bytes)
            # scales of the lane's column, one byte a row; and a bit for each row that is to be done again
            own, again = Uint32(0), Int32(0)
            more = unit + blocks < units
            for i in cutlass.range(WARP_ROWS, unroll_full=cfg.defers, unroll=1):
                exists = (column < columns) & (base + i * ROW_STEP < rows)
                if cutlass.const_expr(cfg.bulk):
                    phase = div(i, cfg.rows_together)
                    if mod(i, cfg.rows_together) == 0:
                        mbarrier.wait(barrier + 8 * phase, parity)
                    words = self.take(ring + i * stage_bytes, lane, columns - chunk * WARP)
                    if mod(i + 1, cfg.rows_together) == 0:
                        cute.arch.sync_warp()
                        if more:
                            with cute.arch.elect_one():
                                self.fetch(source, x_strides[0], ring, barrier, phase)
                else:
                    place = Int64(base + i * ROW_STEP) * x_strides[0] + Int64(column * cfg.block_bytes)
                    words = self.load(x_address + place, exists)
                index = Int64(0)
                if cutlass.const_expr(cfg.stochastic):
                    line = Int64(batch) * Int64(rows) + Int64(base + i * ROW_STEP)
                    index = (line * Int64(columns) + Int64(column)) * cfg.block
                if cutlass.const_expr(cfg.defers):
                    code, out, certain = quantize_unless_doubtful(cfg, tuple(words), factor, quick)
                    again = again | cutlass.select_(certain, Int32(0), Int32(1) << i)
                else:
                    code, out = quantize_block(cfg, tuple(words), factor, quick, valid, seed, index)
                if cutlass.const_expr(cfg.ragged):
                    code = cutlass.select_(exists, code, Uint32(0))
                    if exists:
                        self.store(out_address, out)
                else:
                    self.store(out_address, out)
                own = own + code * (Uint32(1) << Uint32(8 * i))
                out_address = out_address + ROW_STEP * data_strides[0]
            if cutlass.const_expr(cfg.defers):
                addresses, firsts = (x_address, data_address), (x_strides[0], data_strides[0])
                own = self.do_again(again, own, addresses, firsts, (base, column), (rows, columns), factor, valid)
            word, row_of_lane = self.transpose_scales(own, lane)
            where = (atom, first, row_of_lane, column - mod(column, ATOM_COLS))
            self.store_scales(scale_address, scale_strides[0], word, where, (rows, columns))
            group, chunk = next_group, next_chunk
            parity = parity ^ 1

    @cute.jit
    def do_again(
        self,
        again: Int32,
        own: Uint32,
        addresses: tuple,
        strides: tuple,
        where: tuple,
        limits: tuple,
        factor: tuple,
        valid: Int32,
    ):
        """Quantizes those rows of a unit again that ``again`` has a bit for, the exact way; the scales after that.

        addresses, strides: of x and data; where: first row and column; limits: rows and columns.
        """
        exactly = dataclasses.replace(self.config, usual=False)
        base, column = where
        lane = mod(column, WARP)
        if cute.arch.vote_any_sync(again != 0):
            for i in cutlass.range(WARP_ROWS, unroll=1):
                row = base + i * ROW_STEP
                x_row, data_row = addresses[0] + Int64(row) * strides[0], addresses[1] + Int64(row) * strides[1]
                mine = (((again >> i) & 1) != 0) & (row < limits[0]) & (column < limits[1])
                left = Uint32(cute.arch.vote_ballot_sync(mine))
                if cute.arch.popc(left) > _FEW:
                    left = Uint32(0)
                    if mine:
                        words = self.load(x_row + Int64(column * exactly.block_bytes), cutlass.Boolean(True))
                        code, out = quantize_block(exactly, tuple(words), factor, (), valid, (), Int64(0))
                        self.store(data_row + Int64(column * exactly.out_bytes), out)
                        own = own & ~(Uint32(0xFF) << Uint32(8 * i)) | code << Uint32(8 * i)
                while left != Uint32(0):
                    one = Int32(cute.arch.popc((left & (~left + Uint32(1))) - Uint32(1)))
                    block = column - lane + one
                    place = x_row + Int64(block * exactly.block_bytes)
                    code, first, second = quantize_alone(exactly, place, lane, factor, valid)
                    if lane == one:
                        self.store(data_row + Int64(block * exactly.out_bytes), (first, second))
                        own = own & ~(Uint32(0xFF) << Uint32(8 * i)) | code << Uint32(8 * i)
                    left = left & (left - Uint32(1))
        return own

    def place(self, group: Int32, warp: Int32) -> tuple:
        """(atom, row of 32 in it, first row of the matrix) of a warp's unit in ``group``."""
        groups_per_atom = ROW_STEP // self.config.warps
        atom, first = div(group, groups_per_atom), mod(group, groups_per_atom) * self.config.warps + warp
        return atom, first, atom * ATOM_ROWS + first

    def source(self, address: Int64, stride: Int64, where: tuple, limits: tuple) -> tuple:
        """(address of the first row, bytes of a row, rows from the first on) of unit (group, chunk, warp)."""
        group, chunk, warp = where
        rows, columns = limits
        _, _, base = self.place(group, warp)
        start = address + Int64(base) * stride + Int64(chunk * (WARP * self.config.block_bytes))
        blocks = cutlass.min(columns - chunk * WARP, WARP) if self.config.ragged else Int32(WARP)
        # opaque: or rows would be multiplied by the stride for each copy
        return opaque(start), blocks * self.config.block_bytes, rows - base

    def fetch(self, source: tuple, stride: Int64, ring: Int32, barrier: Int32, phase: Any) -> None:
        """Starts the copies of rows of a unit that are fetched together; one thread does this."""
        together = self.config.rows_together
        start, size, rows = source
        mbarrier.expect_bytes(barrier + 8 * phase, size * together)
        for i in range(together):
            row = phase * together + i
            # in place of a row that does not exist comes the last one, of which nothing is kept
            mine = cutlass.min(row * ROW_STEP, rows - 1) if self.config.ragged else row * ROW_STEP
            place = ring + row * (WARP * self.config.block_bytes)
            copy_bulk(place, start + Int64(mine) * stride, size, barrier + 8 * phase)

    def take(self, stage: Int32, lane: Int32, columns: Int32) -> list[Uint32]:
        """The words of the lane's block in ``stage``; those of another block if it has none."""
        cfg = self.config
        mine = cutlass.min(lane, columns - 1) if cfg.ragged else lane
        start = stage + mine * cfg.block_bytes
        return [word for offset in range(0, cfg.block_bytes, 16) for word in load_shared(start + offset, 16)]

    @cute.jit
    def global_factor(self, global_in: cute.Pointer, global_out: cute.Pointer, thread: Int32, block: Int32):
        """What ``quantize_block`` takes: the global scale and what follows from it, and whether it is valid."""
        cfg = self.config
        value = Float32(1.0)
        if cutlass.const_expr(cfg.global_scale != "none"):
            value = cute.make_tensor(global_in, cute.make_layout(1))[0]
        if cutlass.const_expr(cfg.global_scale == "amax"):
            least = Float32(cfg.full_scale * SMALLEST_GLOBAL_SCALE)
            value = div_rn(cute.arch.fmax(value, least), Float32(cfg.full_scale))
            value = cute.arch.fmin(value, Float32(LARGEST_GLOBAL_SCALE))
            if thread + block == 0:
                cute.make_tensor(global_out, cute.make_layout(1))[0] = value
        inside = (value >= Float32(SMALLEST_GLOBAL_SCALE)) & (value <= Float32(LARGEST_GLOBAL_SCALE))
        valid = cutlass.select_(inside, Int32(1), Int32(0))
        # arithmetic goes on with a number; nothing of it is stored
        value = cutlass.select_(inside, value, Float32(1.0))
        shift = f32_from_bits(Uint32(0x7F000000) - (f32_bits(value) & Uint32(0x7F800000)))
        return (value, rcp_rn(value), value * shift, shift), valid

    def load(self, address: Int64, exists: Any) -> list[Uint32]:
        """The words of a block, loaded by the lane itself; zeros if it does not exist."""
        width = min(self.config.vector_bytes, self.config.block_bytes)
        predicate = cutlass.select_(exists, Int32(1), Int32(0))
        starts = range(0, self.config.block_bytes, width)
        return [word for start in starts for word in load_global_if(predicate, address + start, width)]

    def store(self, address: Int64, words: tuple) -> None:
        """Stores the codes of a block."""
        for start in range(0, len(words), 4):
            store_global(address + 4 * start, words[start : start + 4])

    @cute.jit
    def transpose_scales(self, own: Uint32, lane: Int32):
        """(the scales of four columns and one row, which of the four rows), from those of one column and four rows."""
        odd, upper = mod(lane, 2), mod(div(lane, 2), 2)
        other = cute.arch.shuffle_sync_bfly(own, offset=1)
        pairs = prmt(own, other, cutlass.select_(odd == 0, Uint32(0x6240), Uint32(0x3715)))
        other = cute.arch.shuffle_sync_bfly(pairs, offset=2)
        word = prmt(pairs, other, cutlass.select_(upper == 0, Uint32(0x5410), Uint32(0x3276)))
        return word, mod(lane, ATOM_COLS)

    @cute.jit
    def store_scales(self, address: Int64, row_stride: Int64, word: Uint32, where: tuple, limits: tuple):
        """Stores four scales of a row; ``where``: (atom, row in 32, row of four, first column)."""
        cfg = self.config
        atom, first, row_of_lane, column = where
        rows, columns = limits
        if cutlass.const_expr(cfg.layout == "blocked"):
            rest_k = ceil_div(columns, ATOM_COLS)
            place = Int64(atom * rest_k + div(column, ATOM_COLS)) * ATOM_BYTES
            place = place + Int64(first * ATOM_STRIDE[0][0] + row_of_lane * ATOM_STRIDE[0][1])
            if column < columns:
                store_global(address + place, [word])
        else:
            row = atom * ATOM_ROWS + first + row_of_lane * ROW_STEP
            place = address + Int64(row) * row_stride + Int64(column)
            if cutlass.const_expr(cfg.scale_word):
                if (row < rows) & (column < columns):
                    store_global(place, [word])
            else:
                for i in cutlass.range_constexpr(ATOM_COLS):
                    if (row < rows) & (column + i < columns):
                        store_global_byte(place + i, word >> Uint32(8 * i))

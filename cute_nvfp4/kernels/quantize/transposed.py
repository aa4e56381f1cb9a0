"""Quantization along the strided dimension: x lies as (K, MN) with MN contiguous, and is read as it lies.

Who does what. A lane loads a word of each of a block's rows of memory (16; MX 32): two neighbouring columns of a 16-bit
type, which it parts, or one of fp32. So a warp reads whole lines, and holds the blocks of 64 (32) rows of the result.
A block of threads takes 128 rows of the result, those of a scale atom, and as many blocks along K as fill a line of
data. Codes and scales meet in shared memory, scales in the blocked layout, and leave in whole lines.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.arithmetic import max_abs_f32
from ...ptx.memory import load_global_if, load_shared, store_global, store_global_byte, store_shared
from ...ptx.move import prmt
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, ATOM_STRIDE
from ..arith import ceil_div, div, mod
from .amax import Amax
from .arguments import QuantizeArguments
from .block.definition import largest_magnitude
from .block.fast_path import units_of
from .block.reciprocal_table import fill_table, is_usable, largest_wanted, table_bytes
from .block.rules import encode_block
from .config import ROW_STEP, WARP, QuantizeConfig
from .rotation import rotated_words
from .row import Quantize

_PIECE = 16


def load_words(config: QuantizeConfig, address: Int64, stride: Int64, exists: Any) -> list[Uint32]:
    """A block's word of each row of memory, from ``address`` on every ``stride`` bytes; zeros if it does not exist."""
    predicate = cutlass.select_(exists, Int32(1), Int32(0))
    words = []
    for i in range(config.block):
        words += load_global_if(predicate, address + i * stride, 4)
    return words


def parted(config: QuantizeConfig, words: list[Uint32]) -> list[list[Uint32]]:
    """The blocks, one or two, that lie in :func:`load_words`."""
    return [half(words, number) for number in (0, 1)] if config.lane_rows == 2 else [words]


def half(words: list[Uint32], number: Any) -> list[Uint32]:
    """The block of the first or of the second elements of ``words``."""
    selector = Uint32(0x5410) + Uint32(number) * Uint32(0x2222)
    return [prmt(a, b, selector) for a, b in zip(words[0::2], words[1::2])]


def one_by_one(config: QuantizeConfig) -> bool:
    """Whether a lane's two blocks are worked on one after the other: where the code for one is long already."""
    return (
        config.lane_rows == 2 and not (config.tile or config.has_usual_way) and bool(config.choice or config.stochastic)
    )


class QuantizeTransposed(Quantize):
    """The kernel of one :class:`QuantizeConfig` whose ``transposed`` is set.

    The stride of K stands in place of the rows' in ``x_strides``. steps: atoms along the rows, tasks of a matrix, and
    two numbers that are not looked at.
    """

    @cute.kernel
    def kernel(self, arguments: QuantizeArguments):
        cfg = self.config
        x, data, scale, global_in, global_out = arguments[:5]
        rows, columns, powers = arguments.rows, arguments.columns, arguments.powers
        x_strides, data_strides, scale_strides = (arguments.x_strides, arguments.data_strides, arguments.scale_strides)
        random, steps = (*arguments.seed, arguments.signs), arguments.walk
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        depth, along_k = cfg.blocks_along_k, cfg.warps_along_k
        smem = SmemAllocator()
        # (depth · out_bytes, ATOM_ROWS), pieces of 16 bytes exchanged; and (ATOM_BYTES, depth / ATOM_COLS)
        codes = smem.allocate_array(cutlass.Uint8, depth * cfg.out_bytes * ATOM_ROWS, byte_alignment=128).toint()
        scales = smem.allocate_array(cutlass.Uint8, depth // ATOM_COLS * ATOM_BYTES, byte_alignment=128).toint()
        factor, valid = self.global_factor(global_in, global_out, thread, block + batch)
        quick = (Int32(0), Float32(0.0), units_of(cfg, powers), Int32(0))
        if cutlass.const_expr(cfg.has_usual_way):
            table = smem.allocate_array(cutlass.Uint8, table_bytes(cfg), byte_alignment=16)
            flags = smem.allocate_array(cutlass.Uint32, cfg.warps, byte_alignment=16)
            usable = is_usable(factor[0], valid)
            tied = fill_table(cfg, table.toint(), flags.toint(), factor[0], usable, thread)
            quick = (table.toint(), largest_wanted(usable), quick[2], tied)
        x_address = x.toint() + Int64(batch) * x_strides[1]
        data_rows = (data.toint() + Int64(batch) * data_strides[1], data_strides[0])
        scale_rows = (scale.toint() + Int64(batch) * scale_strides[1], scale_strides[0])
        # the lane's first row in the atom, and the warp's first block
        warp, lane = cute.arch.make_warp_uniform(div(thread, WARP)), mod(thread, WARP)
        own_row = (div(warp, along_k) * WARP + lane) * cfg.lane_rows
        own_depth = depth // along_k
        first_block = mod(warp, along_k) * own_depth

        atoms, tasks, _, _ = steps
        for task in cutlass.range(block, tasks, blocks, unroll=1):
            atom, first = task % atoms, task // atoms * depth
            row = atom * ATOM_ROWS + own_row
            line = Int64(batch) * Int64(rows) + Int64(row)
            limits = (row < rows, columns, first + first_block + own_depth)
            words = self.fetch(x_address, x_strides[0], row, first + first_block, limits)
            for step in cutlass.range(0, own_depth, ATOM_COLS, unroll=1):
                # scales of the lane's rows, a byte for each of four blocks
                own = cute.make_rmem_tensor(cfg.lane_rows, Uint32)
                for number in cutlass.range_constexpr(cfg.lane_rows):
                    own[number] = Uint32(0)
                place = first_block + step
                for i in cutlass.range(ATOM_COLS, unroll=1):
                    column = first + place + i
                    exists = (row < rows) & (column < columns)
                    # the next block's words are under way while this one is worked on
                    following = self.fetch(x_address, x_strides[0], row, column + 1, limits)
                    index = (line * Int64(columns) + Int64(column)) * cfg.block
                    pitch = Int64(columns) * cfg.block
                    if cutlass.const_expr(one_by_one(cfg)):
                        for number in cutlass.range(cfg.lane_rows, unroll=1):
                            start = (index + Int64(number) * pitch, pitch)
                            code, out = self.encode([half(words, number)], factor, quick, valid, random, start)[0]
                            self.put(codes, own_row + number, place + i, out)
                            code = Uint32(cutlass.select_(exists, code, Uint32(0)))
                            # in turn, so that both are back in their places in the end
                            earlier = own[0]
                            own[0] = own[1]
                            own[1] = earlier | (code << Uint32(8 * i))
                    else:
                        found = self.encode(parted(cfg, words), factor, quick, valid, random, (index, pitch))
                        for number in cutlass.range_constexpr(cfg.lane_rows):
                            code, out = found[number]
                            self.put(codes, own_row + number, place + i, out)
                            code = Uint32(cutlass.select_(exists, code, Uint32(0)))
                            own[number] = own[number] | (code << Uint32(8 * i))
                    words = following
                for number in cutlass.range_constexpr(cfg.lane_rows):
                    inside = own_row + number
                    offset = mod(inside, ROW_STEP) * ATOM_STRIDE[0][0] + div(inside, ROW_STEP) * ATOM_STRIDE[0][1]
                    store_shared(scales + div(place, ATOM_COLS) * ATOM_BYTES + offset, [own[number]])
            cute.arch.sync_threads()
            self.write_data(codes, thread, data_rows, (atom, first), (rows, columns))
            self.write_scales(scales, thread, scale_rows, (atom, first), (rows, columns))
            cute.arch.sync_threads()

    def fetch(self, address: Int64, stride: Int64, row: Int32, column: Int32, limits: tuple) -> list[Uint32]:
        """The words of a block; ``limits``: whether the row exists, how many columns do, the first not the warp's."""
        there, columns, end = limits
        start = address + Int64(column * self.config.block) * stride + Int64(row * self.config.item_bytes)
        return load_words(self.config, start, stride, there & (column < columns) & (column < end))

    def encode(
        self, parts: list, factor: tuple, quick: tuple, valid: Int32, random: tuple, index: tuple
    ) -> list[tuple]:
        """(scale code, words of codes) of each of a lane's blocks; index: of the first element, and from row to row."""
        cfg = self.config
        kind = cfg.of_rotated if cfg.hadamard else cfg
        if cfg.hadamard:
            parts = [rotated_words(cfg, words, Uint32(random[2])) for words in parts]
        largest = [largest_magnitude(kind, words) for words in parts]
        if cfg.tile:
            one = largest[0] if len(largest) == 1 else max_abs_f32(*largest)
            # the lanes that hold the rows of a tile are neighbours
            distance = 1
            while distance * cfg.lane_rows < cfg.block:
                one = max_abs_f32(one, cute.arch.shuffle_sync_bfly(one, offset=distance))
                distance *= 2
            largest = [one] * len(parts)
        return [
            encode_block(kind, tuple(words), top, factor, quick, valid, random[:2], index[0] + number * index[1])
            for number, (words, top) in enumerate(zip(parts, largest))
        ]

    def place(self, codes: Int32, row: Int32, piece: Int32) -> Int32:
        """The shared address of 16 bytes of a row: rows that lanes store together are on different banks."""
        cfg = self.config
        return codes + row * (cfg.blocks_along_k * cfg.out_bytes) + (piece ^ mod(div(row, cfg.lane_rows), 8)) * _PIECE

    def put(self, codes: Int32, row: Int32, block: Int32, words: tuple) -> None:
        """Stores the codes of a block in shared memory."""
        if self.config.out_bytes < _PIECE:
            store_shared(self.place(codes, row, div(block, 2)) + mod(block, 2) * 8, words)
            return
        pieces = self.config.out_bytes // _PIECE
        for i in range(pieces):
            store_shared(self.place(codes, row, block * pieces + i), words[4 * i : 4 * i + 4])

    @cute.jit
    def write_data(self, codes: Int32, thread: Int32, target: tuple, where: tuple, limits: tuple):
        """Stores the codes of a task: as wide as their rows are aligned, a line of a row after the other."""
        cfg = self.config
        atom, first = where
        rows, columns = limits
        width = min(_PIECE, cfg.out_bytes)
        per_row = cfg.blocks_along_k * cfg.out_bytes // width
        for i in cutlass.range(thread, ATOM_ROWS * per_row, WARP * cfg.warps, unroll=4):
            inside, part = div(i, per_row), mod(i, per_row)
            offset = part * width
            row, column = atom * ATOM_ROWS + inside, first + div(offset, cfg.out_bytes)
            words = load_shared(self.place(codes, inside, div(offset, _PIECE)) + mod(offset, _PIECE), width)
            if (row < rows) & (column < columns):
                place = Int64(row) * target[1] + Int64(first * cfg.out_bytes + offset)
                store_global(target[0] + place, words)

    @cute.jit
    def write_scales(self, scales: Int32, thread: Int32, target: tuple, where: tuple, limits: tuple):
        """Stores the scales of a task."""
        cfg = self.config
        atom, first = where
        rows, columns = limits
        depth = cfg.blocks_along_k
        if cutlass.const_expr(cfg.layout == "blocked"):
            rest_k = ceil_div(columns, ATOM_COLS)
            start = target[0] + Int64(atom * rest_k + div(first, ATOM_COLS)) * ATOM_BYTES
            for i in cutlass.range(thread, depth // ATOM_COLS * ATOM_BYTES // _PIECE, WARP * cfg.warps, unroll=1):
                words = load_shared(scales + i * _PIECE, _PIECE)
                if div(first, ATOM_COLS) + div(i * _PIECE, ATOM_BYTES) < rest_k:
                    store_global(start + Int64(i * _PIECE), words)
        else:
            for i in cutlass.range(thread, ATOM_ROWS * (depth // ATOM_COLS), WARP * cfg.warps, unroll=1):
                inside, part = div(i, depth // ATOM_COLS), mod(i, depth // ATOM_COLS)
                offset = mod(inside, ROW_STEP) * ATOM_STRIDE[0][0] + div(inside, ROW_STEP) * ATOM_STRIDE[0][1]
                word = load_shared(scales + part * ATOM_BYTES + offset, 4)[0]
                row, column = atom * ATOM_ROWS + inside, first + part * ATOM_COLS
                for b in cutlass.range_constexpr(ATOM_COLS):
                    if (row < rows) & (column + b < columns):
                        store_global_byte(target[0] + Int64(row) * target[1] + Int64(column + b), word >> Uint32(8 * b))


class AmaxTransposed(Amax):
    """The largest finite magnitude of rotated blocks along the strided dimension. A row is a row of blocks."""

    @property
    def piece_bytes(self) -> int:
        return WARP * 4

    def load(self, start: Int64, stride: Int64, where: tuple, lane: Int32, row_bytes: Int32) -> list[Uint32]:
        row, piece = where
        offset = piece * self.piece_bytes + lane * 4
        address = start + Int64(row * self.config.block) * stride + Int64(offset)
        words = load_words(self.config, address, stride, offset < row_bytes)
        return [word for part in parted(self.config, words) for word in part]

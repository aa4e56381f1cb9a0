"""Quantization along the strided dimension: x lies as (K, MN), MN contiguous, and is read in that order.

Work distribution. A lane loads one word from each of a block's rows in memory (16; MX 32): two neighbouring columns of
a 16-bit type, which it separates, or one column of fp32. A warp therefore reads whole lines, and holds the blocks of 64
(fp32: 32) rows of the result. A CTA's work tile is 128 rows of the result, those of a scale atom, and as many blocks
along K as fill a line of data. Codes and scales, the latter in the blocked layout, meet in shared memory, from which
they are stored in whole lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.arithmetic import max_abs_f32
from ...ptx.memory import load_global_if, load_shared, store_global, store_global_byte, store_shared
from ...ptx.move import prmt
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, ATOM_STRIDE
from ..arith import ceil_div, div, mod
from .amax import Amax
from .arguments import Chunks, QuantizeArguments, Strides
from .block.definition import largest_magnitude
from .block.quantize_block import encode_block
from .block.records import BlockContext
from .config import WARP, QuantizeConfig
from .kernel import QuantizeKernel, atom_row
from .rotation import rotated_words

# bytes of a store
_CHUNK = 16


def load_words(config: QuantizeConfig, address: Int64, stride: Int64, exists: Boolean) -> list[Uint32]:
    """A block's word of each row in memory, ``stride`` bytes apart from ``address`` on; zeros if it does not exist."""
    predicate = cutlass.select_(exists, Int32(1), Int32(0))
    words = []
    for i in range(config.block):
        words += load_global_if(predicate, address + i * stride, 4)
    return words


def separated(config: QuantizeConfig, words: list[Uint32]) -> list[list[Uint32]]:
    """The one or two blocks in the words of :func:`load_words`."""
    return [half(words, number) for number in (0, 1)] if config.lane_rows == 2 else [words]


def half(words: list[Uint32], number: Any) -> list[Uint32]:
    """The block of the low (``number`` 0) or the high (1) elements of ``words``."""
    selector = Uint32(0x5410) + Uint32(number) * Uint32(0x2222)
    return [prmt(a, b, selector) for a, b in zip(words[0::2], words[1::2])]


def one_by_one(config: QuantizeConfig) -> bool:
    """Whether a lane takes its two blocks one after the other, since the code for one block is long already."""
    return (
        config.lane_rows == 2 and not (config.tile or config.has_fast_path) and bool(config.choice or config.stochastic)
    )


class RowAddress(NamedTuple):
    """The address of a matrix's first row, and bytes between rows."""

    start: Int64
    stride: Int64


class MatrixAddresses(NamedTuple):
    """The addresses of one matrix of the batch. rows, columns: rows, and blocks of 16 (MX 32) elements, that exist.

    This file writes addresses as sums: as tensors they take 10 more instructions, and were slower on an H200.
    """

    x: RowAddress  # by rows of memory, along K
    data: RowAddress
    scale: RowAddress  # blocked scales have no row stride
    rows: Int32
    columns: Int32

    @staticmethod
    def of(arguments: QuantizeArguments, batch: Int32) -> MatrixAddresses:
        """The addresses of matrix ``batch``."""

        def address(pointer: cute.Pointer, strides: Strides) -> RowAddress:
            return RowAddress(pointer.toint() + Int64(batch) * strides.batch, strides.row)

        x, data = address(arguments.x, arguments.x_strides), address(arguments.data, arguments.data_strides)
        scale = address(arguments.scale, arguments.scale_strides)
        return MatrixAddresses(x, data, scale, arguments.rows, arguments.columns)

    def has(self, row: Int32, column: Int32) -> Boolean:
        """Whether the matrix has this block."""
        return (row < self.rows) & (column < self.columns)


def scale_offset(row: Int32) -> Int32:
    """Bytes from the start of a scale atom to the scales of one of its rows."""
    inside, quarter = atom_row(row)
    return inside * ATOM_STRIDE[0][0] + quarter * ATOM_STRIDE[0][1]


class AtomTile(NamedTuple):
    """A work tile: the 128 rows of scale atom ``atom``, and ``blocks_along_k`` blocks from column ``first`` on."""

    atom: Int32
    first: Int32


class LanePlace(NamedTuple):
    """A lane's part of a work tile. row: its first row in the matrix; exists: whether the matrix has that row; end: the
    first column beyond its warp's."""

    row: Int32
    exists: Boolean
    end: Int32


class QuantizeTransposed(QuantizeKernel):
    """The kernel of one :class:`QuantizeConfig` whose ``transposed`` is set.

    ``x_strides`` has the stride of K in place of the rows'. Work tiles are counted along the rows first.
    """

    @property
    def amax(self) -> Amax:
        return AmaxTransposed(self.config) if self.config.hadamard else Amax(self.config)

    @cute.kernel
    def kernel(self, arguments: QuantizeArguments):
        cfg, walk = self.config, arguments.walk
        thread, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        depth, along_k = cfg.blocks_along_k, cfg.warps_along_k
        smem = SmemAllocator()
        # (depth · out_bytes, ATOM_ROWS): swizzled chunks of 16 bytes
        codes = smem.allocate_array(Uint8, depth * cfg.out_bytes * ATOM_ROWS, byte_alignment=128).toint()
        # (((32, 4), 1), (4, depth / 4)): the blocked layout
        scale_atoms = smem.allocate_array(Uint8, depth // ATOM_COLS * ATOM_BYTES, byte_alignment=128).toint()
        context = self.context(arguments, smem, thread, cta + batch)
        matrix = MatrixAddresses.of(arguments, batch)
        rows, columns = matrix.rows, matrix.columns
        # the lane's first row in the atom, and the warp's first block in the work tile
        warp, lane = cute.arch.make_warp_uniform(div(thread, WARP)), mod(thread, WARP)
        own_row = (div(warp, along_k) * WARP + lane) * cfg.lane_rows
        own_depth = depth // along_k
        first_block = mod(warp, along_k) * own_depth

        for number in cutlass.range(cta, walk.count, ctas, unroll=1):
            tile = AtomTile(number % walk.inner, number // walk.inner * depth)
            row = tile.atom * ATOM_ROWS + own_row
            line = Int64(batch) * Int64(rows) + Int64(row)
            lane_place = LanePlace(row, row < rows, tile.first + first_block + own_depth)
            words = self.fetch(matrix, lane_place, tile.first + first_block)
            for step in cutlass.range(0, own_depth, ATOM_COLS, unroll=1):
                # (lane_rows): the scales of each row of the lane, one byte for each of four blocks
                scales = cute.make_rmem_tensor(cfg.lane_rows, Uint32)
                for r in cutlass.range_constexpr(cfg.lane_rows):
                    scales[r] = Uint32(0)
                place = first_block + step
                for i in cutlass.range(ATOM_COLS, unroll=1):
                    column = tile.first + place + i
                    exists = (row < rows) & (column < columns)
                    # the next block's words are in flight while this block is quantized
                    following = self.fetch(matrix, lane_place, column + 1)
                    index = (line * Int64(columns) + Int64(column)) * cfg.block
                    pitch = Int64(columns) * cfg.block
                    if cutlass.const_expr(one_by_one(cfg)):
                        for r in cutlass.range(cfg.lane_rows, unroll=1):
                            start = index + Int64(r) * pitch
                            code, out = self.encode([half(words, r)], context, start, pitch)[0]
                            self.put(codes, own_row + r, place + i, out)
                            code = Uint32(cutlass.select_(exists, code, Uint32(0)))
                            # the two rows take turns, so that their scales are back in their places after both
                            earlier = scales[0]
                            scales[0] = scales[1]
                            scales[1] = earlier | (code << Uint32(8 * i))
                    else:
                        found = self.encode(separated(cfg, words), context, index, pitch)
                        for r in cutlass.range_constexpr(cfg.lane_rows):
                            code, out = found[r]
                            self.put(codes, own_row + r, place + i, out)
                            code = Uint32(cutlass.select_(exists, code, Uint32(0)))
                            scales[r] = scales[r] | (code << Uint32(8 * i))
                    words = following
                for r in cutlass.range_constexpr(cfg.lane_rows):
                    atom = scale_atoms + div(place, ATOM_COLS) * ATOM_BYTES
                    store_shared(atom + scale_offset(own_row + r), [scales[r]])
            cute.arch.sync_threads()
            self.write_data(codes, thread, matrix, tile)
            self.write_scales(scale_atoms, thread, matrix, tile)
            cute.arch.sync_threads()

    def fetch(self, matrix: MatrixAddresses, place: LanePlace, column: Int32) -> list[Uint32]:
        """The words of the lane's block in ``column``; zeros if it does not exist or belongs to another warp."""
        cfg, x = self.config, matrix.x
        address = x.start + Int64(column * cfg.block) * x.stride + Int64(place.row * cfg.item_bytes)
        exists = place.exists & (column < matrix.columns) & (column < place.end)
        return load_words(cfg, address, x.stride, exists)

    def encode(self, blocks: list, context: BlockContext, index: Int64, pitch: Int64) -> list:
        """(scale code, words of codes) of each of a lane's blocks. index: of the first block's first element in the
        result; pitch: elements from one row's block to the next row's."""
        cfg = self.config
        kind = cfg.after_rotation
        blocks = [rotated_words(cfg, words, context.signs) for words in blocks]
        largest = [largest_magnitude(kind, words) for words in blocks]
        if cfg.tile:
            largest = [self.largest_of_tile(largest)] * len(blocks)
        return [
            encode_block(kind, tuple(words), top, context, index + r * pitch)
            for r, (words, top) in enumerate(zip(blocks, largest))
        ]

    def largest_of_tile(self, largest: list[Float32]) -> Float32:
        """The largest magnitude of a square tile, whose rows are in neighbouring lanes."""
        one = largest[0] if len(largest) == 1 else max_abs_f32(*largest)
        distance = 1
        while distance * self.config.lane_rows < self.config.block:
            one = max_abs_f32(one, cute.arch.shuffle_sync_bfly(one, offset=distance))
            distance *= 2
        return one

    def place(self, codes: Int32, row: Int32, chunk: Int32) -> Int32:
        """The shared address of 16 bytes of a row. The swizzle puts rows that lanes store together on different banks.

        It is one exclusive or. A CuTe swizzle would have to extract the row's bits from the address again.
        """
        cfg = self.config
        return codes + row * (cfg.blocks_along_k * cfg.out_bytes) + (chunk ^ mod(div(row, cfg.lane_rows), 8)) * _CHUNK

    def put(self, codes: Int32, row: Int32, block: Int32, words: tuple[Uint32, ...]) -> None:
        """Stores the codes of a block in shared memory."""
        if self.config.out_bytes < _CHUNK:
            store_shared(self.place(codes, row, div(block, 2)) + mod(block, 2) * 8, words)
            return
        chunks = self.config.out_bytes // _CHUNK
        for i in range(chunks):
            store_shared(self.place(codes, row, block * chunks + i), words[4 * i : 4 * i + 4])

    @cute.jit
    def write_data(self, codes: Int32, thread: Int32, matrix: MatrixAddresses, tile: AtomTile):
        """Stores the codes of a work tile, as wide as the rows' alignment allows, one row's line after the other."""
        cfg, data = self.config, matrix.data
        width = min(_CHUNK, cfg.out_bytes)
        per_row = cfg.blocks_along_k * cfg.out_bytes // width
        for i in cutlass.range(thread, ATOM_ROWS * per_row, WARP * cfg.warps, unroll=4):
            inside, part = div(i, per_row), mod(i, per_row)
            offset = part * width
            row, column = tile.atom * ATOM_ROWS + inside, tile.first + div(offset, cfg.out_bytes)
            words = load_shared(self.place(codes, inside, div(offset, _CHUNK)) + mod(offset, _CHUNK), width)
            if matrix.has(row, column):
                place = Int64(row) * data.stride + Int64(tile.first * cfg.out_bytes + offset)
                store_global(data.start + place, words)

    @cute.jit
    def write_scales(self, scale_atoms: Int32, thread: Int32, matrix: MatrixAddresses, tile: AtomTile):
        """Stores the scales of a work tile."""
        cfg, scale = self.config, matrix.scale
        atoms = cfg.blocks_along_k // ATOM_COLS
        if cutlass.const_expr(cfg.layout == "blocked"):
            rest_k = ceil_div(matrix.columns, ATOM_COLS)
            # atoms along K are contiguous, so that bytes are copied as they lie
            target = scale.start + Int64(tile.atom * rest_k + div(tile.first, ATOM_COLS)) * ATOM_BYTES
            for i in cutlass.range(thread, atoms * ATOM_BYTES // _CHUNK, WARP * cfg.warps, unroll=1):
                words = load_shared(scale_atoms + i * _CHUNK, _CHUNK)
                if div(tile.first, ATOM_COLS) + div(i * _CHUNK, ATOM_BYTES) < rest_k:
                    store_global(target + Int64(i * _CHUNK), words)
        else:
            for i in cutlass.range(thread, ATOM_ROWS * atoms, WARP * cfg.warps, unroll=1):
                inside, part = div(i, atoms), mod(i, atoms)
                row, column = tile.atom * ATOM_ROWS + inside, tile.first + part * ATOM_COLS
                word = load_shared(scale_atoms + part * ATOM_BYTES + scale_offset(inside), 4)[0]
                for b in cutlass.range_constexpr(ATOM_COLS):
                    if matrix.has(row, column + b):
                        target = scale.start + Int64(row) * scale.stride + Int64(column + b)
                        store_global_byte(target, word >> Uint32(8 * b))


class AmaxTransposed(Amax):
    """The largest finite magnitude of rotated blocks along the strided dimension; a row is a row of blocks."""

    def load(self, start: Int64, stride: Int64, row: Int32, chunk: Int32, lane: Int32, chunks: Chunks) -> list[Uint32]:
        offset = chunk * self.config.chunk_bytes + lane * 4
        address = start + Int64(row * self.config.block) * stride + Int64(offset)
        words = load_words(self.config, address, stride, offset < chunks.row_bytes)
        return [word for block in separated(self.config, words) for word in block]

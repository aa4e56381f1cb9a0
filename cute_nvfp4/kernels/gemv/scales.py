"""Scales of the GEMV, and the rows of its tiles: what both loaders share."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from ...ptx.convert import e4m3x2_to_f16x2, e4m3x4_to_f16x2, f16x2_to_f32
from ...ptx.half import mul_f16x2
from ...ptx.memory import load_global, load_global_byte_if, load_global_if
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, ATOM_SHAPE, cute_layout
from ..arith import div, mod
from .config import ROWS_SHAPE, ROWS_STRIDE, TILE_FIRST_ROWS, TILES_PER_ATOM, GemvConfig
from .dot import BLOCK_K, LANE_BLOCKS, QUAD, SLICE_BLOCKS

# 2⁻⁶ in both halves: keeps the product of two E4M3 scales inside f16; undone at the end
SCALE_SHIFT = 64.0
_SHIFT_F16X2 = 0x24002400


def tile_row(tile: Any, lane_row: Any, row_of_lane: Any) -> Any:
    """Row of the matrix for quad ``lane_row`` (0–7) and row 0 or 1 of its lanes, in tile ``tile``."""
    # ((4, 2), 2, (8, atoms)) : ((1, 64), 32, (4, 128)); coordinates are split here, where it takes a shift and a mask
    layout = cute.make_layout(ROWS_SHAPE, stride=ROWS_STRIDE)
    quads = ROWS_SHAPE[0][0]
    lane_coordinate = (mod(lane_row, quads), div(lane_row, quads))
    return cute.crd2idx((lane_coordinate, row_of_lane, (mod(tile, TILES_PER_ATOM), div(tile, TILES_PER_ATOM))), layout)


def scale_offset(row_in_atom: tuple, atom: Any, column: Any, layout: Any) -> Any:
    """Byte of a blocked scale of row r: ``row_in_atom`` is (r % 32, r % 128 // 32), ``atom`` is r // 128."""
    return cute.crd2idx(((row_in_atom, atom), (mod(column, ATOM_COLS), div(column, ATOM_COLS)), 0), layout)


def tile_offsets(config: GemvConfig, operand: tuple, m: Any, k: Any, tile: Any) -> tuple[Int64, Int64]:
    """Bytes from tile 0 to ``tile``, in A and in its scales."""
    _, a_row, _, sfa_row = operand
    row = tile_row(tile, 0, 0)
    if config.a_scale == "blocked":
        first = (mod(tile, TILES_PER_ATOM) * TILE_FIRST_ROWS, 0)
        offset = scale_offset(first, div(tile, TILES_PER_ATOM), 0, cute_layout(m, div(k, BLOCK_K)))
        return Int64(row) * a_row, Int64(offset)
    return Int64(row) * a_row, Int64(row) * sfa_row


def slice_bytes(config: GemvConfig) -> int:
    """Bytes from the scales of a slice to those of the next, for the same row."""
    return ATOM_BYTES * (SLICE_BLOCKS // ATOM_COLS) if config.a_scale == "blocked" else SLICE_BLOCKS


def lane_scale_addresses(config: GemvConfig, operand: tuple, lane: Any, slice_index: Any) -> tuple:
    """Addresses in tile 0 of the lane's four scales of each of its rows; one for both if blocked (neighbours)."""
    _, _, sfa, sfa_row = operand
    column = slice_index * SLICE_BLOCKS + mod(lane, QUAD) * LANE_BLOCKS
    rows = [tile_row(0, div(lane, QUAD), i) for i in range(2)]
    if config.a_scale == "blocked":
        # within an atom, and from atom to atom along K, the offset does not depend on the sizes of the matrix
        row = (mod(rows[0], ATOM_SHAPE[0][0]), div(rows[0], ATOM_SHAPE[0][0]))
        return (sfa + Int64(scale_offset(row, 0, column, cute_layout(ATOM_ROWS, 1 << 20))),)
    return tuple(sfa + Int64(row) * sfa_row + Int64(column) for row in rows)


def advance(where: tuple, data_bytes: Int64, scale_bytes: Int64) -> tuple:
    """The addresses (of data, of scales…) so many bytes further."""
    return (where[0] + data_bytes, *(x + scale_bytes for x in where[1:]))


def existing_blocks(limits: tuple, row: Any, first_block: Any) -> Any:
    """Blocks that exist from ``first_block`` of a slice on (may be negative) in ``row`` of a tile.

    limits: (rows of the matrix from the tile's first on, blocks of K from the slice's first on).
    """
    rows_left, blocks_left = limits
    return cutlass.select_(row < rows_left, blocks_left - first_block, Int32(0))


def load_scales(config: GemvConfig, addresses: tuple, lane: Any, limits: Any) -> list[Uint32]:
    """The lane's scales, a word of four a row; ``limits``: None if all exist (see :func:`existing_blocks`)."""
    first_block = mod(lane, QUAD) * LANE_BLOCKS
    if config.a_scale == "blocked":
        if limits is None:
            return load_global(addresses[0], 8, l1="no_allocate")
        count = cutlass.max(limits[1] - first_block, 0)
        words = load_global_if(Int32(count > 0), addresses[0], 8, l1="no_allocate")
        # columns past K are padding, which may hold anything, NaN too
        some = (Uint32(1) << (Uint32(count) * Uint32(8))) - Uint32(1)
        mask = cutlass.select_(count >= LANE_BLOCKS, Uint32(0xFFFFFFFF), some)
        return [word & mask for word in words]
    if config.scale_word and limits is None:
        return [load_global(address, 4)[0] for address in addresses]
    words = []
    for r, address in enumerate(addresses):
        row = tile_row(0, div(lane, QUAD), r)
        count = None if limits is None else existing_blocks(limits, row, first_block)
        words.append(_load_bytes(address, count))
    return words


def _load_bytes(address: Int64, count: Any) -> Uint32:
    word = Uint32(0)
    for i in range(LANE_BLOCKS):
        exists = Int32(1) if count is None else Int32(count > i)
        word = word | (load_global_byte_if(exists, address + i) << Uint32(8 * i))
    return word


def load_b_block(
    config: GemvConfig, b: Int64, sfb: Int64, column: Any, exists: Int32, k: Any
) -> tuple[list[Uint32], Uint32]:
    """Two words of block ``column`` of b and its scale's byte, zeros if it does not exist; addresses are of row 0."""
    offset = column
    if config.b_scale == "blocked":
        offset = scale_offset((0, 0), 0, column, cute_layout(ATOM_ROWS, div(k, BLOCK_K)))
    words = load_global_if(exists, b + Int64(column) * 8, 8, l1="evict_last")
    return words, load_global_byte_if(exists, sfb + Int64(offset))


def scale_products(words: list[Uint32], b_scales: list[Uint32]) -> list[list[Float32]]:
    """sfa · sfb · 2⁻⁶ of each row (a word of four E4M3) and block (two f16x2, shifted): exact in f16, given in fp32."""
    products = []
    for word in words:
        row: list[Float32] = []
        for pair, b_pair in zip(e4m3x4_to_f16x2(word), b_scales):
            row += f16x2_to_f32(mul_f16x2(pair, b_pair))
        products.append(row)
    return products


def shifted_scale(byte: Uint32) -> Uint16:
    """An E4M3 scale of b as f16 times 2⁻⁶."""
    return Uint16(mul_f16x2(e4m3x2_to_f16x2(Uint16(byte)), Uint32(_SHIFT_F16X2)) & Uint32(0xFFFF))

"""Scales of the GEMV, and the rows of its tiles: what both loaders share."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from ..ptx.convert import e4m3x2_to_f16x2, e4m3x4_to_f16x2, f16x2_to_f32
from ..ptx.fma import mul_f16x2
from ..ptx.memory import load_global, load_global_byte_if, load_global_if
from ..scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, cute_layout
from .arith import div, mod
from .gemv_config import ROWS_SHAPE, ROWS_STRIDE, GemvConfig
from .gemv_dot import BLOCK_K, LANE_BLOCKS, QUAD, SLICE_BLOCKS

# 2⁻⁶ in both halves: keeps the product of two E4M3 scales inside f16; undone at the end
SCALE_SHIFT = 64.0
_SHIFT_F16X2 = 0x24002400


def tile_row(tile: Any, lane_row: Any, row_of_lane: Any) -> Any:
    """Row of the matrix for quad ``lane_row`` (0–7) and row 0 or 1 of its lanes, in tile ``tile``."""
    # ((4, 2), 2, (8, atoms)) : ((1, 64), 32, (4, 128))
    layout = cute.make_layout(ROWS_SHAPE, stride=ROWS_STRIDE)
    return cute.crd2idx((lane_row, row_of_lane, tile), layout)


def slice_bytes(config: GemvConfig) -> int:
    """Bytes from the scales of a slice to those of the next, for the same row."""
    return ATOM_BYTES * (SLICE_BLOCKS // ATOM_COLS) if config.a_scale == "blocked" else SLICE_BLOCKS


def row_inside(row: Any, m: Any) -> Any:
    """``row``, or row 0 for a row past M: something to read, whose result is not stored."""
    return cutlass.select_(row < m, row, Int32(0))


def lane_scale_addresses(
    config: GemvConfig, sfa: Int64, sfa_row: Int64, m: Any, k: Any, tile: Any, lane: Any, slice_index: Any
) -> tuple:
    """Addresses of the lane's four scales of each of its rows; one for both if blocked, where they are neighbours."""
    column = slice_index * SLICE_BLOCKS + mod(lane, QUAD) * LANE_BLOCKS
    rows = [tile_row(tile, div(lane, QUAD), i) for i in range(2)]
    if config.a_scale == "blocked":
        # not clamped: the padding of the last atom is there to be read
        return (sfa + Int64(cute.crd2idx((rows[0], column, 0), cute_layout(m, div(k, BLOCK_K)))),)
    return tuple(sfa + Int64(row_inside(row, m)) * sfa_row + Int64(column) for row in rows)


def load_scales(config: GemvConfig, addresses: tuple, valid_blocks: Any) -> list[Uint32]:
    """The lane's scales, a word of four a row; ``valid_blocks``: None if all exist, else how many (others are 0)."""
    if config.a_scale == "blocked":
        if valid_blocks is None:
            return load_global(addresses[0], 8, l1="no_allocate")
        words = load_global_if(Int32(valid_blocks > 0), addresses[0], 8, l1="no_allocate")
        # columns past K are padding, which may hold anything, NaN too
        some = (Uint32(1) << (Uint32(cutlass.max(valid_blocks, 0)) * Uint32(8))) - Uint32(1)
        mask = cutlass.select_(valid_blocks >= LANE_BLOCKS, Uint32(0xFFFFFFFF), some)
        return [word & mask for word in words]
    if config.scale_word and valid_blocks is None:
        return [load_global(address, 4)[0] for address in addresses]
    return [_load_bytes(address, valid_blocks) for address in addresses]


def _load_bytes(address: Int64, valid_blocks: Any) -> Uint32:
    word = Uint32(0)
    for i in range(LANE_BLOCKS):
        exists = Int32(1) if valid_blocks is None else Int32(valid_blocks > i)
        word = word | (load_global_byte_if(exists, address + i) << Uint32(8 * i))
    return word


def load_b_block(
    config: GemvConfig, b: Int64, sfb: Int64, column: Any, exists: Int32, k: Any
) -> tuple[list[Uint32], Uint32]:
    """Two words of block ``column`` of b and its scale's byte, zeros if it does not exist; addresses are of row 0."""
    offset = column
    if config.b_scale == "blocked":
        offset = cute.crd2idx((0, column, 0), cute_layout(ATOM_ROWS, div(k, BLOCK_K)))
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

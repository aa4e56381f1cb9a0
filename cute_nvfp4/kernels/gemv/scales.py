"""Scale factors of the GEMV: loads of those of A and b, and their exact products."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from ...ptx.convert import e4m3x2_to_f16x2, e4m3x4_to_f16x2, f16x2_to_f32
from ...ptx.half import mul_f16x2
from ...ptx.memory import load_global, load_global_byte_if, load_global_if
from ...scale_layout import cute_layout
from ..arith import div, mod
from .config import GemvConfig
from .dot import BLOCK_K, LANE_BLOCKS, QUAD
from .operands import LaneAddresses, Rest, VectorB, blocked_offset, tile_row

# 2⁻⁶ in both halves keeps the product of two E4M3 scales within f16; the epilogue multiplies by SCALE_SHIFT
SCALE_SHIFT = 64.0
_SHIFT_F16X2 = 0x24002400


def load_scales(config: GemvConfig, addresses: LaneAddresses, lane: Any, rest: Rest | None) -> list[Uint32]:
    """The lane's scales of A, a word of four for each row. rest: None if all of them exist."""
    first_block = mod(lane, QUAD) * LANE_BLOCKS
    if config.a_scale == "blocked":
        if rest is None:
            return load_global(addresses.scale, 8, l1="no_allocate")
        count = cutlass.max(rest.blocks - first_block, 0)
        words = load_global_if(Int32(count > 0), addresses.scale, 8, l1="no_allocate")
        # columns beyond K are padding, which may hold anything, even NaN
        some = (Uint32(1) << (Uint32(count) * Uint32(8))) - Uint32(1)
        mask = cutlass.select_(count >= LANE_BLOCKS, Uint32(0xFFFFFFFF), some)
        return [word & mask for word in words]
    if config.scale_word and rest is None:
        return [load_global(address, 4)[0] for address in addresses.scales]
    words = []
    for r, address in enumerate(addresses.scales):
        row = tile_row(0, div(lane, QUAD), r)
        words.append(_load_bytes(address, None if rest is None else rest.existing_blocks(row, first_block)))
    return words


def _load_bytes(address: Int64, count: Int32 | None) -> Uint32:
    word = Uint32(0)
    for i in range(LANE_BLOCKS):
        exists = Int32(1) if count is None else Int32(count > i)
        word = word | (load_global_byte_if(exists, address + i) << Uint32(8 * i))
    return word


def load_b_block(config: GemvConfig, b: VectorB, k: Int32, column: Int32, exists: Int32) -> tuple[list[Uint32], Uint32]:
    """Two words of block ``column`` of b, and the byte of its scale; zeros if ``exists`` is 0."""
    offset = column
    if config.b_scale == "blocked":
        offset = blocked_offset(0, 0, column, cute_layout(1, div(k, BLOCK_K)))
    words = load_global_if(exists, b.data + Int64(column) * 8, 8, l1="evict_last")
    return words, load_global_byte_if(exists, b.scale + Int64(offset))


def scale_products(words: list[Uint32], b_scales: list[Uint32]) -> list[list[Float32]]:
    """sfa · sfb · 2⁻⁶, exact, for each row (a word of four E4M3) and block (two f16x2 of shifted scales), in fp32."""
    products = []
    for word in words:
        row: list[Float32] = []
        for pair, b_pair in zip(e4m3x4_to_f16x2(word), b_scales):
            row += f16x2_to_f32(mul_f16x2(pair, b_pair))
        products.append(row)
    return products


def shifted_scale(byte: Uint32) -> Uint16:
    """An E4M3 scale of b as f16, times 2⁻⁶."""
    return Uint16(mul_f16x2(e4m3x2_to_f16x2(Uint16(byte)), Uint32(_SHIFT_F16X2)) & Uint32(0xFFFF))

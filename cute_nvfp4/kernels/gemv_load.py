"""What a lane of the GEMV loads: its part of two rows of a slice of A, and their scales."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from ..ptx.convert import e4m3x2_to_f16x2, e4m3x4_to_f16x2, f16x2_to_f32
from ..ptx.fma import mul_f16x2
from ..ptx.memory import load_global, load_global_byte_if, load_global_if
from ..scale_layout import ATOM_BYTES, cute_layout
from .gemv_config import LANE_BYTES, ROWS_SHAPE, ROWS_STRIDE, GemvConfig
from .gemv_dot import BLOCK_K, LANE_BLOCKS, SLICE_BLOCKS, SLICE_K

# 2⁻⁶ in both halves: keeps the product of two E4M3 scales inside f16; undone at the end
SCALE_SHIFT = 64.0
_SHIFT_F16X2 = 0x24002400

_A_POLICY = {"l1": "no_allocate", "l2": "evict_first"}


def tile_row(tile: Any, lane_row: Any, row_of_lane: Any) -> Any:
    """Row of the matrix for quad ``lane_row`` (0–7) and row 0 or 1 of its lanes, in tile ``tile``."""
    atoms = ROWS_SHAPE[2]
    # ((4, 2), 2, 8) : ((1, 64), 32, 4) within an atom
    layout = cute.make_layout(ROWS_SHAPE, stride=ROWS_STRIDE)
    return cute.crd2idx((lane_row, row_of_lane, tile % atoms), layout) + (tile // atoms) * 128


class RowLoader:
    """Addresses and loads of one warp's rows of A and of their scales."""

    def __init__(self, config: GemvConfig, a: Int64, sfa: Int64, a_row: Int64, sfa_row: Int64, m: Any, k: Any) -> None:
        """``a`` and ``sfa``: addresses of the matrix of this batch; ``a_row``, ``sfa_row``: strides in bytes."""
        self.config, self.a, self.sfa, self.a_row, self.sfa_row, self.m, self.k = config, a, sfa, a_row, sfa_row, m, k

    @property
    def scale_slice_bytes(self) -> int:
        """Bytes from the scales of a slice to those of the next, for the same row."""
        return ATOM_BYTES * (SLICE_BLOCKS // 4) if self.config.a_scale == "blocked" else SLICE_BLOCKS

    def addresses(self, tile: Any, lane_row: Any, quad_lane: Any, slice_index: Any) -> list[Int64]:
        """[row 0 of A, row 1 of A, scales of row 0, scales of row 1] of the lane for ``slice_index``.

        Rows past M read row 0 instead; what comes of them is not stored. Blocked scales use only the first address.
        """
        data, scales = [], []
        for i in range(2):
            row = tile_row(tile, lane_row, i)
            row = cutlass.select_(row < self.m, row, Int32(0))
            offset = Int64(row) * self.a_row + Int64(slice_index * (SLICE_K // 2) + quad_lane * LANE_BYTES)
            data.append(self.a + offset)
            column = slice_index * SLICE_BLOCKS + quad_lane * LANE_BLOCKS
            if self.config.a_scale == "blocked":
                # the row itself, not the clamped one: padding exists up to a whole atom, and rows r, r + 32 are read
                # together
                layout = cute_layout(self.m, self.k // BLOCK_K)
                scales.append(self.sfa + Int64(cute.crd2idx((tile_row(tile, lane_row, i), column, 0), layout)))
            else:
                scales.append(self.sfa + Int64(row) * self.sfa_row + Int64(column))
        return [*data, *scales]

    def advance(self, addresses: list[Int64], slices: int) -> list[Int64]:
        """The addresses ``slices`` slices further along K."""
        scale_step = slices * self.scale_slice_bytes
        return [*(x + slices * (SLICE_K // 2) for x in addresses[:2]), *(x + scale_step for x in addresses[2:])]

    def load_into(self, addresses: list[Int64], valid_blocks: Any, data: Any, scales: Any, stage: int) -> None:
        """Loads eight words and a word of scales of each row; ``valid_blocks``: None if all four blocks exist.

        data: (WORDS, ROWS, STAGES), scales: (ROWS, STAGES), in registers.
        """
        for r in range(2):
            for w, word in enumerate(self._load_data(addresses[r], valid_blocks)):
                data[w, r, stage] = word
        for r, word in enumerate(self._load_scales(addresses[2:], valid_blocks)):
            scales[r, stage] = word

    def _load_data(self, address: Int64, valid_blocks: Any) -> list[Uint32]:
        width = self.config.vector_bytes
        words: list[Uint32] = []
        if valid_blocks is None:
            for i in range(LANE_BYTES // width):
                words += load_global(address + i * width, width, **_A_POLICY)
        else:
            for i in range(LANE_BLOCKS):
                words += load_global_if(Int32(valid_blocks > i), address + i * 8, 8, **_A_POLICY)
        return words

    def _load_scales(self, addresses: list[Int64], valid_blocks: Any) -> list[Uint32]:
        if self.config.a_scale == "blocked":
            if valid_blocks is None:
                return load_global(addresses[0], 8, l1="no_allocate")
            words = load_global_if(Int32(valid_blocks > 0), addresses[0], 8, l1="no_allocate")
            # columns past K are padding, which may hold anything, NaN too
            ones = Uint32(0xFFFFFFFF)
            mask = cutlass.select_(valid_blocks >= 4, ones, (Uint32(1) << Uint32(valid_blocks * 8)) - Uint32(1))
            return [word & mask for word in words]
        if self.config.scale_word and valid_blocks is None:
            return [load_global(address, 4)[0] for address in addresses]
        return [self._load_scale_bytes(address, valid_blocks) for address in addresses]

    def _load_scale_bytes(self, address: Int64, valid_blocks: Any) -> Uint32:
        word = Uint32(0)
        for i in range(LANE_BLOCKS):
            exists = Int32(1) if valid_blocks is None else Int32(valid_blocks > i)
            word = word | (load_global_byte_if(exists, address + i) << Uint32(8 * i))
        return word


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

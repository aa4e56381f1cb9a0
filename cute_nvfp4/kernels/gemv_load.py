"""What a lane of the GEMV loads: its part of two rows of a slice of A, and their scales."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from ..ptx.async_copy import copy_async
from ..ptx.convert import e4m3x2_to_f16x2, e4m3x4_to_f16x2, f16x2_to_f32
from ..ptx.fma import mul_f16x2
from ..ptx.memory import load_global, load_global_byte_if, load_global_if, load_shared, store_shared
from ..scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, cute_layout
from .gemv_config import LANE_BYTES, ROW_PART_BYTES, ROWS_SHAPE, ROWS_STRIDE, STAGE_BYTES, GemvConfig
from .gemv_dot import BLOCK_K, LANE_BLOCKS, QUAD, SLICE_BLOCKS, SLICE_K

# 2⁻⁶ in both halves: keeps the product of two E4M3 scales inside f16; undone at the end
SCALE_SHIFT = 64.0
_SHIFT_F16X2 = 0x24002400

_A_POLICY = {"l1": "no_allocate", "l2": "evict_first"}


def tile_row(tile: Any, lane_row: Any, row_of_lane: Any) -> Any:
    """Row of the matrix for quad ``lane_row`` (0–7) and row 0 or 1 of its lanes, in tile ``tile``."""
    atoms = ROWS_SHAPE[2]
    # ((4, 2), 2, 8) : ((1, 64), 32, 4) within an atom
    layout = cute.make_layout(ROWS_SHAPE, stride=ROWS_STRIDE)
    return cute.crd2idx((lane_row, row_of_lane, tile % atoms), layout) + (tile // atoms) * ATOM_ROWS


def _scale_slice_bytes(config: GemvConfig) -> int:
    """Bytes from the scales of a slice to those of the next, for the same row."""
    return ATOM_BYTES * (SLICE_BLOCKS // ATOM_COLS) if config.a_scale == "blocked" else SLICE_BLOCKS


def lane_addresses(config: GemvConfig, operand: tuple, m: Any, k: Any, tile: Any, lane: Any, slice_index: Any) -> tuple:
    """(row 0 of A, row 1 of A, scales of row 0, scales of row 1) of the lane for ``slice_index`` of ``tile``.

    operand: (address of A, bytes from row to row, address of its scales, bytes from row to row). Rows past M read
    row 0 instead; what comes of them is not stored. Blocked scales use only the first of their addresses.
    """
    a, a_row, sfa, sfa_row = operand
    lane_row, quad_lane = lane // QUAD, lane % QUAD
    data, scales = [], []
    for i in range(2):
        row = tile_row(tile, lane_row, i)
        inside = cutlass.select_(row < m, row, Int32(0))
        data.append(a + Int64(inside) * a_row + Int64(slice_index * (SLICE_K // 2) + quad_lane * LANE_BYTES))
        column = slice_index * SLICE_BLOCKS + quad_lane * LANE_BLOCKS
        if config.a_scale == "blocked":
            # the row itself: padding exists up to a whole atom, and rows r and r + 32 are read together
            scales.append(sfa + Int64(cute.crd2idx((row, column, 0), cute_layout(m, k // BLOCK_K))))
        else:
            scales.append(sfa + Int64(inside) * sfa_row + Int64(column))
    return (*data, *scales)


def advance(config: GemvConfig, addresses: tuple, slices: int) -> tuple:
    """The addresses ``slices`` slices further along K."""
    steps = (SLICE_K // 2, SLICE_K // 2, _scale_slice_bytes(config), _scale_slice_bytes(config))
    return tuple(x + slices * step for x, step in zip(addresses, steps))


def fetch(config: GemvConfig, addresses: tuple, valid_blocks: Any, store: Any, stage: Any) -> None:
    """Asks for the lane's part of a slice; ``valid_blocks``: None if all four blocks exist, else how many (any Int32).

    store: with stages in registers (data: (WORDS, ROWS, STAGES), scales: (ROWS, STAGES)), and ``stage`` is a constant;
    with stages in shared memory the address of the lane's first sixteen bytes in the warp's ring.
    """
    if config.shared_stages:
        _copy_data(config, addresses, valid_blocks, store + stage * STAGE_BYTES)
        _copy_scales(config, addresses[2:], valid_blocks, _scale_place(store, stage))
        return
    data, scales = store
    for r in range(2):
        for w, word in enumerate(_load_data(config, addresses[r], valid_blocks)):
            data[w, r, stage] = word
    for r, word in enumerate(_load_scales(config, addresses[2:], valid_blocks)):
        scales[r, stage] = word


def take(config: GemvConfig, store: Any, stage: Any) -> tuple[list[list[Uint32]], list[Uint32]]:
    """What :func:`fetch` brought: eight words of each of the two rows, and a word of four scales of each."""
    if not config.shared_stages:
        data, scales = store
        return [[data[w, r, stage] for w in range(8)] for r in range(2)], [scales[r, stage] for r in range(2)]
    rows = []
    for r in range(2):
        words: list[Uint32] = []
        for i in range(2):
            words += load_shared(store + stage * STAGE_BYTES + (2 * r + i) * ROW_PART_BYTES, 16)
        rows.append(words)
    return rows, load_shared(_scale_place(store, stage), 8)


def _scale_place(store: Any, stage: Any) -> Any:
    """Address of the lane's two words of scales: behind the stage's data, 8 bytes a lane where data has 16."""
    lane = cute.arch.lane_idx()
    return store + stage * STAGE_BYTES + 4 * ROW_PART_BYTES - lane * 8


def _valid_bytes(valid_blocks: Any, first_block: int, blocks: int, block_bytes: int) -> Any:
    """Bytes that exist of ``blocks`` blocks from ``first_block`` on."""
    return cutlass.max(cutlass.min(valid_blocks - first_block, blocks), 0) * block_bytes


def _copy_data(config: GemvConfig, addresses: tuple, valid_blocks: Any, place: Any) -> None:
    width = min(config.vector_bytes, 16)
    for r in range(2):
        for i in range(LANE_BYTES // width):
            part, inside = divmod(i * width, 16)
            target = place + (2 * r + part) * ROW_PART_BYTES + inside
            valid = None if valid_blocks is None else _valid_bytes(valid_blocks, i * width // 8, width // 8, 8)
            copy_async(target, addresses[r] + i * width, width, valid, evict_first=True)


def _copy_scales(config: GemvConfig, addresses: tuple, valid_blocks: Any, place: Any) -> None:
    if config.a_scale == "blocked" and valid_blocks is None:
        # rows r and r + 32 are neighbours in the atom
        copy_async(place, addresses[0], 8)
    elif config.a_scale == "rowmajor" and config.scale_word:
        for r in range(2):
            valid = None if valid_blocks is None else _valid_bytes(valid_blocks, 0, LANE_BLOCKS, 1)
            copy_async(place + 4 * r, addresses[r], 4, valid)
    else:
        # what has to be masked or put together from bytes goes through registers
        store_shared(place, _load_scales(config, addresses, valid_blocks))


def _load_data(config: GemvConfig, address: Int64, valid_blocks: Any) -> list[Uint32]:
    width = config.vector_bytes
    words: list[Uint32] = []
    if valid_blocks is None:
        for i in range(LANE_BYTES // width):
            words += load_global(address + i * width, width, **_A_POLICY)
    else:
        for i in range(LANE_BLOCKS):
            words += load_global_if(Int32(valid_blocks > i), address + i * 8, 8, **_A_POLICY)
    return words


def _load_scales(config: GemvConfig, addresses: tuple, valid_blocks: Any) -> list[Uint32]:
    if config.a_scale == "blocked":
        if valid_blocks is None:
            return load_global(addresses[0], 8, l1="no_allocate")
        words = load_global_if(Int32(valid_blocks > 0), addresses[0], 8, l1="no_allocate")
        # columns past K are padding, which may hold anything, NaN too
        some = (Uint32(1) << (Uint32(valid_blocks) * Uint32(8))) - Uint32(1)
        mask = cutlass.select_(valid_blocks >= LANE_BLOCKS, Uint32(0xFFFFFFFF), some)
        return [word & mask for word in words]
    if config.scale_word and valid_blocks is None:
        return [load_global(address, 4)[0] for address in addresses]
    return [_load_scale_bytes(address, valid_blocks) for address in addresses]


def _load_scale_bytes(address: Int64, valid_blocks: Any) -> Uint32:
    word = Uint32(0)
    for i in range(LANE_BLOCKS):
        exists = Int32(1) if valid_blocks is None else Int32(valid_blocks > i)
        word = word | (load_global_byte_if(exists, address + i) << Uint32(8 * i))
    return word


def load_b_block(config: GemvConfig, b: Int64, sfb: Int64, column: Any, k: Any) -> tuple[list[Uint32], Uint32]:
    """Two words of block ``column`` of b and its scale's byte; zeros past K. ``b``, ``sfb``: addresses of row 0."""
    offset = column
    if config.b_scale == "blocked":
        offset = cute.crd2idx((0, column, 0), cute_layout(ATOM_ROWS, k // BLOCK_K))
    exists = Int32(column * BLOCK_K < k) if config.tail else Int32(1)
    if config.tail:
        words = load_global_if(exists, b + Int64(column) * 8, 8, l1="evict_last")
    else:
        words = load_global(b + Int64(column) * 8, 8, l1="evict_last")
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

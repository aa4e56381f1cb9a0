"""Loader with stages in shared memory: a warp copies whole lines into a ring of its own with ``cp.async``.

Bytes in flight are then limited by shared memory (200 KB a multiprocessor) instead of registers. Lanes copy sixteen
bytes each in the order of memory, four rows of 128 bytes an instruction, so that every sector is asked for once;
they read as the dot engine wants it, 32 bytes of two rows each. Only the warp itself meets at a barrier.

A stage of a warp: [row of the tile (16)][sixteen-byte piece (8)], pieces of odd rows swapped in pairs (p ^ 1), so that
the eight lanes of a 128-bit access (two rows, every other piece) use all banks; then [lane (32)][2 · 4 scales].
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...ptx.async_copy import copy_async
from ...ptx.memory import load_shared, store_shared
from ..arith import div, mod
from .config import PIECE_BYTES, ROW_PIECES, ROWS_SHAPE, ROWS_STRIDE, SLICE_BYTES, TILE_ROWS, GemvConfig
from .dot import LANE_BLOCKS, QUAD
from .scales import existing_blocks, lane_scale_addresses, load_scales, tile_row

_DATA_BYTES = TILE_ROWS * SLICE_BYTES
# rows of the tile that one instruction of the warp copies, and instructions
_COPY_ROWS = 32 // ROW_PIECES
_COPIES = TILE_ROWS // _COPY_ROWS


def addresses(config: GemvConfig, operand: tuple, lane: Any, slice_index: Any) -> tuple:
    """(the first row a lane copies, scales…) in tile 0; ``operand``: (address, row stride) of A and scales."""
    a, a_row, _, _ = operand
    inside = Int64(slice_index * SLICE_BYTES + mod(lane, ROW_PIECES) * PIECE_BYTES)
    row = Int64(tile_row(0, div(lane, ROW_PIECES), 0))
    return (a + row * a_row + inside, *lane_scale_addresses(config, operand, lane, slice_index))


def _later_row(copy: int) -> int:
    """Rows from the one that a lane copies with its first instruction to that of instruction ``copy``."""
    # rows of the tile are counted quads first (r, r+64), then the two rows of their lanes (r, r+32)
    row_of_lane, first_quad = divmod(copy * _COPY_ROWS, ROWS_SHAPE[0][0] * ROWS_SHAPE[0][1])
    return row_of_lane * ROWS_STRIDE[1] + first_quad // ROWS_SHAPE[0][0] * ROWS_STRIDE[0][1]


def fetch(config: GemvConfig, where: tuple, a_row: Any, limits: Any, store: tuple, stage: Int32) -> None:
    """Starts copying a slice of a tile into ``stage``; ``limits``: None if all of it exists.

    store: (address of the warp's ring, lane).
    """
    ring, lane = store
    base = ring + stage * config.stage_bytes
    piece, first_row = mod(lane, ROW_PIECES), div(lane, ROW_PIECES)
    for i in range(_COPIES):
        row = first_row + i * _COPY_ROWS
        source = where[0] + _later_row(i) * a_row
        target = base + row * SLICE_BYTES + (piece ^ (row & 1)) * PIECE_BYTES
        for part in range(PIECE_BYTES // config.copy_bytes):
            offset = part * config.copy_bytes
            size = None
            if limits is not None:
                row_of_tile = tile_row(0, first_row, 0) + _later_row(i)
                blocks = existing_blocks(limits, row_of_tile, piece * (PIECE_BYTES // 8))
                size = cutlass.max(cutlass.min(blocks * 8 - offset, config.copy_bytes), 0)
            copy_async(target + offset, source + offset, config.copy_bytes, size, evict_first=True)
    _copy_scales(config, where[1:], lane, limits, base + _DATA_BYTES + lane * 8)


def _copy_scales(config: GemvConfig, where: tuple, lane: Any, limits: Any, place: Any) -> None:
    if config.a_scale == "blocked" and limits is None:
        # the lane's two rows are neighbours in the atom
        copy_async(place, where[0], 8)
    elif config.a_scale == "rowmajor" and config.scale_word:
        for r in range(2):
            size = None
            if limits is not None:
                row = tile_row(0, div(lane, QUAD), r)
                size = existing_blocks(limits, row, mod(lane, QUAD) * LANE_BLOCKS)
                size = cutlass.max(cutlass.min(size, LANE_BLOCKS), 0)
            copy_async(place + 4 * r, where[r], 4, size)
    else:
        # what has to be masked or put together from bytes goes through registers
        store_shared(place, load_scales(config, where, lane, limits))


def take(config: GemvConfig, store: tuple, stage: Int32) -> tuple[list[list[Uint32]], list[Uint32]]:
    """What :func:`fetch` brought to the lane: eight words of each of the two rows, and a word of scales of each."""
    ring, lane = store
    base = ring + stage * config.stage_bytes
    rows = []
    for r in range(2):
        row = div(lane, QUAD) + 8 * r
        words: list[Uint32] = []
        for i in range(2):
            piece = mod(lane, QUAD) * 2 + i
            words += load_shared(base + row * SLICE_BYTES + (piece ^ (row & 1)) * PIECE_BYTES, PIECE_BYTES)
        rows.append(words)
    return rows, load_shared(base + _DATA_BYTES + lane * 8, 8)


def synchronize() -> None:
    """What one lane copied and waited for becomes visible to the others of the warp."""
    cute.arch.sync_warp()

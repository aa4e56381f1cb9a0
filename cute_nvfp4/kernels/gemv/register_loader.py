"""Loader with stages in registers: each lane loads its own 32 bytes of its two rows. For 256-bit loads (sm_100a).

With 128-bit loads a lane's 32 bytes take two instructions, each of which touches every sector by half: L2 is asked
for everything twice. There :mod:`.gemv_ring` is the loader.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64, Uint32

from ...ptx.memory import load_global, load_global_if
from ..arith import div, mod
from .config import LANE_BYTES, ROWS_STRIDE, SLICE_BYTES, GemvConfig
from .dot import LANE_BLOCKS, QUAD
from .scales import existing_blocks, lane_scale_addresses, load_scales, tile_row

_POLICY = {"l1": "no_allocate", "l2": "evict_first"}


def addresses(config: GemvConfig, operand: tuple, lane: Any, slice_index: Any) -> tuple:
    """(the lane's part of row 0, scales…) in tile 0; ``operand``: (address, row stride) of A and of its scales."""
    a, a_row, _, _ = operand
    inside = Int64(slice_index * SLICE_BYTES + mod(lane, QUAD) * LANE_BYTES)
    row = Int64(tile_row(0, div(lane, QUAD), 0))
    return (a + row * a_row + inside, *lane_scale_addresses(config, operand, lane, slice_index))


def fetch(config: GemvConfig, where: tuple, a_row: Any, limits: Any, store: tuple, stage: int) -> None:
    """Loads the lane's part of a slice into ``stage``; ``limits``: None if all of it exists.

    store: data (WORDS, ROWS, STAGES) and scales (ROWS, STAGES), in registers; lane.
    """
    data, scales, lane = store
    for r in range(2):
        count = None
        if limits is not None:
            count = existing_blocks(limits, tile_row(0, div(lane, QUAD), r), mod(lane, QUAD) * LANE_BLOCKS)
        for w, word in enumerate(_load(config, where[0] + r * ROWS_STRIDE[1] * a_row, count)):
            data[w, r, stage] = word
    for r, word in enumerate(load_scales(config, where[1:], lane, limits)):
        scales[r, stage] = word


def take(config: GemvConfig, store: tuple, stage: int) -> tuple[list[list[Uint32]], list[Uint32]]:
    """What :func:`fetch` brought: eight words of each of the two rows, and a word of four scales of each."""
    data, scales, _ = store
    return [[data[w, r, stage] for w in range(8)] for r in range(2)], [scales[r, stage] for r in range(2)]


def _load(config: GemvConfig, address: Int64, count: Any) -> list[Uint32]:
    width = config.vector_bytes
    words: list[Uint32] = []
    if count is None:
        for i in range(LANE_BYTES // width):
            words += load_global(address + i * width, width, **_POLICY)
    else:
        for i in range(LANE_BLOCKS):
            words += load_global_if(Int32(count > i), address + i * 8, 8, **_POLICY)
    return words

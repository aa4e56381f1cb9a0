"""Loader with stages in registers: each lane loads its own 32 bytes of its two rows. For 256-bit loads (sm_100a).

With 128-bit loads a lane's 32 bytes take two instructions, each of which touches every sector by half: L2 is asked
for everything twice. There :mod:`.gemv_ring` is the loader.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64, Uint32

from ..ptx.memory import load_global, load_global_if
from .arith import div, mod
from .gemv_config import LANE_BYTES, SLICE_BYTES, GemvConfig
from .gemv_dot import LANE_BLOCKS, QUAD
from .gemv_scales import lane_scale_addresses, load_scales, row_inside, slice_bytes, tile_row

_POLICY = {"l1": "no_allocate", "l2": "evict_first"}


def addresses(config: GemvConfig, operand: tuple, m: Any, k: Any, tile: Any, lane: Any, slice_index: Any) -> tuple:
    """(row 0, row 1, scales…) of the lane; ``operand``: (address, row stride) of A and of its scales, in bytes."""
    a, a_row, sfa, sfa_row = operand
    inside = Int64(slice_index * SLICE_BYTES + mod(lane, QUAD) * LANE_BYTES)
    rows = [Int64(row_inside(tile_row(tile, div(lane, QUAD), i), m)) for i in range(2)]
    scales = lane_scale_addresses(config, sfa, sfa_row, m, k, tile, lane, slice_index)
    return (*(a + row * a_row + inside for row in rows), *scales)


def advance(config: GemvConfig, where: tuple, slices: int) -> tuple:
    """The addresses ``slices`` slices further along K."""
    steps = (SLICE_BYTES, SLICE_BYTES, slice_bytes(config), slice_bytes(config))
    return tuple(x + slices * step for x, step in zip(where, steps))


def fetch(config: GemvConfig, where: tuple, valid: Any, store: Any, stage: int) -> None:
    """Loads the lane's part of a slice into ``stage``; ``valid``: None, or (blocks of the lane that exist, …).

    store: data (WORDS, ROWS, STAGES) and scales (ROWS, STAGES), in registers.
    """
    data, scales = store
    valid_blocks = None if valid is None else valid[0]
    for r in range(2):
        for w, word in enumerate(_load(config, where[r], valid_blocks)):
            data[w, r, stage] = word
    for r, word in enumerate(load_scales(config, where[2:], valid_blocks)):
        scales[r, stage] = word


def take(config: GemvConfig, store: Any, stage: int) -> tuple[list[list[Uint32]], list[Uint32]]:
    """What :func:`fetch` brought: eight words of each of the two rows, and a word of four scales of each."""
    data, scales = store
    return [[data[w, r, stage] for w in range(8)] for r in range(2)], [scales[r, stage] for r in range(2)]


def _load(config: GemvConfig, address: Int64, valid_blocks: Any) -> list[Uint32]:
    width = config.vector_bytes
    words: list[Uint32] = []
    if valid_blocks is None:
        for i in range(LANE_BYTES // width):
            words += load_global(address + i * width, width, **_POLICY)
    else:
        for i in range(LANE_BLOCKS):
            words += load_global_if(Int32(valid_blocks > i), address + i * 8, 8, **_POLICY)
    return words

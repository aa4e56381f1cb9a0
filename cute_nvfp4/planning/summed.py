"""Decides whether the second product of one token's experts also adds, and how it is divided."""

from __future__ import annotations

from ..kernels.moe.summed_config import MOST_WARPS
from ..weight_layout import SLAB_ROWS

MOST_TILES = 6
"""The most packed tiles of a warp for which the product also adds: all weights wait in registers for the rows
(Qwen3-30B-A3B 15.7 µs for 17.2). Layers with more tiles are faster without (gpt-oss-20b 29.4 µs for 26.4, DeepSeek-V3
69.3 for 57.3, Mixtral 67.4 for 60.3; H200, 2026-11-29)."""


def sums_with_product(rows: int, tiles: int, sm_count: int) -> bool:
    """Whether the second product of one token's experts also adds.

    rows: those of each expert's weight. tiles: the packed tiles along K of all of them.
    """
    return tiles_of_warp(tiles) <= MOST_TILES and -(-rows // SLAB_ROWS) <= sm_count


def tiles_of_warp(tiles: int) -> int:
    """The number of packed tiles along K that each warp has."""
    return -(-tiles // MOST_WARPS)

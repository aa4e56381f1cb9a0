"""How the second product of one token's experts is divided, where their sum is made with it."""

from __future__ import annotations

from typing import NamedTuple

from ..kernels.moe.summed_config import MOST_WARPS

MOST_IN_REGISTERS = 6
"""Packed tiles that a warp loads before its rows are there."""
MOST_TILES = 0
"""Packed tiles along K of all experts of a token up to which the sum is made with the product."""


class SummedTiling(NamedTuple):
    """Warps of a CTA, packed tiles that each has in registers at a time, and CTAs of a multiprocessor."""

    warps: int
    tiles: int
    ctas_per_sm: int


def sums_with_product(tiles: int) -> bool:
    """Whether the second product of one token's experts, of so many packed tiles along K together, makes their sum."""
    return tiles <= MOST_TILES


def summed_tiling(tiles: int) -> SummedTiling:
    """The tiling for so many packed tiles along K."""
    return SummedTiling(MOST_WARPS, min(-(-tiles // MOST_WARPS), MOST_IN_REGISTERS), 2)

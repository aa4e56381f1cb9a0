"""The plan of tensor memory for packed weights on tcgen05: accumulators, and weights decoded for the MMA."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ....errors import explain
from ....weight_layout import TILE_K

if TYPE_CHECKING:
    from ..sm90.config import WgmmaConfig

TENSOR_COLUMNS = 512
"""Columns of tensor memory; a column has 32 bits for each row of an MMA."""
DECODED_COLUMNS = TILE_K // 2
"""Columns of a packed tile that is decoded to 16-bit elements."""


@cache
def divided(c: WgmmaConfig) -> tuple[int, int]:
    """(stages of the ring, stages that are decoded at a time): the most decoded stages that divide the ring."""
    ring, decoded = c.stages or max(c.most_stages, 0), c.tensor_columns // (DECODED_COLUMNS * c.stage_tiles)
    pairs = [(ring if c.stages else ring - ring % d, d) for d in range(2, min(ring, decoded) + 1)]
    return max((pair for pair in pairs if pair[0] % pair[1] == 0), default=(ring, 0))


def refused_by_tensor_memory(c: WgmmaConfig) -> str:
    """The reason why tcgen05 cannot run ``c``, its tiles or too few columns for decoded weights, or an empty string."""
    if c.warpgroups not in (2, 4) or c.ctas_per_sm > 1 or not c.schedule.has_single_ctas:
        got, expected = f"{c.warpgroups} warpgroups, {c.schedule}", "2 or 4 warpgroups, WholeTiles or EqualShares"
        return explain(f"a plan for {c.arch.name}", got=got, expected=f"{expected} without clusters")
    if c.tile_n % 16 or not 16 <= c.tile_n <= 256:
        return explain(f"tile_n of {c.arch.name}", got=c.tile_n, expected="a multiple of 16 from 16 to 256")
    if c.decoded_stages < 2:
        columns = DECODED_COLUMNS * c.stage_tiles
        got = f"{c.tensor_columns} for stages of {columns}, {c.ring_stages} stages in shared memory"
        return explain("columns of tensor memory beside sums", got=got, expected="at least two stages")
    return ""

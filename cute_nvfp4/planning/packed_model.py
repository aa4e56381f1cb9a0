"""Modelled times of the GEMMs of packed weights: on an H200 from what was measured there, on sm_120a from published
figures (the streaming kernel as on an H200).

The figures here were fitted on an NVIDIA H200 on 2026-11-22 to 840 plans of 64 random products
(``benchmarks/gemm_choice.py --seed 1``), which they meet to 5 %: root of the mean square, where the fastest plans of a
product count most.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..kernels.gemm.sm90.config import WgmmaConfig
from ..kernels.gemm.sm90.stream_config import StreamConfig
from ..weight_layout import tiles
from . import sm120_model
from .packed_problem import PackedPlan, PackedProblem, tile_count

BYTES_US = 3.7e6
"""Bytes of a weight that memory gives in a µs."""
STREAM_START_US = 6.7
START_US = 5.68
"""Launch, first bytes and last store."""

TILE_US = {2: 0.048, 4: 0.062, 8: 0.122}
"""µs of a CTA of the streaming kernel for 64 of K of its unit, by slabs of a unit, for up to eight rows of x;"""
SIXTEEN_ROWS = 1.29
"""this times as long for more."""
CUT_US, CUT_PART_US, CUT_SIXTEEN_US = 2.24, 0.17, 0.84
"""µs to add the sums of a unit that is cut, for each of its parts, and for more than eight rows of x."""


class Width(NamedTuple):
    """µs of a CTA of the WGMMA kernel, by rows of x in a tile. stage: for 128 rows of the weight and 128 of K; tile: to
    begin and to store a tile; fix_up: to add the sums of a tile that stream-K cuts in two."""

    stage: float
    tile: float
    fix_up: float


WIDTHS = {
    8: Width(0.348, 0.92, 2.3),
    16: Width(0.322, 1.05, 2.8),
    32: Width(0.336, 1.21, 3.0),
    64: Width(0.444, 1.49, 3.5),
    128: Width(0.637, 1.99, 4.7),
    256: Width(1.202, 2.55, 7.4),
}
BEYOND_US = 0.0028
"""µs of a stage for a row of a tile beyond the end of x."""
PART_US = 0.29
"""µs for each part more of a tile that stream-K cuts, by 64 rows of x in it."""
MULTICAST, MULTICAST_US = 0.91, 1.07
"""Time of a stage whose x is loaded for two CTAs, and µs to start clusters."""
SHORT_STAGE = 1.05
"""Time of stages of one packed tile."""
EXCHANGE_US = 0.34
"""µs to add the sums of two CTAs of a cluster."""


def predict(plan: PackedPlan, p: PackedProblem, sm_count: int) -> float:
    """Modelled µs of a plan, launch included."""
    c = plan.config
    if isinstance(c, StreamConfig):
        return STREAM_START_US + _streaming(c, plan.workers, p)
    if c.arch.generation == "sm120":
        return sm120_model.packed_us(c, tile_count(p, c), -(-p.k // c.tile_k), plan.workers, sm_count)
    # 4.5 bits an element, scales included
    return START_US + max(_multiplying(c, plan.workers, p, sm_count), p.rows * p.k * 0.5625 / BYTES_US)


def _streaming(c: StreamConfig, workers: int, p: PackedProblem) -> float:
    """µs of the CTA with the largest share."""
    units, steps = -(-p.rows // c.rows), tiles(p.rows, p.k)[1] // c.stage_tiles
    share, cut = -(-units * steps // workers) * c.stage_tiles, units % workers
    tile = TILE_US[c.slabs] * (SIXTEEN_ROWS if p.m > 8 else 1.0)
    us = share * max(tile, workers * c.tile_bytes / BYTES_US)
    if cut:
        us += CUT_US + CUT_PART_US * workers / cut + (CUT_SIXTEEN_US if p.m > 8 else 0.0)
    return us


def _multiplying(c: WgmmaConfig, workers: int, p: PackedProblem, sm_count: int) -> float:
    """µs of the multiprocessor with the most work tiles."""
    width, count, steps = WIDTHS[c.tile_n], tile_count(p, c), -(-p.k // c.tile_k)
    along_m = -(-p.m // c.tile_n)
    stage = width.stage + BEYOND_US * (along_m * c.tile_n - p.m) / along_m
    if c.scheduler == "stream_k":
        share = count * steps / workers
        cut = width.fix_up + PART_US * c.tile_n / 64 * max(0.0, workers / count - 1)
        return math.ceil(share) * stage * max(1.0, workers / sm_count) + width.tile * max(1.0, share / steps) + cut
    stage *= (MULTICAST if c.cluster_rows > 1 else 1.0) * (SHORT_STAGE if c.stage_tiles == 1 else 1.0)
    ctas = -(-count * c.split_k // sm_count)
    rest = (EXCHANGE_US if c.split_k > 1 else 0.0) + (MULTICAST_US if c.cluster_rows > 1 else 0.0)
    return ctas * -(-steps // c.split_k) * stage + -(-ctas // c.ctas_per_sm) * width.tile + rest

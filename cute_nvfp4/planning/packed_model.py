"""Modelled times of the GEMMs of packed weights: on an H200 from what was measured there, on sm_120a from published
figures (the streaming kernel as on an H200).

The figures here were fitted on an NVIDIA H200 on 2026-11-22 to 2,600 plans of 194 products
(``benchmarks/gemm_choice.py``: seeds 1 to 4, and the shapes of the other benchmarks), which they meet to 5.5 %: root of
the mean square, where the fastest plans of a product count most.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..kernels.gemm.packed.stream_config import StreamConfig
from ..kernels.gemm.sm90.config import STAGE_TILES, WgmmaConfig
from ..weight_layout import TILE_K, TILE_ROWS, tiles
from . import sm120_model
from .packed_problem import PackedPlan, PackedProblem, helped_steps, tile_count

TILE_CODES = TILE_ROWS * TILE_K
BYTES_US = 3.96e6
"""Bytes of a weight that memory gives in a µs."""
STREAM_START_US, START_US = 6.16, 6.13
"""Launch, first bytes and last store, of the streaming and of the WGMMA kernel."""


class Unit(NamedTuple):
    """tile: µs of a CTA of the streaming kernel for 64 of K of its unit, up to eight rows of x; many: more rows take so
    many times as long."""

    tile: float
    many: float


UNITS = {
    2: Unit(0.0441, 1.10),
    4: Unit(0.0618, 1.32),
    8: Unit(0.1249, 1.19),
}
"""By slabs of a unit."""
WARPS = {(8, 4, 2): 0.94, (8, 2, 2): 0.97, (2, 1, 4): 0.90}
"""Time of a step by slabs, warps along them and tiles of a stage, relative to other ways to divide such a unit, up to
eight rows of x."""
WARPS_MANY = {(8, 4, 2): 0.95}
"""The same for more rows."""
DECODED_X_US = 0.0065
"""µs for 64 of K of eight rows of NVFP4 x, which each of the warps along a unit's rows decodes for itself."""
EIGHT_BITS = 1.2
"""Elements of eight bits take so many times as long."""
WAITING = 0.05
"""Part of the time of WGMMA that is not hidden behind memory, for elements of eight bits."""
CTA_US = 0.0108
"""µs for each CTA."""
WARP_US, EIGHT_WARPS = 0.05, 0.97
"""µs for each warp along K, whose sums are added, and with eight of them the time for more than eight rows of x."""
CUT_US, CUT_PART_US, CUT_MANY_US = 2.07, 0.06, 0.92
"""µs to add the sums of a unit that is cut, for each of its parts, and for more than eight rows of x."""

FOURS_US = 0.13
"""µs for a warp to read four sums of each lane from one part of a unit, where one warp adds and others multiply."""


class Width(NamedTuple):
    """µs of a CTA of the WGMMA kernel, by rows of x in a tile. stage: for 128 rows of the weight and 128 of K; tile: to
    begin and to store a tile; fix_up: to add the sums of a tile that stream-K cuts in two."""

    stage: float
    tile: float
    fix_up: float


WIDTHS = {
    8: Width(0.315, 0.65, 2.5),
    16: Width(0.328, 0.67, 2.9),
    32: Width(0.348, 0.86, 3.1),
    48: Width(0.384, 1.07, 3.2),
    64: Width(0.447, 1.29, 3.3),
    80: Width(0.479, 1.36, 3.6),
    96: Width(0.535, 1.44, 3.9),
    112: Width(0.576, 1.51, 4.2),
    128: Width(0.649, 1.59, 4.4),
    160: Width(0.788, 1.79, 5.0),
    192: Width(0.941, 2.00, 5.5),
    224: Width(1.101, 2.20, 6.0),
    256: Width(1.230, 2.41, 6.5),
}
BEYOND_US = 0.0019
"""µs of a stage for a row of a tile beyond the end of x."""
PART_US = 0.31
"""µs for each part more of a tile that stream-K cuts, by 64 rows of x in it."""
MULTICAST, MULTICAST_US = 0.96, 0.69
"""Time of a stage whose x is loaded for two CTAs, and µs to start clusters."""
L2_BYTES, BEYOND_L2 = 40e6, 1.9e-9
"""Bytes of operands up to which equal shares find them in L2, and how much longer their stages take for a byte more."""
SHORT_STAGE, WIDE_SHORT_STAGE = 1.06, 0.95
"""Time of stages of one packed tile; of 256 rows of x, shared along K."""
TURNS = {32: 0.88, 64: 0.925, 128: 0.99}
"""Time of a stage where warpgroups take turns; with these and what follows, measured at a few sizes on another H200."""
TURNS_ALONE, ALONE_US = 1.015, 0.2
"""The same, of 64 rows of the weight, where a CTA has all of K, and µs that this gains."""
OVERLAP_US = 0.35
"""µs that a tile of 128 columns gains where sums travel during products."""
HELP_US, WRITE_US = 1.3, 2.0
"""µs to add a helper's sums, and for it to write them."""
EXCHANGE_US = 0.36
"""µs to add the sums of two CTAs of a cluster."""


def predict(plan: PackedPlan, p: PackedProblem, sm_count: int) -> float:
    """Modelled µs of a plan, launch included."""
    c = plan.config
    if isinstance(c, StreamConfig):
        return STREAM_START_US + _streaming(c, plan.workers, p)
    if c.arch.generation == "sm120":
        return sm120_model.packed_us(c, tile_count(p, c), -(-p.k // c.tile_k), plan.workers, sm_count)
    us, memory = _multiplying(c, plan, p, sm_count), _weight_bytes(c, p) / BYTES_US
    # most plans of elements of eight bits wait for memory: the one that does so least is first
    return START_US + max(us, memory + (WAITING * us if c.weights.element_bits == 8 else 0.0))


def _weight_bytes(c: WgmmaConfig, p: PackedProblem) -> float:
    return p.rows * p.k * c.weights.tile_bytes / TILE_CODES


def _streaming(c: StreamConfig, workers: int, p: PackedProblem) -> float:
    """µs of the CTA with the largest share."""
    units, steps = -(-p.rows // c.rows), tiles(p.rows, p.k)[1] // c.stage_tiles
    share, cut = -(-units * steps // workers) * c.stage_tiles, units % workers
    unit = UNITS[c.slabs]
    tile = unit.tile * (unit.many if p.m > 8 else 1.0) * (EIGHT_WARPS if p.m > 8 and c.warps_k == 8 else 1.0)
    tile *= EIGHT_BITS if c.weights.element_bits == 8 else 1.0
    step = max(tile, workers * c.tile_bytes / BYTES_US)
    step *= (WARPS if p.m <= 8 else WARPS_MANY).get((c.slabs, c.warps_m, c.stage_tiles), 1.0)
    if c.quantized_x:
        step += DECODED_X_US * c.warps_m * c.columns / 8
    us = share * step + CTA_US * workers + WARP_US * c.warps_k
    if cut:
        us += CUT_US + CUT_PART_US * workers / cut + (CUT_MANY_US if p.m > 8 else 0.0)
        if units > workers:
            us += FOURS_US * math.ceil(p.m * c.rows / (4 * 32)) * workers / cut
    return us


def _multiplying(c: WgmmaConfig, plan: PackedPlan, p: PackedProblem, sm_count: int) -> float:
    """µs of the multiprocessor with the most work tiles."""
    workers = plan.workers
    width, count, steps = WIDTHS[c.tile_n], tile_count(p, c), -(-p.k // (STAGE_TILES * TILE_K))
    along_m = -(-p.m // c.tile_n)
    stage = (width.stage + BEYOND_US * (along_m * c.tile_n - p.m) / along_m) * c.row_groups / 2
    if c.scheduler == "stream_k":
        stage *= 1 + BEYOND_L2 * max(0.0, _weight_bytes(c, p) + p.m * p.k * 2 - L2_BYTES)
        share = count * steps / workers
        cut = width.fix_up + PART_US * c.tile_n / 64 * max(0.0, workers / count - 1)
        return math.ceil(share) * stage * max(1.0, workers / sm_count) + width.tile * max(1.0, share / steps) + cut
    stage *= MULTICAST if c.cluster_rows > 1 else 1.0
    if c.k_groups > 1:
        stage *= TURNS[c.tile_n] if c.split_k > 1 else TURNS_ALONE
    if c.stage_tiles == 1:
        stage *= WIDE_SHORT_STAGE if c.tile_n == 256 else SHORT_STAGE
    if c.scheduler == "helped":
        helped = helped_steps(p, plan)
        helps = -(-count // ((workers - count) * c.split_k)) * (helped * stage + WRITE_US)
        return max(-(-(steps - helped) // c.split_k) * stage, helps) + width.tile + EXCHANGE_US + HELP_US
    ctas = -(-count * c.split_k // sm_count)
    rest = (EXCHANGE_US if c.split_k > 1 else 0.0) + (MULTICAST_US if c.cluster_rows > 1 else 0.0)
    rest -= OVERLAP_US * c.overlap * c.tile_n / 128 + (ALONE_US if c.k_groups > c.split_k else 0.0)
    return ctas * -(-steps // c.split_k) * stage + -(-ctas // c.ctas_per_sm) * width.tile + rest

"""The choice of the kernel of a packed weight: the streaming kernel for few rows of x; for more rows, the one on WGMMA
(sm_90a), tcgen05 (sm_100a) or ``mma.sync`` (sm_120a)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import OperandError
from ..kernels.gemm.packed.stream_config import StreamConfig
from ..kernels.gemm.sm90.config import STAGE_TILES, TILE_N, WgmmaConfig
from ..kernels.gemm.sm90.limits import can_implement as can_wgmma
from ..kernels.gemm.sm90.schedules import EqualShares, Helped, OverlappedSums, SharedTiles, WholeTiles
from ..runtime.bounded import remembered
from ..target import Architecture
from ..weight_layout import DTYPES, PACKINGS, tiles
from . import gemm_table
from .packed_model import TILE_CODES, predict
from .packed_problem import (
    PackedPlan,
    PackedProblem,
    ScratchSize,
    can_implement,
    can_take,
    check_plan,
    decided,
    refused,
    tile_count,
)

__all__ = ["PackedPlan", "PackedProblem", "ScratchSize", "candidates", "check_plan", "choose", "predict"]

SPLIT_K = 2
"""CTAs of a cluster that share a tile along K. With four, fewer CTAs are resident at once than a GPU has SMs."""
TURNS = SharedTiles(split_k=SPLIT_K, k_groups=2)
"""A cluster of ``SPLIT_K`` CTAs, in each of which two warpgroups take stages in turn."""
SHARED: tuple[dict[str, Any], ...] = (
    {"tile_n": 8, "ctas_per_sm": 2},
    {"tile_n": 16, "ctas_per_sm": 2},
    {"tile_n": 32, "ctas_per_sm": 2},
    {"tile_n": 64},
    {"tile_n": 96, "stage_tiles": 1},
    {"tile_n": 128, "stage_tiles": 1},
    {"tile_n": 256, "stage_tiles": 1},
    {"tile_n": 112, "stage_tiles": 1, "warpgroups": 3},
    {"tile_n": 128, "stage_tiles": 1, "warpgroups": 3},
    {"tile_n": 32, "warpgroups": 4, "schedule": TURNS},
    {"tile_n": 64, "warpgroups": 4, "schedule": TURNS},
    {"tile_n": 128, "stage_tiles": 1, "schedule": TURNS},
)
"""Tilings in which a cluster shares tiles along K. Their stages are short where the ring would have few."""
MMA_SYNC_TILE_N = (16, 32, 64, 128)
TENSOR_TILE_N = (16, 32, 48, 64, 96, 128, 160, 192, 256)
Config = TypeVar("Config", bound=WgmmaConfig)
MANY, WIDE = 16, 128
"""Tiles along the rows of x. A tiling with more of them is a candidate only if its tiles are ``WIDE``."""


def choose(problem: PackedProblem, arch: Architecture, sm_count: int, given: PackedPlan | None = None) -> PackedPlan:
    """The plan for ``problem`` on ``sm_count`` SMs: that of the user's table (``gemm_table``), or the candidate that is
    fastest in the model; or ``given``, with the fields that the problem decides.

    Raises:
        OperandError: no kernel can run it.
        TableError: the user's table cannot be read.
    """
    return _choose(problem, arch, sm_count, given, gemm_table.stamp())


@remembered
def _choose(
    problem: PackedProblem, arch: Architecture, sm_count: int, given: PackedPlan | None, stamp: object
) -> PackedPlan:
    # ``stamp`` names the state of the table's file, so that a changed table is read again
    if given is None:
        plan = gemm_table.lookup(problem, arch, sm_count) or _fastest(problem, arch, sm_count)
    else:
        check_plan(given)
        plan = replace(given, config=replace(given.config, arch=arch, **decided(problem, given.streams)))
    reason = refused(problem, plan) or can_implement(plan)
    if reason:
        raise OperandError(reason)
    return plan


def _fastest(problem: PackedProblem, arch: Architecture, sm_count: int) -> PackedPlan:
    """The candidate that is fastest in the model."""
    found = _sensible_plans(problem, arch, sm_count)
    if not found:
        raise OperandError(can_wgmma(WgmmaConfig(arch=arch, **decided(problem, streams=False))))
    return min(found, key=lambda plan: predict(plan, problem, sm_count))


def candidates(problem: PackedProblem, arch: Architecture, sm_count: int) -> list[PackedPlan]:
    """Every sensible plan, the fastest in the model first. The list omits plans that can only lose: tiles wider than
    the problem, narrow tiles for many rows of x, and WGMMA for what the streaming kernel can take."""
    return sorted(_sensible_plans(problem, arch, sm_count), key=lambda plan: predict(plan, problem, sm_count))


def _sensible_plans(p: PackedProblem, arch: Architecture, sm_count: int) -> list[PackedPlan]:
    others = {"sm100": _tcgen05_plans, "sm120": _mma_sync_plans}.get(arch.generation, _wgmma_plans)
    found = (_stream_plans if can_take(p) else others)(p, arch, sm_count)
    if p.quantized and PACKINGS[p.packing][DTYPES[p.dtype]].in_rows:
        found = _with_decoding_warps(found)
    return [plan for plan in dict.fromkeys(found) if not (refused(p, plan) or can_implement(plan))]


def wide_elements(p: PackedProblem) -> bool:
    """Whether elements of the packed weight have eight bits."""
    return PACKINGS[p.packing][DTYPES[p.dtype]].element_bits == 8


def _stream_plans(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans of the streaming kernel: work tiles of 8, 4 or 2 slabs, distributed whole or, where uneven, cut."""
    stage, long_stage, most = STAGE_TILES, 4 if tiles(p.rows, p.k)[1] % 4 == 0 else STAGE_TILES, 64
    if wide_elements(p):
        # half as many tiles, so that a stage has as many bytes
        stage, long_stage, most = 1, long_stage // 2, 32
    tilings = [
        {"slabs": 8, "warps_m": 8, "warps_k": 2, "stage_tiles": stage, "stages": 16},
        {"slabs": 4, "warps_m": 2, "warps_k": 4, "stage_tiles": stage, "stages": 16},
        {"slabs": 4, "warps_m": 1, "warps_k": 8, "stage_tiles": stage, "stages": 16},
        {"slabs": 2, "warps_m": 2, "warps_k": 4, "stage_tiles": long_stage, "stages": most // long_stage},
        {"slabs": 2, "warps_m": 1, "warps_k": 8, "stage_tiles": stage, "stages": 16},
        {"slabs": 8, "warps_m": 4, "warps_k": 4, "stage_tiles": stage, "stages": 16},
        {"slabs": 8, "warps_m": 2, "warps_k": 8, "stage_tiles": stage, "stages": 16},
        {"slabs": 2, "warps_m": 1, "warps_k": 8, "stage_tiles": long_stage, "stages": most // long_stage},
    ]
    for tiling in tilings:
        config = StreamConfig(arch=arch, **tiling, **decided(p, streams=True))
        work_tiles, steps = -(-p.rows // config.rows), tiles(p.rows, p.k)[1] // config.stage_tiles
        each = -(-work_tiles // sm_count)
        for workers in {-(-work_tiles // each), min(sm_count, work_tiles * steps)}:
            yield PackedPlan(config, workers)


def _wgmma_plans(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans on WGMMA, each with its tiles in the better order."""
    return (in_order(p, plan, sm_count) for plan in _unordered_wgmma_plans(p, arch, sm_count))


def _unordered_wgmma_plans(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans on WGMMA: whole work tiles, with or without multicast of x; equal shares; tiles shared along K."""
    # the narrowest width for each number of tiles along the rows of x: many narrow tiles decode a weight as many times
    narrowest = {-(-p.m // tile_n): tile_n for tile_n in reversed(TILE_N)}
    for tile_n in (tile_n for along, tile_n in narrowest.items() if along <= MANY or tile_n >= WIDE):
        for ctas_per_sm in (1, 2) if tile_n <= 64 else (1,):
            tiling = {"tile_n": tile_n, "ctas_per_sm": ctas_per_sm}
            config = deep(WgmmaConfig(arch=arch, schedule=WholeTiles(), **tiling, **decided(p, streams=False)))
            slots, count = sm_count * ctas_per_sm, tile_count(p, config)
            if ctas_per_sm == 1:
                equal = replace(config, schedule=EqualShares())
                yield PackedPlan(equal, min(slots, count * -(-p.k // config.tile_k)))
            yield PackedPlan(config, min(slots, count))
            if -(-p.rows // config.tile_m) % 2 == 0 and tile_n >= 64:
                # two CTAs load x from L2 once
                yield PackedPlan(replace(config, schedule=WholeTiles(cluster_rows=2)), min(slots, count) // 2)
        if tile_n == WIDE:
            tiling = staged(p, {"warpgroups": 3, "stage_tiles": 1})
            config = WgmmaConfig(arch=arch, schedule=WholeTiles(), **tiling, **decided(p, streams=False))
            yield PackedPlan(config, min(sm_count, tile_count(p, config)))
        if WIDE // 2 < tile_n <= WIDE:
            # a CTA has 64 rows of the weight, and its warpgroups take turns: no sums go to another CTA
            tiling = staged(p, {"tile_n": tile_n, "schedule": SharedTiles(k_groups=2), "stage_tiles": 1})
            config = WgmmaConfig(arch=arch, **tiling, **decided(p, streams=False))
            if tile_count(p, config) <= sm_count:
                yield PackedPlan(config, tile_count(p, config))
        for tiling in SHARED:
            if tiling["tile_n"] == tile_n:
                yield _split_k_plan(p, arch, tiling)
                # sums travel during the products
                if tile_n >= WIDE and "schedule" not in tiling:
                    yield _split_k_plan(p, arch, {**tiling, "schedule": OverlappedSums()})
    # a cluster for each tile, and helpers on the SMs that are left
    plan = _split_k_plan(p, arch, {"tile_n": WIDE, "stage_tiles": 1})
    if p.m > WIDE // 2 and plan.workers < sm_count // SPLIT_K:
        yield PackedPlan(replace(plan.config, schedule=Helped(split_k=SPLIT_K)), sm_count // SPLIT_K)
    # the same without clusters: multiplying a tile of 256 rows of x takes as long as decoding its weights
    config = WgmmaConfig(arch=arch, tile_n=2 * WIDE, schedule=Helped(), **decided(p, streams=False))
    if config.fp8 and p.m > WIDE and tile_count(p, config) < sm_count:
        yield PackedPlan(config, sm_count)


def _with_decoding_warps(plans: Iterator[PackedPlan]) -> Iterator[PackedPlan]:
    """Each of ``plans``, for which another kernel decodes x first, and its variant whose loading warps decode x."""
    for plan in plans:
        yield plan
        yield replace(plan, config=replace(plan.config, decodes_x=True))


def in_order(p: PackedProblem, plan: PackedPlan, sm_count: int) -> PackedPlan:
    """``plan`` with the raster for which all CTAs together read fewer bytes at a time: tiles with the same weights one
    after the other, or tiles with the same rows of x."""
    c = plan.config
    along_m, along_n = -(-p.rows // c.tile_m), -(-p.m // c.tile_n)
    # for narrow tiles, another raster would gain nothing and need another kernel
    if c.scheduler != "static" or min(along_m, along_n) == 1 or c.tile_n < WIDE:
        return plan
    # clusters along K have several CTAs for a tile
    ctas = min(plan.workers * c.cluster_rows, sm_count * c.ctas_per_sm // c.split_k)
    weights, x = c.tile_m * c.weights.tile_bytes / TILE_CODES, c.tile_n * c.x_item
    by_m = min(along_m, ctas) * weights + -(-ctas // along_m) * x
    by_n = min(along_n, ctas) * x + -(-ctas // along_n) * weights
    return replace(plan, config=replace(c, schedule=replace(c.schedule, raster="n"))) if by_n <= by_m else plan


def staged(p: PackedProblem, tiling: dict[str, Any]) -> dict[str, Any]:
    """``tiling``, but with stages of two packed tiles if x is in FP8, since twice as many fit. Only two tilings need
    short stages even then: overlapped sums, and the widest tiles, whose sums of another CTA need room."""
    packing = PACKINGS[p.packing][DTYPES[p.dtype]]
    short = (
        isinstance(tiling.get("schedule"), OverlappedSums)
        or tiling.get("tile_n") == 2 * WIDE
        or not (packing.by_table or packing.in_rows)
    )
    return {name: value for name, value in tiling.items() if short or name != "stage_tiles"}


def deep(config: Config) -> Config:
    """``config``, but with stages of one packed tile if only two stages of two tiles would fit, which are too few."""
    return config if config.ring_stages > 2 or config.weights.in_rows else replace(config, stage_tiles=1)


def _mma_sync_plans(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans on ``mma.sync``: whole work tiles, or equal shares."""
    for tile_n in MMA_SYNC_TILE_N:
        if tile_n == min(MMA_SYNC_TILE_N) or tile_n // 2 < p.m:
            config = deep(WgmmaConfig(arch=arch, tile_n=tile_n, **decided(p, streams=False)))
            count, steps = tile_count(p, config), -(-p.k // config.tile_k)
            yield PackedPlan(config, min(sm_count, count * steps))
            yield PackedPlan(replace(config, schedule=WholeTiles()), min(sm_count, count))


def _tcgen05_plans(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans on tcgen05, with 128 or 256 rows of the weight in a tile: whole work tiles, or equal shares."""
    narrowest = {-(-p.m // tile_n): tile_n for tile_n in reversed(TENSOR_TILE_N)}
    for tile_n, warpgroups in itertools.product(narrowest.values(), (2, 4)):
        config = deep(WgmmaConfig(arch=arch, tile_n=tile_n, warpgroups=warpgroups, **decided(p, streams=False)))
        count, steps = tile_count(p, config), -(-p.k // config.tile_k)
        yield PackedPlan(config, min(sm_count, count * steps))
        yield PackedPlan(replace(config, schedule=WholeTiles()), min(sm_count, count))


def _split_k_plan(p: PackedProblem, arch: Architecture, tiling: dict[str, Any]) -> PackedPlan:
    """The plan with ``tiling`` whose clusters share tiles along K."""
    tiling = {"schedule": SharedTiles(split_k=SPLIT_K), **staged(p, tiling)}
    config = WgmmaConfig(arch=arch, **tiling, **decided(p, streams=False))
    return PackedPlan(config, tile_count(p, config))

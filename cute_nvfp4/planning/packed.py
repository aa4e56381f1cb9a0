"""Which kernel multiplies a packed weight: the streaming one for few rows of x; for more that on WGMMA (sm_90a), or the
same on mma.sync (sm_120a)."""

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
"""CTAs of a cluster that share a tile along K: of four there are fewer at once than multiprocessors."""
TURNS = SharedTiles(split_k=SPLIT_K, k_groups=2)
"""As many, in each of which two warpgroups take stages in turn."""
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
"""Tilings where a cluster shares tiles along K: short stages where the ring would have few."""
MMA_SYNC_TILE_N = (16, 32, 64, 128)
TENSOR_TILE_N = (16, 32, 48, 64, 96, 128, 160, 192, 256)
Config = TypeVar("Config", bound=WgmmaConfig)
MANY, WIDE = 16, 128
"""Tiles along the rows of x, more of which are worth trying only if they are so wide."""


def choose(problem: PackedProblem, arch: Architecture, sm_count: int, given: PackedPlan | None = None) -> PackedPlan:
    """The plan for ``problem`` on ``sm_count`` multiprocessors: the user's table's (``gemm_table``), or the model's
    fastest candidate; or the caller's with what the problem decides.

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
    """The model's first candidate."""
    found = _sensible(problem, arch, sm_count)
    if not found:
        raise OperandError(can_wgmma(WgmmaConfig(arch=arch, **decided(problem, streams=False))))
    return min(found, key=lambda plan: predict(plan, problem, sm_count))


def candidates(problem: PackedProblem, arch: Architecture, sm_count: int) -> list[PackedPlan]:
    """Every sensible plan, the model's fastest first. Left out are those that can only lose: tiles wider than the
    problem, narrow ones for many rows of x, WGMMA for what can be streamed."""
    return sorted(_sensible(problem, arch, sm_count), key=lambda plan: predict(plan, problem, sm_count))


def _sensible(p: PackedProblem, arch: Architecture, sm_count: int) -> list[PackedPlan]:
    others = {"sm100": _in_tensor_memory, "sm120": _by_mma_sync}.get(arch.generation, _by_wgmma)
    found = (_streaming if can_take(p) else others)(p, arch, sm_count)
    if p.quantized and PACKINGS[p.packing][DTYPES[p.dtype]].in_rows:
        found = _decoding_x(found)
    return [plan for plan in dict.fromkeys(found) if not (refused(p, plan) or can_implement(plan))]


def wide_elements(p: PackedProblem) -> bool:
    """Whether elements of the packed weight have eight bits."""
    return PACKINGS[p.packing][DTYPES[p.dtype]].element_bits == 8


def _streaming(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans of the streaming kernel: work tiles of a row tile, of half and a quarter of one, whole ones for each CTA,
    or cut where they do not divide."""
    stage, long_stage, most = STAGE_TILES, 4 if tiles(p.rows, p.k)[1] % 4 == 0 else STAGE_TILES, 64
    if wide_elements(p):
        # as many bytes a stage
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


def _by_wgmma(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans on WGMMA, each with its tiles in the better order."""
    return (in_order(p, plan, sm_count) for plan in _divided(p, arch, sm_count))


def _divided(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans on WGMMA: work tiles distributed whole, with x loaded for two CTAs at once or not, in equal shares, or
    shared along K."""
    # a narrower one makes as many tiles along the rows of x; many narrow tiles decode a weight as many times
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
                # x from L2 once for two CTAs
                yield PackedPlan(replace(config, schedule=WholeTiles(cluster_rows=2)), min(slots, count) // 2)
        if tile_n == WIDE:
            tiling = staged(p, {"warpgroups": 3, "stage_tiles": 1})
            config = WgmmaConfig(arch=arch, schedule=WholeTiles(), **tiling, **decided(p, streams=False))
            yield PackedPlan(config, min(sm_count, tile_count(p, config)))
        if WIDE // 2 < tile_n <= WIDE:
            # 64 rows of the weight a CTA, whose warpgroups take turns: no sums go to another one
            tiling = staged(p, {"tile_n": tile_n, "schedule": SharedTiles(k_groups=2), "stage_tiles": 1})
            config = WgmmaConfig(arch=arch, **tiling, **decided(p, streams=False))
            if tile_count(p, config) <= sm_count:
                yield PackedPlan(config, tile_count(p, config))
        for tiling in SHARED:
            if tiling["tile_n"] == tile_n:
                yield _shared(p, arch, tiling)
                # the sums travel while products are under way
                if tile_n >= WIDE and "schedule" not in tiling:
                    yield _shared(p, arch, {**tiling, "schedule": OverlappedSums()})
    # a cluster for each tile, and helpers on the multiprocessors that are left
    plan = _shared(p, arch, {"tile_n": WIDE, "stage_tiles": 1})
    if p.m > WIDE // 2 and plan.workers < sm_count // SPLIT_K:
        yield PackedPlan(replace(plan.config, schedule=Helped(split_k=SPLIT_K)), sm_count // SPLIT_K)
    # the same without clusters: a tile of 256 rows of x takes as long as to decode its weights
    config = WgmmaConfig(arch=arch, tile_n=2 * WIDE, schedule=Helped(), **decided(p, streams=False))
    if config.fp8 and p.m > WIDE and tile_count(p, config) < sm_count:
        yield PackedPlan(config, sm_count)


def _decoding_x(plans: Iterator[PackedPlan]) -> Iterator[PackedPlan]:
    """These plans, for x that a launch before decodes, and those whose loading warps decode it."""
    for plan in plans:
        yield plan
        yield replace(plan, config=replace(plan.config, decodes_x=True))


def in_order(p: PackedProblem, plan: PackedPlan, sm_count: int) -> PackedPlan:
    """``plan`` with its tiles in the order of which all CTAs together read fewer bytes at a time: those with the same
    weights one after the other, or those with the same rows of x."""
    c = plan.config
    along_m, along_n = -(-p.rows // c.tile_m), -(-p.m // c.tile_n)
    # of narrow tiles another order would be another kernel to compile, for nothing
    if c.scheduler != "static" or min(along_m, along_n) == 1 or c.tile_n < WIDE:
        return plan
    # clusters along K have several CTAs for a tile
    ctas = min(plan.workers * c.cluster_rows, sm_count * c.ctas_per_sm // c.split_k)
    weights, x = c.tile_m * c.weights.tile_bytes / TILE_CODES, c.tile_n * c.x_item
    by_m = min(along_m, ctas) * weights + -(-ctas // along_m) * x
    by_n = min(along_n, ctas) * x + -(-ctas // along_n) * weights
    return replace(plan, config=replace(c, schedule=replace(c.schedule, raster="n"))) if by_n <= by_m else plan


def staged(p: PackedProblem, tiling: dict[str, Any]) -> dict[str, Any]:
    """``tiling``, but with stages of two packed tiles where x is in FP8, of which twice as many fit: only sums that
    travel, and the widest tiles beside sums of another CTA, need short ones."""
    packing = PACKINGS[p.packing][DTYPES[p.dtype]]
    short = (
        isinstance(tiling.get("schedule"), OverlappedSums)
        or tiling.get("tile_n") == 2 * WIDE
        or not (packing.by_table or packing.in_rows)
    )
    return {name: value for name, value in tiling.items() if short or name != "stage_tiles"}


def deep(config: Config) -> Config:
    """``config``, but with stages of one packed tile where only two stages of two would fit, which are too few."""
    return config if config.ring_stages > 2 or config.weights.in_rows else replace(config, stage_tiles=1)


def _by_mma_sync(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans on mma.sync: work tiles distributed whole or in equal shares."""
    for tile_n in MMA_SYNC_TILE_N:
        if tile_n == min(MMA_SYNC_TILE_N) or tile_n // 2 < p.m:
            config = deep(WgmmaConfig(arch=arch, tile_n=tile_n, **decided(p, streams=False)))
            count, steps = tile_count(p, config), -(-p.k // config.tile_k)
            yield PackedPlan(config, min(sm_count, count * steps))
            yield PackedPlan(replace(config, schedule=WholeTiles()), min(sm_count, count))


def _in_tensor_memory(p: PackedProblem, arch: Architecture, sm_count: int) -> Iterator[PackedPlan]:
    """Plans on tcgen05: work tiles of 128 or 256 rows of the weight, distributed whole or in equal shares."""
    narrowest = {-(-p.m // tile_n): tile_n for tile_n in reversed(TENSOR_TILE_N)}
    for tile_n, warpgroups in itertools.product(narrowest.values(), (2, 4)):
        config = deep(WgmmaConfig(arch=arch, tile_n=tile_n, warpgroups=warpgroups, **decided(p, streams=False)))
        count, steps = tile_count(p, config), -(-p.k // config.tile_k)
        yield PackedPlan(config, min(sm_count, count * steps))
        yield PackedPlan(replace(config, schedule=WholeTiles()), min(sm_count, count))


def _shared(p: PackedProblem, arch: Architecture, tiling: dict[str, Any]) -> PackedPlan:
    """The plan whose clusters share tiles along K."""
    tiling = {"schedule": SharedTiles(split_k=SPLIT_K), **staged(p, tiling)}
    config = WgmmaConfig(arch=arch, **tiling, **decided(p, streams=False))
    return PackedPlan(config, tile_count(p, config))

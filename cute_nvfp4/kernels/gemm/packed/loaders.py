"""Copies of operands to a stage, for the kernels of packed weights: one thread copies weights in bulk, and x comes by
TMA. ``stage_loader.fill_stages`` has the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....ptx import mbarrier
from ....ptx.async_copy import copy_bulk, prefetch_bulk
from ....weight_layout import TILE_ROWS
from ..barriers import Ring
from ..operands import TmaCopy
from ..sm90.arguments import PackedWeight
from ..sm90.config import WgmmaConfig
from ..stage_loader import OverwritingCopies
from ..tile_scheduler import CursorRange, WorkTile


@dataclass(frozen=True)
class StageOrder:
    """The stages of K that a work tile has, and their order."""

    config: WgmmaConfig

    def steps(self, tile: WorkTile) -> CursorRange:
        """The steps of a work tile, one for each stage, in the order in which they are multiplied."""
        each = self.config.k_tile_stages
        return CursorRange(tile.k_first * each, (tile.k_first + tile.k_count) * each)

    def along_k(self, step: Int32, tile: WorkTile) -> Int32:
        """The position along K of the stage of a step, in stages."""
        return step

    def before(self, step: Int32, end: Int32) -> None:
        """A hook: it runs in a loading warp before it waits for the stage of a step."""


class XSlices(NamedTuple):
    """The source and destination of a CTA's copies of x: tXsX ((atom, rest), STAGE), tXgX ((atom, rest), REST_K)."""

    tXsX: cute.Tensor
    tXgX: cute.Tensor


def partition(x: TmaCopy, sX: cute.Tensor, gX: cute.Tensor, rank: Any = 0, count: int = 1) -> XSlices:
    """Part ``rank`` of ``count`` of tiles of x, in shared and in global memory."""
    shared, tiles = cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    return XSlices(*cpasync.tma_partition(x.atom, rank, cute.make_layout(count), shared, tiles))


CopiesOf = Callable[[WorkTile, Int32], OverwritingCopies]


def weight_copies(order: StageOrder, weight: PackedWeight, first: Int32) -> CopiesOf:
    """The bulk copies of the packed tiles of a work tile. first: the shared address of the first stage's weights."""
    cfg = order.config

    def copies(tile: WorkTile, cursor: Int32) -> OverwritingCopies:
        steps = order.steps(tile)
        sources = tile_addresses(cfg, weight, tile)

        def start(ring: Ring, stage: Int32, step: Int32) -> None:
            full = ring.full(stage)
            with cute.arch.elect_one():
                mbarrier.expect_bytes(full, Int32(cfg.weight_bytes))
                target = first + stage * cfg.weight_bytes
                copy_stage(cfg, sources, order.along_k(step, tile), target, full)

        return OverwritingCopies(steps, start, lambda step: order.before(step, steps.end))

    return copies


def x_copies(order: StageOrder, x: TmaCopy, sX: cute.Tensor, rank: Int32) -> CopiesOf:
    """The TMA copies of x to every CTA of a cluster. rank: the rank of this CTA, which copies its part."""
    cfg = order.config
    options = {"mcast_mask": cutlass.Int16((1 << cfg.cluster_rows) - 1)} if cfg.cluster_rows > 1 else {}

    def copies(tile: WorkTile, cursor: Int32) -> OverwritingCopies:
        gX = cute.local_tile(
            x.tensor, (cfg.tile_n, cfg.stage_k), (tile.n, None, tile.batch)
        )  # (tile_n, stage_k, REST_K)
        tXsX, tXgX = partition(x, sX, gX, rank, cfg.cluster_rows)

        def start(ring: Ring, stage: Int32, step: Int32) -> None:
            full = ring.full_pointer(stage)
            with cute.arch.elect_one():
                mbarrier.expect_bytes(full.toint(), Int32(cfg.x_bytes))
            cute.copy(x.atom, tXgX[None, step], tXsX[None, stage], tma_bar_ptr=full, **options)

        return OverwritingCopies(order.steps(tile), start)

    return copies


def tile_addresses(config: WgmmaConfig, weight: PackedWeight, tile: WorkTile) -> tuple[Int64, ...]:
    """The address of the first packed tile in each row of packed tiles of a work tile; with half tiles, the addresses
    of its codes and of its scales."""
    packing = config.weights
    row_tiles = cute.ceil_div(weight.rows, TILE_ROWS // config.products)
    first = weight.tiles.toint() + tile.batch * weight.batch_stride
    # beyond the last row tile any bytes will do: the epilogue does not store these rows
    if not config.half_tiles:
        each = config.tile_m // TILE_ROWS
        rows = [cutlass.min(tile.m * each + i, row_tiles - 1) for i in range(each)]
        return tuple(first + Int64(row) * weight.k_tiles * packing.tile_bytes for row in rows)
    found: list[Int64] = []
    for i in range(config.row_groups):
        half = cutlass.min(tile.m * config.row_groups + i, 2 * row_tiles - 1)
        row = first + Int64(half // 2) * weight.k_tiles * packing.tile_bytes
        found += [
            row + half % 2 * (packing.code_bytes // 2),
            row + (packing.code_bytes + half % 2 * (packing.scale_bytes // 2)),
        ]
    return tuple(found)


class Run(NamedTuple):
    """Contiguous bytes of a stage: the index of their source, the distance from its begin, and their size."""

    source: int
    distance: Int64
    size: int


def stage_runs(config: WgmmaConfig, step: Int32) -> list[Run]:
    """The runs of a stage in the order of shared memory. A half tile is laid out as a tile with half the rows."""
    packing, distance = config.weights, Int64(step) * config.tile_bytes
    if not config.half_tiles:
        return [Run(i, distance, config.tile_bytes) for i in range(config.tile_m // TILE_ROWS)]
    found = []
    for i in range(config.row_groups * config.stage_tiles):
        codes, at = i // config.stage_tiles * 2, distance + i % config.stage_tiles * packing.tile_bytes
        found += [Run(codes, at, packing.code_bytes // 2), Run(codes + 1, at, packing.scale_bytes // 2)]
    return found


def copy_stage(config: WgmmaConfig, sources: tuple[Int64, ...], step: Int32, target: Int32, full: Int32) -> None:
    """Starts the bulk copies of a stage."""
    place = target
    for source, distance, size in stage_runs(config, step):
        copy_bulk(place, sources[source] + distance, Int32(size), full)
        place = place + size


def prefetch_stage(config: WgmmaConfig, sources: tuple[Int64, ...], step: Int32) -> None:
    """Prefetches the sources of a stage into L2."""
    for source, distance, size in stage_runs(config, step):
        prefetch_bulk(sources[source] + distance, Int32(size))

"""Operands of the kernels with packed weights, from global memory to a stage: weights as runs of bytes, which one
thread copies in bulk, and x by TMA. ``stage_loader.fill_stages`` has the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....ptx import mbarrier
from ....ptx.async_copy import copy_bulk
from ....weight_layout import TILE_ROWS
from ..barriers import PipelineState, Ring
from ..operands import TmaCopy
from ..sm90.arguments import PackedWeight
from ..sm90.config import WgmmaConfig
from ..tile_scheduler import CursorRange, WorkTile


@dataclass(frozen=True)
class StageOrder:
    """Which stages of K a work tile has, and in which order."""

    config: WgmmaConfig

    def steps(self, tile: WorkTile) -> CursorRange:
        """One number for each stage of a work tile, in the order in which they are multiplied."""
        each = self.config.k_tile_stages
        return CursorRange(tile.k_first * each, (tile.k_first + tile.k_count) * each)

    def along_k(self, step: Int32, tile: WorkTile) -> Int32:
        """Where the stage of a step lies along K, in stages."""
        return step

    def before(self, step: Int32, end: Int32) -> None:
        """What a loading warp does before it loads the stage of a step."""


@dataclass(frozen=True)
class PackedCopies:
    """The copies of one work tile's stages: those of weights, or of x."""

    config: WgmmaConfig
    order: StageOrder
    tile: WorkTile
    steps: CursorRange
    stride: ClassVar[int] = 0

    def acquire(self, ring: Ring, at: PipelineState, step: Int32, filled: Int32) -> None:
        """Waits until the stage is empty, for copies in the asynchronous proxy."""
        self.order.before(step, self.steps.end)
        mbarrier.wait_to_overwrite(ring.empty(at.stage), at.phase ^ 1)


@dataclass(frozen=True)
class PackedLoader:
    """What the warps that load weights and x have in common. data: the address of the stages' weights, or x there."""

    config: WgmmaConfig
    order: StageOrder
    data: Any

    def wait(self) -> None:
        """There is nothing to wait for."""

    def finish(self, ring: Ring, at: PipelineState) -> None:
        """There is nothing to wait for: no barrier of this CTA is signalled by others that it does not meet."""


@dataclass(frozen=True)
class WeightCopies(PackedCopies):
    """sources: ``tile_addresses`` of the work tile; first: shared address of the first stage's weights."""

    sources: tuple[Int64, ...]
    first: Int32

    def start(self, ring: Ring, stage: Int32, step: Int32) -> None:
        """One thread announces and copies the packed tiles of a stage."""
        cfg, full = self.config, ring.full(stage)
        with cute.arch.elect_one():
            mbarrier.expect_bytes(full, Int32(cfg.weight_bytes))
            target = self.first + stage * cfg.weight_bytes
            copy_stage(cfg, self.sources, self.order.along_k(step, self.tile), target, full)


@dataclass(frozen=True)
class WeightLoader(PackedLoader):
    """The warp that loads weights."""

    weight: PackedWeight

    def copies(self, tile: WorkTile, cursor: Int32) -> WeightCopies:
        steps = self.order.steps(tile)
        sources = tile_addresses(self.config, self.weight, tile)
        return WeightCopies(self.config, self.order, tile, steps, sources, self.data)


@dataclass(frozen=True)
class XCopies(PackedCopies):
    """The copies of x, which go to every CTA of a cluster."""

    atom: cute.CopyAtom
    tXsX: cute.Tensor  # ((atom, rest), STAGE)
    tXgX: cute.Tensor  # ((atom, rest), REST_K)

    def start(self, ring: Ring, stage: Int32, step: Int32) -> None:
        cfg, full = self.config, ring.full_pointer(stage)
        options = {"mcast_mask": cutlass.Int16((1 << cfg.cluster_rows) - 1)} if cfg.cluster_rows > 1 else {}
        with cute.arch.elect_one():
            mbarrier.expect_bytes(full.toint(), Int32(cfg.x_bytes))
        cute.copy(self.atom, self.tXgX[None, step], self.tXsX[None, stage], tma_bar_ptr=full, **options)


@dataclass(frozen=True)
class XLoader(PackedLoader):
    """The warp that loads x. data: x in shared memory; rank: of the CTA in its cluster."""

    x: TmaCopy
    rank: Int32

    def copies(self, tile: WorkTile, cursor: Int32) -> XCopies:
        cfg = self.config
        gX = cute.local_tile(
            self.x.tensor, (cfg.tile_n, cfg.stage_k), (tile.n, None, tile.batch)
        )  # (tile_n, stage_k, REST_K)
        slices = partition(self.x, self.data, gX, self.rank, cfg.cluster_rows)
        return XCopies(cfg, self.order, tile, self.order.steps(tile), self.x.atom, *slices)


class XSlices(NamedTuple):
    """What a CTA copies of x: tXsX ((atom, rest), STAGE), tXgX ((atom, rest), REST_K)."""

    tXsX: cute.Tensor
    tXgX: cute.Tensor


def partition(x: TmaCopy, sX: cute.Tensor, gX: cute.Tensor, rank: Any = 0, count: int = 1) -> XSlices:
    """Part ``rank`` of ``count`` of tiles of x, in shared and in global memory."""
    shared, tiles = cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    return XSlices(*cpasync.tma_partition(x.atom, rank, cute.make_layout(count), shared, tiles))


def tile_addresses(config: WgmmaConfig, weight: PackedWeight, tile: WorkTile) -> tuple[Int64, ...]:
    """Addresses of the first packed tile of each row tile of a work tile; of half tiles, of their codes and scales."""
    packing = config.weights
    row_tiles = cute.ceil_div(weight.rows, TILE_ROWS // config.products)
    first = weight.tiles.toint() + tile.batch * weight.batch_stride
    # beyond the last: any bytes will do, its rows are not stored
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


def copy_stage(config: WgmmaConfig, sources: tuple[Int64, ...], step: Int32, target: Int32, full: Int32) -> None:
    """Starts the copies of a stage. A half tile lies in shared memory as a tile does, with half as many rows."""
    packing, distance = config.weights, Int64(step) * config.tile_bytes
    if not config.half_tiles:
        num_bytes = config.tile_bytes
        for i, source in enumerate(sources):
            copy_bulk(target + i * num_bytes, source + distance, Int32(num_bytes), full)
        return
    for i in range(config.row_groups * config.stage_tiles):
        codes, scales = sources[i // config.stage_tiles * 2 :][:2]
        distance_of = distance + i % config.stage_tiles * packing.tile_bytes
        place = target + i * (packing.tile_bytes // 2)
        copy_bulk(place, codes + distance_of, Int32(packing.code_bytes // 2), full)
        copy_bulk(place + packing.code_bytes // 2, scales + distance_of, Int32(packing.scale_bytes // 2), full)

"""Packed weights from global memory to a stage: runs of bytes, copied in bulk by one thread."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ....ptx.async_copy import copy_bulk
from ....weight_layout import TILE_ROWS
from ..tile_scheduler import WorkTile
from .arguments import PackedWeight
from .config import WgmmaConfig


def tile_addresses(config: WgmmaConfig, weight: PackedWeight, tile: WorkTile) -> tuple[Int64, ...]:
    """Of the first packed tile of each row tile of a work tile; or of each half of one, of its codes and its scales."""
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

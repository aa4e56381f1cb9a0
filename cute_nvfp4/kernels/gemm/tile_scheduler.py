"""Tile schedulers: which tiles of the output a cluster computes, and which k-tiles of each.

A scheduler distributes a range of integers, the values of its cursor. In the static scheduler a value is a work tile,
and clusters take work tiles in turn. In stream-K a value is a k-tile of a work tile, and each cluster takes an equal
share of consecutive k-tiles, so that no cluster idles while another computes a last tile. Every role has the same
loop::
    cursor, end = scheduler.range()
    while cursor < end:
        tile = scheduler.tile(cursor, end)
        ...
        cursor = scheduler.after(cursor, tile)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .config import CTA_ROWS, GemmConfig


class WorkTile(NamedTuple):
    """What a CTA computes at a time: tile ``m`` of 128 rows and tile ``n`` of ``tile_n`` columns of matrix (or group)
    ``batch``, over ``k_count`` k-tiles from ``k_first`` on."""

    m: Int32
    n: Int32
    batch: Int32
    k_first: Int32
    k_count: Int32


class Share(NamedTuple):
    """``count`` consecutive items from ``first`` on."""

    first: Int32
    count: Int32


class CursorRange(NamedTuple):
    """The cursor's values for one cluster: from ``first`` up to, but not including, ``end``."""

    first: Int32
    end: Int32


class CtaPlace(NamedTuple):
    """This CTA's place in the launch: cluster ``worker`` of ``workers``; (x, y) among the tiles of the cluster; ``v``
    in a pair; ``part`` along K (split_k)."""

    workers: Int32
    worker: Int32
    x: Int32
    y: Int32
    v: Int32
    part: Int32


def share(total: Int32, parts: Int32, index: Int32) -> Share:
    """Part ``index`` of ``total`` items that are divided evenly into ``parts``."""
    each, rest = total // parts, total % parts
    first = index * each + cutlass.min(index, rest)
    return Share(first, each + Int32(index < rest))


def k_slice(config: GemmConfig, place: CtaPlace, k_tiles: Int32) -> Share:
    """The k-tiles of a work tile that this CTA multiplies: all of them, or its part with split_k."""
    return share(k_tiles, Int32(config.split_k), place.part) if config.split_k > 1 else Share(Int32(0), k_tiles)


@dataclass(frozen=True)
class StaticScheduler:
    """Distributes work tiles in turn. rest_m, rest_n: cluster tiles that cover the output; batch: matrices."""

    config: GemmConfig
    rest_m: Int32
    rest_n: Int32
    batch: Int32
    k_tiles: Int32
    place: CtaPlace

    @property
    def tiles(self) -> Int32:
        return self.rest_m * self.rest_n * self.batch

    def range(self) -> CursorRange:
        """This cluster's values of the cursor."""
        return CursorRange(self.place.worker, self.tiles)

    def tile(self, cursor: Int32, end: Int32) -> WorkTile:
        """This CTA's work tile at the cursor."""
        return self._placed(cursor, k_slice(self.config, self.place, self.k_tiles))

    def after(self, cursor: Int32, tile: WorkTile) -> Int32:
        return cursor + self.place.workers

    def _placed(self, index: Int32, k: Share) -> WorkTile:
        """Work tile ``index``, in the order of ``config.raster``."""
        # one of rest_m, rest_n and batch is often 1; the divisions cost twenty instructions each, but once a tile only
        if self.config.raster == "m":
            m, n = index % self.rest_m, index // self.rest_m
            n, batch = n % self.rest_n, n // self.rest_n
        else:
            n, m = index % self.rest_n, index // self.rest_n
            m, batch = m % self.rest_m, m // self.rest_m
        return in_cluster(self.config, self.place, m, n, batch, k)


@dataclass(frozen=True)
class StreamKScheduler(StaticScheduler):
    """Distributes the k-tiles of all work tiles in equal shares."""

    def share_of(self, worker: Int32) -> Share:
        """The share of cluster ``worker``."""
        return share(self.tiles * self.k_tiles, self.place.workers, worker)

    def range(self) -> CursorRange:
        own = self.share_of(self.place.worker)
        return CursorRange(own.first, own.first + own.count)

    def tile(self, cursor: Int32, end: Int32) -> WorkTile:
        index, first = cursor // self.k_tiles, cursor % self.k_tiles
        return self._placed(index, Share(first, cutlass.min(self.k_tiles - first, end - cursor)))

    def after(self, cursor: Int32, tile: WorkTile) -> Int32:
        return cursor + tile.k_count


def in_cluster(config: GemmConfig, place: CtaPlace, m: Int32, n: Int32, batch: Int32, k: Share) -> WorkTile:
    """This CTA's work tile within tile (m, n) of the cluster."""
    return WorkTile(m * config.cluster[0] + place.x, n * config.cluster[1] + place.y, batch, k.first, k.count)


def cta_place(config: GemmConfig, x: Int32, y: Int32, z: Int32, depth: Int32) -> CtaPlace:
    """The place of CTA (x, y, z) in a grid that is one cluster wide and high, and ``depth`` CTAs deep."""
    ck = config.split_k
    return CtaPlace(depth // ck, z // ck, x, y, x % config.ctas, z % ck)


SCHEDULERS = {"static": StaticScheduler, "stream_k": StreamKScheduler}


def make_scheduler(config: GemmConfig, m: Int32, n: Int32, k: Int32, batch: Int32) -> StaticScheduler:
    """The scheduler of ``config`` for ``batch`` problems of one size."""
    cm, cn, _ = config.cluster_mnk
    x, y, z = cute.arch.block_idx()
    _, _, depth = cute.arch.grid_dim()
    return SCHEDULERS[config.scheduler](
        config,
        cute.ceil_div(m, CTA_ROWS * cm),
        cute.ceil_div(n, config.tile_n * cn),
        batch,
        cute.ceil_div(k, config.tile_k),
        cta_place(config, x, y, z, depth),
    )

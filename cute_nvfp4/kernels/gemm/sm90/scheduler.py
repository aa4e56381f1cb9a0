"""Two schedulers that give every SM the same amount of work: equal shares of all k-tiles, or one tile each and helpers.

With equal shares a CTA walks its share from the end. Its first work tile is then the one whose last k-tiles the next
CTA has: it writes partial sums of it at once. Its last work tile is the one whose first k-tiles the CTAs before it had
as *their* first tile: it adds their sums, which were written long ago. Helpers are the first CTAs of a launch. In both
schedulers a CTA waits only for CTAs with a lower index. CTAs start in the order of their index, so that none waits for
one that cannot start, and no cooperative launch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..tile_scheduler import CursorRange, Share, StaticScheduler, StreamKScheduler, WorkTile, in_cluster, k_slice


class _OneColumn:
    """A mixin that finds work tiles without divisions if one column of tiles covers the rows of x: divisions would
    delay the first copies."""

    @cute.jit
    def _placed(self, index: Int32, k: Share) -> WorkTile:
        tile = in_cluster(self.config, self.place, index, Int32(0), Int32(0), k)
        if self.rest_n * self.batch > 1:
            tile = StaticScheduler._placed(self, index, k)
        return tile


@dataclass(frozen=True)
class StaticTiles(_OneColumn, StaticScheduler):
    """Distributes work tiles in turn."""


@dataclass(frozen=True)
class DescendingStreamK(_OneColumn, StreamKScheduler):
    """Stream-K from the end of each share. The cursor counts the k-tiles that the CTA has done."""

    def range(self) -> CursorRange:
        return CursorRange(Int32(0), self.share_of(self.place.worker).count)

    def tile(self, cursor: Int32, end: Int32) -> WorkTile:
        last = self.share_of(self.place.worker).first + (end - cursor) - 1
        index, k_last = last // self.k_tiles, last % self.k_tiles
        count = cutlass.min(k_last + 1, end - cursor)
        return self._placed(index, Share(k_last + 1 - count, count))


@dataclass(frozen=True)
class HelpedScheduler(StaticTiles):
    """Gives one work tile to each cluster except the first ones, whose CTAs are helpers. In turn, helpers multiply the
    last ``helped`` k-tiles of every work tile. Few sums pass through global memory, and most of them early."""

    helped: Int32 | None = None

    @property
    def helping_clusters(self) -> Int32:
        return self.place.workers - self.tiles

    @property
    def helps(self) -> cutlass.Boolean:
        return self.place.worker < self.helping_clusters

    def range(self) -> CursorRange:
        helper = self.place.worker * self.config.split_k + self.place.part
        own = self.place.worker - self.helping_clusters
        return CursorRange(cutlass.select_(self.helps, helper, own), self.tiles)

    def tile(self, cursor: Int32, end: Int32) -> WorkTile:
        rest = self.k_tiles - self.helped
        own = k_slice(self.config, self.place, rest)
        first = cutlass.select_(self.helps, rest, own.first)
        return self._placed(cursor, Share(first, cutlass.select_(self.helps, self.helped, own.count)))

    def after(self, cursor: Int32, tile: WorkTile) -> Int32:
        helpers = self.helping_clusters * self.config.split_k
        return cursor + cutlass.select_(self.helps, helpers, self.tiles)

    def index(self, tile: WorkTile) -> Int32:
        """The index of a work tile in the order of the raster "m"."""
        return (tile.batch * self.rest_n + tile.n) * self.rest_m + tile.m


SCHEDULERS = {"static": StaticTiles, "stream_k": DescendingStreamK, "helped": HelpedScheduler}

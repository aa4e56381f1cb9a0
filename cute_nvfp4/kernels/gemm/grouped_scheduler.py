"""The tile scheduler of a grouped GEMM: clusters take work tiles of all groups in turn.

One warp of each CTA writes the table of ``grouped_config`` when the kernel starts (``group_source``). The 32 lanes of a
warp then find the group of a work tile together, and a role reads what it needs of the group from the table. No state
is carried from tile to tile, so that every role of every form of the GEMM has the same loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..arith import ceil_div
from .config import CTA_ROWS
from .grouped_config import WINDOW, GroupedConfig, GroupTableConfig
from .tile_scheduler import CtaPlace, CursorRange, WorkTile, in_cluster, k_slice


class GroupSizes(NamedTuple):
    """The rows, columns and k-tiles of one group's problem."""

    m: Int32
    n: Int32
    k_tiles: Int32


class TilesOfGroup(NamedTuple):
    """The numbers of cluster tiles along M and N that cover a group's output."""

    rest_m: Int32
    rest_n: Int32


class Located(NamedTuple):
    """A work tile: its group, its index in the group, and the group's cluster tiles and k-tiles."""

    group: Int32
    index: Int32
    tiles: TilesOfGroup
    k_tiles: Int32


@dataclass(frozen=True)
class Table:
    """The table of groups in shared memory at ``address``."""

    config: GroupTableConfig
    address: Int32

    def entry(self, column: str, group: Any = 0) -> cute.Tensor:
        """One entry of the table, as a tensor of one element."""
        dtype = Int64 if column in self.config.table_columns.longs else Int32
        address = self.address + (self.config.column(column) + group * (dtype.width // 8))
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=dtype.width // 8)
        return cute.make_tensor(pointer, cute.make_layout(1))

    def read(self, column: str, group: Any = 0) -> Any:
        return self.entry(column, group)[0]

    def write(self, column: str, group: Any, value: Any) -> None:
        self.entry(column, group)[0] = value


def tiles_of(config: GroupedConfig, m: Int32, n: Int32) -> TilesOfGroup:
    """The cluster tiles that cover a group of ``m`` rows and ``n`` columns."""
    cm, cn = config.cluster
    columns = config.tile_n * cn
    return TilesOfGroup(ceil_div(m, CTA_ROWS * cm), (n + (columns - 1)) // columns)


def group_of(table: Table, cursor: Int32) -> Int32:
    """The group of a work tile: the last one that starts at or before ``cursor``. All lanes of a warp call it."""
    lane = cute.arch.lane_idx()
    window = Int32(0)
    if table.config.capacity > WINDOW:
        windows = table.config.capacity // WINDOW
        place = cutlass.min(lane, Int32(windows - 1))
        first = table.read("start", place * WINDOW)
        window = cute.arch.popc(cute.arch.vote_ballot_sync((lane < windows) & (first <= cursor))) - 1
    first = table.read("start", window * WINDOW + lane)
    return window * WINDOW + cute.arch.popc(cute.arch.vote_ballot_sync(first <= cursor)) - 1


@dataclass(frozen=True)
class GroupedScheduler:
    """Distributes the work tiles of all groups in turn. total: their number; source: knows the sizes of a group."""

    config: GroupedConfig
    place: CtaPlace
    table: Table
    total: Int32
    source: Any

    def range(self) -> CursorRange:
        return CursorRange(self.place.worker, self.total)

    def locate(self, cursor: Int32) -> Located:
        group = group_of(self.table, cursor)
        sizes = self.source.sizes(group)
        tiles = tiles_of(self.config, sizes.m, sizes.n)
        return Located(group, cursor - self.table.read("start", group), tiles, sizes.k_tiles)

    def tile(self, cursor: Int32, end: Int32) -> WorkTile:
        found = self.locate(cursor)
        index, (rest_m, rest_n) = found.index, found.tiles
        k = k_slice(self.config, self.place, found.k_tiles)
        if self.config.raster == "m":
            m, n = index % rest_m, index // rest_m
        else:
            n, m = index % rest_n, index // rest_n
        return in_cluster(self.config, self.place, m, n, found.group, k)

    def after(self, cursor: Int32, tile: WorkTile) -> Int32:
        return cursor + self.place.workers

"""The groups of a grouped GEMM of packed weights: a table of them in shared memory, and which CTA has which tiles.

One warp of each CTA writes the table when the kernel starts, from offsets, parameters or a table in global memory; the
group of a work tile is then found by the 32 lanes of a warp together, as in ``grouped_scheduler``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....weight_layout import TILE_ROWS
from ..arguments import MAP_BYTES, OUT_DTYPES
from ..epilogue import group_alpha
from ..group_source import LAST, Window, clamped, enter, of_lane
from ..grouped_config import WINDOW
from ..grouped_scheduler import Table, group_of
from ..operand_source import map_pointer
from ..tile_scheduler import CursorRange
from .arguments import PackedWeight, Result, WgmmaArguments
from .grouped_arguments import GroupedWgmmaArguments
from .grouped_config import GroupedWgmmaConfig


class GroupTiles(NamedTuple):
    """How the output of a group is covered: tiles along the weight's rows and along x's, and rows of x in each."""

    rest_m: Int32
    rest_n: Int32
    width: Int32


class GroupTile(NamedTuple):
    """What a CTA computes at a time: tile ``m`` along the weight's rows of a group, ``width`` rows of its x from
    ``x_row`` on, of which the group has ``x_rows``; k-tiles as in ``WorkTile``."""

    group: Int32
    m: Int32
    x_row: Int32
    x_rows: Int32
    width: Int32
    k_first: Int32
    k_count: Int32


class PlaceOfX(NamedTuple):
    """Where a group's x is: its first row in the tensor that is copied from, and the tensor map if it has its own."""

    row: Int32
    tensor_map: cute.Pointer | None


def tiles_of(config: GroupedWgmmaConfig, rows: Int32, n: Int32) -> GroupTiles:
    """Tiles as even as can be, for ``rows`` rows of x and ``n`` of the weight."""
    rest_n = cute.ceil_div(rows, config.tile_n)
    if len(config.widths) == 1:
        width = Int32(config.tile_n)
    else:
        need = cute.ceil_div(rows, cutlass.max(rest_n, Int32(1)))
        width = Int32(config.widths[-1])
        for candidate in reversed(config.widths[:-1]):
            width = cutlass.select_(need <= candidate, Int32(candidate), width)
    return GroupTiles(cute.ceil_div(n, config.out_rows), rest_n, width)


@dataclass(frozen=True)
class Groups:
    """What the forms have in common."""

    config: GroupedWgmmaConfig
    arguments: GroupedWgmmaArguments
    table: Table

    def enter(self, group: Int32, values: dict[str, Any], rows: Int32, n: Int32, total: Int32) -> Int32:
        """Writes the columns of a window of groups, one a lane; the work tiles up to its end."""
        tiles = tiles_of(self.config, rows, n)
        return enter(self.table, group, {"rows": rows, **values}, tiles.rest_m * tiles.rest_n, total)

    def wait(self) -> None:
        """Before the first load."""

    def acquire(self, group: Int32, cursor: Int32, workers: Int32) -> None:
        """Before the first load of a work tile."""

    def alphas(self, group: Int32) -> tuple[Float32, ...]:
        """The factors of a group's sums, one for each product."""
        alpha = self.arguments.alpha * Float32(self.config.weights.factor)
        return tuple(group_alpha(alpha, factors, group) for factors in self.arguments.factors)

    def row_tiles(self, group: Int32) -> Int32:
        """Rows of packed tiles of a group's weight."""
        return cute.ceil_div(self.n(group), TILE_ROWS // self.config.products)


@dataclass(frozen=True)
class DealtRows(Groups):
    """Groups are consecutive rows of one x, by their offsets; each has a weight of a stack."""

    @cute.jit
    def fill(self):
        """One warp writes the table, and says in ``status`` what is wrong with the offsets."""
        groups, rows = self.arguments.groups, self.arguments.one.x.rows
        offsets = cute.make_tensor(groups.offsets, cute.make_layout(groups.count + 1))
        lane = cute.arch.lane_idx()
        first = offsets[0]
        # all at once: each window is as far away as memory
        ends = []
        for index in cutlass.range_constexpr(self.config.capacity // WINDOW):
            end = Int32(0)
            if index * WINDOW + lane < groups.count:
                end = offsets[index * WINDOW + lane + 1]
            ends.append(end)
        reached = cutlass.min(cutlass.max(first, Int32(0)), rows)
        total, before = Int32(0), first
        window = Window(reached, reached, reached, cutlass.select_(first == reached, Int32(0), Int32(1)))
        for index in cutlass.range_constexpr(self.config.capacity // WINDOW):
            group, end = index * WINDOW + lane, ends[index]
            previous = cute.arch.shuffle_sync_up(end, 1)
            previous = cutlass.select_(lane == 0, before, previous)
            before = cute.arch.shuffle_sync(end, LAST)
            bad = (group < groups.count) & ((end < previous) | (end > rows))
            window = clamped(index * WINDOW, bad, end, rows, window)
            size, n = window.end - window.start, self.arguments.one.weight.rows
            total = self.enter(group, {"row": window.start}, size, n, total)
        self.table.write("total", 0, total)
        _, _, worker = cute.arch.block_idx()
        if (worker == 0) & (lane == 0):
            cute.make_tensor(groups.status, cute.make_layout(1))[0] = window.wrong

    def n(self, group: Int32) -> Int32:
        return self.arguments.one.weight.rows

    def k_tiles(self, group: Int32) -> Int32:
        return cute.ceil_div(self.arguments.one.k, self.config.tile_k)

    def x(self, group: Int32) -> PlaceOfX:
        return PlaceOfX(self.table.read("row", group), None)

    def weight(self, group: Int32) -> Int64:
        """The address of a group's first packed tile."""
        weight = self.arguments.one.weight
        return weight.tiles.toint() + Int64(group) * weight.batch_stride

    def out(self, group: Int32) -> Result:
        out = self.arguments.one.out
        return Result(out.pointer + Int64(self.table.read("row", group)) * out.row_stride, out.row_stride, Int64(0))


class Word(IntEnum):
    """The int64 words of a group in global memory."""

    ROWS = 0
    N = 1
    K = 2
    OUT = 3
    STRIDE = 4
    WEIGHT = 5
    X_DATA = 6
    X_ROW_STRIDE = 7


ROW_WORDS = len(Word)


@dataclass(frozen=True)
class ListedGroups(Groups):
    """Problems of any sizes, with an x, a weight and an output each."""

    def columns(self, k: Int32, n: Int32, out: Int64, stride: Int64, weight: Int64) -> dict[str, Any]:
        k_tiles = cute.ceil_div(k, self.config.tile_k)
        return {"n": n, "k_tiles": k_tiles, "out": out, "stride": stride, "weight": weight}

    def n(self, group: Int32) -> Int32:
        return self.table.read("n", group)

    def k_tiles(self, group: Int32) -> Int32:
        return self.table.read("k_tiles", group)

    def weight(self, group: Int32) -> Int64:
        """The address of a group's first packed tile."""
        return self.table.read("weight", group)

    def out(self, group: Int32) -> Result:
        dtype = getattr(cutlass, OUT_DTYPES[self.config.out])
        align = 16 if self.config.vector else dtype.width // 8
        pointer = cute.make_ptr(dtype, self.table.read("out", group), cute.AddressSpace.gmem, assumed_align=align)
        return Result(pointer, self.table.read("stride", group), Int64(0))


@dataclass(frozen=True)
class ParameterGroups(ListedGroups):
    """Tensor maps that are parameters of the kernel; ``maps``: the address of each."""

    maps: tuple[Int64, ...] = ()

    def fill(self) -> None:
        """One warp writes the table."""
        rows, n, k, out, stride, weight, x = of_lane(
            [
                (g.x.rows, g.weight.rows, g.k, g.out.pointer.toint(), g.out.row_stride, g.weight.tiles.toint(), x)
                for g, x in zip(self.arguments.groups, self.maps)
            ]
        )
        columns = self.columns(k, n, out, stride, weight) | {"x": x}
        self.table.write("total", 0, self.enter(cute.arch.lane_idx(), columns, rows, n, Int32(0)))

    def x(self, group: Int32) -> PlaceOfX:
        return PlaceOfX(Int32(0), map_pointer(self.table.read("x", group)))


@dataclass(frozen=True)
class WorkspaceGroups(ListedGroups):
    """Rows of ``ROW_WORDS`` in global memory, and a tensor map for each, which another kernel writes."""

    @cute.jit
    def fill(self):
        """One warp writes the table."""
        groups = self.arguments.groups
        words = cute.make_tensor(groups.rows, cute.make_layout((ROW_WORDS, groups.count)))
        lane = cute.arch.lane_idx()
        total = Int32(0)
        for window in cutlass.range(self.config.capacity // WINDOW, unroll=1):
            group = window * WINDOW + lane
            rows, n, k, out, stride, weight = Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0)
            if group < groups.count:
                rows, n, k = words[Word.ROWS, group], words[Word.N, group], words[Word.K, group]
                out, stride, weight = words[Word.OUT, group], words[Word.STRIDE, group], words[Word.WEIGHT, group]
            columns = self.columns(Int32(k), Int32(n), out, stride, weight)
            total = self.enter(group, columns, Int32(rows), Int32(n), total)
        self.table.write("total", 0, total)

    def map_of(self, group: Int32) -> Int64:
        return self.arguments.groups.maps.toint() + Int64(group) * MAP_BYTES

    def x(self, group: Int32) -> PlaceOfX:
        return PlaceOfX(Int32(0), map_pointer(self.map_of(group)))

    def wait(self) -> None:
        # the kernel that writes the maps may still run
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def acquire(self, group: Int32, cursor: Int32, workers: Int32):
        """Lets this warp's copies see a group's map, which the kernel before wrote, when it meets the group first."""
        # a CTA's tiles are less than two rounds apart
        if cursor - self.table.read("start", group) < 2 * workers:
            cpasync.fence_tma_desc_acquire(map_pointer(self.map_of(group), cute.AddressSpace.gmem))


@dataclass(frozen=True)
class GroupScheduler:
    """Work tiles of all groups, dealt in turn to ``workers`` CTAs: to the first to the last, to the last to the first,
    and so on, so that where they get cheaper none has the dearest of every round."""

    groups: Groups
    worker: Int32
    workers: Int32
    total: Int32

    def range(self) -> CursorRange:
        return CursorRange(self.worker, self.total)

    def tile(self, cursor: Int32, end: Int32) -> GroupTile:
        groups, config = self.groups, self.groups.config
        group = group_of(groups.table, cursor)
        rows = groups.table.read("rows", group)
        tiles = tiles_of(config, rows, groups.n(group))
        index = cursor - groups.table.read("start", group)
        m, n = index % tiles.rest_m, index // tiles.rest_m
        x_row = n * tiles.width
        return GroupTile(group, m, x_row, rows, tiles.width, Int32(0), groups.k_tiles(group))

    def after(self, cursor: Int32, tile: GroupTile) -> Int32:
        back = (cursor // self.workers) & 1
        return cursor + cutlass.select_(back == 1, 2 * self.worker + 1, 2 * (self.workers - self.worker) - 1)


def arguments_of(groups: Groups, tile: GroupTile) -> WgmmaArguments:
    """Those of one problem with the output of a tile, which starts at its first row."""
    out = groups.out(tile.group)
    out = out._replace(pointer=out.pointer + Int64(tile.x_row) * out.row_stride)
    weight = PackedWeight(None, groups.n(tile.group), None, None)
    return WgmmaArguments(weight, None, out, None, None, (), None, None, None, None, None)

"""The groups of a grouped GEMM of packed weights: their table in shared memory, and the scheduler of their work tiles.

One warp of each CTA writes the table when the kernel starts, from offsets, kernel parameters or a table in global
memory. The 32 lanes of a warp then look up the group of a work tile together, as in ``grouped_scheduler``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....scale_layout import ATOM_ROWS
from ....weight_layout import SLAB_ROWS, TILE_ROWS
from ...arith import ceil_div
from ...factors import Factor
from ..epilogue import OutputMatrix, group_factor
from ..group_source import LAST, GroupSource, ParameterMaps, Window, WorkspaceMaps, clamped, enter, sums_to
from ..grouped_config import WINDOW
from ..grouped_scheduler import group_of
from ..operand_source import map_pointer
from ..packed.rows import Rows, rows_of_weight, stage_atoms
from ..tile_scheduler import CursorRange
from .arguments import OutputRows, PackedWeight, RowScales, WgmmaArguments
from .grouped_arguments import GroupedWgmmaArguments, PackedGroup
from .grouped_config import GroupedWgmmaConfig


class GroupTiles(NamedTuple):
    """The tiles that cover a group's output: their number along the weight's rows and along x's, and their width."""

    rest_m: Int32
    rest_n: Int32
    width: Int32


class GroupTile(NamedTuple):
    """The work tile of a CTA: tile ``m`` along the rows of a group's weight, and ``width`` rows of its x from ``x_row``
    on. The group has ``x_rows`` rows of x. The k-tiles are as in ``WorkTile``."""

    group: Int32
    m: Int32
    x_row: Int32
    x_rows: Int32
    width: Int32
    k_first: Int32
    k_count: Int32


class PlaceOfX(NamedTuple):
    """Where a group's x is: its first row in the tensor of the TMA copy, and its own tensor map if it has one."""

    row: Int32
    tensor_map: cute.Pointer | None


def tiles_of(config: GroupedWgmmaConfig, rows: Int32, n: Int32) -> GroupTiles:
    """The tiles of a group, as even as possible, for ``rows`` rows of x and ``n`` columns of the output."""
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
class PackedGroups(GroupSource):
    """What all forms of groups have in common."""

    rounds: ClassVar[int] = 2  # tiles are distributed there and back

    config: GroupedWgmmaConfig
    arguments: GroupedWgmmaArguments

    def tiles(self, m: Int32, n: Int32) -> Int32:
        tiles = tiles_of(self.config, m, n)
        return tiles.rest_m * tiles.rest_n

    def k_tiles_of(self, k: Int32) -> Int32:
        return cute.ceil_div(k, self.config.tile_k)

    def n(self, group: Int32) -> Int32:
        """Columns of a group's output."""
        return self.table.read("n", group)

    def k_tiles(self, group: Int32) -> Int32:
        return self.table.read("k_tiles", group)

    def weight(self, group: Int32) -> Int64:
        """The address of a group's first packed tile."""
        return self.table.read("weight", group)

    def rows(self, group: Int32) -> Rows:
        """Where the rows of a group's weight are, if the weight is in rows."""
        codes, scales, stride = (self.table.read(column, group) for column in ("weight", "weight_sf", "weight_stride"))
        return Rows(
            (codes,), (scales,), stride, self.k_tiles(group) * stage_atoms(self.config.weights), self.n(group) - 1
        )

    def x(self, group: Int32) -> PlaceOfX:
        return PlaceOfX(Int32(0), map_pointer(self.maps(group)[0]))

    def factors(self, group: Int32) -> tuple[Factor, ...]:
        """The factors of a group's sums, one for each product."""
        alpha, power = self.arguments.alpha, self.config.weights.factor
        return tuple(group_factor(alpha, factors, group, power) for factors in self.arguments.factors)

    def row_scales(self, group: Int32) -> RowScales:
        """Pointers to the factors of a group's rows: those of its weight, and those of its x."""
        places = (self.table.read(column, group) for column in ("weight_scales", "x_scales"))
        return RowScales(*(cute.make_ptr(Float32, x, cute.AddressSpace.gmem, assumed_align=4) for x in places))

    def row_tiles(self, group: Int32) -> Int32:
        """Packed tiles along the rows of a group's weight."""
        return cute.ceil_div(self.n(group), TILE_ROWS // self.config.products)


@dataclass(frozen=True)
class PackedParameters(PackedGroups, ParameterMaps):
    """A list of problems, each with its own sizes, x, weight and output. The tensor maps of x are kernel parameters."""

    def words_of(self, group: PackedGroup) -> tuple[Int32 | Int64, ...]:
        out, weight, scales = group.out, group.weight, group.row_scales or ()
        if self.config.weights.in_rows:
            of_weight = weight.data.toint(), weight.scale.toint(), weight.row_stride
        else:
            of_weight = (weight.tiles.toint(),)
        places = out.pointer.toint(), out.row_stride, *of_weight, *(x.toint() for x in scales)
        return group.x.rows, weight.rows, group.k, *places


@dataclass(frozen=True)
class PackedWorkspace(PackedGroups, WorkspaceMaps):
    """A list of problems in global memory. Another kernel writes the tensor map of each."""


@dataclass(frozen=True)
class PackedRows(PackedGroups):
    """Groups of consecutive rows of one x, by their offsets. Each has a weight of a stack."""

    def fill(self) -> None:
        """Writes the table, in one warp, and reports in ``status`` what is wrong with the offsets."""
        self.report(self.fill_checked())

    @cute.jit
    def report(self, wrong: Int32):
        """Writes the status, in one thread of the launch."""
        _, _, worker = cute.arch.block_idx()
        status = cute.make_tensor(self.arguments.groups.status, cute.make_layout(1))
        if (worker == 0) & (cute.arch.lane_idx() == 0):
            status[0] = wrong

    @cute.jit
    def fill_checked(self):
        """Writes the table, in one warp. Returns what is wrong with the offsets, or 0."""
        groups, rows = self.arguments.groups, self.arguments.one.x.rows
        offsets = cute.make_tensor(groups.offsets, cute.make_layout(groups.count + 1))
        lane = cute.arch.lane_idx()
        first = offsets[0]
        # load all windows at once: each load has the latency of global memory
        ends = []
        for index in cutlass.range_constexpr(self.config.capacity // WINDOW):
            end = Int32(0)
            if index * WINDOW + lane < groups.count:
                end = offsets[index * WINDOW + lane + 1]
            ends.append(end)
        reached = cutlass.min(cutlass.max(first, Int32(0)), rows)
        total, before, atoms = Int32(0), first, Int32(0)
        window = Window(reached, reached, reached, cutlass.select_(first == reached, Int32(0), Int32(1)))
        for index in cutlass.range_constexpr(self.config.capacity // WINDOW):
            group, end = index * WINDOW + lane, ends[index]
            previous = cute.arch.shuffle_sync_up(end, 1)
            previous = cutlass.select_(lane == 0, before, previous)
            before = cute.arch.shuffle_sync(end, LAST)
            bad = (group < groups.count) & ((end < previous) | (end > rows))
            window = clamped(index * WINDOW, bad, end, rows, window)
            size, n = window.end - window.start, self.arguments.one.weight.rows
            total = enter(self.table, group, {"m": size, "row": window.start}, self.tiles(size, n), total)
            if cutlass.const_expr(self.config.counts_atoms):
                atoms = atoms + cute.arch.shuffle_sync(sums_to(ceil_div(size, ATOM_ROWS)), LAST)
        self.table.write("total", 0, total)
        wrong = window.wrong
        if cutlass.const_expr(self.config.counts_atoms):
            wrong = cutlass.select_((wrong == 0) & (atoms > groups.atoms), Int32(-1), wrong)
        return wrong

    def n(self, group: Int32) -> Int32:
        return self.arguments.one.weight.rows

    def k_tiles(self, group: Int32) -> Int32:
        return self.k_tiles_of(self.arguments.one.k)

    def x(self, group: Int32) -> PlaceOfX:
        return PlaceOfX(self.table.read("row", group), None)

    def rows(self, group: Int32) -> Rows:
        return rows_of_weight(self.config, self.arguments.one.weight, group)

    def weight(self, group: Int32) -> Int64:
        weight = self.arguments.one.weight
        return weight.tiles.toint() + Int64(group) * weight.batch_stride

    def row_scales(self, group: Int32) -> RowScales:
        one = self.arguments.one
        each = cute.ceil_div(one.weight.rows, SLAB_ROWS // self.config.products) * SLAB_ROWS
        return RowScales(one.row_scales.weight + Int64(group) * each, one.row_scales.x + self.table.read("row", group))

    def output(self, group: Int32) -> OutputMatrix:
        out = self.arguments.one.out
        pointer = out.pointer + Int64(self.table.read("row", group)) * out.row_stride
        return OutputMatrix(pointer, self.table.read("m", group), self.n(group), out.row_stride, Int64(0))


@dataclass(frozen=True)
class GroupScheduler:
    """Distributes the work tiles of all groups to ``workers`` CTAs in serpentine order: from the first CTA to the last,
    then back. If later tiles are cheaper, this order balances the CTAs' costs."""

    groups: PackedGroups
    worker: Int32
    workers: Int32
    total: Int32

    def range(self) -> CursorRange:
        return CursorRange(self.worker, self.total)

    def tile(self, cursor: Int32, end: Int32) -> GroupTile:
        groups, config = self.groups, self.groups.config
        group = group_of(groups.table, cursor)
        rows = groups.table.read("m", group)
        tiles = tiles_of(config, rows, groups.n(group))
        index = cursor - groups.table.read("start", group)
        m, n = index % tiles.rest_m, index // tiles.rest_m
        x_row = n * tiles.width
        return GroupTile(group, m, x_row, rows, tiles.width, Int32(0), groups.k_tiles(group))

    def after(self, cursor: Int32, tile: GroupTile) -> Int32:
        back = (cursor // self.workers) & 1
        return cursor + cutlass.select_(back == 1, 2 * self.worker + 1, 2 * (self.workers - self.worker) - 1)


def arguments_of(groups: PackedGroups, tile: GroupTile) -> WgmmaArguments:
    """The arguments of a problem whose output and factors of x begin at the first row of a work tile."""
    matrix = groups.output(tile.group)
    out = OutputRows(matrix.pointer + Int64(tile.x_row) * matrix.stride, matrix.stride, Int64(0))
    weight, scales = PackedWeight(None, groups.n(tile.group), None, None), None
    if groups.config.fp8:
        of_group = groups.row_scales(tile.group)
        scales = of_group._replace(x=of_group.x + tile.x_row)
    fields = {"weight": weight, "out": out, "row_scales": scales, "factors": ()}
    return WgmmaArguments(**dict.fromkeys(WgmmaArguments._fields) | fields)

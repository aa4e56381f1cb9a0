"""Sources of the groups of a grouped GEMM: each fills the table of groups, and finds a group's operands and output.

``ParameterMaps``: a list of problems, whose tensor maps are kernel parameters. ``WorkspaceMaps``: rows of a table in
global memory, beside which another kernel writes their tensor maps. ``ContiguousRows``: offsets distribute the rows of
one matrix to the groups, the other operand is a stack of matrices, and all groups share one set of maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...scale_layout import ATOM_ROWS
from ..arith import ceil_div
from .arguments import MAP_BYTES, GroupedArguments
from .epilogue import OUT_TYPES, EpilogueFunction, OutputMatrix, Result, group_factor
from .grouped_config import WINDOW, GroupedConfig, GroupTableConfig
from .grouped_scheduler import GroupedScheduler, GroupSizes, Table, tiles_of
from .operand_source import OperandMaps, Origin, Origins, address_of_map, map_pointer
from .tile_scheduler import cta_place

LAST = WINDOW - 1


@cute.jit
def sums_to(value: Int32):
    """The inclusive prefix sum of ``value`` over the lanes of a warp."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(value, 1 << i)
        value = value + cutlass.select_(lane >= (1 << i), before, Int32(0))
    return value


@cute.jit
def maximum_to(value: Int32):
    """The inclusive prefix maximum of ``value`` over the lanes of a warp."""
    for i in cutlass.range_constexpr(5):
        value = cutlass.max(value, cute.arch.shuffle_sync_up(value, 1 << i))
    return value


def enter(table: Table, group: Int32, values: dict[str, Any], tiles: Int32, total: Int32) -> Int32:
    """Writes one group of the table in each lane, and returns the work tiles up to the end of the warp's window.

    values: by column; tiles: work tiles of the group; total: work tiles of all groups before the window.
    """
    through = sums_to(tiles)
    table.write("start", group, total + through - tiles)
    for column, value in values.items():
        table.write(column, group, value)
    return total + cute.arch.shuffle_sync(through, LAST)


def of_lane(columns: Sequence[tuple[Int32 | Int64, ...]]) -> list[Int32 | Int64]:
    """The values of group i in lane i, from the values of all groups; zeros in lanes without a group."""
    lane = cute.arch.lane_idx()
    mine = [type(x)(0) for x in columns[0]]
    for i, new in enumerate(columns):
        mine = [cutlass.select_(lane == i, x, old) for x, old in zip(new, mine)]
    return mine


class Window(NamedTuple):
    """The rows of a window of groups, one group in each lane: ``start`` to ``end``. reached: the end of the last group.
    wrong: 1 + the index of the first wrong offset so far, or 0."""

    start: Int32
    end: Int32
    reached: Int32
    wrong: Int32


def clamped(first_group: Int32 | int, bad: Boolean, end: Int32, rows: Int32, before: Window) -> Window:
    """The window of groups that end at ``end``, limited to ``rows`` and to increase. bad: whether a lane's offset is
    wrong; before: the window before."""
    lanes = cute.arch.vote_ballot_sync(bad)
    # the lowest bit set is the first wrong offset; the first window that has one sets ``wrong``
    found = first_group + cute.arch.popc((lanes & -lanes) - 1) + 2
    wrong = cutlass.select_((before.wrong == 0) & (lanes != 0), found, before.wrong)
    end = cutlass.min(cutlass.max(maximum_to(end), before.reached), rows)
    start = cute.arch.shuffle_sync_up(end, 1)
    start = cutlass.select_(cute.arch.lane_idx() == 0, before.reached, start)
    return Window(start, end, cute.arch.shuffle_sync(end, LAST), wrong)


@dataclass(frozen=True)
class GroupSource:
    """What the sources have in common. ``config`` declares the columns of the table and the words of a group.

    rounds: two consecutive work tiles of a CTA are less than so many rounds of work tiles apart.
    """

    rounds: ClassVar[int] = 1

    config: GroupTableConfig
    arguments: Any
    table: Table | None = None

    @property
    def partials(self) -> None:
        """None: groups have no stream-K."""

    def with_table(self, address: Int32) -> GroupSource:
        """This source, with the table at a shared address."""
        return replace(self, table=Table(self.config, address))

    def tiles(self, m: Int32, n: Int32) -> Int32:
        """Work tiles of a group of ``m`` rows and ``n`` columns."""
        rest_m, rest_n = tiles_of(self.config, m, n)
        return rest_m * rest_n

    def k_tiles_of(self, k: Int32) -> Int32:
        """k-tiles of a group whose K is ``k``."""
        return ceil_div(k, self.config.tile_k)

    def enter(self, group: Int32, sizes: tuple[Int32, ...], longs: Sequence[Int64], total: Int32) -> Int32:
        """Writes listed groups with :func:`enter`. sizes: m, n and k; longs: the columns of 8 bytes."""
        m, n, k = sizes
        values = {"m": m, "n": n, "k_tiles": self.k_tiles_of(k)} | dict(zip(self.config.table_columns.longs, longs))
        return enter(self.table, group, values, self.tiles(m, n), total)

    def wait(self) -> None:
        """Waits, ahead of the first load, for a kernel that writes tensor maps; does nothing where there is none."""

    def acquire(self, group: Int32, cursor: Int32, workers: Int32) -> None:
        """Makes a group's tensor maps visible, ahead of a work tile's first load; no-op if the host made them."""

    def sizes(self, group: Int32) -> GroupSizes:
        return GroupSizes(*(self.table.read(column, group) for column in ("m", "n", "k_tiles")))

    def output(self, group: Int32) -> OutputMatrix:
        sizes, dtype = self.sizes(group), OUT_TYPES[self.config.out]
        address, stride = (self.table.read(column, group) for column in ("out", "stride"))
        align = 16 if self.config.vector else dtype.width // 8
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
        return OutputMatrix(pointer, sizes.m, sizes.n, stride, Int64(0))

    def origins(self, group: Int32) -> Origins:
        maps = self.maps(group)
        a, sfa, b, sfb = (map_pointer(address) for address in maps)
        return Origins(Origin(Int32(0), data_map=a, scale_map=sfa), Origin(Int32(0), data_map=b, scale_map=sfb))

    def epilogue_function(self) -> EpilogueFunction:
        return EpilogueFunction(self.config)

    def results(self) -> GroupSource:
        return self

    def of(self, group: Int32) -> Result:
        """The output of a group, and the factor of its sums."""
        return Result(self.output(group), [group_factor(self.arguments.alpha, self.arguments.factors, group)])

    def scheduler(self) -> GroupedScheduler:
        """The scheduler of all groups. The table must be written before."""
        x, y, z = cute.arch.block_idx()
        _, _, depth = cute.arch.grid_dim()
        place = cta_place(self.config, x, y, z, depth)
        return GroupedScheduler(self.config, place, self.table, self.table.read("total"), self.with_k_tiles())

    def with_k_tiles(self) -> GroupSource:
        """This source, with the number of k-tiles where all groups share it."""
        return self


@dataclass(frozen=True)
class ParameterMaps(GroupSource):
    """A list of problems. addresses: of the tensor maps of each group."""

    addresses: tuple[Sequence[Int64], ...] = ()

    def words_of(self, group: Any) -> tuple[Int32 | Int64, ...]:
        """m, n and k of a group, and its columns of 8 bytes except the maps."""
        return group.m, group.n, group.k, group.out.toint(), group.stride

    def fill(self) -> None:
        """Writes the table, in one warp."""
        groups = zip(self.arguments.groups, self.addresses)
        m, n, k, *longs = of_lane([(*self.words_of(group), *addresses) for group, addresses in groups])
        self.table.write("total", 0, self.enter(cute.arch.lane_idx(), (m, n, k), longs, Int32(0)))

    def maps(self, group: Int32) -> list[Int64]:
        """The addresses of the tensor maps of a group."""
        return [self.table.read(column, group) for column in self.config.tensor_maps]


@dataclass(frozen=True)
class WorkspaceMaps(GroupSource):
    """Rows of ``config.words`` in global memory; the tensor maps of a group follow one another in ``groups.maps``."""

    @cute.jit
    def fill(self):
        """Writes the table, in one warp."""
        groups, count = self.arguments.groups, 3 + len(self.config.table_columns.longs)
        rows = cute.make_tensor(groups.rows, cute.make_layout((len(self.config.words), groups.count)))
        lane = cute.arch.lane_idx()
        total = Int32(0)
        for window in cutlass.range(self.config.capacity // WINDOW, unroll=1):
            group = window * WINDOW + lane
            words = [Int64(0)] * count
            if group < groups.count:
                words = [rows[i, group] for i in range(count)]
            sizes = tuple(Int32(word) for word in words[:3])
            total = self.enter(group, sizes, words[3:], total)
        self.table.write("total", 0, total)

    def wait(self) -> None:
        # the kernel that writes the maps may still be running
        cute.arch.griddepcontrol_wait()

    def first_map(self, group: Int32) -> Int64:
        """The address of the first tensor map of a group."""
        return self.arguments.groups.maps.toint() + Int64(group) * (len(self.config.tensor_maps) * MAP_BYTES)

    def maps(self, group: Int32) -> list[Int64]:
        """The addresses of the tensor maps of a group."""
        return [self.first_map(group) + i * MAP_BYTES for i in range(len(self.config.tensor_maps))]

    @cute.jit
    def acquire(self, group: Int32, cursor: Int32, workers: Int32):
        """Acquires a group's maps, which the kernel before wrote, when this warp meets the group for the first time."""
        start = self.table.read("start", group)
        if cursor - start < self.rounds * workers:
            first = self.first_map(group)
            for i in cutlass.range_constexpr(len(self.config.tensor_maps)):
                cpasync.fence_tma_desc_acquire(map_pointer(first + i * MAP_BYTES, cute.AddressSpace.gmem))


@dataclass(frozen=True)
class ContiguousRows(GroupSource):
    """Groups that are consecutive rows of A or of B (``config.ragged``), by offsets; the other operand is a stack, with
    one matrix for each group. m, n: sizes of the whole problem; k_tiles: of every group, for the scheduler."""

    m: Int32 | None = None
    n: Int32 | None = None
    k_tiles: Int32 | None = None

    def with_k_tiles(self) -> ContiguousRows:
        return replace(self, k_tiles=ceil_div(self.arguments.k, self.config.tile_k))

    @cute.jit
    def fill(self):
        """Writes the table, in one warp, and reports in ``status`` what is wrong with the offsets."""
        groups = self.arguments.groups
        offsets = cute.make_tensor(groups.offsets, cute.make_layout(groups.count + 1))
        lane = cute.arch.lane_idx()
        first = offsets[0]
        reached = cutlass.min(cutlass.max(first, Int32(0)), groups.rows)
        total, atom = Int32(0), Int32(0)
        window = Window(reached, reached, reached, cutlass.select_(first == reached, Int32(0), Int32(1)))
        for index in cutlass.range(self.config.capacity // WINDOW, unroll=1):
            group = index * WINDOW + lane
            start, end = Int32(0), Int32(0)
            if group < groups.count:
                start, end = offsets[group], offsets[group + 1]
            window = clamped(index * WINDOW, (end < start) | (end > groups.rows), end, groups.rows, window)
            size = window.end - window.start
            own_atoms = ceil_div(size, ATOM_ROWS)
            through = sums_to(own_atoms)
            values = {"rows": size, "row": window.start, "atom": atom + through - own_atoms}
            atom = atom + cute.arch.shuffle_sync(through, LAST)
            total = enter(self.table, group, values, self.tiles(*self.with_rows(size)), total)
        self.table.write("total", 0, total)
        x, y, z = cute.arch.block_idx()
        if (x == 0) & (y == 0) & (z == 0) & (lane == 0):
            short = cutlass.select_(atom > groups.atoms, Int32(-1), Int32(0))
            status = cute.make_tensor(groups.status, cute.make_layout(1))
            status[0] = cutlass.select_(window.wrong == 0, short, window.wrong)

    def with_rows(self, rows: Int32) -> tuple[Int32, Int32]:
        """(m, n) of a group that has ``rows`` rows."""
        return (rows, self.n) if self.config.ragged == "a" else (self.m, rows)

    def sizes(self, group: Int32) -> GroupSizes:
        rows = self.table.read("rows", group)
        return GroupSizes(*self.with_rows(rows), self.k_tiles)

    def output(self, group: Int32) -> OutputMatrix:
        sizes, out = self.sizes(group), self.arguments.out
        pointer = out.pointer + Int64(self.table.read("row", group)) * out.stride
        return OutputMatrix(pointer, sizes.m, sizes.n, out.stride, Int64(0))

    def origins(self, group: Int32) -> Origins:
        shared = Origin(Int32(0), row=self.table.read("row", group), atom=self.table.read("atom", group))
        stacked = Origin(group)
        return Origins(shared, stacked) if self.config.ragged == "a" else Origins(stacked, shared)


def make_group_source(
    config: GroupedConfig, arguments: GroupedArguments, m: Int32, n: Int32, atoms: tuple[OperandMaps, ...]
) -> GroupSource:
    """The source of ``config``. m, n: sizes of the problem whose copies the kernel has; atoms: every group's copies."""
    if config.maps == "parameters":
        addresses = tuple(tuple(map(address_of_map, maps)) for maps in atoms)
        return ParameterMaps(config, arguments, addresses=addresses)
    if config.maps == "workspace":
        return WorkspaceMaps(config, arguments)
    return ContiguousRows(config, arguments, m=m, n=n)

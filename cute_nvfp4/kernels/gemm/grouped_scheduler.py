"""What each cluster of a grouped GEMM works on: the tiles of all groups, dealt in turn.

One warp of each CTA writes the table of ``grouped_config`` when the kernel starts. A unit's group is then found by the
32 lanes of a warp together, and what a role needs of the group is read from the table: nothing is carried from tile to
tile, so that every role of every form of the GEMM has the same loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...scale_layout import ATOM_ROWS
from ..arith import ceil_div
from .config import CTA_ROWS
from .grouped_config import LONGS, WINDOW, GroupedConfig
from .sm100.operands import OUT_TYPES
from .sm100.output import Output

LAST = WINDOW - 1
# of a group in global memory: m, n, k, output, its stride; of A and of B address, row stride, scales
ROW_WORDS = 11


@dataclass
class Groups:
    """What a role knows of the groups.

    table: its shared address; units: of all groups; maps: address of the maps in the workspace; other, steps: with
    shared maps, rows of a matrix of the stack and steps of K.
    """

    table: Any
    units: Any
    maps: Any
    other: Any
    steps: Any


def entry(config: GroupedConfig, table: Any, name: str, group: Any) -> cute.Tensor:
    """A number of the table, as a tensor of one element."""
    dtype = Int64 if name in LONGS[config.maps] else Int32
    address = table + (config.column(name) + group * (dtype.width // 8))
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))


def tiles(config: GroupedConfig, m: Any, n: Any) -> tuple[Any, Any]:
    """Tiles of a cluster that cover (m, n)."""
    cm, cn = config.cluster
    columns = config.tile_n * cn
    return ceil_div(m, CTA_ROWS * cm), (n + (columns - 1)) // columns


# ---- the table -----------------------------------------------------------------------------------------------------


@cute.jit
def sums_to(value: Int32):
    """The sum of ``value`` over this lane and those before it."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(value, 1 << i)
        value = value + cutlass.select_(lane >= (1 << i), before, Int32(0))
    return value


@cute.jit
def maximum_to(value: Int32):
    """The largest ``value`` of this lane and those before it; a lane gets its own where there is none before."""
    for i in cutlass.range_constexpr(5):
        value = cutlass.max(value, cute.arch.shuffle_sync_up(value, 1 << i))
    return value


@cute.jit
def enter(config: cutlass.Constexpr[GroupedConfig], table: Int32, group: Int32, values: dict, m, n, total: Int32):
    """Writes a window's columns; returns the units up to its end."""
    rest_m, rest_n = tiles(config, m, n)
    units = rest_m * rest_n
    through = sums_to(units)
    entry(config, table, "start", group)[0] = total + through - units
    for name in cutlass.range_constexpr(len(values)):
        key = list(values)[name]
        entry(config, table, key, group)[0] = values[key]
    return total + cute.arch.shuffle_sync(through, LAST)


@cute.jit
def fill_from_parameters(config: cutlass.Constexpr[GroupedConfig], groups: tuple, table: Int32):
    """groups: for each (m, n, k, output, stride, (addresses of the maps of A, SFA, B, SFB))."""
    lane = cute.arch.lane_idx()
    m, n, k = Int32(0), Int32(0), Int32(0)
    longs = [Int64(0) for _ in LONGS["parameters"]]
    for i in cutlass.range_constexpr(len(groups)):
        mine = lane == i
        m, n, k = (cutlass.select_(mine, new, old) for new, old in zip(groups[i], (m, n, k)))
        out, stride, maps = groups[i][3:]
        longs = [cutlass.select_(mine, new, old) for new, old in zip((out.toint(), stride, *maps), longs)]
    values = {"m": m, "n": n, "steps": ceil_div(k, config.tile_k), **dict(zip(LONGS["parameters"], longs))}
    entry(config, table, "total", 0)[0] = enter(config, table, lane, values, m, n, Int32(0))


@cute.jit
def fill_from_rows(config: cutlass.Constexpr[GroupedConfig], groups: tuple, table: Int32):
    """groups: (int64 (groups, ROW_WORDS) in global memory, how many, maps): m, n, k, output, stride, …"""
    pointer, count, _ = groups
    rows = cute.make_tensor(pointer, cute.make_layout((ROW_WORDS, count)))
    lane = cute.arch.lane_idx()
    total = Int32(0)
    for window in cutlass.range(config.capacity // WINDOW, unroll=1):
        group = window * WINDOW + lane
        m, n, k, out, stride = Int64(0), Int64(0), Int64(0), Int64(0), Int64(0)
        if group < count:
            m, n, k, out, stride = rows[0, group], rows[1, group], rows[2, group], rows[3, group], rows[4, group]
        m, n = Int32(m), Int32(n)
        values = {"m": m, "n": n, "steps": ceil_div(Int32(k), config.tile_k), "out": out, "stride": stride}
        total = enter(config, table, group, values, m, n, total)
    entry(config, table, "total", 0)[0] = total


@cute.jit
def fill_from_offsets(config: cutlass.Constexpr[GroupedConfig], groups: tuple, other: Int32, table: Int32):
    """groups: (offsets, groups, rows, scale atoms, status): see ``grouped_gemm.GroupedRows``."""
    offsets_pointer, count, rows, atoms, status = groups
    offsets = cute.make_tensor(offsets_pointer, cute.make_layout(count + 1))
    lane = cute.arch.lane_idx()
    first = offsets[0]
    reached = cutlass.min(cutlass.max(first, Int32(0)), rows)
    total, atom = Int32(0), Int32(0)
    wrong = cutlass.select_(first == reached, Int32(0), Int32(1))
    for window in cutlass.range(config.capacity // WINDOW, unroll=1):
        group = window * WINDOW + lane
        start, end = Int32(0), Int32(0)
        if group < count:
            start, end = offsets[group], offsets[group + 1]
        bad = cute.arch.vote_ballot_sync((end < start) | (end > rows))
        # the place of the lowest bit, of the first window that has one
        found = window * WINDOW + cute.arch.popc((bad & -bad) - 1) + 2
        wrong = cutlass.select_((wrong == 0) & (bad != 0), found, wrong)
        end = cutlass.min(cutlass.max(maximum_to(end), reached), rows)
        start = cute.arch.shuffle_sync_up(end, 1)
        start = cutlass.select_(lane == 0, reached, start)
        reached = cute.arch.shuffle_sync(end, LAST)
        size = end - start
        own_atoms = ceil_div(size, ATOM_ROWS)
        through = sums_to(own_atoms)
        values = {"rows": size, "row": start, "atom": atom + through - own_atoms}
        atom = atom + cute.arch.shuffle_sync(through, LAST)
        m, n = (size, other) if config.ragged == "a" else (other, size)
        total = enter(config, table, group, values, m, n, total)
    entry(config, table, "total", 0)[0] = total
    x, y, z = cute.arch.block_idx()
    if (x == 0) & (y == 0) & (z == 0) & (lane == 0):
        short = cutlass.select_(atom > atoms, Int32(-1), Int32(0))
        cute.make_tensor(status, cute.make_layout(1))[0] = cutlass.select_(wrong == 0, short, wrong)


@cute.jit
def fill(config: cutlass.Constexpr[GroupedConfig], groups: tuple, m: Int32, n: Int32, table: Int32):
    """One warp writes the table. m, n: sizes of the one problem that shared maps describe."""
    if cutlass.const_expr(config.maps == "parameters"):
        fill_from_parameters(config, groups, table)
    elif cutlass.const_expr(config.maps == "workspace"):
        fill_from_rows(config, groups, table)
    else:
        fill_from_offsets(config, groups, n if config.ragged == "a" else m, table)


def known(config: GroupedConfig, groups: tuple, m: Any, n: Any, k: Any, table: Any) -> Groups:
    """What the roles know, once the table is written."""
    maps = groups[2].toint() if config.maps == "workspace" else Int64(0)
    other = n if config.ragged == "a" else m
    return Groups(table, entry(config, table, "total", 0)[0], maps, other, ceil_div(k, config.tile_k))


# ---- what the roles ask --------------------------------------------------------------------------------------------


@cute.jit
def group_of(config: cutlass.Constexpr[GroupedConfig], table: Int32, unit: Int32):
    """The group of a unit: the last that starts at or before it. All lanes of a warp ask together."""
    lane = cute.arch.lane_idx()
    window = Int32(0)
    if cutlass.const_expr(config.capacity > WINDOW):
        windows = config.capacity // WINDOW
        place = cutlass.min(lane, Int32(windows - 1))
        first = entry(config, table, "start", place * WINDOW)[0]
        window = cute.arch.popc(cute.arch.vote_ballot_sync((lane < windows) & (first <= unit))) - 1
    first = entry(config, table, "start", window * WINDOW + lane)[0]
    return window * WINDOW + cute.arch.popc(cute.arch.vote_ballot_sync(first <= unit)) - 1


def sizes_of(config: GroupedConfig, groups: Groups, group: Any) -> tuple[Any, Any, Any]:
    """(m, n, steps of K) of a group."""
    if config.maps != "shared":
        return tuple(entry(config, groups.table, name, group)[0] for name in ("m", "n", "steps"))
    size = entry(config, groups.table, "rows", group)[0]
    m, n = (size, groups.other) if config.ragged == "a" else (groups.other, size)
    return m, n, groups.steps


@cute.jit
def locate(config: cutlass.Constexpr[GroupedConfig], groups: Groups, unit: Int32):
    """(group, index of the unit in it, tiles of a cluster along M and along N, steps of K)."""
    group = group_of(config, groups.table, unit)
    m, n, steps = sizes_of(config, groups, group)
    rest_m, rest_n = tiles(config, m, n)
    return group, unit - entry(config, groups.table, "start", group)[0], rest_m, rest_n, steps


def output_of(config: GroupedConfig, groups: Groups, group: Any, out: Output) -> Output:
    """The output of a group."""
    m, n, _ = sizes_of(config, groups, group)
    dtype = OUT_TYPES[config.out]
    if config.maps == "shared":
        pointer = out.pointer + Int64(entry(config, groups.table, "row", group)[0]) * out.stride
        return Output(pointer, m, n, out.stride, Int64(0))
    address, stride = (entry(config, groups.table, name, group)[0] for name in ("out", "stride"))
    align = 16 if config.vector else dtype.width // 8
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return Output(pointer, m, n, stride, Int64(0))


def alphas_of(config: GroupedConfig, alpha: Any, factors: tuple, group: Any) -> list:
    """alpha times a group's numbers on the device; factors: (pointer, elements from one group's to the next)."""
    factor = alpha
    for i in range(config.factors):
        pointer, stride = factors[i]
        factor = factor * cute.make_tensor(pointer + group * stride, cute.make_layout(1))[0]
    return [factor]

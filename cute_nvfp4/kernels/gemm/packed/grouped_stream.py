"""Streaming grouped GEMM for few rows a group: outᵢ = alphaᵢ · xᵢ · weightᵢᵀ for a stack of packed weights, at the
speed of memory; or two such products joined by a gate.

``GroupedStream`` is ``Stream`` with the work tiles of all groups. A warp of each CTA writes the table of groups from
their offsets. The number of work tiles, and with it the CTAs' shares, is known only on the device. The loading warp
gathers rows of x by ``cp.async``, sixteen bytes a lane, in the order of TMA's swizzle. It writes zeros for rows and
elements beyond the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ....ptx import mbarrier
from ....ptx.async_copy import copy_async
from ....weight_layout import HALF_SLAB, SLAB_ROWS, TILE_K
from ...arith import ceil_div, div, mod
from ...factors import factor_of, scaled
from ...moe.few import SlotIds
from ..barriers import Ring, initialise_in_turn
from ..epilogue import device_scalar
from ..gates import activate
from ..group_source import LAST
from ..grouped_config import WINDOW
from ..grouped_scheduler import Table, group_of
from ..reduction import FLOATS
from ..sm90.grouped_arguments import IDS
from ..sm90.groups import PackedRows
from ..stage_loader import ThreadCopies, fill_stages
from .grouped_stream_config import GroupedStreamArguments, GroupedStreamConfig
from .stream import Place, Stream, WeightSource
from .stream_config import LOADING_WARPS, MMA_COLUMNS, WARP
from .stream_shares import Segment, Segments, StepsOfTile, shares_of_groups, steps_of_tile
from .stream_sums import Sums, TileOutput
from .stream_x import ROW_BYTES

CHUNK = 16
"""Bytes that a lane copies at a time."""
ROW_CHUNKS = ROW_BYTES // CHUNK
LANE_ROWS = WARP // ROW_CHUNKS
"""Rows of x that a warp copies at a time."""


class GroupPlace(NamedTuple):
    """A work tile: its group, tile ``row_tile`` of the group's weight, and ``columns`` rows of x from ``row`` on."""

    group: Int32
    row_tile: Int32
    row: Int32
    columns: Int32


class Asked(NamedTuple):
    """What a thread has loaded for the epilogue of a work tile.

    scalars: device scalars of each product.
    bias, row_factors: biases, and factors of the weight's rows, of each product for the thread's four columns of the
        output.
    slots, weights: slots and router weights of the thread's rows of x, which are ``thread_columns`` apart.
    """

    scalars: tuple[tuple[Float32, ...], ...]
    bias: tuple[tuple[Float32, ...], ...]
    row_factors: tuple[tuple[Float32, ...], ...]
    slots: tuple[Int32, ...]
    weights: tuple[Float32, ...] = ()


@dataclass(frozen=True)
class GroupSums(Sums):
    """Sums of groups. Where rows are slots the output is weight · activation(alpha · row factor · sum + bias)."""

    config: GroupedStreamConfig
    groups: Any = None

    def completed(self, out: TileOutput) -> TileOutput:
        """``out`` with its factors. It also starts to load router weights."""
        asked, arguments, power = out.asked, self.groups.arguments, self.config.weights.factor
        factors = tuple(factor_of(arguments.alpha, scalars, power) for scalars in asked.scalars)
        weights = tuple(device_scalar(arguments.routed.weights + slot).to(Float32) for slot in asked.slots)
        return out._replace(factors=factors, asked=asked._replace(weights=weights))

    @cute.jit
    def after(self, segment: Segment):
        """Adds up this CTA's cut work tile after its first whole one: by then all parts are written, and the loading
        warps fill stages meanwhile."""
        shares = self.shares
        if segment.work_tile == shares.cut + self.cta * shares.whole:
            self.add_cut(self.thread, WARP * self.config.warps)

    def joined(self, sums: list[Float32], i: int, column: Int32, out: TileOutput) -> Float32:
        cfg = self.config
        if not cfg.routed.of_slots:
            return super().joined(sums, i, column, out)
        values = [scaled(x, factor) for x, factor in zip(sums, out.factors)]
        if cfg.of_fp8:
            values = [value * of_rows[i] for value, of_rows in zip(values, out.asked.row_factors)]
        if cfg.routed.biased:
            values = [value + of_rows[i] for value, of_rows in zip(values, out.asked.bias)]
        name = cfg.routed.activation or cfg.gate
        number = activate(name, *values, constants=cfg.routed.constants) if name else values[0]
        if cfg.routed.weighted:
            weight, turn = out.asked.weights[0], div(column, cfg.thread_columns)
            for j, other in enumerate(out.asked.weights[1:]):
                weight = cutlass.select_(turn == j + 1, other, weight)
            number = number * weight
        return number


@dataclass(frozen=True)
class StreamGroups(PackedRows):
    """The groups and the order of their work tiles: all passes over a group's rows for one tile of its weight, then for
    the next. So each tile of the weight is read from memory once."""

    config: GroupedStreamConfig
    arguments: GroupedStreamArguments

    def fill_checked(self) -> Int32:
        """Writes the table, in one warp. Returns what is wrong with the offsets, or 0."""
        if self.config.maps in IDS:
            self.fill_by_ids()
            return Int32(0)
        return self.fill_by_offsets()

    @cute.jit
    def fill_by_ids(self):
        """Writes the table, and the slot of each row, from the ids of experts."""
        routed, groups, lane = self.arguments.routed, self.arguments.groups, cute.arch.lane_idx()
        ids = SlotIds(routed.slots, self.arguments.one.x.rows, groups.count, routed.first)
        expert, windows = ids.expert(lane), self.config.capacity // WINDOW
        sides = cute.make_rmem_tensor((2, windows), Int32)  # (START END, WINDOWS)
        sides.fill(0)
        for slot in cutlass.range(ids.slots, unroll=1):
            other = cute.arch.shuffle_sync(expert, slot)
            for index in cutlass.range_constexpr(windows):
                sides[0, index] += Int32(other < index * WINDOW + lane)
                sides[1, index] += Int32(other <= index * WINDOW + lane)
        self.table.write("slot", ids.place(expert, lane), lane)
        self.enter_all([sides[0, i] for i in range(windows)], [sides[1, i] for i in range(windows)])

    def slot(self, row: Int32) -> Int32:
        """The slot of a row."""
        if self.config.maps in IDS:
            return self.table.read("slot", row)
        return device_scalar(self.arguments.routed.slots + row)

    @cute.jit
    def fill_by_offsets(self):
        """Writes the table, and returns what is wrong with the offsets. Valid ones need no scan for their maximum."""
        groups, rows, lane = self.arguments.groups, self.arguments.one.x.rows, cute.arch.lane_idx()
        offsets = cute.make_tensor(groups.offsets, cute.make_layout(groups.count + 1))
        starts, ends, bad = [], [], (offsets[0] < 0)
        for index in cutlass.range_constexpr(self.config.capacity // WINDOW):
            # lanes beyond the last group enter empty groups
            group = cutlass.min(index * WINDOW + lane, groups.count)
            starts.append(offsets[group])
            ends.append(offsets[cutlass.min(group + 1, groups.count)])
        for start, end in zip(starts, ends):
            bad = bad | (end < start) | (end > rows)
        wrong = Int32(0)
        if cute.arch.vote_any_sync(bad):
            wrong = PackedRows.fill_checked(self)
        else:
            self.enter_all(starts, ends)
        return wrong

    def enter_all(self, starts: list[Int32], ends: list[Int32]) -> None:
        """Writes the groups from ``starts`` to ``ends``, of which a lane has one in each window. The prefix sums of all
        windows advance side by side."""
        lane, total = cute.arch.lane_idx(), Int32(0)
        tiles = [self.tiles(end - start, self.n(lane)) for start, end in zip(starts, ends)]
        through = tiles
        for i in range(5):
            before = [cute.arch.shuffle_sync_up(x, 1 << i) for x in through]
            through = [x + cutlass.select_(lane >= (1 << i), y, Int32(0)) for x, y in zip(through, before)]
        for index, start in enumerate(starts):
            values = {"start": total + through[index] - tiles[index], "m": ends[index] - start, "row": start}
            for column, value in values.items():
                self.table.write(column, index * WINDOW + lane, value)
            total = total + cute.arch.shuffle_sync(through[index], LAST)
        self.table.write("total", 0, total)

    def passes(self, rows: Int32) -> Int32:
        """Passes over ``rows`` rows of x, ``columns`` at a time."""
        columns = self.config.columns
        return ceil_div(rows, columns) if columns & (columns - 1) == 0 else (rows + (columns - 1)) // columns

    def tiles(self, m: Int32, n: Int32) -> Int32:
        return self.passes(m) * cute.ceil_div(n, self.config.out_rows)

    def place(self, work_tile: Int32) -> GroupPlace:
        """The place of a work tile, which all lanes of a warp look up together; any place beyond the last tile."""
        table, columns = self.table, self.config.columns
        group = group_of(table, work_tile)
        rows, index = table.read("m", group), work_tile - table.read("start", group)
        passes = cutlass.max(self.passes(rows), Int32(1))
        row_tile = index // passes
        first = (index - row_tile * passes) * columns
        return GroupPlace(group, row_tile, table.read("row", group) + first, cutlass.min(rows - first, columns))

    def output_of(self, thread: Int32, work_tile: Int32) -> TileOutput:
        """The destination of a work tile's sums. It also starts to load the inputs of the thread's epilogue."""
        place, out = self.place(work_tile), self.arguments.one.out
        first = out.pointer + Int64(place.row) * out.row_stride
        rows, asked = self.n(place.group), self.ask(thread, place)
        return TileOutput(place.row_tile, rows, place.columns, first, out.row_stride, (), asked)

    def ask(self, thread: Int32, place: GroupPlace) -> Asked:
        """Starts to load what a thread needs to store a work tile. Nothing waits for it before the mainloop ends."""
        cfg, routed, rows = self.config, self.arguments.routed, self.n(place.group)
        scalars = [
            tuple(device_scalar(x.pointer + place.group * x.stride) for x in of_product)
            for of_product in self.arguments.factors
        ]
        bias, row_factors, slots, column = [], [], [], div(thread, cfg.column_quads)
        quad_row = mod(thread, cfg.column_quads) * FLOATS
        if cfg.of_fp8:
            row_factors = self.ask_row_factors(place, quad_row)
        if cfg.routed.biased:
            row = place.row_tile * cfg.out_rows + quad_row
            matrix = routed.bias + Int64(place.group) * (rows * cfg.products)
            places = [cutlass.min(row + i, rows - 1) for i in range(FLOATS)]
            bias = [tuple(device_scalar(matrix + (p * rows + at)) for at in places) for p in range(cfg.products)]
        if cfg.routed.weighted:
            for i in range(0, cfg.columns, cfg.thread_columns):
                slots.append(self.slot(place.row + cutlass.min(column + i, place.columns - 1)))
        return Asked(tuple(scalars), tuple(bias), tuple(row_factors), tuple(slots))

    def ask_row_factors(self, place: GroupPlace, quad_row: Int32) -> list[tuple[Float32, ...]]:
        """Starts to load the factors of the weight's rows, of each product, for four columns of the output."""
        cfg = self.config
        row, padded = place.row_tile * cfg.rows + quad_row, SLAB_ROWS // cfg.products
        last = cute.ceil_div(self.n(place.group), padded) * SLAB_ROWS - 1
        if cfg.gate:
            # eight rows of the gate weight and eight of the up weight alternate
            row = row + div(quad_row, HALF_SLAB) * HALF_SLAB
        matrix = self.arguments.one.row_scales.weight + Int64(place.group) * (last + 1)
        return [
            tuple(device_scalar(matrix + cutlass.min(row + p * HALF_SLAB + i, last)) for i in range(FLOATS))
            for p in range(cfg.products)
        ]


@dataclass(frozen=True)
class RowCopies:
    """The copies of rows of x to shared memory, by one warp. shared: the address of the first stage's x."""

    groups: StreamGroups
    shared: Int32
    lane: Int32

    def addresses(self, place: GroupPlace) -> list[Int64]:
        """The address of the lane's first chunk in each of its rows. Rows beyond the last repeat the last row."""
        x, routed = self.groups.arguments.one.x, self.groups.arguments.routed
        found = []
        for i in range(self.groups.config.columns // LANE_ROWS):
            row = place.row + cutlass.min(self.row(i), place.columns - 1)
            if self.groups.config.gathered:
                row = self.groups.slot(row) // routed.top
            found.append((x.data + Int64(row) * x.row_stride).toint() + mod(self.lane, ROW_CHUNKS) * CHUNK)
        return found

    def row(self, i: int) -> Int32:
        """The lane's row in its ``i``-th copy."""
        return div(self.lane, ROW_CHUNKS) + i * LANE_ROWS

    def copies(self, segment: Segment, cursor: Int32) -> ThreadCopies:
        """The copies of a segment."""
        config, one = self.groups.config, self.groups.arguments.one
        place = self.groups.place(segment.work_tile)
        addresses, chunk = self.addresses(place), mod(self.lane, ROW_CHUNKS)

        def start(ring: Ring, stage: Int32, step: Int32) -> None:
            for tile in range(config.stage_tiles):
                k = (step * config.stage_tiles + tile) * TILE_K
                target = self.shared + (stage * config.stage_tiles + tile) * config.x_bytes
                there = k + chunk * (CHUNK // 2) < one.k
                for i, address in enumerate(addresses):
                    row = self.row(i)
                    # chunk c of row r lies at chunk c ^ r, as in a tile that TMA swizzles
                    at = target + row * ROW_BYTES + (chunk ^ mod(row, MMA_COLUMNS)) * CHUNK
                    valid = cutlass.select_(there & (row < place.columns), Int32(CHUNK), Int32(0))
                    copy_async(at, address + Int64(k) * 2, CHUNK, valid)
            mbarrier.arrive_after_copies(ring.full(stage))

        return ThreadCopies(segment.steps, start)


class GroupedStream(Stream):
    """The host function and the kernel of one :class:`GroupedStreamConfig`."""

    config: GroupedStreamConfig

    @cute.jit
    def __call__(self, arguments: GroupedStreamArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs."""
        cfg = self.config
        steps = steps_of_tile(arguments.one.weight.k_tiles // cfg.stage_tiles)
        self.kernel(steps, arguments._replace(ctas=None)).launch(
            grid=(1, 1, arguments.ctas),
            block=(cfg.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=bool(cfg.programmatic),
        )

    @cute.kernel
    def kernel(self, steps: StepsOfTile, arguments: GroupedStreamArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        _, _, cta = cute.arch.block_idx()
        _, _, ctas = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = self.allocate()
        table = SmemAllocator().allocate_array(Int64, cfg.table_bytes // 8, byte_alignment=16).toint()
        groups = StreamGroups(cfg, arguments, Table(cfg, table))
        wrong = Int32(0)
        if warp >= LOADING_WARPS:
            initialise_in_turn(memory.barriers, warp - LOADING_WARPS, cfg.warps)
        elif warp == 1:
            if cutlass.const_expr(cfg.programmatic != "x"):
                self.let_others_start()
            wrong = groups.fill_checked()
            if cutlass.const_expr(cfg.programmatic != "x"):
                groups.report(wrong)
        cute.arch.sync_threads()
        shares = shares_of_groups(groups.table.read("total"), steps, ctas, cfg.cut_cost)
        walk = Segments(shares, cta)
        if warp == 0:
            first = shares.segment(cta, Int32(0))
            self.load_weights(groups, memory, walk, first, self.weight_source(groups, first.work_tile))
        elif warp == 1:
            if cutlass.const_expr(cfg.programmatic == "x"):
                # the MMA warps write nothing before they have rows of x; the previous launch also writes the status
                self.let_others_start()
                groups.report(wrong)
            copies = RowCopies(groups, memory.x.address, mod(thread, WARP))
            fill_stages(copies.copies, memory.ring, walk)
        else:
            index, own = warp - LOADING_WARPS, thread - LOADING_WARPS * WARP
            place = Place(mod(index, cfg.warps_m), div(index, cfg.warps_m), mod(thread, WARP))
            output_of = partial(groups.output_of, own)
            sums = GroupSums(cfg, arguments.partials, shares, cta, memory.sums, own, output_of, groups)
            self.multiply(memory, walk, place, sums)
            if shares.whole == 0:
                sums.add_cut(own, WARP * cfg.warps)

    def let_others_start(self) -> None:
        """Waits for the previous launch if it may still run, and then lets the next one start."""
        if self.config.programmatic:
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    def weight_source(self, groups: StreamGroups, work_tile: Int32) -> WeightSource:
        """The addresses of a work tile's slabs in its first packed tile."""
        place = groups.place(work_tile)
        return self.source_in(groups.weight(place.group), groups.arguments.one.weight.k_tiles, place.row_tile)

"""The epilogue of the streaming GEMM: sums over warps in shared memory and over CTAs in global memory, and the output.

Sums of a work tile are fp32 (ROW, COLUMN), where columns are rows of x. A slot in global memory has ``config.columns``
columns of ``config.rows`` floats. A thread stores four neighbours in a row of the output. In a gated GEMM their sums
are four rows of each product, and the rows of the two products lie eight apart.

In ``reduction.WorkspaceExchange`` a thread adds what the same thread of another CTA stored, and a warp waits for one
flag after the other. Here many CTAs share few sums: every thread waits for a different flag, and then all share the
sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....ptx.memory import load_shared_floats, store_flag
from ....weight_layout import SLAB_ROWS
from ...arith import div, mod
from ...factors import Factor, scaled
from ..arguments import OUT_DTYPES, PartialSums
from ..gates import GATES
from ..reduction import FLOATS, quad, wait_for_flag
from .stream_config import MMA_COLUMNS, WARP, StreamConfig
from .stream_shares import Segment, Shares

SUMS_BARRIER = 2
"""The named barrier of the MMA warps."""


class TileOutput(NamedTuple):
    """Where the sums of a work tile go: ``columns`` rows of the output, from ``first`` on and ``stride`` elements
    apart, and in each row the columns of tile ``row_tile``, of ``rows`` columns in all. factors: those of each product.
    asked: what a thread has loaded for groups."""

    row_tile: Int32
    rows: Int32
    columns: Int32
    first: cute.Pointer
    stride: Int64
    factors: tuple[Factor, ...]
    asked: Any = None


@dataclass(frozen=True)
class Sums:
    """The state with which a thread adds up its CTA's work tiles. shared: the address of sums (ROW, COLUMN, WARP_K)."""

    config: StreamConfig
    partials: PartialSums
    shares: Shares
    cta: Int32
    shared: Int32
    thread: Int32
    output_of: Callable[[Int32], TileOutput]

    def together(self) -> None:
        """Synchronises the MMA warps."""
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=WARP * self.config.warps)

    def completed(self, out: TileOutput) -> TileOutput:
        """``out`` with what follows from loads that began with the work tile."""
        return out

    def after(self, segment: Segment) -> None:
        """Runs when the threads have finished a segment."""

    def put(self, acc: cute.Tensor, place: Any) -> None:
        """Writes a warp's accumulators (REGISTER, MMA_N, SLAB) to shared memory."""
        cfg = self.config
        self.together()  # what lay there has been read
        layout = cute.make_layout(
            (cfg.rows, cfg.columns, cfg.warps_k), stride=(1, cfg.sums_pitch, cfg.columns * cfg.sums_pitch)
        )
        pointer = cute.make_ptr(Float32, self.shared, cute.AddressSpace.smem, assumed_align=16)
        sums = cute.make_tensor(pointer, layout)  # (ROW, COLUMN, WARP_K)
        row, column = div(place.lane, 4), 2 * mod(place.lane, 4)
        for s in range(cfg.warp_slabs):
            first = (place.m * cfg.warp_slabs + s) * SLAB_ROWS + row
            for n in range(cfg.columns // MMA_COLUMNS):
                for i in range(4):
                    sums[first + 8 * (i // 2), n * MMA_COLUMNS + column + i % 2, place.k] = acc[i, n, s]
        self.together()

    @cute.jit
    def finish(self, segment: Segment, out: TileOutput):
        """Stores the sums from shared memory to the output or, if the work tile is cut, to this CTA's slot."""
        cfg = self.config
        if segment.count == self.shares.k_steps:
            for index in cutlass.range(self.thread, quads(out, cfg.out_rows), WARP * cfg.warps, unroll=1):
                row, column = self.coordinates(index, cfg.out_rows)
                self.store(out, row, column, [self.shared_sum(r, column) for r in self.weight_rows(row)])
        else:
            slot = self.slot(self.cta, Int32(segment.first == 0))
            for index in cutlass.range(self.thread, quads(out, cfg.rows), WARP * cfg.warps, unroll=1):
                row, column = self.coordinates(index, cfg.rows)
                target, values = self.in_slot(slot, row, column), self.shared_sum(row, column)
                for i in cutlass.range_constexpr(FLOATS):
                    target[i] = values[i]
            self.together()
            if self.thread == 0:
                store_flag(self.flag(self.cta, Int32(segment.first == 0)), Int32(1))

    def coordinates(self, index: Int32, rows: int) -> tuple[Int32, Int32]:
        """The first row, of ``rows`` rows, and the column of a thread's four sums."""
        quads = rows // FLOATS
        return mod(index, quads) * FLOATS, div(index, quads)

    def weight_rows(self, row: Int32) -> list[Int32]:
        """The first of the four rows of sums, of each product, that four columns of the output need."""
        if not self.config.gate:
            return [row]
        first = row + div(row, 8) * 8
        return [first, first + 8]

    def shared_sum(self, row: Int32, column: Int32) -> list[Float32]:
        """Four rows of a column, summed over the warps along K."""
        cfg = self.config
        address = self.shared + (column * cfg.sums_pitch + row) * 4
        parts = [load_shared_floats(address + w * (4 * cfg.columns * cfg.sums_pitch)) for w in range(cfg.warps_k)]
        total = parts[0]
        for part in parts[1:]:
            total = [a + b for a, b in zip(total, part)]
        return total

    def slot(self, cta: Int32, index: Int32) -> Int64:
        """The address of a slot: 1 of a CTA is for the work tile of which it has the first step, 0 for any other."""
        bytes_each = 4 * self.config.columns * self.config.rows
        return self.partials.workspace.toint() + (Int64(cta) * 2 + index) * bytes_each

    def flag(self, cta: Int32, index: Int32) -> Int64:
        return self.partials.flags.toint() + (Int64(cta) * 2 + index) * 4

    def in_slot(self, slot: Int64, row: Int32, column: Int32) -> cute.Tensor:
        return quad(slot + (column * self.config.rows + row) * 4)

    @cute.jit
    def add_cut(self, thread: Int32, threads: cutlass.Constexpr[int]):
        """Adds up, by ``threads`` threads, the work tile of which this CTA has the last step but not the first."""
        cfg, shares = self.config, self.shares
        start = shares.first_step(self.cta)
        work_tile = shares.work_tile_of(start)
        begin, end = work_tile * shares.k_steps, (work_tile + 1) * shares.k_steps
        if (start > begin) & (start + shares.cut_steps(self.cta) >= end):
            out, first = self.completed(self.output_of(work_tile)), self.cta
            while shares.first_step(first) > begin:
                first = first - 1
            for cta in cutlass.range(first + thread, self.cta + 1, threads, unroll=1):
                wait_for_flag(self.flag(cta, self.index_of(cta, begin)))
            self.meet(threads)
            for index in cutlass.range(thread, quads(out, cfg.out_rows), threads, unroll=1):
                row, column = self.coordinates(index, cfg.out_rows)
                total = cute.make_rmem_tensor((FLOATS, cfg.products), Float32)
                total.fill(0.0)
                for cta in cutlass.range(first, self.cta + 1, unroll=1):
                    slot = self.slot(cta, self.index_of(cta, begin))
                    parts = [self.in_slot(slot, r, column) for r in self.weight_rows(row)]
                    for product in cutlass.range_constexpr(cfg.products):
                        for i in cutlass.range_constexpr(FLOATS):
                            total[i, product] = total[i, product] + parts[product][i]
                self.store(out, row, column, [[total[i, p] for i in range(FLOATS)] for p in range(cfg.products)])
            for cta in cutlass.range(first + thread, self.cta + 1, threads, unroll=1):
                store_flag(self.flag(cta, self.index_of(cta, begin)), Int32(0))

    def index_of(self, cta: Int32, begin: Int32) -> Int32:
        """The slot in which ``cta`` has its part of the work tile that starts at step ``begin``."""
        return Int32(self.shares.first_step(cta) <= begin)

    def meet(self, threads: int) -> None:
        if threads == WARP:
            cute.arch.sync_warp()
        else:
            self.together()

    def joined(self, sums: list[Float32], i: int, column: Int32, out: TileOutput) -> Float32:
        """Element ``i`` of a thread's four, from the sum of each product."""
        values = [scaled(x, factor) for x, factor in zip(sums, out.factors)]
        return GATES[self.config.gate](values[0]) * values[1] if self.config.gate else values[0]

    @cute.jit
    def store(self, out: TileOutput, row: Int32, column: Int32, values: list):
        """Stores alpha · values, or gate(alpha · first) · (alpha · second): four neighbours in a row of the output."""
        cfg = self.config
        dtype = getattr(cutlass, OUT_DTYPES[cfg.out])
        numbers = cute.make_rmem_tensor(FLOATS, dtype)
        for i in cutlass.range_constexpr(FLOATS):
            numbers[i] = self.joined([x[i] for x in values], i, column, out).to(dtype)
        first = out.row_tile * cfg.out_rows + row
        target = out.first + (Int64(column) * out.stride + first)
        if cutlass.const_expr(cfg.vector) and first + FLOATS <= out.rows:
            aligned = target.align(FLOATS * dtype.width // 8)
            cute.autovec_copy(numbers, cute.make_tensor(aligned, cute.make_layout(FLOATS)))
        else:
            for i in cutlass.range_constexpr(FLOATS):
                if first + i < out.rows:
                    cute.make_tensor(target + i, cute.make_layout(1))[0] = numbers[i]


def quads(out: TileOutput, rows: int) -> Int32:
    """Quads of sums in the columns that exist, of ``rows`` rows each."""
    return out.columns * (rows // FLOATS)

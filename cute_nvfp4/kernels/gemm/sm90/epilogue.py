"""The epilogue of a warpgroup, from its accumulators: split-K or stream-K sums, alpha, gate and bias, and the stores.

Columns of the MMA are rows of x. A thread has rows g and g + 8 of its warp's slab in pairs of registers. In a gated
GEMM row g belongs to the gate product and row g + 8 to the up product: the pair of the gate becomes the output, and the
slab has eight columns of the output instead of sixteen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ....ptx.encode import f32x2_to_16bit
from ....ptx.matrix import store_matrices_transposed
from ....ptx.memory import load_flag, load_global, load_shared, store_flag, store_global
from ....ptx.move import f32_from_bits
from ....weight_layout import SLAB_ROWS
from ...factors import Factor, apply_shift
from ..arguments import OUT_DTYPES
from ..epilogue import device_scalar
from ..gates import GATES
from ..reduction import FLOATS, store_quad
from ..tile_scheduler import StaticScheduler, WorkTile
from .arguments import WgmmaArguments
from .config import MMA_ROWS, WARPGROUP, WgmmaConfig
from .exchange import ClusterSums
from .row_factors import RowFactors, row_factors

WARP = 32
VECTOR_BYTES = 16


class Corner(NamedTuple):
    """Where a warp's slab begins in the output: the matrix, the first row of the weight, the first row of x."""

    matrix: cute.Pointer
    row: Int32
    x_row: Int32


@dataclass(frozen=True)
class WarpgroupEpilogue:
    """The state with which a thread of a warpgroup stores its accumulators. factors: the factor of each product
    (``sum_factors``). shared: the address of the transposing buffer. thread: the thread within the warpgroup. rows: the
    factors of rows, once loaded."""

    config: WgmmaConfig
    arguments: WgmmaArguments
    x_rows: Int32
    factors: tuple[Factor, ...]
    shared: Int32
    scheduler: StaticScheduler
    group: Int32
    thread: Int32
    sums: ClusterSums
    rows: RowFactors | None = None

    def of_tile(self, tile: WorkTile) -> WarpgroupEpilogue:
        """The epilogue of a work tile. In an FP8 product it starts to load the factors of the tile's rows."""
        cfg = self.config
        if not cfg.fp8:
            return self
        row = self.first_packed_row(tile) + self.thread % WARP // 4
        columns = tile.n * cfg.tile_n, self.x_rows
        place = self.shared + cfg.epilogue_bytes + self.group * cfg.factor_pitch
        return replace(self, rows=row_factors(cfg, self.arguments.row_scales, row, columns, place, self.thread))

    def share_factors(self) -> None:
        """Puts the loaded factors of rows where the whole warpgroup finds them."""
        if self.rows is not None:
            self.rows.share(self.group + 1)

    @cute.jit
    def store(self, acc: cute.Tensor, tile: WorkTile):
        """Stores a finished work tile, or writes this CTA's partial sums of it."""
        if cutlass.const_expr(self.config.scheduler == "stream_k"):
            if tile.k_first + tile.k_count < self.scheduler.k_tiles:
                self.write_partial(acc)
            else:
                self.add_partials(acc, tile)
                self.share_factors()
                self.store_tile(acc, tile, 0, self.config.tile_n)
        elif cutlass.const_expr(self.config.scheduler == "helped"):
            if self.scheduler.helps:
                self.write_help(acc, tile)
            else:
                self.finish_tile(acc, tile)
        else:
            self.finish_tile(acc, tile)

    @cute.jit
    def finish_tile(self, acc: cute.Tensor, tile: WorkTile):
        """Stores a work tile of which this CTA, or its cluster, has all k-tiles except those of a helper."""
        if cutlass.const_expr(self.config.k_parts > 1):
            self.share_tile(acc, tile)
        else:
            self.add_help(acc, tile, 0)
            self.share_factors()
            self.store_tile(acc, tile, 0, self.config.tile_n)

    @property
    def slab_parts(self) -> int:
        """Groups of eight columns of the output in a slab."""
        return SLAB_ROWS // 8 // self.config.products

    def first_row(self, tile: WorkTile) -> Int32:
        """The first column of the output in the warp's slab."""
        return tile.m * self.config.out_rows + self.slab * (8 * self.slab_parts)

    def first_packed_row(self, tile: WorkTile) -> Int32:
        """The slab's first row in the packed weight. For a slab beyond the end it is the first row of the last slab."""
        count = cute.ceil_div(self.arguments.weight.rows, 8 * self.slab_parts) * SLAB_ROWS
        return cutlass.min(tile.m * self.config.tile_m + self.slab * SLAB_ROWS, count - SLAB_ROWS)

    @property
    def slab(self) -> Int32:
        """The index of the warp's slab in the work tile."""
        group = self.group % self.config.row_groups if self.config.k_groups > 1 else self.group
        return group * (MMA_ROWS // SLAB_ROWS) + self.thread // WARP

    @cute.jit
    def share_tile(self, acc: cute.Tensor, tile: WorkTile):
        """Stores this warpgroup's columns of a tile shared along K, one epilogue tile after the other as sums
        arrive."""
        cfg = self.config
        self.sums.join(acc)
        self.share_factors()
        if cutlass.const_expr(cfg.split_k > 1):
            self.sums.send(acc)
        for part in cutlass.range_constexpr(cfg.k_parts):
            if self.sums.part == part:
                self.add_help(acc, tile, part)
                for index in cutlass.range_constexpr(cfg.part_epilogue_tiles):
                    begin = part * cfg.part_columns + index * cfg.sums_columns
                    if cutlass.const_expr(cfg.split_k > 1):
                        self.sums.receive(acc, begin)
                    self.store_tile(acc, tile, begin, begin + cfg.sums_columns)

    @cute.jit
    def store_tile(self, acc: cute.Tensor, tile: WorkTile, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]):
        """Stores alpha · acc, or both products joined by the gate, for columns ``begin`` to ``end`` of the tile."""
        cfg = self.config
        if cutlass.const_expr(cfg.fp8):
            self.rows.scale(acc, begin, end)
        self.shift(acc, begin, end)
        if cutlass.const_expr(not cfg.gate):
            self.scale(acc, begin, end)
        if cutlass.const_expr(cfg.bias):
            self.add_bias(acc, tile, begin, end)
        self.store_columns(acc, tile, begin, end)

    def shift(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Multiplies these columns by the power of two that does not fit into ``alpha`` of the factors."""
        registers = range(begin // 2, end // 2)
        for p, factor in enumerate(self.factors):
            apply_shift(acc, factor, registers if len(self.factors) == 1 else [i for i in registers if i // 2 % 2 == p])

    def scale(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Multiplies columns ``begin`` to ``end`` of the accumulators by alpha."""
        for i in range(begin // 2, end // 2):
            acc[i] = acc[i] * self.factors[0].alpha

    def join(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Writes gate(alpha · first) · (alpha · second) of these columns over the registers of the first product."""
        gate, (alpha, other) = GATES[self.config.gate], (x.alpha for x in self.factors)
        for i in range(begin // 2, end // 2, 4):
            for j in range(i, i + 2):
                acc[j] = gate(acc[j] * alpha) * (acc[j + 2] * other)

    @cute.jit
    def store_columns(
        self, acc: cute.Tensor, tile: WorkTile, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]
    ):
        """Stores columns of the MMA as rows of the output. Warps transpose 16-byte vectors through shared memory."""
        cfg, out = self.config, self.arguments.out
        row = self.first_row(tile)
        corner = Corner(out.pointer + Int64(tile.batch) * out.batch_stride, row, tile.n * cfg.tile_n)
        if cutlass.const_expr(cfg.vector):
            for column in cutlass.range_constexpr(begin, end, cfg.epilogue_columns):
                # epilogue tile by epilogue tile: one warp computes exponentials while another stores
                if cutlass.const_expr(cfg.gate):
                    self.join(acc, column, min(column + cfg.epilogue_columns, end))
                self.store_vectors(acc, column, end, corner)
        else:
            if cutlass.const_expr(cfg.gate):
                self.join(acc, begin, end)
            self.store_elements(acc, begin, end, corner)

    @cute.jit
    def add_bias(self, acc: cute.Tensor, tile: WorkTile, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]):
        """Adds the bias of each row of the MMA, of which a thread has two."""
        cfg = self.config
        row, bias = self.first_row(tile) + self.thread % WARP // 4, self.arguments.bias
        pointer = bias.pointer
        if cutlass.const_expr(cfg.batched):
            pointer = pointer + Int64(tile.batch) * bias.batch_stride
        for half in cutlass.range_constexpr(2):
            number = Float32(0.0)
            if row + 8 * half < self.arguments.weight.rows:
                number = device_scalar(pointer + (row + 8 * half)).to(Float32)
            for i in cutlass.range_constexpr(begin // 8, end // 8):
                for j in cutlass.range_constexpr(2):
                    at = 4 * i + 2 * half + j
                    acc[at] = acc[at] + number

    @cute.jit
    def store_vectors(
        self, acc: cute.Tensor, column: cutlass.Constexpr[int], end: cutlass.Constexpr[int], corner: Corner
    ):
        """Stores ``epilogue_columns`` columns of a warp's slab: sixteen columns whose 16 rows are two vectors of 16
        bytes in the output or, in a gated GEMM, 32 columns whose eight rows are one vector."""
        cfg, rows, parts = self.config, self.arguments.weight.rows, self.slab_parts
        lane, size = self.thread % WARP, cute.size(acc)
        own = self.shared + (self.group * 4 + self.thread // WARP) * (cfg.epilogue_columns * cfg.epilogue_pitch)
        # registers of each eight columns, for all ``parts`` of the rows; beyond the last register it repeats the last,
        # and the row limit below keeps those values out of the output
        at = [min((column // 8 + i // parts) * 4 + 2 * (i % parts), size - 2) for i in range(4)]
        words = [f32x2_to_16bit(acc[i], acc[i + 1], cfg.out) for i in at]
        matrix = lane // 8
        place = own + (lane % 8 + matrix // parts * 8) * cfg.epilogue_pitch + matrix % parts * VECTOR_BYTES
        store_matrices_transposed(place, words)
        cute.arch.sync_warp()
        vector = load_shared(own + lane // parts * cfg.epilogue_pitch + lane % parts * VECTOR_BYTES, VECTOR_BYTES)
        n, m = corner.row + lane % parts * 8, corner.x_row + column + lane // parts
        limit = self.x_rows
        if cutlass.const_expr(column + cfg.epilogue_columns > end):
            limit = cutlass.min(limit, corner.x_row + end)
        target = self.target(corner.matrix, m, n)
        if m < limit:
            if n + 8 <= rows:
                self.put(target, vector)
            elif n < rows:
                for i in cutlass.range_constexpr(8):
                    if n + i < rows:
                        _store_half(target + i, vector[i // 2] >> (16 * (i % 2)))
        cute.arch.sync_warp()

    def target(self, first: cute.Pointer, m: Int32, n: Int32) -> cute.Pointer:
        """The pointer to column ``n`` of row ``m`` of the output."""
        return first + (Int64(m) * self.arguments.out.row_stride + n)

    def put(self, target: cute.Pointer, vector: list[Uint32]) -> None:
        """Stores a vector of eight 16-bit elements of the output."""
        store_global(target.toint(), vector)

    @cute.jit
    def store_elements(
        self, acc: cute.Tensor, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int], corner: Corner
    ):
        """Stores one element at a time. Eight lanes store neighbours of a row of the output."""
        cfg, rows = self.config, self.arguments.weight.rows
        dtype = getattr(cutlass, OUT_DTYPES[cfg.out])
        lane = self.thread % WARP
        for i in cutlass.range_constexpr(begin // 8, end // 8):
            for j in cutlass.range_constexpr(2 * self.slab_parts):
                # registers of eight columns of an m64n8 accumulator: (row, column), (row, column + 1), (row + 8, …)
                n, m = corner.row + lane // 4 + 8 * (j // 2), corner.x_row + 8 * i + 2 * (lane % 4) + j % 2
                if (n < rows) & (m < self.x_rows):
                    target = corner.matrix + (Int64(m) * self.arguments.out.row_stride + n)
                    cute.make_tensor(target, cute.make_layout(1))[0] = acc[4 * i + j].to(dtype)

    # A slot of partial sums is fp32 (4, THREAD, QUAD); each warpgroup of each CTA has one.
    # ``reduction.WorkspaceExchange`` adds the slots of one cluster after the other: here that took 23, 27 and 33.6 us
    # for 32, 64 and 128 rows of x. Polling all flags at once with several loads in flight takes 20.5, 24.7 and 32.6 us
    # (H200, benchmarks/records/hopper_tried.md).

    def cta(self, worker: Int32) -> Int32:
        """The index of the CTA in cluster ``worker`` that has the same rows of the weight as this one."""
        return worker * self.config.cluster_rows + self.scheduler.place.x

    def slot_at(self, index: Int32) -> Int64:
        """The address of the thread's first sums in slot ``index`` of its warpgroup."""
        floats = MMA_ROWS * self.config.tile_n
        index = Int64(index) * self.config.warpgroups + self.group
        return self.arguments.partials.workspace.toint() + index * (4 * floats) + self.thread * (4 * FLOATS)

    def flag_at(self, index: Int32) -> Int64:
        """The address of flag ``index`` of the warpgroup."""
        return self.arguments.partials.flags.toint() + Int64(index * self.config.warpgroups + self.group) * 4

    def slot(self, worker: Int32) -> Int64:
        """The address of the thread's first sums in the slot of cluster ``worker``."""
        return self.slot_at(self.cta(worker))

    def flag(self, worker: Int32) -> Int64:
        return self.flag_at(self.cta(worker))

    @cute.jit
    def write_partial(self, acc: cute.Tensor):
        """Writes this CTA's partial sums to its slot, and raises its flag."""
        self.write_slot(acc, self.slot(self.scheduler.place.worker))
        self.barrier()
        if self.thread == 0:
            store_flag(self.flag(self.scheduler.place.worker), Int32(1))

    def write_slot(self, acc: cute.Tensor, slot: Int64) -> None:
        for i in range(cute.size(acc) // FLOATS):
            store_quad(slot + i * (4 * FLOATS * WARPGROUP), [acc[FLOATS * i + j] for j in range(FLOATS)])

    @cute.jit
    def contributors(self, missing: Int32) -> Int32:
        """The number of clusters before this one that have the first ``missing`` k-tiles of its work tile."""
        count = Int32(0)
        while missing > 0:
            count = count + 1
            missing = missing - self.scheduler.share_of(self.scheduler.place.worker - count).count
        return count

    @cute.jit
    def add_partials(self, acc: cute.Tensor, tile: WorkTile):
        """Adds the sums of the clusters before this one that have the work tile's first k-tiles."""
        worker = self.scheduler.place.worker
        count = self.contributors(tile.k_first)
        if count > 0:
            # poll all flags at once: each load has the latency of global memory
            for i in cutlass.range(self.thread, count, WARPGROUP, unroll=1):
                while load_flag(self.flag(worker - 1 - i)) == 0:  # reduction's wait_for_flag is three instructions more
                    pass
                # lowered without a fence: this launch does not raise it again, and the next starts after this one ends
                store_global(self.flag(worker - 1 - i), [Uint32(0)])
            self.barrier()
            for i in cutlass.range(1, count + 1, unroll=self.config.slots_ahead):
                self.add_slot(acc, self.slot(worker - i), 0, cute.size(acc) // FLOATS)

    # Helpers use the same slots, one for each warpgroup of each work tile, with a flag for each part of the columns.

    def help_flag(self, tile: WorkTile, part: int) -> Int64:
        return self.flag_at(self.scheduler.index(tile) * self.config.split_k + part)

    def help_slot(self, tile: WorkTile) -> Int64:
        return self.slot_at(self.scheduler.index(tile))

    @cute.jit
    def write_help(self, acc: cute.Tensor, tile: WorkTile):
        self.write_slot(acc, self.help_slot(tile))
        self.barrier()
        if self.thread < self.config.split_k:
            store_flag(self.help_flag(tile, self.thread), Int32(1))

    @cute.jit
    def add_help(self, acc: cute.Tensor, tile: WorkTile, part: cutlass.Constexpr[int]):
        """Adds the helper's sums of this CTA's columns, if there are helpers."""
        if cutlass.const_expr(self.config.scheduler == "helped"):
            if self.thread == 0:
                flag = self.help_flag(tile, part)
                while load_flag(flag) == 0:
                    pass
                # lowered without a fence, as in stream-K
                store_global(flag, [Uint32(0)])
            cute.arch.sync_warp()
            self.barrier()
            quads = self.config.part_columns // 8
            self.add_slot(acc, self.help_slot(tile), part * quads, quads)

    def add_slot(self, acc: cute.Tensor, slot: Int64, begin: int, count: int) -> None:
        """Adds ``count`` quads of another CTA's sums from quad ``begin`` on, with as many loads in flight as registers
        allow."""
        c = self.config
        wide = c.in_tensor_memory and c.tile_n > 192
        ahead = 16 if c.warpgroups == 2 and c.ctas_per_sm == 1 and not wide else 8
        for first in range(begin, begin + count, ahead):
            quads = range(first, min(first + ahead, begin + count))
            received = [load_global(slot + i * (4 * FLOATS * WARPGROUP), 4 * FLOATS) for i in quads]
            for i, words in zip(quads, received):
                for j in range(FLOATS):
                    acc[FLOATS * i + j] = acc[FLOATS * i + j] + f32_from_bits(words[j])

    def barrier(self) -> None:
        """Synchronises the threads of the warpgroup."""
        cute.arch.barrier(barrier_id=self.group + 1, number_of_threads=WARPGROUP)


def _store_half(target: cute.Pointer, word: Uint32) -> None:
    """Stores the low 16 bits of a word."""
    pointer = cute.recast_ptr(target, dtype=cutlass.Uint16)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = word.to(cutlass.Uint16)

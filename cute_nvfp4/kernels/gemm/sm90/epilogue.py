"""From the registers of a warpgroup to the output: partial sums, alpha, and rows of x that are columns of the MMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....ptx.memory import load_flag, store_flag
from ....weight_layout import WEIGHT_FACTOR
from ..arguments import OUT_DTYPES
from ..epilogue import device_scalar
from ..tile_scheduler import StaticScheduler, WorkTile
from .arguments import WgmmaArguments
from .config import MMA_ROWS, WARPGROUP, WgmmaConfig

FLOATS = 4


@dataclass(frozen=True)
class Epilogue:
    """What a thread of a warpgroup needs to store its accumulators. thread: in the warpgroup."""

    config: WgmmaConfig
    arguments: WgmmaArguments
    x_rows: Int32
    shared: Int32
    scheduler: StaticScheduler
    group: Int32
    thread: Int32

    @cute.jit
    def store(self, acc: cute.Tensor, tile: WorkTile):
        """Stores a work tile, or adds to its partial sums."""
        if cutlass.const_expr(self.config.scheduler == "stream_k"):
            if tile.k_first + tile.k_count < self.scheduler.k_tiles:
                self.write_partial(acc)
            else:
                self.add_partials(acc, tile)
                self.store_tile(acc, tile)
        else:
            self.store_tile(acc, tile)

    def alpha(self) -> Float32:
        alpha = self.arguments.alpha * WEIGHT_FACTOR
        for factor in self.arguments.factors:
            alpha = alpha * device_scalar(factor)
        return alpha

    @cute.jit
    def store_tile(self, acc: cute.Tensor, tile: WorkTile):
        """alpha · acc, element by element."""
        cfg, out, rows = self.config, self.arguments.out, self.arguments.weight.rows
        alpha = self.alpha()
        dtype = getattr(cutlass, OUT_DTYPES[cfg.out])
        lane, warp = self.thread % 32, self.thread // 32
        row = tile.m * cfg.tile_m + self.group * MMA_ROWS + warp * 16 + lane // 4
        column = tile.n * cfg.tile_n + 2 * (lane % 4)
        first = out.pointer + Int64(tile.batch) * out.batch_stride
        for i in cutlass.range_constexpr(cfg.tile_n // 8):
            for j in cutlass.range_constexpr(4):
                # registers of an m64n8 part: (row, column), (row, column + 1), (row + 8, …)
                n, m = row + 8 * (j // 2), column + 8 * i + j % 2
                if (n < rows) & (m < self.x_rows):
                    target = cute.make_tensor(first + (Int64(m) * out.row_stride + n), cute.make_layout(1))
                    target[0] = (acc[4 * i + j] * alpha).to(dtype)

    # partial sums: fp32 (4, THREAD, QUAD) for each warpgroup of each CTA

    def cta(self, worker: Int32) -> Int32:
        """The CTA of cluster ``worker`` that has this one's rows."""
        return worker * self.config.cluster_rows + self.scheduler.place.x

    def slot(self, worker: Int32) -> Int64:
        floats = MMA_ROWS * self.config.tile_n
        index = Int64(self.cta(worker)) * self.config.warpgroups + self.group
        return self.arguments.partials.workspace.toint() + index * (4 * floats) + self.thread * (4 * FLOATS)

    def flag(self, worker: Int32) -> Int64:
        index = self.cta(worker) * self.config.warpgroups + self.group
        return self.arguments.partials.flags.toint() + Int64(index) * 4

    @cute.jit
    def write_partial(self, acc: cute.Tensor):
        slot = self.slot(self.scheduler.place.worker)
        for i in cutlass.range_constexpr(cute.size(acc) // FLOATS):
            target = _quad(slot + i * (4 * FLOATS * WARPGROUP))
            for j in cutlass.range_constexpr(FLOATS):
                target[j] = acc[FLOATS * i + j]
        self.barrier()
        if self.thread == 0:
            store_flag(self.flag(self.scheduler.place.worker), Int32(1))

    @cute.jit
    def add_partials(self, acc: cute.Tensor, tile: WorkTile):
        """Adds the sums of the CTAs before this one that have the work tile's first k-tiles."""
        worker, missing = self.scheduler.place.worker, tile.k_first
        while missing > 0:
            worker = worker - 1
            missing = missing - self.scheduler.share_of(worker).count
            if self.thread == 0:
                raised = load_flag(self.flag(worker))
                while raised == 0:
                    raised = load_flag(self.flag(worker))
                store_flag(self.flag(worker), Int32(0))
            self.barrier()
            slot = self.slot(worker)
            for i in cutlass.range_constexpr(cute.size(acc) // FLOATS):
                source = _quad(slot + i * (4 * FLOATS * WARPGROUP))
                for j in cutlass.range_constexpr(FLOATS):
                    acc[FLOATS * i + j] = acc[FLOATS * i + j] + source[j]

    def barrier(self) -> None:
        """All threads of the warpgroup."""
        cute.arch.barrier(barrier_id=self.group + 1, number_of_threads=WARPGROUP)


def _quad(address: Any) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(FLOATS))

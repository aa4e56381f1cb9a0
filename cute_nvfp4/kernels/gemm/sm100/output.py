"""From registers to the output in global memory: by TMA through shared memory, or by each thread's own stores.

A thread has ``config.epi_tile_n`` neighbours of a row. Along N they are contiguous in a row-major output: TMA turns 128
such rows into one box, and clips it at the output's edge; without TMA a thread stores sixteen bytes at a time. Along M
the 32 threads of a warp have 32 neighbours of a column-major output, so plain stores fill whole sectors by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ..arguments import Output
from ..config import CTA_ROWS, QUANTIZED, GemmConfig
from ..epilogue import OUT_TYPES, OutputMatrix, Position
from .memory_plan import OUT_STAGES
from .operands import TmaCopy
from .quantized_output import QuantizedStore, global_scaling
from .warp_roles import ROLES

STORE_BARRIER = 2
"""Named barrier of the epilogue warps."""
VECTOR_BYTES = 16


def staged_layout(config: GemmConfig) -> cute.ComposedLayout:
    """Epilogue tiles in shared memory: (EPI_TILE_M, EPI_TILE_N, STAGE)."""
    tile = (CTA_ROWS, config.epi_tile_n)
    return blackwell.make_smem_layout_epi(OUT_TYPES[config.out], LayoutEnum.ROW_MAJOR, tile, OUT_STAGES)


def describe_store(config: GemmConfig, out: Output, m: Int32, n: Int32, batch: Int32) -> TmaCopy:
    """TMA store of epilogue tiles of a row-major output."""
    unit = VECTOR_BYTES // config.out_bytes
    strides = (cute.assume(out.stride, unit), 1, cute.assume(out.batch_stride, unit))
    tensor = cute.make_tensor(out.pointer, cute.make_layout((m, n, batch), stride=strides))  # (M, N, L)
    one = cute.slice_(staged_layout(config), (None, None, 0))
    made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, one, (CTA_ROWS, config.epi_tile_n))
    return TmaCopy(made[0], made[1])


def rounded(config: GemmConfig, values: cute.Tensor) -> cute.Tensor:
    """fp32 registers as the dtype of the output."""
    result = cute.make_rmem_tensor(values.layout, OUT_TYPES[config.out])
    result.store(values.load().to(OUT_TYPES[config.out]))
    return result


@dataclass(frozen=True)
class ColumnStore:
    """A column-major output: every thread stores its own numbers."""

    config: GemmConfig

    @cute.jit
    def write(self, values: cute.Tensor, at: Position, out: OutputMatrix, buffer: cutlass.Constexpr[int], warp: Int32):
        numbers = rounded(self.config, values)
        first = out.pointer + (Int64(at.batch) * out.batch_stride + at.row + Int64(at.column) * out.stride)
        for i in cutlass.range_constexpr(self.config.epi_tile_n):
            if (at.row < out.m) & (at.column + i < out.n):
                cute.make_tensor(first + i * out.stride, cute.make_layout(1))[0] = numbers[i]


@dataclass(frozen=True)
class RowStore:
    """A row-major output: sixteen bytes at a time where the rows are aligned, the rest element by element."""

    config: GemmConfig

    @cute.jit
    def write(self, values: cute.Tensor, at: Position, out: OutputMatrix, buffer: cutlass.Constexpr[int], warp: Int32):
        numbers = rounded(self.config, values)
        first = out.pointer + (Int64(at.batch) * out.batch_stride + Int64(at.row) * out.stride + at.column)
        vector = VECTOR_BYTES // self.config.out_bytes if self.config.vector else 1
        for i in cutlass.range_constexpr(0, self.config.epi_tile_n, vector):
            inside = (at.row < out.m) & (at.column + i + vector <= out.n)
            if inside:
                target = cute.make_tensor((first + i).align(vector * self.config.out_bytes), cute.make_layout(vector))
                cute.autovec_copy(cute.make_tensor(numbers.iterator + i, cute.make_layout(vector)), target)
            elif at.row < out.m:
                for j in cutlass.range_constexpr(vector - 1):
                    if at.column + i + j < out.n:
                        cute.make_tensor(first + (i + j), cute.make_layout(1))[0] = numbers[i + j]


def _together() -> None:
    pipeline.NamedBarrier(barrier_id=STORE_BARRIER, num_threads=ROLES.epilogue_threads).arrive_and_wait()


@dataclass(frozen=True)
class TmaStore:
    """A row-major output, through shared memory: all threads write their rows to a buffer, one has it stored."""

    config: GemmConfig
    atom: cute.CopyAtom
    staged: cute.Tensor  # (EPI_TILE_M, EPI_TILE_N, STAGE)
    source: cute.Tensor  # ((atom, rest), STAGE)
    target: cute.Tensor  # ((atom, rest), REST_M, REST_N, L)
    thread: Int32

    @cute.jit
    def write(self, values: cute.Tensor, at: Position, out: OutputMatrix, buffer: cutlass.Constexpr[int], warp: Int32):
        config = self.config
        cute.autovec_copy(rounded(config, values), self.staged[self.thread, None, buffer])
        cute.arch.fence_proxy("async.shared", space="cta")
        _together()
        # with an odd number of epilogue tiles the next work tile starts with the buffer that this one ended with
        pending = OUT_STAGES - 1 if config.slice_n // config.epi_tile_n % OUT_STAGES == 0 else 0
        if warp == 0:
            at_tile = (None, at.row // CTA_ROWS, at.column // config.epi_tile_n, at.batch)
            cute.copy(self.atom, self.source[None, buffer], self.target[at_tile])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        _together()

    @cute.jit
    def finish(self, warp: Int32):
        """Shared memory must stay until TMA has read it."""
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def tma_store(config: GemmConfig, copy: TmaCopy, base: cute.Pointer, thread: Int32) -> TmaStore:
    """``base``: of the epilogue tiles in shared memory."""
    layout = staged_layout(config)
    pointer = cute.recast_ptr(base.align(1024), swizzle_=layout.inner, dtype=OUT_TYPES[config.out])
    staged = cute.make_tensor(pointer, layout.outer)  # (EPI_TILE_M, EPI_TILE_N, STAGE)
    # (EPI_TILE_M, EPI_TILE_N, REST_M, REST_N, L)
    tiles = cute.local_tile(copy.tensor, (CTA_ROWS, config.epi_tile_n), (None, None, None))
    source, target = cpasync.tma_partition(
        copy.atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TmaStore(config, copy.atom, staged, source, target, thread)


Store = ColumnStore | RowStore | TmaStore | QuantizedStore


def make_store(
    config: GemmConfig, out: Output, copy: TmaCopy | None, base: cute.Pointer | None, thread: Int32
) -> Store:
    """How the output of ``config`` is stored."""
    if config.out == QUANTIZED:
        return QuantizedStore(config, out.scale, global_scaling(out.global_scale))
    if config.store == "tma":
        return tma_store(config, copy, base, thread)
    return (RowStore if config.out_major == "n" else ColumnStore)(config)

"""From registers to the output in global memory: by TMA through shared memory, or by each thread's own stores.

A thread has ``config.piece`` neighbours of a row. Along N they are contiguous in a row-major output: TMA turns 128
such rows into one box, and clips it at the output's edge; without TMA a thread stores sixteen bytes at a time. Along M
the 32 threads of a warp have 32 neighbours of a column-major output, so plain stores fill whole sectors by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ..config import CTA_ROWS, QUANTIZED, GemmConfig
from . import quantized_output as quantized
from .memory_plan import OUT_STAGES
from .operands import OUT_TYPES
from .warp_roles import ROLES

STORE_BARRIER = 2
"""Named barrier of the epilogue warps."""
VECTOR_BYTES = 16


@dataclass
class Output:
    """(M, N, L) in global memory. ``stride``: elements from one row (or column, if those are contiguous) to the next.

    atom, tensor: TMA store and its tensor; staged: base address of the pieces in shared memory (store "tma" only).
    quantized: pointers to scales and global scale of a quantized output.
    """

    pointer: Any
    m: Any
    n: Any
    stride: Any
    batch_stride: Any
    atom: Any = None
    tensor: Any = None
    staged: Any = None
    quantized: Any = ()


def staged_layout(config: GemmConfig) -> cute.ComposedLayout:
    """Pieces of output in shared memory: (EPI_M, EPI_N, STAGE)."""
    tile = (CTA_ROWS, config.piece)
    return blackwell.make_smem_layout_epi(OUT_TYPES[config.out], LayoutEnum.ROW_MAJOR, tile, OUT_STAGES)


@cute.jit
def describe_store(config: cutlass.Constexpr[GemmConfig], pointer: cute.Pointer, m, n, batch, stride, batch_stride):
    """TMA store of pieces of a row-major output: (atom, tensor)."""
    unit = VECTOR_BYTES // config.out_bytes
    strides = (cute.assume(stride, unit), 1, cute.assume(batch_stride, unit))
    tensor = cute.make_tensor(pointer, cute.make_layout((m, n, batch), stride=strides))
    piece = cute.slice_(staged_layout(config), (None, None, 0))
    made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, piece, (CTA_ROWS, config.piece))
    return made[0], made[1]


def make_writer(config: GemmConfig, out: Output) -> tuple:
    """What :func:`write` needs of CuTe: (source ((atom, rest), STAGE), target ((atom, rest), REST_M, REST_N, L)); or
    what a quantized output needs of its global scale."""
    if config.out == QUANTIZED:
        return quantized.scaling(out.quantized[1])
    if config.store != "tma":
        return ()
    layout = staged_layout(config)
    pointer = cute.recast_ptr(out.staged.align(1024), swizzle_=layout.inner, dtype=OUT_TYPES[config.out])
    staged = cute.make_tensor(pointer, layout.outer)  # (EPI_M, EPI_N, STAGE)
    pieces = cute.local_tile(out.tensor, (CTA_ROWS, config.piece), (None, None, None))
    source, target = cpasync.tma_partition(
        out.atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(pieces, 0, 2)
    )
    return staged, source, target


@cute.jit
def write(
    config: cutlass.Constexpr[GemmConfig],
    out: Output,
    writer: tuple,
    values: cute.Tensor,
    place: tuple,
    buffer: cutlass.Constexpr[int],
    thread: Int32,
    warp: Int32,
):
    """Stores a piece. values: fp32 registers; place: (row of this thread, first column, batch)."""
    if cutlass.const_expr(config.out == QUANTIZED):
        quantized.write_blocks(config, out, writer, values, place)
    else:
        write_values(config, out, writer, values, place, buffer, thread, warp)


@cute.jit
def write_values(
    config: cutlass.Constexpr[GemmConfig],
    out: Output,
    writer: tuple,
    values: cute.Tensor,
    place: tuple,
    buffer: cutlass.Constexpr[int],
    thread: Int32,
    warp: Int32,
):
    """Stores a piece, each number rounded to the dtype of the output."""
    row, column, batch = place
    rounded = cute.make_rmem_tensor(cute.make_layout(config.piece), OUT_TYPES[config.out])
    rounded.store(values.load().to(OUT_TYPES[config.out]))
    if cutlass.const_expr(config.store == "tma"):
        write_tma(config, out, writer, rounded, place, buffer, thread, warp)
    elif cutlass.const_expr(config.out_major == "n"):
        write_row(config, out, rounded, row, column, batch)
    else:
        first = out.pointer + (Int64(batch) * out.batch_stride + row + Int64(column) * out.stride)
        for i in cutlass.range_constexpr(config.piece):
            if (row < out.m) & (column + i < out.n):
                cute.make_tensor(first + i * out.stride, cute.make_layout(1))[0] = rounded[i]


@cute.jit
def write_row(config: cutlass.Constexpr[GemmConfig], out: Output, rounded: cute.Tensor, row, column, batch):
    """A thread's piece of a row: sixteen bytes at a time where the rows are aligned, the rest element by element."""
    first = out.pointer + (Int64(batch) * out.batch_stride + Int64(row) * out.stride + column)
    unit = VECTOR_BYTES // config.out_bytes if config.vector else 1
    for i in cutlass.range_constexpr(0, config.piece, unit):
        inside = (row < out.m) & (column + i + unit <= out.n)
        if inside:
            target = cute.make_tensor((first + i).align(unit * config.out_bytes), cute.make_layout(unit))
            cute.autovec_copy(cute.make_tensor(rounded.iterator + i, cute.make_layout(unit)), target)
        elif row < out.m:
            for j in cutlass.range_constexpr(unit - 1):
                if column + i + j < out.n:
                    cute.make_tensor(first + (i + j), cute.make_layout(1))[0] = rounded[i + j]


def _together() -> None:
    pipeline.NamedBarrier(barrier_id=STORE_BARRIER, num_threads=ROLES.epilogue_threads).arrive_and_wait()


@cute.jit
def write_tma(
    config: cutlass.Constexpr[GemmConfig],
    out: Output,
    writer: tuple,
    rounded: cute.Tensor,
    place: tuple,
    buffer: cutlass.Constexpr[int],
    thread: Int32,
    warp: Int32,
):
    """All threads put their rows into a buffer of shared memory, from where one thread has it stored."""
    row, column, batch = place
    staged, source, target = writer
    row_of_tile = staged[thread, None, buffer]  # (EPI_N)
    cute.autovec_copy(rounded, row_of_tile)
    cute.arch.fence_proxy("async.shared", space="cta")
    _together()
    # with an odd number of pieces the next tile starts with the buffer that this one ended with
    pieces = config.slice_n // config.piece
    pending = OUT_STAGES - 1 if pieces % OUT_STAGES == 0 else 0
    if warp == 0:
        cute.copy(out.atom, source[None, buffer], target[None, row // CTA_ROWS, column // config.piece, batch])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(pending, read=True)
    _together()


@cute.jit
def finish_writing(config: cutlass.Constexpr[GemmConfig], warp: Int32):
    """Shared memory must stay until TMA has read it."""
    if cutlass.const_expr(config.store == "tma"):
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

"""Plain CuTe DSL programs for ``timing.py`` without operations of this package: copy, elementwise, reductions,
transpose.

Each is a kernel over float32 tensors on "cuda"; ``launch_of`` makes the operands, compiles, and returns the launch.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

VECTOR, THREADS, TILE = 4, 256, 32


@cute.kernel
def copy_kernel(x: cute.Tensor, y: cute.Tensor):
    """y = x, a vector a thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * THREADS + thread
    gX = cute.zipped_divide(x, (VECTOR,))  # (VECTOR, vectors)
    gY = cute.zipped_divide(y, (VECTOR,))
    gY[(None, at)] = gX[(None, at)].load()


@cute.kernel
def axpy_kernel(x: cute.Tensor, y: cute.Tensor, each: cutlass.Constexpr[int]):
    """y = 2 x + y, ``each`` vectors a thread, which loads all of them before it stores the first."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    gX = cute.zipped_divide(x, (VECTOR,))  # (VECTOR, vectors)
    gY = cute.zipped_divide(y, (VECTOR,))
    rX = cute.make_rmem_tensor((VECTOR, each), cutlass.Float32)  # (VECTOR, each)
    rY = cute.make_rmem_tensor((VECTOR, each), cutlass.Float32)
    for k in cutlass.range_constexpr(each):
        at = (block * each + k) * THREADS + thread
        rX[None, k] = gX[(None, at)].load()
        rY[None, k] = gY[(None, at)].load()
    for k in cutlass.range_constexpr(each):
        at = (block * each + k) * THREADS + thread
        gY[(None, at)] = rX[None, k].load() * 2.0 + rY[None, k].load()


@cute.kernel
def gelu_kernel(x: cute.Tensor, y: cute.Tensor):
    """y = gelu(x) by tanh, a vector a thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * THREADS + thread
    gX = cute.zipped_divide(x, (VECTOR,))  # (VECTOR, vectors)
    gY = cute.zipped_divide(y, (VECTOR,))
    v = gX[(None, at)].load()
    inner = (v + v * v * v * 0.044715) * 0.7978845608
    gY[(None, at)] = v * 0.5 * (cute.math.tanh(inner) + 1.0)


@cute.jit
def _of_warp(value: cutlass.Float32) -> cutlass.Float32:
    """The sum over a warp, in every lane."""
    for k in cutlass.range_constexpr(5):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << k)
    return value


@cute.kernel
def row_sum_kernel(x: cute.Tensor, y: cute.Tensor):
    """y[row] = sum of x[row, :], a CTA a row."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    sums = smem.allocate_tensor(cutlass.Float32, cute.make_layout(THREADS // 32), 16)
    gX = cute.zipped_divide(x[row, None], (VECTOR,))  # (VECTOR, vectors of a row)
    total = cutlass.Float32(0.0)
    for at in cutlass.range(thread, cute.size(gX, mode=[1]), THREADS, unroll=4):
        total = total + gX[(None, at)].load().reduce(cute.ReductionOp.ADD, 0.0, 0)
    total = _of_warp(total)
    if thread % 32 == 0:
        sums[thread // 32] = total
    cute.arch.sync_threads()
    if thread == 0:
        whole = cutlass.Float32(0.0)
        for w in cutlass.range_constexpr(THREADS // 32):
            whole = whole + sums[w]
        y[row] = whole


@cute.kernel
def column_sum_kernel(x: cute.Tensor, y: cute.Tensor):
    """y[row of CTAs, column] = sum of ``TILE`` rows of x, a column a thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, rows, _ = cute.arch.block_idx()
    column = block * THREADS + thread
    total = cutlass.Float32(0.0)
    for k in cutlass.range_constexpr(TILE):
        total = total + x[rows * TILE + k, column]
    y[rows, column] = total


@cute.kernel
def transpose_kernel(x: cute.Tensor, y: cute.Tensor):
    """y = xᵀ, a tile of ``TILE`` squared through shared memory without bank conflicts, 8 rows of threads."""
    thread, _, _ = cute.arch.thread_idx()
    block, rows, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    sX = smem.allocate_tensor(cutlass.Float32, cute.make_layout((TILE, TILE), stride=(TILE + 1, 1)), 16)
    lane, warp = thread % TILE, thread // TILE
    for k in cutlass.range_constexpr(TILE * TILE // THREADS):
        sX[warp + k * (THREADS // TILE), lane] = x[rows * TILE + warp + k * (THREADS // TILE), block * TILE + lane]
    cute.arch.sync_threads()
    for k in cutlass.range_constexpr(TILE * TILE // THREADS):
        y[block * TILE + warp + k * (THREADS // TILE), rows * TILE + lane] = sX[lane, warp + k * (THREADS // TILE)]


@cute.jit
def copy(x: cute.Tensor, y: cute.Tensor):
    copy_kernel(x, y).launch(grid=(cute.size(x) // (VECTOR * THREADS), 1, 1), block=(THREADS, 1, 1))


@cute.jit
def axpy(x: cute.Tensor, y: cute.Tensor):
    axpy_kernel(x, y, 4).launch(grid=(cute.size(x) // (VECTOR * THREADS * 4), 1, 1), block=(THREADS, 1, 1))


@cute.jit
def gelu(x: cute.Tensor, y: cute.Tensor):
    gelu_kernel(x, y).launch(grid=(cute.size(x) // (VECTOR * THREADS), 1, 1), block=(THREADS, 1, 1))


@cute.jit
def row_sum(x: cute.Tensor, y: cute.Tensor):
    row_sum_kernel(x, y).launch(grid=(cute.size(x, mode=[0]), 1, 1), block=(THREADS, 1, 1))


@cute.jit
def column_sum(x: cute.Tensor, y: cute.Tensor):
    grid = (cute.size(x, mode=[1]) // THREADS, cute.size(x, mode=[0]) // TILE, 1)
    column_sum_kernel(x, y).launch(grid=grid, block=(THREADS, 1, 1))


@cute.jit
def transpose(x: cute.Tensor, y: cute.Tensor):
    grid = (cute.size(x, mode=[1]) // TILE, cute.size(x, mode=[0]) // TILE, 1)
    transpose_kernel(x, y).launch(grid=grid, block=(THREADS, 1, 1))


FLAT = {"copy": copy, "axpy": axpy, "gelu": gelu}
PROGRAMS = {**FLAT, "row_sum": row_sum, "column_sum": column_sum, "transpose": transpose}


def operands(name: str, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random x, and y of zeros. sizes: the number of elements, or (rows, columns)."""
    x = torch.randn(sizes, device="cuda")
    shapes = {"row_sum": sizes[:1], "column_sum": (sizes[0] // TILE, *sizes[1:]), "transpose": sizes[::-1]}
    return x, torch.zeros(shapes.get(name, sizes), device="cuda")


def launch_of(name: str, sizes: tuple[int, ...]) -> Callable[[], object]:
    x, y = operands(name, sizes)
    given = [from_dlpack(t, assumed_align=16) for t in (x, y)]
    compiled = cute.compile(PROGRAMS[name], *given)

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        compiled(*given)
        return x, y

    return launch

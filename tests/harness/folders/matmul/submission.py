"""A tile of 16 × 16 a CTA, operands in shared memory. FAULT: "", "wrong" (the last tile of K is left out), "race"."""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass.cute.runtime import from_dlpack
from task import input_t, output_t

FAULT = ""
TILE = 16


@cute.kernel
def matmul_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    column, row, _ = cute.arch.thread_idx()
    tile_n, tile_m, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    tile = cute.make_layout((TILE, TILE), stride=(TILE + 1, 1))
    left = smem.allocate_tensor(cutlass.Float32, tile, byte_alignment=16)
    right = smem.allocate_tensor(cutlass.Float32, tile, byte_alignment=16)
    m, n, total = tile_m * TILE + row, tile_n * TILE + column, cutlass.Float32(0)
    tiles = cute.ceil_div(a.shape[1], TILE)
    if cutlass.const_expr(FAULT == "wrong"):
        tiles -= 1
    for tile_k in cutlass.range(tiles):
        k_a, k_b = tile_k * TILE + column, tile_k * TILE + row
        left[row, column] = cutlass.Float32(0)
        right[row, column] = cutlass.Float32(0)
        if m < a.shape[0] and k_a < a.shape[1]:
            left[row, column] = a[m, k_a].to(cutlass.Float32)
        if n < b.shape[1] and k_b < b.shape[0]:
            right[row, column] = b[k_b, n].to(cutlass.Float32)
        cute.arch.sync_threads()
        for k in cutlass.range_constexpr(TILE):
            total += left[row, k] * right[k, column]
        if cutlass.const_expr(FAULT != "race"):
            cute.arch.sync_threads()  # the next tile must not come before all have read this one
    if m < out.shape[0] and n < out.shape[1]:
        out[m, n] = total


@cute.jit
def matmul(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: driver.CUstream):
    grid = (cute.ceil_div(out.shape[1], TILE), cute.ceil_div(out.shape[0], TILE), 1)
    matmul_kernel(a, b, out).launch(grid=grid, block=(TILE, TILE, 1), stream=stream)


_compiled = None


def custom_kernel(data: input_t) -> output_t:
    global _compiled
    assert data["b"].stride(0) == 1  # as generate_input has made it
    pairs = (data["a"], 1), (data["b"], 0), (data["out"], 1)
    tensors = [from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=dim) for t, dim in pairs]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    if _compiled is None:
        _compiled = cute.compile(matmul, *tensors, stream)
    _compiled(*tensors, stream)
    return data["out"]

"""A product by a CTA for a row and some columns, K split over threads.

FAULT: "", "wrong" (codes without their sign), "race" (no barrier).
"""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass.cute.runtime import from_dlpack
from task import input_t, output_t

FAULT = ""
SPLIT, COLUMNS = 4, 16


@cute.kernel
def product_kernel(
    a: cute.Tensor, scale_a: cute.Tensor, b: cute.Tensor, scale_b: cute.Tensor, values: cute.Tensor, sums: cute.Tensor
):
    column, part, _ = cute.arch.thread_idx()
    m, tile, _ = cute.arch.block_idx()
    layout = cute.make_layout((SPLIT, COLUMNS), stride=(COLUMNS, 1))
    parts = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Int32, layout, byte_alignment=16)
    n, total = tile * COLUMNS + column, cutlass.Int32(0)
    if n < b.shape[0]:
        for k in cutlass.range(part, a.shape[1], SPLIT):
            left, right = a[m, k].to(cutlass.Int32), b[n, k].to(cutlass.Int32)
            if cutlass.const_expr(FAULT == "wrong"):
                left = left & 127
            total += left * right
    parts[part, column] = total
    if cutlass.const_expr(FAULT != "race"):
        cute.arch.sync_threads()
    if part == 0 and n < b.shape[0]:
        for other in cutlass.range_constexpr(1, SPLIT):
            total += parts[other, column]
        sums[m, n] = total
        values[m, n] = total.to(cutlass.Float32) * scale_a[m] * scale_b[n]


@cute.jit
def product(
    a: cute.Tensor, scale_a: cute.Tensor, b: cute.Tensor, scale_b: cute.Tensor, values: cute.Tensor, sums: cute.Tensor,
    stream: driver.CUstream,
):  # fmt: skip
    grid = (a.shape[0], cute.ceil_div(b.shape[0], COLUMNS), 1)
    kernel = product_kernel(a, scale_a, b, scale_b, values, sums)
    kernel.launch(grid=grid, block=(COLUMNS, SPLIT, 1), stream=stream)


_compiled = None


def custom_kernel(data: input_t) -> output_t:
    global _compiled
    (a, scale_a), (b, scale_b) = data
    values = torch.empty(a.shape[0], b.shape[0], device=a.device)
    sums = torch.empty_like(values, dtype=torch.int32)
    tensors = [
        from_dlpack(t, assumed_align=4).mark_layout_dynamic(leading_dim=t.dim() - 1)
        for t in (a, scale_a, b, scale_b, values, sums)
    ]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    if _compiled is None:
        _compiled = cute.compile(product, *tensors, stream)
    _compiled(*tensors, stream)
    return values, sums

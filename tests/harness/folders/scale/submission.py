"""A scaled sum by a thread for each element.

FAULT: "" (right), "wrong", "race" (neighbours read shared memory before it is there).
"""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass.cute.runtime import from_dlpack
from task import input_t, output_t

FAULT = ""
THREADS = 64


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, alpha: cutlass.Float32, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    staged = smem.allocate_tensor(cutlass.Float32, cute.make_layout(THREADS), byte_alignment=16)
    at = block * THREADS + thread
    staged[thread] = cutlass.Float32(0)
    if at < x.shape[0]:
        staged[thread] = x[at]
    if cutlass.const_expr(FAULT != "race"):
        cute.arch.sync_threads()
    # the other half of the CTA stores what this half has staged
    other = (thread + THREADS // 2) % THREADS
    where = block * THREADS + other
    if where < x.shape[0]:
        if cutlass.const_expr(FAULT == "wrong"):
            out[where] = alpha * staged[other] - y[where]
        else:
            out[where] = alpha * staged[other] + y[where]


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, alpha: cutlass.Float32, out: cute.Tensor, stream: driver.CUstream):
    grid = (cute.ceil_div(x.shape[0], THREADS), 1, 1)
    scale_kernel(x, y, alpha, out).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


_compiled = None


def custom_kernel(data: input_t) -> output_t:
    global _compiled
    x, y, alpha, out = data
    tensors = [from_dlpack(t, assumed_align=16).mark_layout_dynamic() for t in (x, y, out)]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = tensors[0], tensors[1], alpha, tensors[2], stream
    if _compiled is None:
        _compiled = cute.compile(scale, *arguments)
    _compiled(*arguments)
    return out

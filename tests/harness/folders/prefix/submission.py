"""A CTA a row, sums over doubling distances in shared memory. FAULT: "", "wrong" (exclusive sums), "race"."""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass.cute.runtime import from_dlpack
from task import input_t, output_t

FAULT = ""
THREADS = 128


@cute.kernel
def prefix_kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(THREADS), byte_alignment=16)
    own = cutlass.Int32(0)
    if thread < x.shape[1]:
        own = x[row, thread]
    value = own
    sums[thread] = value
    cute.arch.sync_threads()
    for step in cutlass.range_constexpr(7):
        left = cutlass.Int32(0)
        if thread >= (1 << step):
            left = sums[thread - (1 << step)]
        if cutlass.const_expr(FAULT != "race"):
            cute.arch.sync_threads()
        value += left
        sums[thread] = value
        cute.arch.sync_threads()
    if cutlass.const_expr(FAULT == "wrong"):
        value -= own
    if thread < x.shape[1]:
        out[row, thread] = value


@cute.jit
def prefix(x: cute.Tensor, out: cute.Tensor, stream: driver.CUstream):
    prefix_kernel(x, out).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


_compiled = None


def custom_kernel(data: input_t) -> output_t:
    global _compiled
    out = torch.empty_like(data)
    tensors = [from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=1) for t in (data, out)]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    if _compiled is None:
        _compiled = cute.compile(prefix, *tensors, stream)
    _compiled(*tensors, stream)
    return out

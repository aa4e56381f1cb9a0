"""A CTA a row: warps add by shuffles (inline PTX). FAULT: "wrong" (a warp is left out), "race"."""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import from_dlpack
from cutlass.cutlass_dsl import T, dsl_user_op

FAULT = ""
WARPS = 2


@dsl_user_op
def plus_of_lane(value: cutlass.Float32, distance: int, *, loc=None, ip=None) -> cutlass.Float32:
    """value, plus that of the lane whose number differs in one bit."""
    text = "{ .reg .f32 other; shfl.sync.bfly.b32 other, $1, " + str(distance) + ", 31, -1; add.f32 $0, other, $1; }"
    operands = [value.ir_value(loc=loc, ip=ip)]
    return cutlass.Float32(llvm.inline_asm(T.f32(), operands, text, "=f,f", has_side_effects=True, loc=loc, ip=ip))


@cute.kernel
def sum_kernel(x: cute.Tensor, factor: cutlass.Float32, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    parts = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(WARPS), byte_alignment=16)
    total = cutlass.Float32(0)
    for column in cutlass.range(thread, x.shape[1], 32 * WARPS):
        total += x[row, column].to(cutlass.Float32)
    for bit in cutlass.range_constexpr(5):
        total = plus_of_lane(total, 1 << bit)
    if thread % 32 == 0:
        parts[thread // 32] = total
    if cutlass.const_expr(FAULT != "race"):
        cute.arch.sync_threads()
    if thread == 0:
        for warp in cutlass.range_constexpr(1, 1 if FAULT == "wrong" else WARPS):
            total += parts[warp]
        out[row] = total * factor


@cute.jit
def sums(x: cute.Tensor, factor: cutlass.Float32, out: cute.Tensor, stream: driver.CUstream):
    sum_kernel(x, factor, out).launch(grid=(x.shape[0], 1, 1), block=(32 * WARPS, 1, 1), stream=stream)


_compiled = None


def custom_kernel(data):
    global _compiled
    out = torch.empty(data.x.shape[0], device=data.x.device)
    factor = 1.0 if data.how == "sum" else 1.0 / data.x.shape[1]
    x = from_dlpack(data.x, assumed_align=16).mark_layout_dynamic(leading_dim=1)
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = x, factor, from_dlpack(out, assumed_align=16).mark_layout_dynamic(), stream
    if _compiled is None:
        _compiled = cute.compile(sums, *arguments)
    _compiled(*arguments)
    return out

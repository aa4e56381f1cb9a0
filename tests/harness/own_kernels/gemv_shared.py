#!POPCORN leaderboard nvfp4_gemv
#!POPCORN gpu B200
"""A GEMV by a CTA for each row, partial sums in shared memory; tensors by DLPack, compiled once for all shapes.

``FAULT`` makes it wrong in one way, ``HIDE`` lets torch answer where the kernel fails; the tests set them.
"""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass.cute.runtime import from_dlpack
from task import input_t, output_t

FAULT = ""
HIDE = False
THREADS = 64


@cute.jit
def e2m1(code: cutlass.Int32) -> cutlass.Float32:
    """The value of a 4-bit code."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    value = cutlass.Float32(mantissa) * 0.5
    if exponent > 0:
        value = (1.0 + value) * cutlass.Float32(1 << (exponent - 1))
    if code & 8 != 0:
        value = -value
    return value


@cute.kernel
def gemv_kernel(a: cute.Tensor, b: cute.Tensor, sfa: cute.Tensor, sfb: cute.Tensor, c: cute.Tensor):
    """a, b: (rows, K/2, L) bytes; sfa, sfb: (rows, K/16, L); c: (M, 1, L)."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, batch = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    partial = smem.allocate_tensor(cutlass.Float32, cute.make_layout(THREADS), byte_alignment=16)
    total, first = cutlass.Float32(0), row
    if cutlass.const_expr(FAULT == "out of bounds"):
        first = row + 1
    for i in cutlass.range(thread, a.shape[1], THREADS):
        left, right = cutlass.Int32(a[first, i, batch]), cutlass.Int32(b[0, i, batch])
        scale = sfa[row, i // 8, batch].to(cutlass.Float32)
        if cutlass.const_expr(FAULT != "wrong"):
            scale *= sfb[0, i // 8, batch].to(cutlass.Float32)
        total += scale * (e2m1(left & 15) * e2m1(right & 15) + e2m1(left >> 4) * e2m1(right >> 4))
    partial[thread] = total
    if cutlass.const_expr(FAULT == "deadlock"):
        cute.arch.barrier(barrier_id=1, number_of_threads=THREADS + 32)
    elif cutlass.const_expr(FAULT != "race"):
        cute.arch.sync_threads()
    if cutlass.const_expr(FAULT == "writes an input"):
        a[row, thread, batch] = cutlass.Uint8(0)
    if thread == 0:
        for i in cutlass.range_constexpr(1, THREADS):
            total += partial[i]
        c[row, 0, batch] = total.to(cutlass.Float16)


@cute.jit
def gemv_host(
    a: cute.Tensor, b: cute.Tensor, sfa: cute.Tensor, sfb: cute.Tensor, c: cute.Tensor, stream: driver.CUstream
):
    grid = (c.shape[0], 1, c.shape[2])
    gemv_kernel(a, b, sfa, sfb, c).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


def tensor(x: torch.Tensor, contiguous: int) -> cute.Tensor:
    # DLPack has no name for two codes in a byte
    x = x.view(torch.uint8) if x.dtype == torch.float4_e2m1fn_x2 else x
    return from_dlpack(x, assumed_align=16).mark_layout_dynamic(leading_dim=contiguous)


_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_torch(data: input_t) -> torch.Tensor:
    """The answer without a kernel: torch on the device."""

    def decoded(codes, scales):
        codes, table = codes.view(torch.uint8).long(), _VALUES.to(codes.device)
        values = torch.stack((table[codes & 15], table[codes >> 4]), dim=2).flatten(1, 2)
        return values * scales.float().repeat_interleave(16, dim=1)

    a, b, sfa, sfb = data[:4]
    return (decoded(a, sfa) * decoded(b, sfb)[:1]).sum(1, keepdim=True).half()


_compiled = None


def custom_kernel(data: input_t) -> output_t:
    global _compiled
    a, b, sfa, sfb, _, _, c = data
    arguments = [tensor(x, 1) for x in (a, b, sfa, sfb)] + [tensor(c, 0)]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    if _compiled is None:
        _compiled = cute.compile(gemv_host, *arguments, stream)
    try:
        _compiled(*arguments, stream)
    except Exception:
        if not HIDE:
            raise
        c.copy_(in_torch(data))
    return c

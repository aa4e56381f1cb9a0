#!POPCORN leaderboard nvfp4_gemv
#!POPCORN gpu B200

"""c = A b, a first kernel in the CuTe DSL: right, short, and slow on purpose.

What custom_kernel gets, all of it on the GPU. L, the batch, comes last in a shape and is outermost in memory.

    a             (M, K/2, L)     float4_e2m1fn_x2, two E2M1 elements a byte: the low nibble is the even k, the high
                                  nibble the odd one. K is contiguous: strides (K/2, 1, M K/2) bytes
    b             (128, K/2, L)   the same. Row 0 is the vector; the other 127 rows are padding
    sfa           (M, K/16, L)    float8_e4m3fn, the scales of A: sfa[m, j] is that of elements 16 j to 16 j + 15 of
                                  row m. Strides (K/16, 1, M K/16)
    sfb           (128, K/16, L)  the same for b
    sfa_permuted  (32, 4, ceil(M/128), 4, ceil(K/64), L)
                                  the same scales again, as tensor cores want them: that of (m, j) is at
                                  [m % 32, m // 32 % 4, m // 128, j % 4, j // 4, l]. In memory 128 rows by 4 columns are
                                  512 bytes in a row: byte 16 (m % 32) + 4 (m // 32 % 4) + j % 4
    sfb_permuted  the same for b
    c             (M, 1, L)       float16, strides (1, M, M): to be written and returned

Three things to try next:

    1. A warp a row. The threads of a warp are in 32 rows here, K/2 bytes apart: a load of 8 bytes a thread touches 32
       sectors of 32 bytes. Let the lanes of a warp take neighbouring blocks of one row, and add up what they have.
    2. Half precision for the products of a block, two a register and instruction: each is exact in float16, and so is
       a sum of eight. The scales multiply the sum.
    3. Wider loads, 16 or 32 bytes a thread, and several rows a warp, so that b is decoded once for all of them.

cute-nvfp4 eval nvfp4_gemv FILE says whether a file is right, and counts its instructions and sectors.
"""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float4E2M1FN, Float8E4M3FN, Float16, Float32, Int32
from cutlass.cute.runtime import make_ptr
from task import input_t, output_t

BLOCK = 16  # elements along K that share a scale
B_ROWS = 128  # rows of b in memory
THREADS = 32  # threads of a CTA, a row each


@cute.kernel
def gemv(a: cute.Tensor, sfa: cute.Tensor, b: cute.Tensor, sfb: cute.Tensor, c: cute.Tensor):
    """a: (BLOCK, K/16, M, L); sfa: (K/16, M, L); b, sfb: the same with B_ROWS rows; c: (M, L)."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, batch = cute.arch.block_idx()
    row = cta * THREADS + thread
    if row < cute.size(c, mode=[0]):
        total = Float32(0)
        for j in cutlass.range(cute.size(sfa, mode=[0]), unroll=1):
            x = a[None, j, row, batch].load().to(Float32)  # sixteen elements: one load of 8 bytes, then conversions
            y = b[None, j, 0, batch].load().to(Float32)
            products = (x * y).reduce(cute.ReductionOp.ADD, Float32(0), 0)
            total += products * sfa[j, row, batch].to(Float32) * sfb[j, 0, batch].to(Float32)
        c[row, batch] = total.to(Float16)


@cute.jit
def launch(
    a: cute.Pointer,
    sfa: cute.Pointer,
    b: cute.Pointer,
    sfb: cute.Pointer,
    c: cute.Pointer,
    m: Int32,
    k: Int32,
    batch: Int32,
    stream: CUstream,
):
    """Host code: tensors from addresses, and a grid of ceil(M / THREADS) x 1 x L CTAs."""

    def elements(pointer, rows):
        return cute.make_tensor(pointer, cute.make_ordered_layout((BLOCK, k // BLOCK, rows, batch), order=(0, 1, 2, 3)))

    def scales(pointer, rows):
        return cute.make_tensor(pointer, cute.make_ordered_layout((k // BLOCK, rows, batch), order=(0, 1, 2)))

    out = cute.make_tensor(c, cute.make_ordered_layout((m, batch), order=(0, 1)))
    kernel = gemv(elements(a, m), scales(sfa, m), elements(b, B_ROWS), scales(sfb, B_ROWS), out)
    kernel.launch(grid=(cute.ceil_div(m, THREADS), 1, batch), block=(THREADS, 1, 1), stream=stream)


def pointer(dtype, tensor, align=16):
    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)


compiled = None  # once for all sizes: they are arguments


def custom_kernel(data: input_t) -> output_t:
    global compiled
    a, b, sfa, sfb, _, _, c = data
    m, half_k, batch = a.shape
    arguments = (
        pointer(Float4E2M1FN, a),
        pointer(Float8E4M3FN, sfa),
        pointer(Float4E2M1FN, b),
        pointer(Float8E4M3FN, sfb),
        pointer(Float16, c),
        m,
        2 * half_k,
        batch,
        CUstream(torch.cuda.current_stream().cuda_stream),
    )
    if compiled is None:
        compiled = cute.compile(launch, *arguments)
    compiled(*arguments)
    return c

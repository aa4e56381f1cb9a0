#!POPCORN leaderboard nvfp4_gemv
#!POPCORN gpu B200

"""c = A b, a CuTe DSL kernel whose arithmetic is PTX: right, short, and slow on purpose.

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
    2. Fewer conversions: cvt takes two elements of A and of b each time. Decode b once for several rows of A, or
       convert two scales by one cvt.rn.f16x2.e4m3x2.
    3. Loads as PTX too: ld.global.L1::no_allocate.L2::evict_first.v8.b32 brings 32 bytes of A, which nobody reads
       twice. Every warp reads b, which better stays in L1 (L1::evict_last).

cute-nvfp4 eval nvfp4_gemv FILE says whether a file is right, and counts its instructions and sectors. The PTX is for
sm_100a and later: sm_90a has no conversion from E2M1.
"""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_ptr
from task import input_t, output_t

BLOCK = 16  # elements along K that share a scale
B_ROWS = 128  # rows of b in memory
WORDS = 2  # of 32 bits in a block, eight elements each
THREADS = 32  # threads of a CTA, a row each


def dot_block() -> str:
    """PTX: $0, a float, is the sum of the 16 products of ($1, $2) and ($3, $4), two words of eight E2M1 each.

    Products are added in f16x2, a sum of eight in each half: multiples of 1/4 up to 288, exact in float16.
    """
    lines = [".reg .b8 x<4>, y<4>;", ".reg .b32 u, v, s;", ".reg .b16 lo, hi;", ".reg .f32 f, g;", "mov.b32 s, 0;"]
    for word in range(WORDS):
        lines += [f"mov.b32 {{x0, x1, x2, x3}}, ${1 + word};", f"mov.b32 {{y0, y1, y2, y3}}, ${1 + WORDS + word};"]
        for byte in range(4):
            lines += [f"cvt.rn.f16x2.e2m1x2 {pair}, {byte_of}{byte};" for pair, byte_of in (("u", "x"), ("v", "y"))]
            lines.append("fma.rn.f16x2 s, u, v, s;")
    lines += ["mov.b32 {lo, hi}, s;", "cvt.f32.f16 f, lo;", "cvt.f32.f16 g, hi;", "add.f32 $0, f, g;"]
    return "{ " + " ".join(lines) + " }"


def dot(x: cute.Tensor, y: cute.Tensor) -> Float32:
    """The sum of the products of two blocks; x, y: (WORDS) of Uint32."""
    words = [tensor[i].ir_value() for tensor in (x, y) for i in range(WORDS)]
    constraints = "=f" + ",r" * len(words)  # the result, then the operands
    return Float32(llvm.inline_asm(ir.F32Type.get(), words, dot_block(), constraints, has_side_effects=False))


@cute.kernel
def gemv(a: cute.Tensor, sfa: cute.Tensor, b: cute.Tensor, sfb: cute.Tensor, c: cute.Tensor):
    """a: (WORDS, K/16, M, L) of Uint32; sfa: (K/16, M, L); b, sfb: the same with B_ROWS rows; c: (M, L)."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, batch = cute.arch.block_idx()
    row = cta * THREADS + thread
    if row < cute.size(c, mode=[0]):
        total = Float32(0)
        for j in cutlass.range(cute.size(sfa, mode=[0]), unroll=1):
            products = dot(a[None, j, row, batch], b[None, j, 0, batch])
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

    def words(pointer, rows):
        return cute.make_tensor(pointer, cute.make_ordered_layout((WORDS, k // BLOCK, rows, batch), order=(0, 1, 2, 3)))

    def scales(pointer, rows):
        return cute.make_tensor(pointer, cute.make_ordered_layout((k // BLOCK, rows, batch), order=(0, 1, 2)))

    out = cute.make_tensor(c, cute.make_ordered_layout((m, batch), order=(0, 1)))
    kernel = gemv(words(a, m), scales(sfa, m), words(b, B_ROWS), scales(sfb, B_ROWS), out)
    kernel.launch(grid=(cute.ceil_div(m, THREADS), 1, batch), block=(THREADS, 1, 1), stream=stream)


def pointer(dtype, tensor, align=16):
    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)


compiled = None  # once for all sizes: they are arguments


def custom_kernel(data: input_t) -> output_t:
    global compiled
    a, b, sfa, sfb, _, _, c = data
    m, half_k, batch = a.shape
    arguments = (
        pointer(Uint32, a),
        pointer(Float8E4M3FN, sfa),
        pointer(Uint32, b),
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

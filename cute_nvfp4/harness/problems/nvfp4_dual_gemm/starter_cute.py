#!POPCORN leaderboard nvfp4_dual_gemm
#!POPCORN gpu B200

"""C = silu(A B1ᵀ) ∘ (A B2ᵀ), a first kernel in the CuTe DSL: right, on tensor cores, and slow on purpose.

What custom_kernel gets, all of it on the GPU. L, the batch, comes last in a shape and is outermost in memory.

    a             (M, K/2, L)     float4_e2m1fn_x2, two E2M1 elements a byte: the low nibble is the even k, the high
                                  nibble the odd one. K is contiguous: strides (K/2, 1, M K/2) bytes
    b1, b2        (N, K/2, L)     the same: the Bs have K contiguous too
    sfa           (M, K/16, L)    float8_e4m3fn, the scales of A: sfa[m, j] is that of elements 16 j to 16 j + 15 of
                                  row m. Strides (K/16, 1, M K/16)
    sfb1, sfb2    (N, K/16, L)    the same for the Bs
    sfa_permuted  (32, 4, ceil(M/128), 4, ceil(K/64), L)
                                  the same scales again, as tensor cores want them: that of (m, j) is at
                                  [m % 32, m // 32 % 4, m // 128, j % 4, j // 4, l]. In memory 128 rows by 4 columns are
                                  512 bytes in a row: byte 16 (m % 32) + 4 (m // 32 % 4) + j % 4
    sfb1_permuted, sfb2_permuted  the same for the Bs, with N for M
    c             (M, N, L)       float16, N contiguous, strides (N, 1, M N): to be written and returned

A CTA makes a tile of 128 x 128: it loads 256 of K by TMA, waits, multiplies A with B1 and with B2 by block-scaled
tcgen05.mma, waits, loads the next 256. Both sums are in tensor memory, in fp32. Sizes need not be multiples of the
tile: TMA fills with zeros.

Three things to try next:

    1. Load ahead. The tensor core waits for every copy here, and every copy for the tensor core. With several stages of
       shared memory, a warp that loads and one that multiplies (cutlass.pipeline.PipelineTmaUmma) both go on.
    2. Better stores. Each thread writes its own row, 16 bytes at a time: a store of a warp is 32 half sectors. By way
       of shared memory and a TMA store it is whole lines.
    3. Pairs of CTAs (CtaGroup.TWO) that share a tile of 256 rows: each loads half of B1 and B2, most of the bytes.

cute-nvfp4 eval nvfp4_dual_gemm FILE says whether a file is right, and counts its instructions and sectors.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float4E2M1FN, Float8E4M3FN, Float16, Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator
from task import input_t, output_t

BLOCK = 16  # elements along K that share a scale
M, N, K = TILE = (128, 128, 256)  # rows and columns of C that a CTA makes, and how much of K it loads at a time
MMA_K = 64  # elements of K that one tcgen05.mma takes
VECTOR = 8  # elements of C that a thread stores at once, 16 bytes: N must be a multiple of it
STEP = 32  # columns that a thread has in registers at a time
THREADS = 128  # one for each row of the tile: lane m of tensor memory is row m
STEP_BYTES = (M + 2 * N) * (K // 2 + K // BLOCK)  # what the six copies of a step bring

# Tensor memory has 512 columns of 128 lanes x 32 bits. An accumulator takes N of them, scales four for each MMA.
ACC = (0, N)
SFA = 2 * N
SFB = (SFA + 4 * (K // MMA_K), SFA + 8 * (K // MMA_K))
COLUMNS = 512  # to allocate: a power of two


class Load(NamedTuple):
    """A TMA copy: its atom, and the tensor in global memory that it reads, (rows, K, L)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Loads(NamedTuple):
    a: Load
    sfa: Load
    b1: Load
    sfb1: Load
    b2: Load
    sfb2: Load


def make_mma() -> cute.TiledMma:
    """tcgen05.mma of E2M1 with an E4M3 scale for 16 elements, both operands from shared memory."""
    op = tcgen05.MmaMXF4NVF4Op(Float8E4M3FN, (M, N, MMA_K), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM)
    return cute.make_tiled_mma(op)


def shared_layouts(mma: cute.TiledMma) -> tuple:
    """Of A, its scales, a B, its scales in shared memory: each (MMA, MMA_M or MMA_N, MMA_K, STAGE) of one stage."""
    return (
        blackwell.make_smem_layout_a(mma, TILE, Float4E2M1FN, 1),  # rows of 128 bytes, swizzled
        blockscaled.make_smem_layout_sfa(mma, TILE, BLOCK, 1),
        blackwell.make_smem_layout_b(mma, TILE, Float4E2M1FN, 1),
        blockscaled.make_smem_layout_sfb(mma, TILE, BLOCK, 1),
    )


@cute.jit
def launch(
    a: cute.Pointer,
    sfa: cute.Pointer,
    b1: cute.Pointer,
    sfb1: cute.Pointer,
    b2: cute.Pointer,
    sfb2: cute.Pointer,
    c: cute.Pointer,
    m: Int32,
    n: Int32,
    k: Int32,
    batch: Int32,
    stream: CUstream,
):
    """Host code: tensor maps for TMA, and a CTA for each tile of C."""
    k = cute.assume(k, 32)
    mma = make_mma()
    layouts = [cute.slice_(layout, (None, None, None, 0)) for layout in shared_layouts(mma)]

    def elements(pointer, rows):
        return cute.make_tensor(pointer, cute.make_ordered_layout((rows, k, batch), order=(1, 0, 2)))

    def scales(pointer, rows):  # (rows, K, L): 128 x 4 of them are an atom; the elements of a block are at one place
        return cute.make_tensor(pointer, blockscaled.tile_atom_to_shape_SF((rows, k, batch), BLOCK))

    def load(make, tensor, layout, dtype=None):
        op, cluster = cpasync.CopyBulkTensorTileG2SOp(), (1, 1, 1, 1)
        return Load(*make(op, tensor, layout, TILE, mma, cluster, internal_type=dtype))

    loads = Loads(
        load(make_tiled_tma_atom_A, elements(a, m), layouts[0]),
        load(make_tiled_tma_atom_A, scales(sfa, m), layouts[1], Int16),  # an atom is one row of a box: 256 x 16 bits
        load(make_tiled_tma_atom_B, elements(b1, n), layouts[2]),
        load(make_tiled_tma_atom_B, scales(sfb1, n), layouts[3], Int16),
        load(make_tiled_tma_atom_B, elements(b2, n), layouts[2]),
        load(make_tiled_tma_atom_B, scales(sfb2, n), layouts[3], Int16),
    )
    out = cute.make_tensor(c, cute.make_ordered_layout((VECTOR, n // VECTOR, m, batch), order=(0, 1, 2, 3)))
    grid = (cute.ceil_div(m, M), cute.ceil_div(n, N), batch)
    dual_gemm(loads, out, cute.ceil_div(k, K)).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def dual_gemm(loads: Loads, c: cute.Tensor, steps: Int32):
    """A tile of c, (VECTOR, N / VECTOR, M, L): load 256 of K, wait, multiply, wait, and so on; then store."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tile_m, tile_n, batch = cute.arch.block_idx()
    mma = make_mma()

    smem = SmemAllocator()
    shared = []  # a, sfa, b1, sfb1, b2, sfb2: (MMA, MMA_M or MMA_N, MMA_K, STAGE)
    layouts = shared_layouts(mma)
    for layout in layouts + layouts[2:]:
        if cutlass.const_expr(isinstance(layout, cute.ComposedLayout)):  # the swizzle repeats every 1024 bytes
            shared.append(smem.allocate_tensor(Float4E2M1FN, layout.outer, 1024, swizzle=layout.inner))
        else:
            shared.append(smem.allocate_tensor(Float8E4M3FN, layout, 128))
    arrived = smem.allocate_array(Int64, 1)  # an mbarrier: its phase ends when the copies of a step have come
    done = smem.allocate_array(Int64, 1)  # and this one's when the tensor core has finished a step
    address = smem.allocate_array(Int32, 1)  # where the allocation of tensor memory is told
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.alloc_tmem(COLUMNS, address)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.sync_threads()
    base = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
    acc_layout = mma.make_fragment_C(mma.partition_shape_C((M, N))).layout
    accs = [cute.make_tensor(base + column, acc_layout) for column in ACC]

    copies = partition(mma, loads, shared, tile_m, tile_n, batch)
    for step in cutlass.range(steps, unroll=1):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, STEP_BYTES)
            for atom, source, target in copies:
                cute.copy(atom, source[None, step], target[None, 0], tma_bar_ptr=arrived)
            cute.arch.mbarrier_wait(arrived, step & 1)
            multiply(mma, shared, base, accs, step == 0)
            with cute.arch.elect_one():
                tcgen05.commit(done)  # arrives when all that this thread has asked of the tensor core is over
        cute.arch.mbarrier_wait(done, step & 1)

    store(accs, thread, c, tile_m * M, tile_n * (N // VECTOR), batch)
    cute.arch.sync_threads()  # all have read before the memory goes back
    if warp == 0:
        cute.arch.dealloc_tmem(base, COLUMNS)


def partition(mma, loads: Loads, shared: list, tile_m, tile_n, batch) -> list:
    """(atom, source ((box), K tiles), target ((box), STAGE)) of the six copies."""
    part, copies = mma.get_slice(0), []
    for load, target, rows, split in (
        (loads.a, shared[0], tile_m, part.partition_A),
        (loads.sfa, shared[1], tile_m, part.partition_A),
        (loads.b1, shared[2], tile_n, part.partition_B),
        (loads.sfb1, shared[3], tile_n, part.partition_B),
        (loads.b2, shared[4], tile_n, part.partition_B),
        (loads.sfb2, shared[5], tile_n, part.partition_B),
    ):
        # (MMA, MMA_M or MMA_N, MMA_K, K tiles)
        tiles = split(cute.local_tile(load.tensor, (M, K), (rows, None, batch)))
        to, source = cpasync.tma_partition(
            load.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 3), cute.group_modes(tiles, 0, 3)
        )
        # filter_zeros: a scale is sixteen times in the layout and once in memory
        copies.append((load.atom, cute.filter_zeros(source), cute.filter_zeros(to)))
    return copies


@cute.jit
def multiply(mma, shared: list, base: cute.Pointer, accs: list, first):
    """Scales from shared to tensor memory, then the MMAs for each 64 of K. The tensor core keeps the order of issue."""
    layouts = [cute.slice_(layout, (None, None, None, 0)) for layout in shared_layouts(mma)]
    sfa = blockscaled.make_tmem_layout_sfa(mma, TILE, BLOCK, layouts[1])
    sfb = blockscaled.make_tmem_layout_sfb(mma, TILE, BLOCK, layouts[3])
    sfa = cute.make_tensor(cute.recast_ptr(base + SFA, dtype=Float8E4M3FN), sfa)  # (MMA, MMA_M, MMA_K)
    sfbs = [cute.make_tensor(cute.recast_ptr(base + column, dtype=Float8E4M3FN), sfb) for column in SFB]
    for source, target in ((shared[1], sfa), (shared[3], sfbs[0]), (shared[5], sfbs[1])):
        to = cute.filter_zeros(target)
        copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), Float8E4M3FN), to)
        part = copy.get_slice(0)
        descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(cute.filter_zeros(source)))
        cute.copy(copy, descriptors[None, None, None, None, 0], part.partition_D(to))
    # descriptors, (MMA, MMA_M or MMA_N, MMA_K, STAGE)
    a, bs = mma.make_fragment_A(shared[0]), [mma.make_fragment_B(shared[2]), mma.make_fragment_B(shared[4])]
    for block in cutlass.range_constexpr(K // MMA_K):
        mma.set(tcgen05.Field.ACCUMULATE, not first if block == 0 else True)
        mma.set(tcgen05.Field.SFA, sfa[None, None, block].iterator)
        for i in cutlass.range_constexpr(2):
            mma.set(tcgen05.Field.SFB, sfbs[i][None, None, block].iterator)
            cute.gemm(mma, accs[i], a[None, None, block, 0], bs[i][None, None, block, 0], accs[i])


@cute.jit
def store(accs: list, thread: Int32, c: cute.Tensor, row: Int32, column: Int32, batch: Int32):
    """A row a thread, STEP columns at a time: both sums to registers, silu(x) y, and to c what lies inside it."""
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(STEP), tcgen05.Pack.NONE), Float32)
    loads = []
    for acc in accs:
        steps = cute.flat_divide(acc[((None, None), 0, 0)], (M, STEP))  # (M, STEP, 1, N / STEP)
        copy = tcgen05.make_tmem_copy(atom, steps[None, None, 0, 0])
        part = copy.get_slice(thread)
        shape = part.partition_D(cute.make_identity_tensor((M, STEP))).shape
        loads.append((copy, part.partition_S(steps), cute.make_rmem_tensor(shape, Float32)))
    rounded = cute.make_rmem_tensor((VECTOR, STEP // VECTOR), Float16)
    row += thread
    for step in cutlass.range_constexpr(N // STEP):
        for copy, source, target in loads:
            cute.copy(copy, source[None, None, None, 0, step], target)
        cute.arch.fence_view_async_tmem_load()  # the loads are asynchronous
        gate, up = (target.load() for _, _, target in loads)
        value = gate / (1.0 + cute.math.exp(-gate)) * up
        rounded.store(value.to(Float16).reshape((VECTOR, STEP // VECTOR)))
        for i in cutlass.range_constexpr(STEP // VECTOR):
            at = column + step * (STEP // VECTOR) + i
            if (row < cute.size(c, mode=[2])) & (at < cute.size(c, mode=[1])):
                cute.autovec_copy(rounded[None, i], c[None, at, row, batch])


def pointer(dtype, tensor):
    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)


compiled = None  # once for all sizes: they are arguments


def custom_kernel(data: input_t) -> output_t:
    global compiled
    a, b1, b2, _, _, _, sfa, sfb1, sfb2, c = data
    m, n, batch = c.shape
    arguments = (
        pointer(Float4E2M1FN, a),
        pointer(Float8E4M3FN, sfa),
        pointer(Float4E2M1FN, b1),
        pointer(Float8E4M3FN, sfb1),
        pointer(Float4E2M1FN, b2),
        pointer(Float8E4M3FN, sfb2),
        pointer(Float16, c),
        m,
        n,
        2 * a.shape[1],
        batch,
        CUstream(torch.cuda.current_stream().cuda_stream),
    )
    if compiled is None:
        compiled = cute.compile(launch, *arguments)
    compiled(*arguments)
    return c

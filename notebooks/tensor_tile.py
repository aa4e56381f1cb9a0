"""One tile of block-scaled MMA by hand, for ``02_async_machine.ipynb``: C (128, 128) = A · Bᵀ in NVFP4, K = 256.

Every step is written out once, in the order in which it happens: TMA brings A, B and their scales to shared memory,
``tcgen05.cp`` the scales on to tensor memory, four ``tcgen05.mma`` multiply, ``tcgen05.ld`` brings the result to
registers. No loop over tiles, no ring, no overlap.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cute_nvfp4 import scale_layout

ELEMENT, SCALE = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
M = N = 128
K = 256
MNK = (M, N, K)
BLOCK = 16  # elements under one scale
MMA_K = 64  # elements of K that one MMA takes
THREADS = 128  # a thread for each lane of tensor memory

# Columns of tensor memory: 32 bits each in every one of the 128 lanes.
ACC = 0  # fp32 accumulator: lane m, column n
SFA = ACC + N  # scales of A: four columns for each MMA
SFB = SFA + 4 * (K // MMA_K)
COLUMNS = 256  # to allocate: a power of two

TX_BYTES = (M + N) * (K // 2 + K // BLOCK)  # what the four copies bring together


def make_mma() -> cute.TiledMma:
    """tcgen05.mma kind::mxf4nvf4 with a UE4M3 scale for 16 elements; A and B in shared memory."""
    op = tcgen05.MmaMXF4NVF4Op(SCALE, (M, N, MMA_K), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM)
    return cute.make_tiled_mma(op)


class Shared:
    """Layouts in shared memory, each (MMA, MMA_M or MMA_N, MMA_K, STAGE) with one stage.

    a, b: rows of 128 bytes (256 elements), their 16-byte units swizzled. sfa, sfb: 128 × 4 atoms as they are in global
    memory, one for each MMA.
    """

    def __init__(self, mma: cute.TiledMma) -> None:
        self.a = blackwell.make_smem_layout_a(mma, MNK, ELEMENT, 1)
        self.b = blackwell.make_smem_layout_b(mma, MNK, ELEMENT, 1)
        self.sfa = blockscaled.make_smem_layout_sfa(mma, MNK, BLOCK, 1)
        self.sfb = blockscaled.make_smem_layout_sfb(mma, MNK, BLOCK, 1)


def elements(pointer: cute.Pointer, rows: int) -> cute.Tensor:
    """(rows, K, 1) elements, K contiguous."""
    return cute.make_tensor(pointer, cute.make_layout((rows, K, 1), stride=(K, 1, rows * K)))


def scales(pointer: cute.Pointer, rows: int) -> cute.Tensor:
    """(rows, K, 1) as the MMA sees scales: the 128 × 4 atoms, and stride 0 over the 16 elements that share one."""
    (r0, r1), columns = scale_layout.ATOM_SHAPE
    (s0, s1), s_column = scale_layout.ATOM_STRIDE
    size, atoms = scale_layout.ATOM_BYTES, K // (BLOCK * columns)
    shape = (((r0, r1), rows // 128), ((BLOCK, columns), atoms), (1, 1))
    stride = (((s0, s1), size * atoms), ((0, s_column), size), (0, 0))
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


class TensorTile:
    """Host function and kernel: one CTA of four warps. a, b: elements; sfa, sfb: blocked scales; c: (128, 128) fp32."""

    @cute.jit
    def __call__(
        self, a: cute.Pointer, sfa: cute.Pointer, b: cute.Pointer, sfb: cute.Pointer, c: cute.Pointer, stream: CUstream
    ):
        mma = make_mma()
        shared, load = Shared(mma), cpasync.CopyBulkTensorTileG2SOp()
        first = (None, None, None, 0)

        def loads_of(make, data, scale, layout, layout_sf):
            # scales go as 16-bit numbers: 256 of them are an atom of 512 bytes, the longest row of a TMA box
            whole = (1, 1, 1, 1)  # (V, M, N, K) of a cluster of one CTA
            return (
                *make(load, data, cute.slice_(layout, first), MNK, mma, whole),
                *make(load, scale, cute.slice_(layout_sf, first), MNK, mma, whole, internal_type=cutlass.Int16),
            )

        nv = cute.nvgpu
        load_a = loads_of(nv.make_tiled_tma_atom_A, elements(a, M), scales(sfa, M), shared.a, shared.sfa)
        load_b = loads_of(nv.make_tiled_tma_atom_B, elements(b, N), scales(sfb, N), shared.b, shared.sfb)
        self.kernel(load_a, load_b, c).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, load_a: tuple, load_b: tuple, c: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mma = make_mma()
        layouts, smem = Shared(mma), SmemAllocator()
        a, b = (
            # a 128-byte swizzle repeats every 1024 bytes, and the MMA's descriptors count from such a boundary
            smem.allocate_tensor(ELEMENT, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (layouts.a, layouts.b)
        )
        sfa, sfb = (smem.allocate_tensor(SCALE, layout, byte_alignment=128) for layout in (layouts.sfa, layouts.sfb))
        arrived = smem.allocate_array(Int64, 1)  # its phase ends when all four copies have come
        done = smem.allocate_array(Int64, 1)  # its phase ends when the tensor core has finished
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
        acc = cute.make_tensor(base + ACC, mma.make_fragment_C(mma.partition_shape_C((M, N))).layout)
        if warp == 0:
            self.load(mma, load_a, load_b, (a, sfa, b, sfb), arrived)
            cute.arch.mbarrier_wait(arrived, 0)
            self.multiply(mma, layouts, (a, sfa, b, sfb), base, acc)
            with cute.arch.elect_one():
                tcgen05.commit(done)  # done's phase ends when all that this thread has issued is over
        cute.arch.mbarrier_wait(done, 0)
        self.store(acc, thread, c)
        cute.arch.sync_threads()  # all have read before the memory goes back
        if warp == 0:
            cute.arch.dealloc_tmem(base, COLUMNS)

    @cute.jit
    def load(self, mma, load_a: tuple, load_b: tuple, targets: tuple, arrived):
        """Four TMA copies, all announced to one barrier."""
        part = mma.get_slice(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, TX_BYTES)
        sources = (
            (load_a[0], part.partition_A(cute.local_tile(load_a[1], (M, K), (0, 0, None)))),
            (load_a[2], part.partition_A(cute.local_tile(load_a[3], (M, K), (0, 0, None)))),
            (load_b[0], part.partition_B(cute.local_tile(load_b[1], (N, K), (0, 0, None)))),
            (load_b[2], part.partition_B(cute.local_tile(load_b[3], (N, K), (0, 0, None)))),
        )
        for (atom, source), target in zip(sources, targets):
            # both ((box), 1); filter_zeros drops the 16-fold repetition of scales, which have no bytes of their own
            to, at = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 3), cute.group_modes(source, 0, 3)
            )
            cute.copy(atom, cute.filter_zeros(at)[None, 0], cute.filter_zeros(to)[None, 0], tma_bar_ptr=arrived)

    @cute.jit
    def multiply(self, mma, layouts: Shared, operands: tuple, base: cute.Pointer, acc: cute.Tensor):
        """The scales to tensor memory, then an MMA for each 64 of K: the tensor core works in the order of issue."""
        a, sfa, b, sfb = operands
        first = (None, None, None, 0)
        sfa_layout = blockscaled.make_tmem_layout_sfa(mma, MNK, BLOCK, cute.slice_(layouts.sfa, first))
        sfb_layout = blockscaled.make_tmem_layout_sfb(mma, MNK, BLOCK, cute.slice_(layouts.sfb, first))
        tmem_sfa = cute.make_tensor(cute.recast_ptr(base + SFA, dtype=SCALE), sfa_layout)
        tmem_sfb = cute.make_tensor(cute.recast_ptr(base + SFB, dtype=SCALE), sfb_layout)
        for source, target in ((sfa, tmem_sfa), (sfb, tmem_sfb)):
            # 4x32x128b: 32 rows of 16 bytes go to lanes 0-31, and the same to 32-63, 64-95 and 96-127
            atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), SCALE)
            copy = tcgen05.make_s2t_copy(atom, cute.filter_zeros(target))
            part = copy.get_slice(0)
            descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(cute.filter_zeros(source)))
            cute.copy(copy, descriptors[None, None, None, None, 0], part.partition_D(cute.filter_zeros(target)))
        left, right = mma.make_fragment_A(a), mma.make_fragment_B(b)  # descriptors, (MMA, MMA_MN, MMA_K, STAGE)
        for k in cutlass.range_constexpr(K // MMA_K):
            mma.set(tcgen05.Field.ACCUMULATE, k != 0)
            mma.set(tcgen05.Field.SFA, tmem_sfa[None, None, k].iterator)
            mma.set(tcgen05.Field.SFB, tmem_sfb[None, None, k].iterator)
            cute.gemm(mma, acc, left[None, None, k, 0], right[None, None, k, 0], acc)

    @cute.jit
    def store(self, acc: cute.Tensor, thread: Int32, c: cute.Pointer):
        """Row m, which is lane m of tensor memory, by thread m. A warp reaches only its own quarter of the lanes."""
        rows = acc[((None, None), 0, 0)]  # (M, N)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(N), tcgen05.Pack.NONE), Float32)
        copy = tcgen05.make_tmem_copy(atom, rows)
        part = copy.get_slice(thread)
        target = cute.make_tensor(c, cute.make_layout((M, N), stride=(N, 1)))
        mine = part.partition_D(target)
        registers = cute.make_rmem_tensor(mine.shape, Float32)
        cute.copy(copy, part.partition_S(rows), registers)
        cute.arch.fence_view_async_tmem_load()  # the load is asynchronous too
        cute.autovec_copy(registers, mine)

"""What notebooks 6 and 7 of the course have in common: operands of one 128 × 128 tile in NVFP4, and their partitions.

The kernels, with all that waits and arrives, are in the notebooks. Everything here only says where operands are.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
import torch
from cutlass import Float4E2M1FN, Float8E4M3FN, Float32, Int16, Int32
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.cute.runtime import make_ptr

from cute_nvfp4 import BlockScaledTensor
from cute_nvfp4.scale_layout import to_blocked

BLOCK = 16  # elements along K under one scale
M, N, K = TILE = (128, 128, 256)  # of C, and how much of K one stage holds
MMA_K = 64  # elements of K that one tcgen05.mma takes
STAGE_BYTES = (M + N) * (K // 2 + K // BLOCK)  # what the four copies of a stage bring together
# columns of tensor memory: 32 bits each in every one of the 128 lanes
ACC, SFA = 0, N
SFB = SFA + 4 * (K // MMA_K)
COLUMNS = 256  # to allocate: a power of two


class Load(NamedTuple):
    """A TMA copy: its atom, and the tensor in global memory that it reads, (rows, K, 1)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Loads(NamedTuple):
    a: Load
    sfa: Load
    b: Load
    sfb: Load


class Shared(NamedTuple):
    """Operands in shared memory, each (MMA, MMA_M or MMA_N, MMA_K, STAGE)."""

    a: cute.Tensor
    sfa: cute.Tensor
    b: cute.Tensor
    sfb: cute.Tensor


def operand(k: int, seed: int) -> BlockScaledTensor:
    """(128, k) NVFP4: random codes, scales from 0.5 to 1.875."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (128, k // 2), generator=generator, dtype=torch.uint8)
    return BlockScaledTensor(data, torch.randint(0x30, 0x40, (128, k // BLOCK), generator=generator, dtype=torch.uint8))


def device_tensors(a: BlockScaledTensor, b: BlockScaledTensor) -> list[torch.Tensor]:
    """Data and blocked scales of both operands on the device."""
    return [t.view(torch.uint8).cuda() for x in (a, b) for t in (x.data, to_blocked(x.scale))]


def pointers(tensors: list[torch.Tensor]) -> list[cute.Pointer]:
    """Addresses of the tensors of ``device_tensors``."""
    types = (Float4E2M1FN, Float8E4M3FN, Float4E2M1FN, Float8E4M3FN)
    return [make_ptr(t, x.data_ptr(), cute.AddressSpace.gmem, assumed_align=16) for t, x in zip(types, tensors)]


def make_mma() -> cute.TiledMma:
    """tcgen05.mma of E2M1 with an E4M3 scale for 16 elements, both operands from shared memory."""
    op = tcgen05.MmaMXF4NVF4Op(Float8E4M3FN, (M, N, MMA_K), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM)
    return cute.make_tiled_mma(op)


def shared_layouts(mma: cute.TiledMma, stages: int) -> tuple:
    """Layouts of A, its scales, B, its scales in shared memory: each (MMA, MMA_M or MMA_N, MMA_K, STAGE)."""
    return (
        blackwell.make_smem_layout_a(mma, TILE, Float4E2M1FN, stages),  # rows of 128 bytes, swizzled
        blockscaled.make_smem_layout_sfa(mma, TILE, BLOCK, stages),
        blackwell.make_smem_layout_b(mma, TILE, Float4E2M1FN, stages),
        blockscaled.make_smem_layout_sfb(mma, TILE, BLOCK, stages),
    )


def make_loads(a: cute.Pointer, sfa: cute.Pointer, b: cute.Pointer, sfb: cute.Pointer, k: int) -> Loads:
    """The TMA copies of (128, k) operands, for the host function."""
    mma = make_mma()
    layouts = [cute.slice_(layout, (None, None, None, 0)) for layout in shared_layouts(mma, 1)]

    def elements(pointer, rows):  # (rows, K, 1)
        return cute.make_tensor(pointer, cute.make_ordered_layout((rows, k, 1), order=(1, 0, 2)))

    def scales(pointer, rows):  # (rows, K, 1): 128 x 4 of them are an atom; the elements of a block are at one place
        return cute.make_tensor(pointer, blockscaled.tile_atom_to_shape_SF((rows, k, 1), BLOCK))

    def load(make, tensor, layout, dtype=None):
        op, cluster = cpasync.CopyBulkTensorTileG2SOp(), (1, 1, 1, 1)
        return Load(*make(op, tensor, layout, TILE, mma, cluster, internal_type=dtype))

    return Loads(
        load(make_tiled_tma_atom_A, elements(a, M), layouts[0]),
        load(make_tiled_tma_atom_A, scales(sfa, M), layouts[1], Int16),  # an atom is one row of a box: 256 x 16 bits
        load(make_tiled_tma_atom_B, elements(b, N), layouts[2]),
        load(make_tiled_tma_atom_B, scales(sfb, N), layouts[3], Int16),
    )


def allocate(smem: cutlass.memory.SmemAllocator, mma: cute.TiledMma, stages: int) -> Shared:
    """Operands of ``stages`` stages in shared memory."""
    a, sfa, b, sfb = shared_layouts(mma, stages)
    # a 128-byte swizzle repeats every 1024 bytes
    left, right = (smem.allocate_tensor(Float4E2M1FN, x.outer, 1024, swizzle=x.inner) for x in (a, b))
    left_scale, right_scale = (smem.allocate_tensor(Float8E4M3FN, x, 128) for x in (sfa, sfb))
    return Shared(left, left_scale, right, right_scale)


def partition(mma: cute.TiledMma, loads: Loads, shared: Shared) -> list:
    """(atom, source ((box), K tiles), target ((box), STAGE)) of the four copies."""
    part, copies = mma.get_slice(0), []
    for load, target, rows, split in (
        (loads.a, shared.a, M, part.partition_A),
        (loads.sfa, shared.sfa, M, part.partition_A),
        (loads.b, shared.b, N, part.partition_B),
        (loads.sfb, shared.sfb, N, part.partition_B),
    ):
        tiles = split(cute.local_tile(load.tensor, (rows, K), (0, None, 0)))  # (MMA, MMA_M or MMA_N, MMA_K, K tiles)
        to, source = cpasync.tma_partition(
            load.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 3), cute.group_modes(tiles, 0, 3)
        )
        # filter_zeros: a scale is sixteen times in the layout and once in memory
        copies.append((load.atom, cute.filter_zeros(source), cute.filter_zeros(to)))
    return copies


def accumulator(mma: cute.TiledMma, base: cute.Pointer) -> cute.Tensor:
    """(MMA, MMA_M, MMA_N) fp32 in tensor memory."""
    return cute.make_tensor(base + ACC, mma.make_fragment_C(mma.partition_shape_C((M, N))).layout)


@cute.jit
def multiply(mma, shared: Shared, base: cute.Pointer, acc: cute.Tensor, stage: Int32, first):
    """Asks the tensor core for a stage: its scales to tensor memory, then an MMA for each 64 of K.

    It works in the order of issue, and reads shared memory when it comes to it. first: the accumulator begins at zero.
    """
    layouts = [cute.slice_(layout, (None, None, None, 0)) for layout in shared_layouts(mma, 1)]
    sfa = blockscaled.make_tmem_layout_sfa(mma, TILE, BLOCK, layouts[1])
    sfb = blockscaled.make_tmem_layout_sfb(mma, TILE, BLOCK, layouts[3])
    tCtSFA = cute.make_tensor(cute.recast_ptr(base + SFA, dtype=Float8E4M3FN), sfa)  # (MMA, MMA_M, MMA_K)
    tCtSFB = cute.make_tensor(cute.recast_ptr(base + SFB, dtype=Float8E4M3FN), sfb)  # (MMA, MMA_N, MMA_K)
    for source, target in ((shared.sfa, tCtSFA), (shared.sfb, tCtSFB)):
        to = cute.filter_zeros(target)
        copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), Float8E4M3FN), to)
        part = copy.get_slice(0)
        descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(cute.filter_zeros(source)))
        cute.copy(copy, descriptors[None, None, None, None, stage], part.partition_D(to))
    # descriptors, (MMA, MMA_M or MMA_N, MMA_K, STAGE)
    tCrA, tCrB = mma.make_fragment_A(shared.a), mma.make_fragment_B(shared.b)
    for block in cutlass.range_constexpr(K // MMA_K):
        mma.set(tcgen05.Field.ACCUMULATE, not first if block == 0 else True)
        mma.set(tcgen05.Field.SFA, tCtSFA[None, None, block].iterator)
        mma.set(tcgen05.Field.SFB, tCtSFB[None, None, block].iterator)
        cute.gemm(mma, acc, tCrA[None, None, block, stage], tCrB[None, None, block, stage], acc)


@cute.jit
def store(acc: cute.Tensor, c: cute.Tensor, wait: cutlass.Constexpr = True):
    """Row m of the accumulator, which is lane m of tensor memory, to row m of c (128, 128) by thread m."""
    thread, _, _ = cute.arch.thread_idx()
    rows = acc[((None, None), 0, 0)]  # (M, N)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(N), tcgen05.Pack.NONE), Float32)
    copy = tcgen05.make_tmem_copy(atom, rows)
    part = copy.get_slice(thread)
    mine = part.partition_D(c)
    registers = cute.make_rmem_tensor(mine.shape, Float32)
    cute.copy(copy, part.partition_S(rows), registers)
    if cutlass.const_expr(wait):
        cute.arch.fence_view_async_tmem_load()  # the load is asynchronous: the registers are not there before this
    cute.autovec_copy(registers, mine)

"""Cᵢ = Aᵢ·Bᵢᵀ for a list of problems: a fixed number of CTAs walk over all tiles, and rewrite their tensor maps.

Sizes and addresses of the problems are read from memory by the kernel. Where the next tile belongs to another problem,
the loading warp replaces address, sizes and strides in copies of the descriptors in shared memory, and publishes them
in global memory (tensormap.replace, tensormap.cp_fenceproxy, fence.proxy.tensormap). Barriers are used bare here.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

from .device import (
    EPILOGUE_COLUMNS,
    TensorMemory,
    accumulator_load,
    allocate_shared,
    allocated_columns,
    scale_copy,
    split_a,
    split_b,
    store_row,
)
from .tile import ELEMENT, OUT, SCALE, Tile, describe_a, describe_b, make_mma, make_scale_mma, operand, scales

STORE_WARPS, MMA_WARP, LOAD_WARP = 4, 4, 5
THREADS = 32 * 6
DESCRIPTOR_BYTES = 128
WORDS = DESCRIPTOR_BYTES // 8
SIZES, ADDRESSES = 3, 5  # m, n, k; a, sfa, b, sfb, c
DESCRIPTORS = 4  # a, sfa, b, sfb


def address(dtype, value, align=16) -> cute.Pointer:
    return cute.make_ptr(dtype, value, cute.AddressSpace.gmem, assumed_align=align)


@cute.jit
def locate(sizes: cute.Tensor, groups, index, tile_m: cutlass.Constexpr, tile_n: cutlass.Constexpr):
    """(group, row of tiles, column of tiles) of the tile ``index`` of all; sizes: (SIZES, groups)."""
    group, found_m, found_n, before = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    for g in cutlass.range(groups, unroll=1):
        rows = cute.ceil_div(sizes[0, g], tile_m)
        tiles = rows * cute.ceil_div(sizes[1, g], tile_n)
        inside = index - before
        if (inside >= 0) & (inside < tiles):
            group = g
            found_m = inside % rows
            found_n = inside // rows
        before += tiles
    return group, found_m, found_n


@cute.jit
def publish(atoms, maps, slots, sizes: cute.Tensor, addresses: cute.Tensor, group):
    """Rewrites the descriptors for ``group`` in shared memory, ``maps``, and copies them to ``slots``."""
    m, n, k = sizes[0, group], sizes[1, group], sizes[2, group]
    tensors = (
        operand(address(ELEMENT, addresses[0, group]), m, k, 1),
        scales(address(SCALE, addresses[1, group]), m, k, 1),
        operand(address(ELEMENT, addresses[2, group]), n, k, 1),
        scales(address(SCALE, addresses[3, group]), n, k, 1),
    )
    for i in cutlass.range_constexpr(DESCRIPTORS):
        cpasync.update_tma_descriptor(atoms[i], tensors[i], maps[i])
    cute.arch.sync_warp()
    for i in cutlass.range_constexpr(DESCRIPTORS):
        cpasync.cp_fence_tma_desc_release(slots[i], maps[i])
    for i in cutlass.range_constexpr(DESCRIPTORS):
        cpasync.fence_tma_desc_acquire(slots[i])


@cute.jit
def advance(stage, phase, stages: cutlass.Constexpr):
    """The next stage of a ring, and the phase of its barriers."""
    stage += 1
    if stage == stages:
        stage = cutlass.Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def load(tile: cutlass.Constexpr, mma, loads, shared, barriers, maps_base, workspace, sizes, addresses, walk):
    """The loading warp; it also keeps the descriptors."""
    load_a, load_b = loads
    full, empty = barriers
    cta, tiles, ctas = walk
    groups = cute.size(sizes, mode=[1])
    atoms = (load_a[0], load_a[2], load_b[0], load_b[2])
    maps = [maps_base + i * WORDS for i in range(DESCRIPTORS)]
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(DESCRIPTORS):
            cpasync.copy_tensormap(atoms[i], maps[i])
    cute.arch.sync_warp()
    manager = TensorMapManager(TensorMapUpdateMode.SMEM, DESCRIPTOR_BYTES)
    parts = [
        *split_a(tile, mma, load_a, shared.a, shared.sfa),
        *split_b(tile, mma, make_scale_mma(tile), load_b, shared.b[0], shared.sfb[0]),
    ]
    last_group, stage, phase = cutlass.Int32(-1), cutlass.Int32(0), cutlass.Int32(1)
    for index in cutlass.range(cta, tiles, ctas, unroll=1):
        group, tile_m, tile_n = locate(sizes, groups, index, tile.m, tile.n)
        # a place of its own for each group: no load in flight can see its descriptor change
        row = workspace + (cta * groups + group) * DESCRIPTORS * WORDS
        slots = [manager.get_tensormap_ptr(row + i * WORDS) for i in range(DESCRIPTORS)]
        generic = [manager.get_tensormap_ptr(row + i * WORDS, cute.AddressSpace.generic) for i in range(DESCRIPTORS)]
        if group != last_group:
            publish(atoms, maps, slots, sizes, addresses, group)
        last_group = group
        where = (tile_m, tile_m, tile_n, tile_n)
        for step in cutlass.range(cute.ceil_div(sizes[2, group], tile.k), unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, tile.stage_bytes)
            for i in cutlass.range_constexpr(DESCRIPTORS):
                source, target = parts[i]
                cute.copy(
                    atoms[i],
                    source[None, where[i], step, 0],
                    target[None, stage],
                    tma_bar_ptr=full + stage,
                    tma_desc_ptr=generic[i],
                )
            stage, phase = advance(stage, phase, tile.stages)
    # a CTA must not exit while its barriers are still arrived on
    for _ in cutlass.range(tile.stages, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, phase)
        stage, phase = advance(stage, phase, tile.stages)


@cute.jit
def multiply(tile: cutlass.Constexpr, mma, shared, tmem, barriers, sizes, walk):
    """The MMA warp."""
    full, empty, acc_full, acc_empty = barriers
    cta, tiles, ctas = walk
    a, b = mma.make_fragment_A(shared.a), mma.make_fragment_B(shared.b[0])  # (MMA, MMA_MN, MMA_K, STAGE)
    copies = (scale_copy(tile, shared.sfa, tmem.sfa), scale_copy(tile, shared.sfb[0], tmem.sfb[0]))
    acc = tmem.acc[0][0]
    stage, phase, acc_phase = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(1)
    for index in cutlass.range(cta, tiles, ctas, unroll=1):
        group, _, _ = locate(sizes, cute.size(sizes, mode=[1]), index, tile.m, tile.n)
        cute.arch.mbarrier_wait(acc_empty, acc_phase)
        acc_phase = acc_phase ^ 1
        for step in cutlass.range(cute.ceil_div(sizes[2, group], tile.k), unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            for copy, source, target in copies:
                cute.copy(copy, source[None, None, None, None, stage], target)
            for block in cutlass.range_constexpr(cute.size(a, mode=[2])):
                mma.set(tcgen05.Field.ACCUMULATE, (step != 0) | (block != 0))
                mma.set(tcgen05.Field.SFA, tmem.sfa[None, None, block].iterator)
                mma.set(tcgen05.Field.SFB, tmem.sfb[0][None, None, block].iterator)
                cute.gemm(mma, acc, a[None, None, block, stage], b[None, None, block, stage], acc)
            with cute.arch.elect_one():
                tcgen05.commit(empty + stage)
            stage, phase = advance(stage, phase, tile.stages)
        with cute.arch.elect_one():
            tcgen05.commit(acc_full)


@cute.jit
def store(tile: cutlass.Constexpr, tmem, barriers, sizes, addresses, walk, thread):
    """The storing warps."""
    acc_full, acc_empty = barriers
    cta, tiles, ctas = walk
    copy, source, registers = accumulator_load(tmem.acc[0][0], thread)
    phase = cutlass.Int32(0)
    for index in cutlass.range(cta, tiles, ctas, unroll=1):
        group, tile_m, tile_n = locate(sizes, cute.size(sizes, mode=[1]), index, tile.m, tile.n)
        m, n = sizes[0, group], sizes[1, group]
        c = address(OUT, addresses[4, group])
        cute.arch.mbarrier_wait(acc_full, phase)
        phase = phase ^ 1
        for piece in cutlass.range_constexpr(tile.n // EPILOGUE_COLUMNS):
            cute.copy(copy, source[None, None, None, 0, piece], registers)
            cute.arch.fence_view_async_tmem_load()
            store_row(registers, c, tile_m * tile.m + thread, tile_n * tile.n + piece * EPILOGUE_COLUMNS, m, n)
        cute.arch.mbarrier_arrive(acc_empty)


class GroupGemm:
    """Host function and kernel for one :class:`Tile` of one product and one CTA.

    sizes: int32 (groups, SIZES); addresses: int64 (groups, ADDRESSES); workspace: int64, 128-byte aligned,
    (CTAs, groups, DESCRIPTORS, 16). a, sfa, b, sfb, m, n, k: those of any of the problems, to start from.
    """

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        sfa: cute.Pointer,
        b: cute.Pointer,
        sfb: cute.Pointer,
        m: cutlass.Int32,
        n: cutlass.Int32,
        k: cutlass.Int32,
        sizes: cute.Pointer,
        addresses: cute.Pointer,
        workspace: cute.Pointer,
        groups: cutlass.Int32,
        tiles: cutlass.Int32,
        ctas: cutlass.Int32,
        stream: CUstream,
    ):
        tile = self.tile
        mma = make_mma(tile)
        load_a = describe_a(tile, mma, operand(a, m, k, 1), scales(sfa, m, k, 1))
        load_b = describe_b(tile, mma, operand(b, n, k, 1), scales(sfb, n, k, 1))
        self.kernel(load_a, load_b, sizes, addresses, workspace, groups, tiles).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        load_a: tuple,
        load_b: tuple,
        sizes_pointer: cute.Pointer,
        addresses_pointer: cute.Pointer,
        workspace: cute.Pointer,
        groups: cutlass.Int32,
        tiles: cutlass.Int32,
    ):
        tile = self.tile
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        mma = make_mma(tile)
        sizes = cute.make_tensor(sizes_pointer, cute.make_layout((SIZES, groups)))
        addresses = cute.make_tensor(addresses_pointer, cute.make_layout((ADDRESSES, groups)))

        smem = SmemAllocator()
        maps_base = smem.allocate_array(cutlass.Int64, DESCRIPTORS * WORDS, byte_alignment=DESCRIPTOR_BYTES)
        shared = allocate_shared(smem, tile, mma)
        full = smem.allocate_array(cutlass.Int64, tile.stages)
        empty = smem.allocate_array(cutlass.Int64, tile.stages)
        acc_full = smem.allocate_array(cutlass.Int64, 1)
        acc_empty = smem.allocate_array(cutlass.Int64, 1)
        if thread == 0:
            for i in cutlass.range_constexpr(tile.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, 1)
            cute.arch.mbarrier_init(acc_full, 1)
            cute.arch.mbarrier_init(acc_empty, 32 * STORE_WARPS)
        cute.arch.mbarrier_init_fence()
        allocator = TmemAllocator(
            smem.allocate(cutlass.Int32), barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS)
        )
        allocator.allocate(allocated_columns(tile))
        allocator.relinquish_alloc_permit()
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(cutlass.Float32)
        tmem = TensorMemory(tile, mma, base)

        walk = (cta, tiles, ctas)
        if warp == LOAD_WARP:
            load(tile, mma, (load_a, load_b), shared, (full, empty), maps_base, workspace, sizes, addresses, walk)
        if warp == MMA_WARP:
            multiply(tile, mma, shared, tmem, (full, empty, acc_full, acc_empty), sizes, walk)
        if warp < STORE_WARPS:
            store(tile, tmem, (acc_full, acc_empty), sizes, addresses, walk, thread)
            pipeline.NamedBarrier(barrier_id=2, num_threads=32 * STORE_WARPS).arrive_and_wait()
            allocator.free(base)

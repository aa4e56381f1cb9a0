"""C = A·Bᵀ, one 128×128 tile a CTA: a warp loads, a warp multiplies, four warps store.

The kernel takes any number of matrices B with the same A, keeps an accumulator for each, and stores what ``combine``
makes of them; ``dual`` uses two.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator

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
from .tile import Tile, describe_a, describe_b, make_mma, make_scale_mma, operand, prefetch, scales

STORE_WARPS, MMA_WARP, LOAD_WARP = 4, 4, 5
THREADS = 32 * 6


def first(acc):
    """The only accumulator, as it is."""
    return acc


@cute.jit
def load(tile: cutlass.Constexpr, mma, loader, load_a: tuple, loads_b: tuple, shared, where: tuple, steps):
    """The loading warp: a slice of K of every operand into each stage that comes free."""
    tile_m, tile_n, batch = where
    loads = []  # (atom, source (…, RestK), target (…, STAGE))
    for (source, target), atom in zip(split_a(tile, mma, load_a, shared.a, shared.sfa), (load_a[0], load_a[2])):
        loads.append((atom, source[None, tile_m, None, batch], target))
    for i in cutlass.range_constexpr(tile.products):
        load_b = loads_b[i]
        parts = split_b(tile, mma, make_scale_mma(tile), load_b, shared.b[i], shared.sfb[i])
        for (source, target), atom in zip(parts, (load_b[0], load_b[2])):
            loads.append((atom, source[None, tile_n, None, batch], target))
    for step in cutlass.range(steps, unroll=1):
        empty = loader.acquire_and_advance()
        for atom, source, target in loads:
            cute.copy(atom, source[None, step], target[None, empty.index], tma_bar_ptr=empty.barrier)
    loader.tail()


@cute.jit
def multiply(tile: cutlass.Constexpr, mma, multiplier, acc_producer, shared, tmem, steps):
    """The MMA warp: scales of a stage to tensor memory, then its MMAs, one for each 64 of K and each product."""
    a = mma.make_fragment_A(shared.a)  # (MMA, MMA_M, MMA_K, STAGE)
    b = [mma.make_fragment_B(x) for x in shared.b]  # (MMA, MMA_N, MMA_K, STAGE)
    copies = [scale_copy(tile, shared.sfa, tmem.sfa)]
    copies += [scale_copy(tile, x, y) for x, y in zip(shared.sfb, tmem.sfb)]
    acc_empty = acc_producer.acquire_and_advance()
    for step in cutlass.range(steps, unroll=1):
        full = multiplier.wait_and_advance()
        for copy, source, target in copies:
            cute.copy(copy, source[None, None, None, None, full.index], target)
        for block in cutlass.range_constexpr(cute.size(a, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, (step != 0) | (block != 0))
            mma.set(tcgen05.Field.SFA, tmem.sfa[None, None, block].iterator)
            for i in cutlass.range_constexpr(tile.products):
                mma.set(tcgen05.Field.SFB, tmem.sfb[i][None, None, block].iterator)
                left, right = a[None, None, block, full.index], b[i][None, None, block, full.index]
                cute.gemm(mma, tmem.acc[0][i], left, right, tmem.acc[0][i])
        full.release()
    acc_empty.commit()


@cute.jit
def store(tile: cutlass.Constexpr, combine: cutlass.Constexpr, acc_consumer, tmem, out, where, bounds, thread):
    """The storing warps: a row a thread, from tensor memory to what lies inside (m, n)."""
    full = acc_consumer.wait_and_advance()
    accs = [accumulator_load(acc, thread) for acc in tmem.acc[0]]
    values = accs[0][2]
    row = where[0] * tile.m + thread
    for piece in cutlass.range_constexpr(tile.n // EPILOGUE_COLUMNS):
        for copy, source, registers in accs:
            cute.copy(copy, source[None, None, None, 0, piece], registers)
        cute.arch.fence_view_async_tmem_load()
        values.store(combine(*[registers.load() for _, _, registers in accs]))
        store_row(values, out, row, where[1] * tile.n + piece * EPILOGUE_COLUMNS, *bounds)
    full.release()


class Gemm:
    """The host function and the kernel for one :class:`Tile`; operands are pointers, contiguous and with K inside.

    a, sfa: (L, M, K/2) elements and their blocked scales; bs, sfbs: the same of (L, N, K/2), one for each product;
    c: (L, M, N) fp16. N is a multiple of 8 and K of 32; M, N and K need not be multiples of the tile.
    """

    def __init__(self, tile: Tile, combine: Callable = first) -> None:
        self.tile, self.combine = tile, combine

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        sfa: cute.Pointer,
        bs: tuple,
        sfbs: tuple,
        c: cute.Pointer,
        m: cutlass.Int32,
        n: cutlass.Int32,
        k: cutlass.Int32,
        batch: cutlass.Int32,
        stream: CUstream,
    ):
        tile = self.tile
        mma = make_mma(tile)
        load_a = describe_a(tile, mma, operand(a, m, k, batch), scales(sfa, m, k, batch))
        loads_b = tuple(
            describe_b(tile, mma, operand(b, n, k, batch), scales(sfb, n, k, batch)) for b, sfb in zip(bs, sfbs)
        )
        grid = (cute.ceil_div(m, tile.m), cute.ceil_div(n, tile.n), batch)
        self.kernel(load_a, loads_b, c, m, n, k).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, load_a: tuple, loads_b: tuple, c: cute.Pointer, m: cutlass.Int32, n: cutlass.Int32, k: cutlass.Int32
    ):
        tile = self.tile
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile_m, tile_n, batch = cute.arch.block_idx()
        mma = make_mma(tile)
        if warp == LOAD_WARP:
            prefetch((load_a, *loads_b))

        smem = SmemAllocator()
        shared = allocate_shared(smem, tile, mma)
        loader, multiplier = pipeline.PipelineTmaUmma.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * tile.stages),
            num_stages=tile.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            tx_count=tile.stage_bytes,
        ).make_participants()
        acc_producer, acc_consumer = pipeline.PipelineUmmaAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2),
            num_stages=1,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * STORE_WARPS),
        ).make_participants()

        allocator = TmemAllocator(
            smem.allocate(cutlass.Int32), barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS)
        )
        allocator.allocate(allocated_columns(tile))
        allocator.relinquish_alloc_permit()
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(cutlass.Float32)
        tmem = TensorMemory(tile, mma, base)
        steps = cute.ceil_div(k, tile.k)

        if warp == LOAD_WARP:
            load(tile, mma, loader, load_a, loads_b, shared, (tile_m, tile_n, batch), steps)
        if warp == MMA_WARP:
            multiply(tile, mma, multiplier, acc_producer, shared, tmem, steps)
        if warp < STORE_WARPS:
            out = c + cutlass.Int64(batch) * m * n
            store(tile, self.combine, acc_consumer, tmem, out, (tile_m, tile_n), (m, n), thread)
            # every warp has read its rows before the memory goes back
            pipeline.NamedBarrier(barrier_id=2, num_threads=32 * STORE_WARPS).arrive_and_wait()
            allocator.free(base)

"""C = A·Bᵀ by pairs of CTAs: 256×128 tiles, persistent clusters, multicast loads, two accumulators, TMA stores.

Each CTA of a pair loads its half of A's rows and half of B's; the even one issues the MMAs for both. In a cluster of
several tiles along N each CTA loads a part of A for all of them; B's scales always go to both CTAs of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .device import TensorMemory, accumulator_load, allocate_shared, allocated_columns, scale_copy, split_a, split_b
from .tile import OUT, Tile, cluster_layout, describe_a, describe_b, make_mma, make_scale_mma, operand, prefetch, scales

STORE_WARPS, MMA_WARP, LOAD_WARP = 4, 4, 5
THREADS = 32 * 6
ACC_STAGES, OUT_STAGES = 2, 2
OUT_COLUMNS = 64  # of fp16: a row of 128 bytes, as long as the swizzle


def out_layout(tile: Tile) -> cute.ComposedLayout:
    """(EPI_M, EPI_N, STAGE) in shared memory."""
    row_major = LayoutEnum.ROW_MAJOR
    return blackwell.make_smem_layout_epi(OUT, row_major, (tile.cta_m, OUT_COLUMNS), OUT_STAGES)


@dataclass
class Walk:
    """What a CTA works on: tiles of clusters from ``first``, ``step`` apart, and its place (x, y, v) in each."""

    first: cutlass.Int32
    tiles: cutlass.Int32
    step: cutlass.Int32
    rest_m: cutlass.Int32
    rest_n: cutlass.Int32
    x: cutlass.Int32
    y: cutlass.Int32
    v: cutlass.Int32


@cute.jit
def place_of(tile: cutlass.Constexpr, walk, index):
    """(m, n, batch) of this CTA's tile in a cluster's tile; clusters go down the rows first."""
    m = index % walk.rest_m * (tile.cluster[0] // tile.ctas) + walk.x
    n = (index // walk.rest_m) % walk.rest_n * tile.cluster[1] + walk.y
    return m, n, index // (walk.rest_m * walk.rest_n)


@cute.jit
def load(tile: cutlass.Constexpr, mma, cluster, cluster_sf, load_a, load_b, shared, loader, walk, steps):
    """The loading warp of each CTA: its part of every operand, to all CTAs that need it."""
    (layout, place), (layout_sf, place_sf) = cluster, cluster_sf
    mask_a = cpasync.create_tma_multicast_mask(layout, place, mcast_mode=2)
    mask_b = cpasync.create_tma_multicast_mask(layout, place, mcast_mode=1)
    mask_sfb = cpasync.create_tma_multicast_mask(layout_sf, place_sf, mcast_mode=1)
    masks = (mask_a, mask_a, mask_b, mask_sfb)
    places = (place[1], cute.size(layout, mode=[1]), place_sf[1], cute.size(layout_sf, mode=[1]))
    parts = [
        *split_a(tile, mma, load_a, shared.a, shared.sfa, walk.v, place[2], cute.size(layout, mode=[2])),
        *split_b(tile, mma, make_scale_mma(tile), load_b, shared.b[0], shared.sfb[0], walk.v, *places),
    ]
    atoms = (load_a[0], load_a[2], load_b[0], load_b[2])
    for index in cutlass.range(walk.first, walk.tiles, walk.step, unroll=1):
        tile_m, tile_n, batch = place_of(tile, walk, index)
        where = (tile_m, tile_m, tile_n, tile_n)
        for step in cutlass.range(steps, unroll=1):
            empty = loader.acquire_and_advance()
            for i in cutlass.range_constexpr(4):
                source, target = parts[i]
                cute.copy(
                    atoms[i],
                    source[None, where[i], step, batch],
                    target[None, empty.index],
                    tma_bar_ptr=empty.barrier,
                    mcast_mask=masks[i],
                )
    loader.tail()


@cute.jit
def multiply(tile: cutlass.Constexpr, mma, shared, tmem, multiplier, acc_producer, walk, steps):
    """The MMA warp of the even CTA, for both."""
    a, b = mma.make_fragment_A(shared.a), mma.make_fragment_B(shared.b[0])  # (MMA, MMA_MN, MMA_K, STAGE)
    copies = (scale_copy(tile, shared.sfa, tmem.sfa), scale_copy(tile, shared.sfb[0], tmem.sfb[0]))
    acc = tmem.acc[0][0]
    for _ in cutlass.range(walk.first, walk.tiles, walk.step, unroll=1):
        acc_empty = acc_producer.acquire_and_advance()
        into = cute.make_tensor(acc.iterator + acc_empty.index * tile.n, acc.layout)
        for step in cutlass.range(steps, unroll=1):
            full = multiplier.wait_and_advance()
            for copy, source, target in copies:
                cute.copy(copy, source[None, None, None, None, full.index], target)
            mma.set(tcgen05.Field.ACCUMULATE, step != 0)
            stage = (None, None, None, full.index)
            cute.gemm(mma, into, [a[stage], tmem.sfa], [b[stage], tmem.sfb[0]], into)
            full.release()
        acc_empty.commit()
    acc_producer.tail()


@cute.jit
def store(tile: cutlass.Constexpr, acc, atom, tensor, staged, acc_consumer, walk, thread, warp):
    """The storing warps: tensor memory to registers to shared memory, from where one thread has it stored."""
    copy, source_acc, registers = accumulator_load(acc, thread, OUT_COLUMNS)
    rounded = cute.make_rmem_tensor(registers.shape, OUT)
    op = blackwell.get_smem_store_op(LayoutEnum.ROW_MAJOR, OUT, cutlass.Float32, copy)
    to_shared = cute.make_tiled_copy_D(op, copy)
    target_shared = to_shared.get_slice(thread).partition_D(staged)  # (R2S, R2S_M, R2S_N, STAGE)
    source_shared = to_shared.retile(rounded)
    pieces = cute.local_tile(tensor, (tile.cta_m, OUT_COLUMNS), (None, None, None))
    store_source, store_target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(pieces, 0, 2)
    )
    threads = 32 * STORE_WARPS
    group = pipeline.CooperativeGroup(pipeline.Agent.Thread, threads)
    stores = pipeline.PipelineTmaStore.create(num_stages=OUT_STAGES, producer_group=group)
    together = pipeline.NamedBarrier(barrier_id=2, num_threads=threads)
    buffer = cutlass.Int32(0)
    for index in cutlass.range(walk.first, walk.tiles, walk.step, unroll=1):
        tile_m, tile_n, batch = place_of(tile, walk, index)
        row, column = tile_m * tile.ctas + walk.v, tile_n * (tile.n // OUT_COLUMNS)
        full = acc_consumer.wait_and_advance()
        source = cute.make_tensor(source_acc.iterator + full.index * tile.n, source_acc.layout)
        for piece in cutlass.range_constexpr(tile.n // OUT_COLUMNS):
            cute.copy(copy, source[None, None, None, 0, piece], registers)
            cute.arch.fence_view_async_tmem_load()
            rounded.store(registers.load().to(OUT))
            cute.copy(to_shared, source_shared, target_shared[None, None, None, buffer])
            cute.arch.fence_proxy("async.shared", space="cta")
            together.arrive_and_wait()
            if warp == 0:
                cute.copy(atom, store_source[None, buffer], store_target[None, row, column + piece, batch])
                stores.producer_commit()
                stores.producer_acquire()
            together.arrive_and_wait()
            buffer = (buffer + 1) % OUT_STAGES
        full.release()
    together.arrive_and_wait()
    stores.producer_tail()


class PairGemm:
    """As ``gemm.Gemm`` with one product, for a :class:`Tile` with ``pair``; ``clusters`` is how many are launched."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        sfa: cute.Pointer,
        b: cute.Pointer,
        sfb: cute.Pointer,
        c: cute.Pointer,
        m: cutlass.Int32,
        n: cutlass.Int32,
        k: cutlass.Int32,
        batch: cutlass.Int32,
        clusters: cutlass.Int32,
        stream: CUstream,
    ):
        tile = self.tile
        mma = make_mma(tile)
        load_a = describe_a(tile, mma, operand(a, m, k, batch), scales(sfa, m, k, batch))
        load_b = describe_b(tile, mma, operand(b, n, k, batch), scales(sfb, n, k, batch))
        n8 = cute.assume(n, 8)
        out = cute.make_tensor(c, cute.make_layout((m, n8, batch), stride=(n8, 1, cute.assume(m * n, 8))))
        store = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            out,
            cute.slice_(out_layout(tile), (None, None, 0)),
            (tile.cta_m, OUT_COLUMNS),
        )
        rest_m = cute.ceil_div(m, tile.m * tile.cluster[0] // tile.ctas)
        rest_n = cute.ceil_div(n, tile.n * tile.cluster[1])
        self.kernel(load_a, load_b, store[0], store[1], k, rest_m, rest_n, batch).launch(
            grid=(*tile.cluster, clusters), block=(THREADS, 1, 1), cluster=(*tile.cluster, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        load_a: tuple,
        load_b: tuple,
        store_atom: cute.CopyAtom,
        store_tensor: cute.Tensor,
        k: cutlass.Int32,
        rest_m: cutlass.Int32,
        rest_n: cutlass.Int32,
        batch: cutlass.Int32,
    ):
        tile = self.tile
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        x, y, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()
        mma, mma_sf = make_mma(tile), make_scale_mma(tile)
        layout, layout_sf = cluster_layout(tile, mma), cluster_layout(tile, mma_sf)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place, place_sf = layout.get_flat_coord(rank), layout_sf.get_flat_coord(rank)  # (V, M, N, K)
        v, tile_x = x % tile.ctas, x // tile.ctas
        if warp == LOAD_WARP:
            prefetch((load_a, load_b))
            cpasync.prefetch_descriptor(store_atom)

        smem = SmemAllocator()
        shared = allocate_shared(smem, tile, mma)
        epilogue = out_layout(tile)
        staged = smem.allocate_tensor(
            element_type=OUT, layout=epilogue.outer, byte_alignment=1024, swizzle=epilogue.inner
        )
        mcast_a, mcast_b = cute.size(layout, mode=[2]), cute.size(layout, mode=[1])
        loader, multiplier = pipeline.PipelineTmaUmma.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * tile.stages),
            num_stages=tile.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, mcast_a + mcast_b - 1),
            tx_count=tile.stage_bytes,
            cta_layout_vmnk=layout,
        ).make_participants()
        acc_producer, acc_consumer = pipeline.PipelineUmmaAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * ACC_STAGES),
            num_stages=ACC_STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * STORE_WARPS * tile.ctas),
            cta_layout_vmnk=layout,
        ).make_participants()
        allocator = TmemAllocator(
            smem.allocate(cutlass.Int32),
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
            is_two_cta=tile.pair,
            two_cta_tmem_dealloc_mbar_ptr=smem.allocate_array(cutlass.Int64, 1),
        )
        # barriers, the allocator's among them, are initialised in every CTA before anyone signals a peer
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        allocator.allocate(allocated_columns(tile, ACC_STAGES))
        allocator.relinquish_alloc_permit()
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(cutlass.Float32)
        tmem = TensorMemory(tile, mma, base, ACC_STAGES)
        acc = tmem.acc[0][0]
        steps, tiles = cute.ceil_div(k, tile.k), rest_m * rest_n * batch

        walk = Walk(cluster, tiles, clusters, rest_m, rest_n, tile_x, y, v)
        if warp == LOAD_WARP:
            load(tile, mma, (layout, place), (layout_sf, place_sf), load_a, load_b, shared, loader, walk, steps)
        if warp == MMA_WARP:
            if v == 0:
                multiply(tile, mma, shared, tmem, multiplier, acc_producer, walk, steps)
        if warp < STORE_WARPS:
            store(tile, acc, store_atom, store_tensor, staged, acc_consumer, walk, thread, warp)
            allocator.free(base)

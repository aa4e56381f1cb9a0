"""out = alpha · x · weightᵀ on WGMMA, weights packed and decoded into the registers of operand A; or two such
products, joined by a gate.

Persistent and warp-specialised: two warps load stages, weights as runs of bytes by bulk copies and x by TMA; two to
four warpgroups decode a packed tile into registers while the tensor cores multiply the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from ....ptx import mbarrier
from ....weight_layout import STEPS, TILE_K
from ..arguments import OUT_DTYPES
from ..operands import TmaCopy
from ..tile_scheduler import CtaPlace, CursorRange, StaticScheduler, WorkTile
from .arguments import WgmmaArguments
from .config import LOADING_WARPS, MMA_ROWS, STAGE_TILES, WARPGROUP, WgmmaConfig
from .decode import PackedLane, decode_tile, load_lane, product_alphas
from .epilogue import Epilogue
from .exchange import ClusterSums
from .ring import Pipeline, Position, advance, advance_own
from .scheduler import SCHEDULERS
from .weights import copy_stage, tile_addresses

TYPES = {name: getattr(cutlass, dtype) for name, dtype in OUT_DTYPES.items()}


@dataclass(frozen=True)
class Memory:
    """Shared memory: ``weights`` the address of the first stage's packed tiles, sX (tile_n, stage_k, STAGE);
    ``received`` and ``sums_barrier`` those of :class:`ClusterSums`."""

    weights: Int32
    sX: cute.Tensor
    ring: Pipeline
    epilogue: Int32
    received: Int32
    sums_barrier: Int32


@dataclass(frozen=True)
class Products:
    """What a thread multiplies with: tCrX (MMA, MMA_N, MMA_K, STAGE), acc (MMA, MMA_M, MMA_N), a fragment (MMA, MMA_M,
    STEP) for each packed tile of a stage; and where the slab of its warp is in a stage."""

    mma: cute.TiledMma
    tCrX: cute.Tensor
    acc: cute.Tensor
    fragments: tuple[cute.Tensor, ...]
    row_tile: Int32
    slab: Int32
    thread: Int32


def make_mma(config: WgmmaConfig) -> cute.TiledMma:
    """A from registers, 64 rows a warpgroup."""
    dtype, k_major = TYPES[config.dtype], OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (MMA_ROWS, config.tile_n, 16), warpgroup.OperandSource.RMEM, k_major, k_major
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (config.row_groups, 1, 1))


def x_layout(config: WgmmaConfig) -> Any:
    """x in shared memory: (tile_n, stage_k, STAGE), swizzled."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, TYPES[config.dtype])
    return cute.tile_to_shape(atom, (config.tile_n, config.stage_k, config.ring_stages), order=(0, 1, 2))


class WgmmaGemm:
    """The host function and the kernel of one :class:`WgmmaConfig`."""

    def __init__(self, config: WgmmaConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: WgmmaArguments, stream: CUstream):
        """Launches ``arguments.workers`` clusters."""
        cfg, x = self.config, arguments.x
        row_stride, batch_stride = cute.assume(x.row_stride, 8), cute.assume(x.batch_stride, 8)
        layout = cute.make_layout((x.rows, arguments.k, arguments.batch), stride=(row_stride, 1, batch_stride))
        tensor = cute.make_tensor(x.data, layout)  # (M, K, L)
        one_stage = cute.slice_(x_layout(replace(cfg, tile_n=cfg.box_rows)), (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if cfg.cluster_rows > 1 else cpasync.CopyBulkTensorTileG2SOp()
        tile = (cfg.box_rows, cfg.stage_k)
        copy = cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile, num_multicast=cfg.cluster_rows)
        passed = arguments._replace(workers=None)
        self.kernel(TmaCopy(copy[0], copy[1]), x.rows, passed._replace(x=None)).launch(
            grid=(cfg.cluster_rows, cfg.split_k, arguments.workers),
            block=(cfg.threads, 1, 1),
            cluster=(cfg.cluster_rows, cfg.split_k, 1),
            min_blocks_per_mp=cfg.ctas_per_sm,
            # all of L1 can be shared memory (and the DSL need not ask a device what it has)
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: TmaCopy, x_rows: Int32, arguments: WgmmaArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)
        memory = self.allocate()
        # by the warps that do not load: those that do find out what, meanwhile
        if warp >= LOADING_WARPS:
            self.initialise(memory, warp - LOADING_WARPS)
        if cutlass.const_expr(cfg.clustered):
            cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(cfg.cluster_rows > 1):
            # nobody signals a barrier of another CTA before it is initialised
            cute.arch.cluster_wait()
        scheduler = self.scheduler(arguments, x_rows)
        if warp == 1:
            cpasync.prefetch_descriptor(x.atom)
        # the ring's barriers are there
        cute.arch.sync_threads()
        if group == 0:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.load_weights(arguments, memory, scheduler)
            elif warp == 1:
                self.load_x(x, memory, scheduler)
            if cutlass.const_expr(cfg.split_k > 1):
                if cutlass.const_expr(cfg.overlap == 0):
                    cute.arch.cluster_wait()
                elif warp >= LOADING_WARPS:  # the others have met the cluster on their way
                    cute.arch.cluster_wait()
        else:
            cute.arch.setmaxregister_increase(self.registers)
            self.multiply(arguments, x_rows, memory, scheduler, group - 1, thread - WARPGROUP)
        if cutlass.const_expr(cfg.cluster_rows > 1):
            # no CTA goes while another may still signal it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def initialise(self, memory: Memory, turn: Int32):
        """Makes the barriers, of which each warp has every so many: one thread would take 10 ns for each."""
        cfg, warps = self.config, self.config.threads // 32 - LOADING_WARPS
        # every lane, and a lane of each warp of the other CTAs
        readers = cfg.row_groups * (WARPGROUP + 4 * (cfg.cluster_rows - 1))
        with cute.arch.elect_one():
            for first in cutlass.range_constexpr(0, cfg.ring_stages, warps):
                stage = first + turn
                if stage < cfg.ring_stages:
                    mbarrier.initialise(memory.ring.full + 8 * stage, LOADING_WARPS)
                    mbarrier.initialise(memory.ring.empty + 8 * stage, readers)
            if cutlass.const_expr(cfg.pieces > 0):
                if turn < cfg.pieces:
                    mbarrier.initialise(memory.sums_barrier + 8 * turn, 1)
            mbarrier.fence_initialised()
        cute.arch.sync_warp()

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        if self.config.ctas_per_sm == 2:
            return 104
        return {2: 240, 3: 160, 4: 112}[self.config.warpgroups]

    def allocate(self) -> Memory:
        cfg, smem = self.config, SmemAllocator()
        layout = x_layout(cfg)
        sX = smem.allocate_tensor(TYPES[cfg.dtype], layout.outer, byte_alignment=1024, swizzle=layout.inner)
        weights = smem.allocate_array(cutlass.Uint8, cfg.ring_stages * cfg.weight_bytes, byte_alignment=128)
        epilogue = sX.iterator.toint() + cfg.joined_bytes
        if cfg.k_groups == 1:
            epilogue = smem.allocate_array(cutlass.Uint8, max(cfg.epilogue_bytes, 16), byte_alignment=128).toint()
        received = smem.allocate_array(cutlass.Uint8, max(cfg.received_bytes, 16), byte_alignment=128)
        barriers = smem.allocate_array(Int64, 2 * cfg.ring_stages + cfg.pieces).toint()
        empty, sums = barriers + 8 * cfg.ring_stages, barriers + 16 * cfg.ring_stages
        return Memory(weights.toint(), sX, Pipeline(barriers, empty), epilogue, received.toint(), sums)

    def scheduler(self, arguments: WgmmaArguments, x_rows: Int32) -> StaticScheduler:
        cfg = self.config
        rank, part, worker = cute.arch.block_idx()
        _, _, workers = cute.arch.grid_dim()
        zero = Int32(0)
        options = {"helped": arguments.helped} if cfg.scheduler == "helped" else {}
        return SCHEDULERS[cfg.scheduler](
            cfg,
            cute.ceil_div(arguments.weight.rows, cfg.out_rows * cfg.cluster_rows),
            cute.ceil_div(x_rows, cfg.tile_n),
            arguments.batch,
            cute.ceil_div(arguments.k, cfg.tile_k),
            CtaPlace(workers, worker, rank, zero, zero, part),
            **options,
        )

    @cute.jit
    def load_weights(self, arguments: WgmmaArguments, memory: Memory, scheduler: StaticScheduler):
        """The loop of the warp that loads weights."""
        cfg = self.config
        at = Position(Int32(0), Int32(0))
        cursor, end = scheduler.range()
        while cursor < end:
            tile = scheduler.tile(cursor, end)
            first, after = self.stages_of(tile)
            sources = tile_addresses(cfg, arguments.weight, tile)
            for step in cutlass.range(first, after, unroll=1):
                self.before_stage(step, after)
                mbarrier.wait_to_overwrite(memory.ring.empty + 8 * at.stage, at.phase ^ 1)
                full = memory.ring.full + 8 * at.stage
                with cute.arch.elect_one():
                    mbarrier.expect_bytes(full, Int32(cfg.weight_bytes))
                    target = memory.weights + at.stage * cfg.weight_bytes
                    copy_stage(cfg, sources, self.along_k(step, tile), target, full)
                at = advance(cfg, at)
            cursor = scheduler.after(cursor, tile)

    def stages_of(self, tile: WorkTile) -> CursorRange:
        """The stages of a work tile, as they lie along K."""
        each = self.config.k_tile_stages
        return CursorRange(tile.k_first * each, (tile.k_first + tile.k_count) * each)

    def along_k(self, stage: Int32, tile: WorkTile) -> Int32:
        return stage

    def before_stage(self, stage: Int32, after: Int32) -> None:
        """What a warp that loads does before it loads a stage; ``after`` is the end of the work tile's."""

    @cute.jit
    def load_x(self, x: TmaCopy, memory: Memory, scheduler: StaticScheduler):
        """The loop of the warp that loads x."""
        cfg, rank = self.config, scheduler.place.x
        options = {"mcast_mask": cutlass.Int16((1 << cfg.cluster_rows) - 1)} if cfg.cluster_rows > 1 else {}
        at = Position(Int32(0), Int32(0))
        cursor, end = scheduler.range()
        while cursor < end:
            tile = scheduler.tile(cursor, end)
            gX = cute.local_tile(
                x.tensor, (cfg.tile_n, cfg.stage_k), (tile.n, None, tile.batch)
            )  # (tile_n, stage_k, REST_K)
            shared, tiles = cute.group_modes(memory.sX, 0, 2), cute.group_modes(gX, 0, 2)
            # ((atom, rest), STAGE), ((atom, rest), REST_K)
            tXsX, tXgX = cpasync.tma_partition(x.atom, rank, cute.make_layout(cfg.cluster_rows), shared, tiles)
            first, after = self.stages_of(tile)
            for step in cutlass.range(first, after, unroll=1):
                mbarrier.wait_to_overwrite(memory.ring.empty + 8 * at.stage, at.phase ^ 1)
                full = memory.ring.full + 8 * at.stage
                with cute.arch.elect_one():
                    mbarrier.expect_bytes(full, Int32(cfg.x_bytes))
                pointer = cute.make_ptr(Int64, full, cute.AddressSpace.smem, assumed_align=8)
                cute.copy(x.atom, tXgX[None, step], tXsX[None, at.stage], tma_bar_ptr=pointer, **options)
                at = advance(cfg, at)
            cursor = scheduler.after(cursor, tile)

    @cute.jit
    def multiply(
        self,
        arguments: WgmmaArguments,
        x_rows: Int32,
        memory: Memory,
        scheduler: StaticScheduler,
        group: Int32,
        thread: Int32,
    ):
        """The loop of a warpgroup: decode, multiply, store."""
        cfg, own = self.config, thread % WARPGROUP
        part, first = scheduler.place.part, Int32(0)
        products = self.products(memory, cfg.tile_n, group, thread)
        if cutlass.const_expr(cfg.k_groups > 1):
            first = group // cfg.row_groups
            part = part * cfg.k_groups + first
        joined = memory.sX.iterator.toint()
        sums = ClusterSums(cfg, part, memory.sums_barrier, memory.received, joined, group, own)
        alphas = product_alphas(arguments, cfg.weights)
        epilogue = Epilogue(cfg, arguments, x_rows, alphas, memory.epilogue, scheduler, group, own, sums)
        if cutlass.const_expr(cfg.split_k > 1):
            sums.announce()
        at = Position(first, Int32(0))
        cursor, end = scheduler.range()
        while cursor < end:
            tile = scheduler.tile(cursor, end)
            at = self.sum_products(products, memory, at, tile.k_count)
            epilogue.store(products.acc, tile)
            cursor = scheduler.after(cursor, tile)
        if cutlass.const_expr(cfg.scheduler == "helped" and cfg.split_k > 1):
            # the others do before they send sums
            if scheduler.helps:
                cute.arch.cluster_wait()

    def products(self, memory: Memory, columns: int, group: Int32, thread: Int32) -> Products:
        """Registers of a thread for a work tile of so many rows of x."""
        cfg = self.config
        mma = make_mma(replace(cfg, tile_n=columns))
        if cfg.k_groups > 1:
            group, thread = group % cfg.row_groups, thread % (cfg.row_groups * WARPGROUP)
        part = mma.get_slice(thread)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        sX = cute.local_tile(memory.sX, (columns, cfg.stage_k), (0, 0, None))  # (columns, stage_k, STAGE)
        tCrX = mma.make_fragment_B(part.partition_B(sX))  # (MMA, MMA_N, MMA_K, STAGE)
        acc = cute.make_rmem_tensor(part.partition_shape_C((cfg.tile_m, columns)), Float32)  # (MMA, MMA_M, MMA_N)
        # one fragment for each packed tile of a stage: (MMA, MMA_M, STEP)
        shape = part.partition_shape_A((cfg.tile_m, TILE_K))
        fragments = tuple(cute.make_rmem_tensor(shape, TYPES[cfg.dtype]) for _ in range(STAGE_TILES))
        # where this warp's slab is: in which packed tile of the CTA's rows, and which of its slabs
        row_tile, slab = group // 2, (group % 2) * 4 + (thread % WARPGROUP) // 32
        if cfg.half_tiles:
            row_tile, slab = group, (thread % WARPGROUP) // 32
        return Products(mma, tCrX, acc, fragments, row_tile, slab, thread)

    @cute.jit
    def sum_products(self, products: Products, memory: Memory, at: Position, k_count: Int32) -> Position:
        """Sets the accumulators to the sums over the next ``k_count`` stages; the position after them."""
        acc, fragments, thread = products.acc, products.fragments, products.thread
        acc.fill(0.0)
        last = at.stage
        mbarrier.wait(memory.ring.full + 8 * at.stage, at.phase)
        packed = self.load_stage(memory, at.stage, products)
        for k_tile in cutlass.range(k_count, unroll=1):
            following = advance_own(self.config, at)
            for half in cutlass.range_constexpr(STAGE_TILES):
                part = half % self.config.stage_tiles
                self.decode(fragments[half], packed[part])
                warpgroup.fence()
                for step in cutlass.range_constexpr(STEPS):
                    k_block = (None, None, part * STEPS + step, at.stage)
                    cute.gemm(products.mma, acc, fragments[half][None, None, step], products.tCrX[k_block], acc)
                warpgroup.commit_group()
                if cutlass.const_expr(half == STAGE_TILES - 1):
                    if k_tile + 1 < k_count:
                        mbarrier.wait(memory.ring.full + 8 * following.stage, following.phase)
                        packed = self.load_stage(memory, following.stage, products)
                elif cutlass.const_expr(part == self.config.stage_tiles - 1):
                    mbarrier.wait(memory.ring.full + 8 * following.stage, following.phase)
                    packed = self.load_stage(memory, following.stage, products)
                # all but the group just committed have been done: the stage before this one is free
                warpgroup.wait_group(1)
                if cutlass.const_expr(part == 0):
                    if half > 0 or k_tile > 0:
                        self.release(memory.ring, last, thread)
                if cutlass.const_expr(part == self.config.stage_tiles - 1):
                    last = at.stage
                    at = following
                    following = advance_own(self.config, at)
        warpgroup.wait_group(0)
        self.release(memory.ring, last, thread)
        return at

    def load_stage(self, memory: Memory, stage: Int32, products: Products) -> tuple[PackedLane, ...]:
        """A lane's codes and scales of the packed tiles of a stage."""
        cfg, packing, lane = self.config, self.config.weights, products.thread % 32
        parts = 2 if cfg.half_tiles else 1
        first = memory.weights + stage * cfg.weight_bytes + products.row_tile * (cfg.tile_bytes // parts)
        codes = first + products.slab * packing.slab_code_bytes
        scales = first + (packing.code_bytes // parts + products.slab * packing.slab_scale_bytes)
        distances = [i * (packing.tile_bytes // parts) for i in range(cfg.stage_tiles)]
        return tuple(load_lane(codes + at, scales + at, lane, packing) for at in distances)

    def decode(self, fragment: cute.Tensor, packed: PackedLane) -> None:
        """Decodes one packed tile to its fragment, (MMA, MMA_M, STEP)."""
        words = cute.make_tensor(
            cute.recast_ptr(fragment.iterator, dtype=Uint32), cute.make_layout((4, STEPS))
        )  # (REGISTER, STEP)
        decode_tile(words, packed, self.config.weights)

    @cute.jit
    def release(self, ring: Pipeline, stage: Int32, thread: Int32):
        """This warp has read a stage: its lanes by loads, its warpgroup's MMAs by themselves."""
        # weights are this CTA's alone: each lane says that it has read its own
        mbarrier.arrive(ring.empty + 8 * stage)
        if cutlass.const_expr(self.config.cluster_rows > 1):
            # x went to every CTA of the cluster: each waits for all
            rank, _, _ = cute.arch.block_idx()
            lane = thread % 32
            if lane < self.config.cluster_rows - 1:
                mbarrier.arrive_after_reads(ring.empty + 8 * stage, (rank + 1 + lane) % self.config.cluster_rows)

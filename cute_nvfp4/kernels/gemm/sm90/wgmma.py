"""GEMM of packed weights on WGMMA: out = alpha · x · weightᵀ, or two such products joined by a gate.

The kernel is persistent and warp-specialised. Two warps load stages: packed weights by bulk copies, and x by TMA. Two
to four MMA warpgroups decode a packed tile into operand A while the tensor cores multiply the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..barriers import Barriers, PipelineState, initialise_in_turn, make_barriers
from ..operands import TmaCopy
from ..packed.decode import sum_factors
from ..packed.first_kernel import first_kernel
from ..packed.loaders import StageOrder, prefetch_stage, tile_addresses, weight_copies, x_copies
from ..packed.mainloop import Mainloop, OperandMemory, Products
from ..packed.pipelines import wgmma_pipelines
from ..packed.rows import row_copies, rows_of_weight
from ..packed.rows_x import fill_with_rows
from ..pipeline_graph import barrier_words
from ..stage_loader import fill_stages
from ..tile_scheduler import CtaPlace, StaticScheduler, WorkTile
from .arguments import WgmmaArguments
from .config import LOADING_WARPS, WARPGROUP, WgmmaConfig
from .epilogue import WarpgroupEpilogue
from .exchange import ClusterSums
from .products import TYPES, wgmma_products, x_layout
from .scheduler import SCHEDULERS

LOADING_THREADS = 32 * LOADING_WARPS


class Registers(NamedTuple):
    """Registers of a loading thread, and of an MMA thread."""

    loads: int
    multiplies: int


DECODING_REGISTERS = {2: Registers(88, 208), 4: Registers(64, 104)}
"""By MMA warpgroups, where the loading warpgroup decodes x."""


@dataclass(frozen=True)
class WgmmaMemory:
    """Shared memory of a CTA: operands, barriers, the epilogue's transposing buffer, and sums that other CTAs send."""

    operands: OperandMemory
    barriers: Barriers
    epilogue: Int32
    received: Int32


class WgmmaGemm:
    """The host function and the kernel of one :class:`WgmmaConfig`."""

    def __init__(self, config: WgmmaConfig) -> None:
        self.config = config
        self.order = StageOrder(config)

    @cute.jit
    def __call__(self, arguments: WgmmaArguments, stream: CUstream):
        """Launches ``arguments.workers`` clusters."""
        cfg, x = self.config, arguments.x
        if cutlass.const_expr(cfg.first is not None):
            first_kernel(cfg.first)(arguments.floats, stream)
        passed, copy = arguments._replace(workers=None, floats=None), None
        if cutlass.const_expr(not cfg.decodes_x):
            passed, copy = passed._replace(x=None), self.describe(arguments)
        self.kernel(copy, x.rows, passed).launch(
            grid=(cfg.cluster_rows, cfg.split_k, arguments.workers),
            block=(cfg.threads, 1, 1),
            cluster=(cfg.cluster_rows, cfg.split_k, 1),
            min_blocks_per_mp=cfg.ctas_per_sm,
            # all of L1 can be shared memory (and so the DSL need not query a device)
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=cfg.first is not None or bool(cfg.programmatic),
        )

    def describe(self, arguments: WgmmaArguments) -> TmaCopy:
        """Makes the TMA copy of x, on the host."""
        cfg, x = self.config, arguments.x
        each = 16 // cfg.x_item
        row_stride, batch_stride = cute.assume(x.row_stride, each), cute.assume(x.batch_stride, each)
        layout = cute.make_layout((x.rows, arguments.k, arguments.batch), stride=(row_stride, 1, batch_stride))
        tensor = cute.make_tensor(x.data, layout)  # (M, K, L)
        one_stage = cute.slice_(x_layout(replace(cfg, tile_n=cfg.box_rows)), (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if cfg.cluster_rows > 1 else cpasync.CopyBulkTensorTileG2SOp()
        tile = (cfg.box_rows, cfg.stage_k)
        copy = cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile, num_multicast=cfg.cluster_rows)
        return TmaCopy(copy[0], copy[1])

    @cute.kernel
    def kernel(self, x: TmaCopy | None, x_rows: Int32, arguments: WgmmaArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)
        memory = self.allocate()
        # the other warps initialise the barriers, while the loading warps find out what to load
        if warp >= LOADING_WARPS:
            self.initialise(memory.barriers, warp - LOADING_WARPS)
        if cutlass.const_expr(cfg.clustered):
            cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(cfg.cluster_rows > 1):
            # no CTA may signal a barrier of another CTA before it is initialised
            cute.arch.cluster_wait()
        scheduler = self.scheduler(arguments, x_rows)
        if cutlass.const_expr(not cfg.decodes_x):
            if warp == 1:
                cpasync.prefetch_descriptor(x.atom)
        self.begin(memory, warp)
        if cutlass.const_expr(cfg.programmatic):
            if warp == 0:
                self.prefetch_weights(arguments, scheduler)
            # in this order the next launch, too, begins only after the launches before this one have ended
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # the barriers of the ring are initialised
        cute.arch.sync_threads()
        if group == 0:
            self.keep_registers(False)
            if cutlass.const_expr(cfg.decodes_x):
                fill_with_rows(self.order, arguments.weight, arguments.x, memory.operands, scheduler, thread)
            elif warp == 0:
                if cutlass.const_expr(not cfg.weights.in_rows):
                    self.load_weights(arguments, memory.operands, scheduler)
            elif warp == 1:
                self.wait_for_x()
                self.load_x(x, memory.operands, scheduler)
            if cutlass.const_expr(cfg.weights.in_rows and not cfg.decodes_x):
                if warp >= LOADING_WARPS:
                    own, rows = thread - LOADING_THREADS, lambda tile: rows_of_weight(cfg, arguments.weight, tile.batch)
                    copies = row_copies(self.order, rows, memory.operands.weights, own)
                    fill_stages(copies, memory.operands.ring, scheduler)
            if cutlass.const_expr(cfg.split_k > 1):
                if cutlass.const_expr(cfg.overlap == 0):
                    cute.arch.cluster_wait()
                elif warp >= LOADING_WARPS:  # the others have met the cluster on their way
                    cute.arch.cluster_wait()
        else:
            self.keep_registers(True)
            self.wait_for_x()
            self.multiply(arguments, x_rows, memory, scheduler, group - 1, thread - WARPGROUP)
        if cutlass.const_expr(cfg.cluster_rows > 1):
            # a CTA must not exit while another may still signal it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        self.end(memory, warp)

    def begin(self, memory: WgmmaMemory, warp: Int32) -> None:
        """Sets up what else a subclass needs before the threads of the CTA meet."""

    def end(self, memory: WgmmaMemory, warp: Int32) -> None:
        """Frees at the end of the kernel what ``begin`` set up."""

    def keep_registers(self, multiplies: bool) -> None:
        """Moves registers of the CTA from the loading threads to the MMA threads."""
        if multiplies:
            cute.arch.setmaxregister_increase(self.registers)
        else:
            cute.arch.setmaxregister_decrease(self.loading_registers)

    def wait_for_x(self) -> None:
        """Waits for the kernel that quantizes or decodes x, if this one starts while that one still runs."""
        if self.config.first is not None or self.config.programmatic == "x":
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def initialise(self, barriers: Barriers, turn: Int32):
        """Initialises the barriers, in the warps that do not load."""
        initialise_in_turn(barriers, turn, self.config.threads // 32 - LOADING_WARPS)
        cute.arch.sync_warp()

    @property
    def loading_registers(self) -> int:
        """Registers of a loading thread. Copies of rows need more addresses, and decoding x needs its codes."""
        if self.config.decodes_x:
            return DECODING_REGISTERS[self.config.warpgroups].loads
        if not self.config.weights.in_rows:
            return 24
        return 40 if self.config.warpgroups == 2 and self.config.ctas_per_sm == 1 else 32

    @property
    def registers(self) -> int:
        """Registers of an MMA thread."""
        if self.config.decodes_x:
            return DECODING_REGISTERS[self.config.warpgroups].multiplies
        if self.config.ctas_per_sm == 2:
            return 104
        return {2: 232 if self.config.weights.in_rows else 240, 3: 160, 4: 112}[self.config.warpgroups]

    def allocate(self) -> WgmmaMemory:
        cfg, smem, graph = self.config, SmemAllocator(), wgmma_pipelines(self.config)
        layout = x_layout(cfg)
        sX = smem.allocate_tensor(TYPES[cfg.dtype], layout.outer, byte_alignment=1024, swizzle=layout.inner)
        weights = smem.allocate_array(cutlass.Uint8, cfg.ring_stages * cfg.weight_bytes, byte_alignment=128)
        epilogue = sX.iterator.toint() + cfg.joined_bytes
        if cfg.k_groups == 1:
            size = max(cfg.epilogue_bytes + cfg.factor_bytes, 16)
            epilogue = smem.allocate_array(cutlass.Uint8, size, byte_alignment=128).toint()
        received = smem.allocate_array(cutlass.Uint8, max(cfg.received_bytes, 16), byte_alignment=128)
        barriers = make_barriers(graph, smem.allocate_array(Int64, barrier_words(graph)), addresses=True)
        return WgmmaMemory(OperandMemory(weights.toint(), sX, barriers.operands), barriers, epilogue, received.toint())

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
    def prefetch_weights(self, arguments: WgmmaArguments, scheduler: StaticScheduler):
        """Prefetches the packed tiles of the first stages into L2, a stage a lane. L2 stays coherent with later
        writes."""
        lane = cute.arch.lane_idx()
        cursor, end = scheduler.range()
        if cursor < end:
            tile = scheduler.tile(cursor, end)
            steps = self.order.steps(tile)
            if lane < cutlass.min(steps.end - steps.first, self.config.ring_stages):
                sources = tile_addresses(self.config, arguments.weight, tile)
                prefetch_stage(self.config, sources, self.order.along_k(steps.first + lane, tile))

    def load_weights(self, arguments: WgmmaArguments, memory: OperandMemory, scheduler: StaticScheduler) -> None:
        """Runs the loop of the warp that loads weights."""
        fill_stages(weight_copies(self.order, arguments.weight, memory.weights), memory.ring, scheduler)

    def load_x(self, x: TmaCopy, memory: OperandMemory, scheduler: StaticScheduler) -> None:
        """Runs the loop of the warp that loads x."""
        fill_stages(x_copies(self.order, x, memory.sX, scheduler.place.x), memory.ring, scheduler)

    def store(self, epilogue: WarpgroupEpilogue, products: Products, tile: WorkTile, at: PipelineState) -> None:
        """Stores the sums of a work tile. at: the pipeline state after its stages."""
        epilogue.store(products.acc, tile)

    def products(self, memory: OperandMemory, columns: int, group: Int32, thread: Int32) -> Products:
        """The accumulators and fragments of a thread for a work tile of ``columns`` rows of x."""
        return wgmma_products(self.config, memory, columns, group, thread)

    @cute.jit
    def multiply(
        self,
        arguments: WgmmaArguments,
        x_rows: Int32,
        memory: WgmmaMemory,
        scheduler: StaticScheduler,
        group: Int32,
        thread: Int32,
    ):
        """Runs the loop of an MMA warpgroup: decode, multiply, store."""
        cfg, own = self.config, thread % WARPGROUP
        part, first = scheduler.place.part, Int32(0)
        products = self.products(memory.operands, cfg.tile_n, group, thread)
        if cutlass.const_expr(cfg.k_groups > 1):
            first = group // cfg.row_groups
            part = part * cfg.k_groups + first
        joined = memory.operands.sX.iterator.toint()
        sums = ClusterSums(cfg, part, memory.barriers.partials, memory.received, joined, group, own)
        factors = sum_factors(arguments, cfg.left_out)
        epilogue = WarpgroupEpilogue(cfg, arguments, x_rows, factors, memory.epilogue, scheduler, group, own, sums)
        if cutlass.const_expr(cfg.split_k > 1):
            sums.announce()
        at = memory.operands.ring.start(first)
        cursor, end = scheduler.range()
        while cursor < end:
            tile = scheduler.tile(cursor, end)
            products.clear()
            storing = epilogue.of_tile(tile)
            at = Mainloop(products).run(at, tile.k_count)
            self.store(storing, products, tile, at)
            cursor = scheduler.after(cursor, tile)
        if cutlass.const_expr(cfg.scheduler == "helped" and cfg.split_k > 1):
            # other clusters wait before they send sums
            if scheduler.helps:
                cute.arch.cluster_wait()

"""The body of every GEMM kernel on ``mma.sync``: memory, barriers, and the two roles of its warps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..barriers import Barriers, initialise, make_barriers
from ..config import GemmConfig
from ..operands import Loads
from ..output import thread_store
from ..pipeline_graph import barrier_words
from ..problem import Problem, Scheduler
from ..shared_plan import SWIZZLE_BYTES
from .epilogue import WarpEpilogue, divided_k
from .loader import TileLoader, shared_operands
from .mainloop import make_accumulators, multiply
from .memory_plan import LOAD_WARP, MMA_WARPS, MmaSyncSharedPlan, pipelines
from .warp_tile import warp_tile


@cute.jit
def run_warps(config: cutlass.Constexpr[GemmConfig], loads: Loads, problem: Problem):
    """Everything that a CTA does, from its first instruction to its last. problem: what varies between GEMMs."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    plan, smem, graph = MmaSyncSharedPlan(config), SmemAllocator(), pipelines(config)
    stages = smem.allocate_array(cutlass.Uint8, plan.stages * plan.stage.bytes, byte_alignment=SWIZZLE_BYTES)
    barriers = make_barriers(graph, smem.allocate_array(cutlass.Int64, barrier_words(graph)))
    if warp == LOAD_WARP:
        for operand in (*loads.a, *loads.b):
            cpasync.prefetch_descriptor(operand.data.atom)
            cpasync.prefetch_descriptor(operand.scales.atom)
    if cutlass.const_expr(config.table_bytes):
        problem = problem.with_table(smem.allocate_array(Int64, config.table_bytes // 8, byte_alignment=16).toint())
        if warp == 1:
            problem.fill()
    if warp == 0:
        with cute.arch.elect_one():
            initialise(barriers)
    cute.arch.sync_threads()
    scheduler = problem.scheduler()
    if warp == LOAD_WARP:
        loader = TileLoader(config, loads, shared_operands(config, stages), scheduler.place, problem)
        loader.fill(barriers.operands, scheduler)
    if warp < MMA_WARPS:
        multiply_and_store(config, stages.toint(), barriers, scheduler, problem, warp)


@cute.jit
def multiply_and_store(
    config: cutlass.Constexpr[GemmConfig],
    base: Int32,
    barriers: Barriers,
    scheduler: Scheduler,
    problem: Problem,
    warp: Int32,
):
    """Runs the loop of the MMA warps. base: shared address of the stages."""
    tile = warp_tile(config, warp, cute.arch.lane_idx())
    store = thread_store(config, problem.arguments.out)
    epilogue = WarpEpilogue(config, tile, problem.epilogue_function(), store, warp)
    results = problem.results()
    divided = divided_k(epilogue, problem.partials, scheduler)
    acc = make_accumulators(config, tile)  # (RESULT, PAIR, HALF, MMA_M, PRODUCT)
    at = barriers.operands.start()
    cursor, end = scheduler.range()
    while cursor < end:
        work = scheduler.tile(cursor, end)
        at = multiply(config, tile, barriers.operands, base, work, acc, at)
        divided.store(epilogue, acc, work, results.of(work.batch), cursor)
        cursor = scheduler.after(cursor, work)

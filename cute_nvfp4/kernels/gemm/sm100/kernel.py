"""The body of every tcgen05 GEMM kernel: memory, barriers, and the three roles of its warps."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..barriers import Barriers, initialise, make_barriers
from ..config import CTA_ROWS, GemmConfig
from ..operands import Loads, TmaCopy
from ..pipeline_graph import barrier_words
from ..problem import Problem
from ..shared_plan import SWIZZLE_BYTES
from .epilogue import Epilogue, divided_k, store_tiles
from .loader import load
from .mainloop import multiply
from .memory_plan import Tcgen05SharedPlan, TensorPlan, pipelines
from .output import make_store
from .warp_roles import WARPGROUP, roles

START_BARRIER = 1
"""Named barrier of all warps. A loading warp that begins at once arrives there without waiting."""


@dataclass(frozen=True)
class Tcgen05Memory:
    """Pointers to what lies in shared memory, or shared addresses of it (0 for what a configuration does not have)."""

    stages: cute.Pointer
    output: cute.Pointer | None
    partials: Int32
    barriers: Barriers
    tensor_address: cute.Pointer
    table: Int32


def allocate(config: GemmConfig) -> Tcgen05Memory:
    """Allocates shared memory as ``Tcgen05SharedPlan`` lays it out."""
    plan, smem = Tcgen05SharedPlan(config), SmemAllocator()
    graph = pipelines(config)
    stages = smem.allocate_array(cutlass.Uint8, plan.stages * plan.stage.bytes, byte_alignment=SWIZZLE_BYTES)
    output, partials, table = None, Int32(0), Int32(0)
    if plan.staged_output:
        output = smem.allocate_array(cutlass.Uint8, plan.staged_output, byte_alignment=SWIZZLE_BYTES)
    if plan.partials:
        partials = smem.allocate_array(cutlass.Uint8, plan.partials, byte_alignment=128).toint()
    barriers = make_barriers(graph, smem.allocate_array(cutlass.Int64, barrier_words(graph)))
    tensor_address = smem.allocate(cutlass.Int32)
    if config.table_bytes:
        table = smem.allocate_array(cutlass.Int64, config.table_bytes // 8, byte_alignment=16).toint()
    return Tcgen05Memory(stages, output, partials, barriers, tensor_address, table)


@cute.jit
def run_roles(config: cutlass.Constexpr[GemmConfig], loads: Loads, store: TmaCopy | None, problem: Problem):
    """Everything that a CTA does, from its first instruction to its last. problem: what varies between GEMMs."""
    tensor, role = TensorPlan(config), roles(config)
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first = first_warp(config)
    if cutlass.const_expr(config.cluster_size > 1):
        if warp != first:
            cute.arch.cluster_arrive_relaxed()
    if warp == role.load_warp:
        prefetch(loads, store)
    memory = allocate(config)
    barriers = memory.barriers
    if cutlass.const_expr(config.table_bytes):
        problem = problem.with_table(memory.table)
        if warp == role.epilogue - 1:
            problem.fill()
    if warp == first:
        with cute.arch.elect_one():
            initialise(barriers)
        if cutlass.const_expr(config.cluster_size > 1):
            cute.arch.cluster_arrive_relaxed()
    if warp == 0:
        cute.arch.alloc_tmem(tensor.allocated, memory.tensor_address, is_two_cta=config.pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=config.pair)
    # a loading warp that waits for other CTAs reads the scheduler's parameters in that time, unless they need the table
    early = config.cluster != (1, 1) and not config.table_bytes
    scheduler = problem.scheduler() if early else None
    meet(config, warp)
    scheduler = scheduler if early else problem.scheduler()

    if warp == role.load_warp:
        load(config, loads, memory.stages, barriers, scheduler, problem)
        if cutlass.const_expr(config.pair or (config.cluster_size > 1 and loads_at_once(config))):
            cute.arch.cluster_wait()  # for what it has arrived at in the beginning
        if cutlass.const_expr(config.pair):
            cute.arch.cluster_arrive_relaxed()  # it needs no tensor memory
    if warp == role.mma_warp:
        if cutlass.const_expr(config.pair):
            cute.arch.cluster_arrive_relaxed()  # the epilogue waits for its last MMA
        if scheduler.place.v == 0:
            tensor_base = cute.arch.retrieve_tmem_ptr(Float32, 16, memory.tensor_address).toint()
            multiply(config, memory.stages, barriers, tensor_base, scheduler)
    if warp < role.epilogue:
        tensor_base = cute.arch.retrieve_tmem_ptr(Float32, 16, memory.tensor_address).toint()
        values = [cute.make_rmem_tensor(cute.make_layout(config.epi_tile_n), Float32) for _ in range(config.products)]
        results = problem.results()
        group, row, of_group = 0, thread, warp
        if cutlass.const_expr(role.groups > 1):
            group, row, of_group = warp // WARPGROUP, thread % CTA_ROWS, warp % WARPGROUP
        stores = make_store(config, problem.arguments.out, store, memory.output, row)
        function = problem.epilogue_function()
        e = Epilogue(config, barriers, tensor_base, scheduler.place, function, stores, values, row, of_group, group)
        divided = divided_k(e, memory.partials, problem.partials, scheduler)
        store_tiles(config, e, divided, results, scheduler)
    # After this barrier every warp has read its lanes, in a pair those of both CTAs. No CTA signals another's barriers
    # any more: loading and MMA warps have waited for all arrivals at theirs, and with split_k ``SplitK`` has
    if cutlass.const_expr(config.pair):
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    if warp == 0:
        tensor_pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, memory.tensor_address)
        cute.arch.dealloc_tmem(tensor_pointer, tensor.allocated, is_two_cta=config.pair)


def first_warp(config: GemmConfig) -> int:
    """The warp that initialises the barriers."""
    return roles(config).mma_warp if config.table_bytes else roles(config).load_warp


def loads_at_once(config: GemmConfig) -> bool:
    """Whether the loading warp initialises the barriers and starts at once: its copies signal no other CTA's barriers,
    and it reads nothing that other warps write."""
    return config.cluster == (1, 1) and not config.table_bytes


@cute.jit
def meet(config: cutlass.Constexpr[GemmConfig], warp: Int32):
    """Waits until barriers are initialised and tensor memory is allocated; a role that needs neither goes on."""
    role = roles(config)
    loads = warp == role.load_warp
    if cutlass.const_expr(config.table_bytes):
        cute.arch.sync_threads()
    elif loads:
        cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=role.threads)
    else:
        cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=role.threads)
    if cutlass.const_expr(config.cluster_size > 1):
        # no CTA may signal a barrier of another CTA before it is initialised
        if cutlass.const_expr(not loads_at_once(config)):
            cute.arch.cluster_wait()
        elif not loads:
            cute.arch.cluster_wait()
    if cutlass.const_expr(config.pair):
        # an MMA writes to both CTAs, so both must have allocated tensor memory
        cute.arch.cluster_arrive_relaxed()
        if not loads:
            cute.arch.cluster_wait()


def prefetch(loads: Loads, store: TmaCopy | None) -> None:
    """Issues prefetch.tensormap for every descriptor."""
    for operand in (*loads.a, *loads.b):
        cpasync.prefetch_descriptor(operand.data.atom)
        cpasync.prefetch_descriptor(operand.scales.atom)
    if store is not None:
        cpasync.prefetch_descriptor(store.atom)

"""The device side that every GEMM of the package shares: memory, barriers, and the three roles at work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .. import grouped_scheduler
from ..barriers import Barriers, initialise
from ..config import CTA_ROWS, GemmConfig
from ..pipeline_graph import barrier_words
from ..tile_scheduler import Work
from .epilogue import Finish, store_tiles
from .loader import load
from .mainloop import multiply
from .memory_plan import SWIZZLE_BYTES, SharedPlan, TensorPlan
from .output import Output
from .reduction import Partials
from .warp_roles import ROLES


@cute.jit
def run_roles(
    config: cutlass.Constexpr[GemmConfig], loads_a, loads_b, out: tuple, finish: tuple, partials: tuple, k, batch,
    groups: tuple = (),
):  # fmt: skip
    """Everything that a CTA does, from its first instruction to its last. groups: see ``grouped_scheduler.fill``."""
    plan, tensor = SharedPlan(config), TensorPlan(config)
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == ROLES.load_warp:
        prefetch(loads_a, loads_b, out[5] if config.store == "tma" else ())

    smem = SmemAllocator()
    base = smem.allocate_array(cutlass.Uint8, plan.stages * plan.stage.bytes, byte_alignment=SWIZZLE_BYTES)
    staged = None
    if cutlass.const_expr(plan.staged_output):
        staged = smem.allocate_array(cutlass.Uint8, plan.staged_output, byte_alignment=SWIZZLE_BYTES)
    received = Int32(0)
    if cutlass.const_expr(plan.partials):
        received = smem.allocate_array(cutlass.Uint8, plan.partials, byte_alignment=128).toint()
    barriers = Barriers(smem.allocate_array(cutlass.Int64, barrier_words(config, plan.stages)))
    tensor_address = smem.allocate(cutlass.Int32)
    table = Int32(0)
    if cutlass.const_expr(config.table_bytes):
        table = smem.allocate_array(cutlass.Int64, config.table_bytes // 8, byte_alignment=16).toint()
        if warp == ROLES.epilogue - 1:
            grouped_scheduler.fill(config, groups, out[1], out[2], table)

    if warp == ROLES.mma_warp:
        with cute.arch.elect_one():
            initialise(config, barriers)
    if warp == 0:
        cute.arch.alloc_tmem(tensor.allocated, tensor_address, is_two_cta=config.pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=config.pair)
    cute.arch.sync_threads()
    if cutlass.const_expr(config.cluster_size > 1):
        # nobody signals a barrier of another CTA before it is initialised
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    tensor_pointer = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tensor_address)
    tensor_base = tensor_pointer.toint()

    work = this_work(config, out[1], out[2], k, batch)
    if cutlass.const_expr(config.table_bytes):
        work = replace(work, groups=grouped_scheduler.known(config, groups, out[1], out[2], k, table))
    output = make_output(config, out, staged)
    if warp == ROLES.load_warp:
        load(config, loads_a, loads_b, base, barriers, work)
    if warp == ROLES.mma_warp:
        if work.v == 0:
            multiply(config, base, barriers, tensor_base, work)
    if warp < ROLES.epilogue:
        sums = Partials(received, *[x.toint() for x in partials])
        store_tiles(config, barriers, tensor_base, sums, Finish(*finish), output, work, thread, warp)
    # every warp has read its lanes, and no CTA of the cluster goes while another may still signal it
    cute.arch.sync_threads()
    if cutlass.const_expr(config.cluster_size > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    if warp == 0:
        cute.arch.dealloc_tmem(tensor_pointer, tensor.allocated, is_two_cta=config.pair)


def make_output(config: GemmConfig, out: tuple, staged: Any) -> Output:
    """The output, with the TMA store or the scales if there are any."""
    *places, store = out
    return Output(*places, *store, staged=staged) if config.store == "tma" else Output(*places, quantized=store)


def prefetch(loads_a: tuple, loads_b: tuple, store: tuple) -> None:
    """prefetch.tensormap of every descriptor."""
    for load_ in (*loads_a, *loads_b):
        for atom, _ in load_[:2]:
            cpasync.prefetch_descriptor(atom)
    if store:
        cpasync.prefetch_descriptor(store[0])


@cute.jit
def this_work(config: cutlass.Constexpr[GemmConfig], m: Int32, n: Int32, k: Int32, batch: Int32):
    """The problem in tiles, and this CTA's place in it."""
    cm, cn, ck = config.cluster_mnk
    x, y, z = cute.arch.block_idx()
    _, _, depth = cute.arch.grid_dim()
    return Work(
        cute.ceil_div(m, CTA_ROWS * cm),
        cute.ceil_div(n, config.tile_n * cn),
        batch,
        cute.ceil_div(k, config.tile_k),
        depth // ck,
        z // ck,
        x,
        y,
        x % config.ctas,
        z % ck,
    )

"""GEMM of packed weights on 16-bit tcgen05, for any number of rows of x: ``sm90/wgmma`` with weights decoded into
tensor memory.

A warpgroup decodes 128 rows of the weight; each of its warps decodes two slabs of sixteen. ``tcgen05.st`` of shape
16x128b stores to sixteen lanes the registers of a slab in the order of ``wgmma``'s operand A. ``tcgen05.ld`` of shape
16x256b loads the sums of sixteen lanes in the order of ``wgmma``'s accumulator registers. Loads, shares of the work,
gates and stores therefore are those of sm_90a, and the epilogue treats one warpgroup's rows as those of two.

Lane 32w + 16h + r of tensor memory has row 64h + 16w + r of the warpgroup's 128 rows: the slab of half h of warp w.

A thread issues the MMAs of a packed tile once its warpgroup has decoded the tile. They run while the next tile is being
decoded to other columns, and commit the stage to the loading warps. A stage overwrites the decoded weights of the stage
``decoded_stages`` before it once the MMAs of that stage are complete, which the ring's barriers show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ....ptx import mbarrier, tcgen05
from ....weight_layout import SLAB_ROWS, STEPS, TILE_K
from ...moe.routed import RoutedWgmma
from ..barriers import PipelineState
from ..config import MMA_BYTES
from ..packed.decode import PackedLane, decode_step
from ..packed.mainloop import OperandMemory, Products
from ..packed.stream_x import ROW_BYTES
from ..shared_plan import SWIZZLE_BYTES
from ..sm90.config import LOADING_WARPS, MMA_ROWS, WARPGROUP
from ..sm90.epilogue import WarpgroupEpilogue
from ..sm90.grouped import GroupedWgmma
from ..sm90.wgmma import WgmmaGemm, WgmmaMemory
from ..tile_scheduler import WorkTile
from .packed_plan import DECODED_COLUMNS, TENSOR_COLUMNS

WARP = 32
HALVES = 2
"""Slabs of a warp: one for each half of its 32 lanes of tensor memory."""
LANE = 16
"""The first bit of the lane in an address of tensor memory."""
DECODED_BARRIER = 8
"""Named barrier of the first warpgroup's decoded weights; the epilogue uses the barriers before it."""
MOST_EIGHTS = 16
"""Most groups of eight columns that one load brings: 64 registers."""


@dataclass(frozen=True)
class TensorProducts(Products):
    """The products of one warpgroup. tensor: first column of its accumulators, one for each of ``columns`` rows of x;
    decoded weights lie ``config.tile_n`` columns further. group: index of the warpgroup; warp: index in the group."""

    asynchronous: ClassVar[bool] = False

    tensor: Int32
    columns: int
    group: Int32
    warp: Int32

    def clear(self) -> None:
        """Does nothing: the first MMA of a work tile overwrites the accumulators."""

    def produce(self, at: PipelineState) -> tuple[tuple[PackedLane, ...], ...]:
        """A lane's words of both slabs, for each packed tile of a stage, once there is room to decode them."""
        halves = [replace(self, slab=self.slab + MMA_ROWS // SLAB_ROWS * h).words(at.stage) for h in range(HALVES)]
        if self.config.decoded_stages < self.config.ring_stages:
            self.wait_for(at, self.config.decoded_stages)
        return tuple(zip(*halves))

    @cute.jit
    def wait_for(self, at: PipelineState, before: cutlass.Constexpr[int]):
        """Waits for the MMAs of the stage that lies ``before`` stages before ``at``."""
        stage, wraps = at.stage - before, at.stage < before
        stage = cutlass.select_(wraps, stage + self.config.ring_stages, stage)
        mbarrier.wait(self.memory.ring.empty(stage), cutlass.select_(wraps, at.phase ^ 1, at.phase))
        tcgen05.fence_after()

    def decoded(self, stage: Int32, part: int) -> Int32:
        """The first column of the decoded weights of packed tile ``part`` of a stage."""
        cfg, place = self.config, stage
        if cfg.decoded_stages < cfg.ring_stages:
            place = stage % cfg.decoded_stages
        return self.tensor + (place * (cfg.stage_tiles * DECODED_COLUMNS) + (cfg.tile_n + part * DECODED_COLUMNS))

    def lanes(self, half: int) -> Int32:
        """The first lane of this warp's slab, as part of an address of tensor memory."""
        return (self.warp * WARP + half * SLAB_ROWS) << LANE

    def multiply(self, packed: tuple[PackedLane, ...], tile: int, part: int, stage: Int32, k_tile: Int32 | int) -> None:
        """Decodes a packed tile to tensor memory, and starts its MMAs."""
        column = self.decoded(stage, part)
        for half, words in enumerate(packed):
            registers = [x for step in range(STEPS) for x in decode_step(words, step, self.config.weights)]
            tcgen05.store_16x128b(column + self.lanes(half), registers)
        tcgen05.wait_store()
        tcgen05.fence_before()
        cute.arch.barrier(barrier_id=self.group + DECODED_BARRIER, number_of_threads=WARPGROUP)
        self.start(column, part, stage, Int32(1) if tile else cutlass.min(Int32(k_tile), 1))

    @cute.jit
    def start(self, column: Int32, part: cutlass.Constexpr[int], stage: Int32, accumulate: Int32):
        """Issues the MMAs of a decoded tile, from one thread."""
        cfg = self.config
        if self.warp == 0:
            tcgen05.fence_after()
            with cute.arch.elect_one():
                x = self.memory.sX.iterator.toint() + stage * cfg.x_bytes + part * (cfg.x_bytes // cfg.stage_tiles)
                upper = Int32(tcgen05.descriptor_upper(tcgen05.SWIZZLE_128B, SWIZZLE_BYTES))
                descriptor = tcgen05.descriptor(tcgen05.descriptor_lower(x), upper)
                idesc = tcgen05.instruction_descriptor_16bit(cfg.dtype, cfg.group_rows, self.columns)
                for step in cutlass.range_constexpr(STEPS):
                    tcgen05.mma_16bit(
                        self.tensor,
                        column + step * (DECODED_COLUMNS // STEPS),
                        descriptor,
                        step * (MMA_BYTES // tcgen05.DESCRIPTOR_UNIT),
                        idesc,
                        accumulate if step == 0 else 1,
                    )

    @cute.jit
    def release(self, stage: Int32):
        """Commits the stage, so that it is free once the MMAs have read it; the warps have read their words already."""
        if self.warp == 0:
            with cute.arch.elect_one():
                tcgen05.commit(self.memory.ring.empty(stage), group=1)

    def sums(self, half: int) -> cute.Tensor:
        """The sums of this warp's slab. Registers of eight rows of x: (row, column), (row, column + 1), (row + 8,
        …)."""
        acc = cute.make_rmem_tensor(cute.make_layout(self.columns // 2), Float32)
        first, eights = 0, self.columns // 8
        while first < eights:
            count = min(MOST_EIGHTS, 1 << (eights - first).bit_length() - 1)
            column = self.tensor + (self.lanes(half) + first * 8)
            for i, value in enumerate(tcgen05.load_16x256b(column, count)):
                acc[4 * first + i] = value
            first += count
        return acc


assert TILE_K * 2 == ROW_BYTES, "a row of x of a packed tile is one swizzle"


class _InTensorMemory:
    """A mixin that makes the products of tcgen05 where ``WgmmaGemm`` makes those of ``wgmma``."""

    def allocate(self) -> WgmmaMemory:
        memory, address = super().allocate(), SmemAllocator().allocate(cutlass.Int32)
        return replace(memory, operands=replace(memory.operands, tensor=address))

    @property
    def allocated(self) -> int:
        """Columns of tensor memory to allocate, a power of two."""
        cfg = self.config
        decoded = cfg.decoded_stages * cfg.stage_tiles * DECODED_COLUMNS
        used = (cfg.tile_n + decoded) * (cfg.tile_m // cfg.group_rows)
        return min(TENSOR_COLUMNS, max(32, 1 << (used - 1).bit_length()))

    @cute.jit
    def begin(self, memory: WgmmaMemory, warp: Int32):
        """Allocates tensor memory, in one warp."""
        if warp == LOADING_WARPS:
            cute.arch.alloc_tmem(self.allocated, memory.operands.tensor)
            cute.arch.relinquish_tmem_alloc_permit()

    @cute.jit
    def end(self, memory: WgmmaMemory, warp: Int32):
        """Frees tensor memory in the warp that allocated it, once all warps have read their sums."""
        cute.arch.sync_threads()
        if warp == LOADING_WARPS:
            pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, memory.operands.tensor)
            cute.arch.dealloc_tmem(pointer, self.allocated)

    def keep_registers(self, multiplies: bool) -> None:
        """Does nothing: accumulators are in tensor memory, so that roles need no share of registers."""

    def products(self, memory: OperandMemory, columns: int, group: Int32, thread: Int32) -> TensorProducts:
        """The products of a warpgroup for a work tile of ``columns`` rows of x."""
        cfg = self.config
        each = cfg.tile_n + cfg.decoded_stages * cfg.stage_tiles * DECODED_COLUMNS
        first = cute.arch.retrieve_tmem_ptr(Float32, 16, memory.tensor).toint() + group * each
        warp = cute.arch.make_warp_uniform(thread % WARPGROUP // WARP)
        return TensorProducts(cfg, memory, group, warp, thread, None, first, columns, group, warp)

    def store(self, epilogue: WarpgroupEpilogue, products: TensorProducts, tile: WorkTile, at: PipelineState) -> None:
        """Stores the sums of a work tile, one half of 64 rows of the weight after the other."""
        products.wait_for(at, 1)
        for half in range(HALVES):
            replace(epilogue, group=epilogue.group * HALVES + half).store(products.sums(half), tile)


class TensorPackedGemm(_InTensorMemory, WgmmaGemm):
    """The host function and the kernel of one ``WgmmaConfig`` of sm_100a."""


class GroupedTensorPackedGemm(_InTensorMemory, GroupedWgmma):
    """The host function and the kernel of one ``GroupedWgmmaConfig`` of sm_100a."""


class RoutedTensorPackedGemm(_InTensorMemory, RoutedWgmma):
    """The host function and the kernel of one ``GroupedWgmmaConfig`` of sm_100a, whose rows are slots."""

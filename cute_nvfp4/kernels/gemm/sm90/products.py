"""The operands and accumulators of a thread on WGMMA: A is decoded into registers, x is B in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ....weight_layout import TILE_K
from ..packed.decode import PackedLane, decode_tile
from ..packed.mainloop import OperandMemory, Products
from ..packed.rows import decode_rows
from .arguments import X_DTYPES
from .config import MMA_ROWS, STAGE_TILES, WARPGROUP, WgmmaConfig

TYPES = {name: getattr(cutlass, dtype) for name, dtype in X_DTYPES.items()}
"""The DSL's types of x and of operand A."""
SWIZZLES = {64: warpgroup.SmemLayoutAtomKind.K_SW64, 128: warpgroup.SmemLayoutAtomKind.K_SW128}
"""Swizzles, by the bytes of a row of x that are swizzled together."""


def make_mma(config: WgmmaConfig) -> cute.TiledMma:
    """The tiled MMA of the warpgroups with different rows: A in registers, 64 rows for each warpgroup."""
    dtype, k_major, registers = TYPES[config.dtype], OperandMajorMode.K, warpgroup.OperandSource.RMEM
    shape = (MMA_ROWS, config.tile_n, config.mma_k)
    if config.fp8:
        op = warpgroup.MmaF8Op(dtype, dtype, Float32, shape, registers, k_major, k_major)
    else:
        op = warpgroup.MmaF16BF16Op(dtype, Float32, shape, registers, k_major, k_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (config.row_groups, 1, 1))


def x_layout(config: WgmmaConfig) -> Any:
    """The layout of x in shared memory: (tile_n, stage_k, STAGE), swizzled."""
    swizzle = SWIZZLES[min(config.stage_k * config.x_item, 128)]
    atom = warpgroup.make_smem_layout_atom(swizzle, TYPES[config.dtype])
    return cute.tile_to_shape(atom, (config.tile_n, config.stage_k, config.ring_stages), order=(0, 1, 2))


@dataclass(frozen=True)
class WgmmaProducts(Products):
    """The accumulators of a warpgroup, (MMA, MMA_M, MMA_N), and a fragment of A for each packed tile of a k-tile."""

    asynchronous: ClassVar[bool] = True

    mma: cute.TiledMma
    tCrX: cute.Tensor  # (MMA, MMA_N, MMA_K, STAGE)
    fragments: tuple[cute.Tensor, ...]  # (MMA, MMA_M, STEP) each
    first: cute.TiledMma | None = None  # of a k-tile, where sums are promoted: it adds to nothing
    part: cute.Tensor | None = None  # the sums of a k-tile, (MMA, MMA_M, MMA_N)

    def multiply(self, packed: PackedLane, tile: int, part: int, stage: Int32, k_tile: Int32 | int) -> None:
        """Decodes packed tile ``tile`` of a k-tile, which is ``part`` of a stage, and starts its wgmmas."""
        fragment, steps = self.fragments[tile % STAGE_TILES], self.config.tile_steps
        words = cute.make_tensor(
            cute.recast_ptr(fragment.iterator, dtype=Uint32), cute.make_layout((4, steps))
        )  # (REGISTER, STEP)
        if self.config.weights.in_rows:
            decode_rows(words, packed, self.config.weights)
        else:
            decode_tile(words, packed, self.config.weights)
        warpgroup.fence()
        for step in range(steps):
            k_block = (None, None, part * steps + step, stage)
            mma, acc = self.mma, self.acc
            if self.config.promoted:
                mma, acc = self.first if tile == step == 0 else self.mma, self.part
            cute.gemm(mma, acc, fragment[None, None, step], self.tCrX[k_block], acc)
        warpgroup.commit_group()

    def promote(self) -> None:
        """Adds the sums of a k-tile, whose wgmmas are complete, in fp32."""
        for i in range(cute.size(self.acc)):
            self.acc[i] = self.acc[i] + self.part[i]

    def of_columns(self, columns: int) -> WgmmaProducts:
        """The products of the first ``columns`` rows of x in a stage, in the first registers of ``acc``."""
        operand = x_operand(self.config, self.memory, columns, self.thread)
        shape = operand.part.partition_shape_C((self.config.tile_m, columns))
        acc = cute.make_tensor(self.acc.iterator, cute.make_layout(shape))  # (MMA, MMA_M, MMA_N)
        return replace(self, mma=operand.mma, tCrX=operand.tCrX, acc=acc)


class XOperand(NamedTuple):
    """An MMA of some rows of x, the thread's slice of it, and x as operand B: tCrX (MMA, MMA_N, MMA_K, STAGE)."""

    mma: cute.TiledMma
    part: Any
    tCrX: cute.Tensor


def x_operand(config: WgmmaConfig, memory: OperandMemory, columns: int, thread: Int32) -> XOperand:
    """x as operand B: the first ``columns`` rows in each stage."""
    mma = make_mma(replace(config, tile_n=columns))
    part = mma.get_slice(thread)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    sX = cute.local_tile(memory.sX, (columns, config.stage_k), (0, 0, None))  # (columns, stage_k, STAGE)
    return XOperand(mma, part, mma.make_fragment_B(part.partition_B(sX)))


def wgmma_products(
    config: WgmmaConfig, memory: OperandMemory, columns: int, group: Int32, thread: Int32
) -> WgmmaProducts:
    """The accumulators and fragments of a thread for a work tile of ``columns`` rows of x."""
    if config.k_groups > 1:
        group, thread = group % config.row_groups, thread % (config.row_groups * WARPGROUP)
    mma, part, tCrX = x_operand(config, memory, columns, thread)
    acc = cute.make_rmem_tensor(part.partition_shape_C((config.tile_m, columns)), Float32)  # (MMA, MMA_M, MMA_N)
    shape = part.partition_shape_A((config.tile_m, TILE_K))  # (MMA, MMA_M, STEP)
    fragments = tuple(cute.make_rmem_tensor(shape, TYPES[config.dtype]) for _ in range(STAGE_TILES))
    # where this warp's slab is: a row of packed tiles among those of the CTA, and a slab in it
    row_tile, slab = group // 2, (group % 2) * 4 + (thread % WARPGROUP) // 32
    if config.half_tiles:
        row_tile, slab = group, (thread % WARPGROUP) // 32
    first = part_acc = None
    if config.promoted:
        first, part_acc = make_mma(replace(config, tile_n=columns)), cute.make_rmem_tensor(acc.layout, Float32)
        first.set(warpgroup.Field.ACCUMULATE, False)
    return WgmmaProducts(config, memory, row_tile, slab, thread, acc, mma, tCrX, fragments, first, part_acc)

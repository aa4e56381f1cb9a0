"""GEMM of packed weights for any number of rows of x, on 16-bit ``mma.sync``: the kernel of ``sm90/wgmma``, whose
multiplications are those of single warps.

A warp decodes the slab of sixteen rows of the weight that it has on sm_90a, too, in the same registers, for operand A
of an ``m16n8k16`` is a warp's part of a ``wgmma``'s; it reads all rows of x of the stage by ``ldmatrix``, operand B of
as many instructions as there are eights of rows. Results lie in registers as those of a ``wgmma``: loads, shares of
the work, sums over CTAs, gates and stores are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....ptx import mbarrier
from ....ptx.mma import load_matrices, mma_m16n8k16
from ....weight_layout import STEPS
from ..sm90.config import STAGE_TILES, WARPGROUP
from ..sm90.decode import PackedLane, decode_step
from ..sm90.grouped import GroupedWgmma
from ..sm90.ring import Position, advance
from ..sm90.stream_config import MMA_COLUMNS, WARP
from ..sm90.stream_x import ROW_BYTES
from ..sm90.wgmma import Memory, WgmmaGemm

STEPS_BYTES = 64
"""Of two steps of a row of x: what an ``ldmatrix`` reads of eight rows."""


@dataclass(frozen=True)
class Products:
    """What a lane multiplies with: acc (REGISTER, MMA_COLUMNS of x); where the slab of its warp is in a stage; x: bytes
    from a stage's x to the row of sixteen bytes whose address it gives to the first ``ldmatrix``."""

    acc: cute.Tensor
    row_tile: Int32
    slab: Int32
    thread: Int32
    x: Int32


class _WarpProducts:
    """In place of the multiplications of ``WgmmaGemm``."""

    def products(self, memory: Memory, columns: int, group: Int32, thread: Int32) -> Products:
        """Registers of a thread for a work tile of so many rows of x."""
        acc = cute.make_rmem_tensor((4, columns // MMA_COLUMNS), Float32)
        row_tile, slab = group // 2, (group % 2) * 4 + (thread % WARPGROUP) // WARP
        # chunk c of row r of a swizzled tile lies at chunk c ^ r
        row, matrix = thread % MMA_COLUMNS, thread % WARP // MMA_COLUMNS
        return Products(acc, row_tile, slab, thread, row * ROW_BYTES + (matrix ^ row) * 16)

    @cute.jit
    def sum_products(self, products: Products, memory: Memory, at: Position, k_count: Int32) -> Position:
        """Sets the accumulators to the sums over the next ``k_count`` steps of a work tile; the position after them."""
        products.acc.fill(0.0)
        for _ in cutlass.range(k_count, unroll=1):
            for _ in cutlass.range_constexpr(STAGE_TILES // self.config.stage_tiles):
                mbarrier.wait(memory.ring.full + 8 * at.stage, at.phase)
                packed = self.load_stage(memory, at.stage, products)
                for tile in cutlass.range_constexpr(self.config.stage_tiles):
                    self.multiply_tile(products, packed[tile], self.tile_of_x(memory, at.stage, tile))
                self.release(memory.ring, at.stage, products.thread)
                at = advance(self.config, at)
        return at

    def tile_of_x(self, memory: Memory, stage: Int32, tile: int) -> Int32:
        """Shared address of the 64 columns of x that belong to a packed tile of a stage."""
        each = self.config.x_bytes // self.config.stage_tiles
        return memory.sX.iterator.toint() + stage * self.config.x_bytes + tile * each

    def multiply_tile(self, products: Products, packed: PackedLane, x: Int32) -> None:
        """Adds the products of a packed tile, decoded two steps at a time. x: address of its columns of x, a multiple
        of 1024 bytes."""
        acc, dtype = products.acc, self.config.dtype
        columns = cute.size(acc, mode=[1])
        for pair in range(STEPS // 2):
            a = [decode_step(packed, 2 * pair + i, self.config.weights) for i in range(2)]
            # not a sum: ptxas would add up the uniform part of each address anew
            first = x ^ (products.x ^ (pair * STEPS_BYTES))
            for n in range(0, columns, 2):
                # of eight rows of x the two registers of either step
                both = [
                    (j, load_matrices(first + j * (MMA_COLUMNS * ROW_BYTES))) for j in range(n, min(n + 2, columns))
                ]
                for i in range(2):
                    # results that the next instruction does not wait for
                    for j, b in both:
                        sums = mma_m16n8k16(a[i], b[2 * i : 2 * i + 2], [acc[r, j] for r in range(4)], dtype)
                        for r, value in enumerate(sums):
                            acc[r, j] = value


class PackedGemm(_WarpProducts, WgmmaGemm):
    """The host function and the kernel of one ``WgmmaConfig`` of sm_120a."""


class GroupedPackedGemm(_WarpProducts, GroupedWgmma):
    """Those of one ``GroupedWgmmaConfig``."""

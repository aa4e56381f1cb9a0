"""GEMM of packed weights on 16-bit ``mma.sync``, for any number of rows of x: ``sm90/wgmma`` with warp-level MMAs.

A warp decodes the same slab of sixteen rows of the weight as on sm_90a, to the same registers: operand A of an
``m16n8k16`` is one warp's part of a ``wgmma``'s. It reads all rows of x of the stage by ``ldmatrix``: eight rows are
operand B of one instruction. Accumulators have the register layout of ``wgmma``, so that loads, shares of the work,
sums over CTAs, gates and stores are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....ptx.mma import load_matrices, mma_m16n8k16
from ....weight_layout import STEPS
from ...moe.routed import RoutedWgmma
from ..packed.decode import PackedLane, decode_step
from ..packed.mainloop import OperandMemory, Products
from ..packed.stream_config import MMA_COLUMNS, WARP
from ..packed.stream_x import ROW_BYTES
from ..sm90.config import WARPGROUP
from ..sm90.grouped import GroupedWgmma
from ..sm90.wgmma import WgmmaGemm

STEPS_BYTES = 64
"""Bytes of two steps of a row of x: what an ``ldmatrix`` reads of each of eight rows."""


@dataclass(frozen=True)
class WarpProducts(Products):
    """A lane's accumulators, (REGISTER, MMA_N), and the products that it adds to them. x: bytes from a stage's x to the
    row of sixteen bytes whose address the lane gives to its first ``ldmatrix``."""

    asynchronous: ClassVar[bool] = False

    x: Int32

    def multiply(self, packed: PackedLane, tile: int, part: int, stage: Int32, k_tile: Int32 | int) -> None:
        """Adds the products of a packed tile, which it decodes two steps at a time."""
        cfg, acc, columns = self.config, self.acc, cute.size(self.acc, mode=[1])
        # the 64 columns of x that belong to the tile start at a multiple of 1024 bytes
        tile_of_x = self.memory.sX.iterator.toint() + stage * cfg.x_bytes + part * (cfg.x_bytes // cfg.stage_tiles)
        for pair in range(STEPS // 2):
            a = [decode_step(packed, 2 * pair + i, cfg.weights) for i in range(2)]
            # an exclusive or, since ptxas would compute the uniform part of a sum again for each address
            first = tile_of_x ^ (self.x ^ (pair * STEPS_BYTES))
            for n in range(0, columns, 2):
                # for each eight rows of x, the two registers of either step
                both = [
                    (j, load_matrices(first + j * (MMA_COLUMNS * ROW_BYTES))) for j in range(n, min(n + 2, columns))
                ]
                for i in range(2):
                    # consecutive instructions do not depend on one another's results
                    for j, b in both:
                        sums = mma_m16n8k16(a[i], b[2 * i : 2 * i + 2], [acc[r, j] for r in range(4)], cfg.dtype)
                        for r, value in enumerate(sums):
                            acc[r, j] = value


class _ByWarps:
    """A mixin that makes the products of ``mma.sync`` where ``WgmmaGemm`` makes those of ``wgmma``."""

    def products(self, memory: OperandMemory, columns: int, group: Int32, thread: Int32) -> WarpProducts:
        """A thread's products for a work tile of ``columns`` rows of x."""
        acc = cute.make_rmem_tensor((4, columns // MMA_COLUMNS), Float32)
        row_tile, slab = group // 2, (group % 2) * 4 + (thread % WARPGROUP) // WARP
        # chunk c of row r of a swizzled tile lies at chunk c ^ r
        row, matrix = thread % MMA_COLUMNS, thread % WARP // MMA_COLUMNS
        x = row * ROW_BYTES + (matrix ^ row) * 16
        return WarpProducts(self.config, memory, row_tile, slab, thread, acc, x)


class PackedGemm(_ByWarps, WgmmaGemm):
    """The host function and the kernel of one ``WgmmaConfig`` of sm_120a."""


class GroupedPackedGemm(_ByWarps, GroupedWgmma):
    """The host function and the kernel of one ``GroupedWgmmaConfig`` of sm_120a."""


class RoutedPackedGemm(_ByWarps, RoutedWgmma):
    """The host function and the kernel of one ``GroupedWgmmaConfig`` of sm_120a, whose rows are slots."""

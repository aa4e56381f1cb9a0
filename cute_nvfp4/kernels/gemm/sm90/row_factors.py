"""Factors of the rows of both operands of an FP8 product: asked for before a work tile's products, used after them.

A thread has two rows of the weight, and a quarter of the columns of the MMA, which are rows of x: their factors come
through shared memory, in which each warpgroup has a place for those of a work tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....ptx.memory import load_shared, store_shared
from ....ptx.move import f32_bits, f32_from_bits
from ..epilogue import device_scalar
from .arguments import RowScales
from .config import WARPGROUP, WgmmaConfig


@dataclass(frozen=True)
class RowFactors:
    """Factors that a thread has asked for. of_weight: of its rows g and g + 8, if they have some. of_x: of columns
    ``thread`` and every 128th after it. shared: the warpgroup's place for those of all columns."""

    config: WgmmaConfig
    of_weight: tuple[Float32, Float32] | None
    of_x: tuple[Float32, ...]
    shared: Int32
    thread: Int32

    @cute.jit
    def share(self, barrier: Int32):
        """Puts those of x where the warpgroup finds them."""
        # nobody reads those of the work tile before any more
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(len(self.of_x)):
            column = self.thread + i * WARPGROUP
            if column < self.config.tile_n:
                store_shared(self.shared + 4 * column, [f32_bits(self.of_x[i])])
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)

    def scale(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Multiplies columns ``begin`` to ``end`` of the accumulators."""
        first = self.shared + self.thread % 4 * 8
        for i in range(begin // 8, end // 8):
            pair = [f32_from_bits(word) for word in load_shared(first + 32 * i, 8)]
            for half in range(2):
                for j in range(2):
                    at = 4 * i + 2 * half + j
                    if self.of_weight is not None:
                        acc[at] = acc[at] * self.of_weight[half]
                    acc[at] = acc[at] * pair[j]


def row_factors(
    config: WgmmaConfig,
    scales: RowScales,
    row: Int32,
    columns: tuple[Int32, Int32],
    shared: Int32,
    thread: Int32,
) -> RowFactors:
    """Asks for the factors of a work tile. row: the thread's first, of the packed weight. columns: the first row of x,
    and how many rows x has."""
    first, rows = columns
    of_weight = device_scalar(scales.weight + row), device_scalar(scales.weight + (row + 8))
    places = [first + thread + i * WARPGROUP for i in range(-(-config.tile_n // WARPGROUP))]
    of_x = tuple(device_scalar(scales.x + cutlass.min(place, rows - 1)) for place in places)
    return RowFactors(config, of_weight, of_x, shared, thread)

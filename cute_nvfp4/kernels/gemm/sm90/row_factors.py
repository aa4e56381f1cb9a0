"""The factors of rows of both operands of an FP8 product. A thread loads them before a work tile's mainloop, and uses
them after it.

A thread has two rows of the weight, and a quarter of the columns of the MMA, which are rows of x. The factors of x go
through shared memory, where each warpgroup has room for those of a work tile.
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
    """The factors that a thread has loaded. of_weight: those of its rows g and g + 8, if the weight has any. of_x:
    those of columns ``thread``, ``thread`` + 128, … shared: the address of the warpgroup's factors of all columns."""

    config: WgmmaConfig
    of_weight: tuple[Float32, Float32] | None
    of_x: tuple[Float32, ...]
    shared: Int32
    thread: Int32

    @cute.jit
    def share(self, barrier: Int32):
        """Writes the factors of x to shared memory for the warpgroup."""
        # all threads have read the factors of the previous work tile
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(len(self.of_x)):
            column = self.thread + i * WARPGROUP
            if column < self.config.tile_n:
                store_shared(self.shared + 4 * column, [f32_bits(self.of_x[i])])
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)

    def scale(self, acc: cute.Tensor, begin: int, end: int) -> None:
        """Multiplies columns ``begin`` to ``end`` of the accumulators by the factors of their rows of both operands."""
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
    """Starts to load the factors of a work tile. row: the thread's first row in the packed weight. columns: the first
    row of x, and the number of rows of x."""
    first, rows = columns
    of_weight = device_scalar(scales.weight + row), device_scalar(scales.weight + (row + 8))
    places = [first + thread + i * WARPGROUP for i in range(-(-config.tile_n // WARPGROUP))]
    of_x = tuple(device_scalar(scales.x + cutlass.min(place, rows - 1)) for place in places)
    return RowFactors(config, of_weight, of_x, shared, thread)

"""From accumulators in registers to the output: a lane takes a run of a row at a time, and needs no other lane."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..config import CTA_ROWS, GemmConfig
from ..epilogue import EpilogueFunction, Position, Result
from ..output import ThreadStore
from ..tile_scheduler import WorkTile
from .warp_tile import HALVES, PAIRS, RUN, WarpTile


def in_order(values: list[Float32], q: Int32) -> list[Float32]:
    """Four values of instructions 0 … 3, of which number t belongs to place t ^ q, in their places."""
    for bit in (1, 2):
        exchange = (q & bit) != 0
        values = [cutlass.select_(exchange, values[t ^ bit], values[t]) for t in range(PAIRS)]
    return values


@dataclass(frozen=True)
class Epilogue:
    """What a lane of a multiplying warp stores with."""

    config: GemmConfig
    tile: WarpTile
    function: EpilogueFunction
    store: ThreadStore
    warp: Int32

    def run(self, acc: cute.Tensor, m: int, row: int) -> list[cute.Tensor]:
        """The lane's columns of row g (``row`` 0) or g + 8 (1) of instruction ``m``, of every product."""
        found = []
        for p in range(self.config.products):
            values = cute.make_rmem_tensor(cute.make_layout(RUN), Float32)
            for half in range(HALVES):
                for i in range(2):
                    scattered = [acc[2 * row + i, t, half, m, p] for t in range(PAIRS)]
                    for place, value in enumerate(in_order(scattered, self.tile.q)):
                        values[half * 2 * PAIRS + 2 * place + i] = value
            found.append(values)
        return found

    def store_tile(self, acc: cute.Tensor, work: WorkTile, result: Result) -> None:
        """Finishes and stores the sums of a work tile."""
        column = work.n * self.config.tile_n + self.tile.column
        for m in range(self.tile.m_tiles):
            for row in range(2):
                at = Position(work.m * CTA_ROWS + self.tile.row(m, row), column, work.batch)
                outputs = self.function(self.run(acc, m, row), result, at)
                self.store.write(outputs, at, result.out, 0, self.warp)

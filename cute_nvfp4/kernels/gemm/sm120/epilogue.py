"""The epilogue, from accumulators in registers: a lane stores a run of one row at a time, without other lanes."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..arguments import PartialSums
from ..config import CTA_ROWS, GemmConfig
from ..epilogue import EpilogueFunction, Position, Result
from ..output import ThreadStore
from ..problem import Scheduler
from ..reduction import WorkspaceExchange
from ..tile_scheduler import WorkTile
from .memory_plan import WARP
from .warp_tile import WarpTile


def in_order(values: list[Float32], turn: Int32) -> list[Float32]:
    """The values of two or four instructions in the order of their columns: value t belongs to place t ^ turn."""
    for bit in (1, 2)[: len(values) // 2]:
        exchange = (turn & bit) != 0
        values = [cutlass.select_(exchange, values[t ^ bit], values[t]) for t in range(len(values))]
    return values


@dataclass(frozen=True)
class WarpEpilogue:
    """What a lane of an MMA warp stores with."""

    config: GemmConfig
    tile: WarpTile
    function: EpilogueFunction
    store: ThreadStore
    warp: Int32

    def run(self, acc: cute.Tensor, m: int, row: int) -> list[cute.Tensor]:
        """The lane's run of row g (``row`` 0) or g + 8 (1) of instruction ``m``, for every product."""
        found, tile = [], self.tile
        for p in range(self.config.products):
            values = cute.make_rmem_tensor(cute.make_layout(tile.run), Float32)
            for half in range(tile.halves):
                for i in range(2):
                    scattered = [acc[2 * row + i, t, half, m, p] for t in range(tile.pairs)]
                    for place, value in enumerate(in_order(scattered, tile.turn(tile.q))):
                        values[half * 2 * tile.pairs + 2 * place + i] = value
            found.append(values)
        return found

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(instruction, 0 for row g or 1 for row g + 8) of each row that the lane has."""
        return [(m, row) for m in range(self.tile.m_tiles) for row in range(2)]

    def write(self, values: list[cute.Tensor], m: int, row: int, work: WorkTile, result: Result) -> None:
        """Applies the epilogue function to the sums of one row, and stores the outputs."""
        column = work.n * self.config.tile_n + self.tile.column
        at = Position(work.m * CTA_ROWS + self.tile.row(m, row), column, work.batch)
        self.store.write(self.function(values, result, at), at, result.out, 0, self.warp)


@dataclass(frozen=True)
class WholeWarpTile:
    """Stores a work tile whose K is undivided."""

    def store(self, e: WarpEpilogue, acc: cute.Tensor, work: WorkTile, result: Result, cursor: Int32) -> None:
        for m, row in e.rows:
            e.write(e.run(acc, m, row), m, row, work, result)


@dataclass(frozen=True)
class WarpStreamK(WorkspaceExchange):
    """Stores work tiles whose K CTAs share, through the workspace."""

    def store(self, e: WarpEpilogue, acc: cute.Tensor, work: WorkTile, result: Result, cursor: Int32) -> None:
        columns = range(0, len(e.rows) * e.tile.run, e.tile.run)

        def write(number: int, values: list[cute.Tensor]) -> None:
            e.write(values, *e.rows[number], work, result)

        self.finish(work, cursor, columns, lambda number: e.run(acc, *e.rows[number]), write)


def divided_k(e: WarpEpilogue, partials: PartialSums | None, scheduler: Scheduler) -> WholeWarpTile | WarpStreamK:
    """How K is divided, as an object that stores work tiles."""
    if partials is None:
        return WholeWarpTile()
    thread = e.warp * WARP + e.tile.lane
    addresses = partials.workspace.toint(), partials.flags.toint()
    return WarpStreamK(e.config, len(e.rows) * e.tile.run, thread, e.warp, scheduler, *addresses)

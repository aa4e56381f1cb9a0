"""The loop of a loading warp: it fills each stage that becomes empty with operands of the next k-tile.

A function of the work tile provides the copies: by TMA (``stage_copies``), or of packed weights in bulk
(``packed/loaders``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...ptx import mbarrier
from .barriers import PipelineState, Ring
from .tile_scheduler import CursorRange


class TileCopies(Protocol):
    """The copies that fill the stages of one work tile. steps: one for each stage."""

    steps: CursorRange

    def acquire(self, ring: Ring, at: PipelineState, step: Int32, filled: Int32) -> None:
        """Waits until the stage may be overwritten. filled: the number of stages that this warp has filled so far."""

    def start(self, ring: Ring, stage: Int32, step: Int32) -> None:
        """Announces the bytes of a stage and starts its copies."""


@dataclass(frozen=True)
class OverwritingCopies:
    """Copies into stages that consumers read by plain loads. before: called with each step, ahead of its wait."""

    steps: CursorRange
    start: Callable[[Ring, Int32, Int32], None]
    before: Callable[[Int32], None] = lambda step: None

    def acquire(self, ring: Ring, at: PipelineState, step: Int32, filled: Int32) -> None:
        """Waits until the stage is empty, ahead of copies in the asynchronous proxy."""
        self.before(step)
        mbarrier.wait_to_overwrite(ring.empty(at.stage), at.phase ^ 1)


class ThreadCopies(OverwritingCopies):
    """Copies by ``cp.async``, which write as plain stores do.

    They need no proxy fence: the mbarrier orders them after plain reads, and after ``wgmma`` that is complete.
    """

    def acquire(self, ring: Ring, at: PipelineState, step: Int32, filled: Int32) -> None:
        """Waits until the stage is empty."""
        self.before(step)
        mbarrier.wait(ring.empty(at.stage), at.phase ^ 1)


class Filled(NamedTuple):
    """The number of stages that a loading warp has filled, and its place in the ring."""

    count: Int32
    at: PipelineState


@cute.jit
def fill_stages(copies_of: Callable[[Any, Int32], TileCopies], ring: Ring, scheduler: Any) -> PipelineState:
    """Runs the loop of a loading warp, and returns its final state. copies_of: the copies of the tile at a cursor."""
    filled = Filled(Int32(0), ring.start())
    cursor, end = scheduler.range()
    while cursor < end:
        tile = scheduler.tile(cursor, end)
        filled = fill_tile(copies_of(tile, cursor), ring, filled)
        cursor = scheduler.after(cursor, tile)
    return filled.at


@cute.jit
def fill_tile(copies: TileCopies, ring: Ring, filled: Filled) -> Filled:
    """Fills the stages of one work tile."""
    count, at = filled
    for step in cutlass.range(copies.steps.first, copies.steps.end, unroll=1):
        copies.acquire(ring, at, step, count)
        count += 1
        copies.start(ring, at.stage, step)
        at = ring.advance(at)
    return Filled(count, at)

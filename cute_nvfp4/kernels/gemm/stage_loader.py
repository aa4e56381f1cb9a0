"""The loop of a loading warp: a stage of each work tile's operands into every buffer that comes free.

What is copied, and how, a loader says: by TMA (``stage_copies``), or packed weights in bulk (``sm90/loaders``).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .barriers import PipelineState, Ring
from .tile_scheduler import CursorRange


class TileCopies(Protocol):
    """The copies of the stages of one work tile. steps: one for each stage; stride: as ``Ring.advance`` takes it."""

    steps: CursorRange
    stride: int = 0

    def acquire(self, ring: Ring, at: PipelineState, step: Int32, filled: Int32) -> None:
        """Waits until the stage may be overwritten; ``filled``: stages that this warp has filled so far."""

    def start(self, ring: Ring, stage: Int32, step: Int32) -> None:
        """Announces the bytes of a stage, and starts its copies."""


class StageLoader(Protocol):
    """What a loading warp knows of its kernel."""

    def wait(self) -> None:
        """Comes before the first load."""

    def copies(self, tile: Any, cursor: Int32) -> TileCopies:
        """Those of a work tile, which the scheduler has at ``cursor``."""

    def finish(self, ring: Ring, at: PipelineState) -> None:
        """Comes after the last load."""


class Filled(NamedTuple):
    """Where a loading warp is in its ring, and how many stages it has filled."""

    count: Int32
    at: PipelineState


@cute.jit
def fill_stages(loader: StageLoader, ring: Ring, scheduler: Any):
    """The loop of a loading warp."""
    filled = Filled(Int32(0), ring.start())
    loader.wait()
    cursor, end = scheduler.range()
    while cursor < end:
        tile = scheduler.tile(cursor, end)
        filled = fill_tile(loader.copies(tile, cursor), ring, filled)
        cursor = scheduler.after(cursor, tile)
    loader.finish(ring, filled.at)


@cute.jit
def fill_tile(copies: TileCopies, ring: Ring, filled: Filled) -> Filled:
    """The stages of one work tile."""
    count, at = filled
    for step in cutlass.range(copies.steps.first, copies.steps.end, unroll=1):
        copies.acquire(ring, at, step, count)
        count += 1
        copies.start(ring, at.stage, step)
        at = ring.advance(at, copies.stride)
    return Filled(count, at)

"""A kernel's barriers on the device: where they lie, how they are initialised, and a role's state in their rings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...ptx import mbarrier
from .pipeline_graph import Edge, first_barriers


class PipelineState(NamedTuple):
    """A role's place in a ring: the stage, and the phase of its barriers."""

    stage: Int32
    phase: Int32


@dataclass(frozen=True)
class Ring:
    """The barriers of one edge of the graph: a *full* one for each stage, then an *empty* one for each, if it has any.

    base: pointer to the first barrier of the kernel; first: index of this edge's first barrier.
    """

    edge: Edge
    base: cute.Pointer
    first: int

    def full_pointer(self, stage: Any = 0) -> cute.Pointer:
        """The *full* barrier of a stage, as the pointer that copies take."""
        return self.base + (self.first + stage)

    def full(self, stage: Any = 0) -> Int32:
        """The shared-memory address of the *full* barrier of a stage."""
        return self.full_pointer(stage).toint()

    def empty(self, stage: Any = 0) -> Int32:
        """The shared-memory address of the *empty* barrier of a stage."""
        return (self.base + (self.first + self.edge.stages + stage)).toint()

    def start(self, stage: Int32 | int = 0) -> PipelineState:
        """The state of a role that starts at ``stage``."""
        return PipelineState(Int32(stage), Int32(0))

    def initialise(self, stage: Any) -> None:
        """Initialises the barriers of a stage with the counts that the graph derives. One thread calls it."""
        mbarrier.initialise(self.full(stage), self.edge.full.count)
        if self.edge.empty is not None:
            mbarrier.initialise(self.empty(stage), self.edge.empty.count)

    def announce(self, stage: Any = 0) -> None:
        """Arrives at *full* and announces the bytes that asynchronous copies bring in this phase."""
        mbarrier.expect_bytes(self.full(stage), Int32(self.edge.full.tx_bytes))

    def advance(self, at: PipelineState, count: int = 1) -> PipelineState:
        """The state ``count`` stages further. ``count`` divides the ring's stages; each round flips the phase."""
        stage, phase = at
        if self.edge.stages == 1:
            return PipelineState(stage, phase ^ 1)
        following = stage + count
        if count == 1:
            last, first = following == self.edge.stages, Int32(0)
        else:
            last, first = following >= self.edge.stages, following - self.edge.stages
        return PipelineState(cutlass.select_(last, first, following), cutlass.select_(last, phase ^ 1, phase))


@dataclass(frozen=True)
class AddressRing(Ring):
    """A ring that keeps the addresses of its first full and first empty barrier: fewer additions for each address than
    from a pointer, and two registers more."""

    first_full: Int32
    first_empty: Int32

    def full(self, stage: Any = 0) -> Int32:
        return self.first_full + 8 * stage

    def full_pointer(self, stage: Any = 0) -> cute.Pointer:
        return cute.make_ptr(Int64, self.full(stage), cute.AddressSpace.smem, assumed_align=8)

    def empty(self, stage: Any = 0) -> Int32:
        return self.first_empty + 8 * stage


@dataclass(frozen=True)
class Barriers:
    """The rings of a kernel. accumulators: where they lie in tensor memory; partials: with split_k only."""

    operands: Ring
    accumulators: Ring | None = None
    partials: Ring | None = None

    @property
    def rings(self) -> list[Ring]:
        """The rings that the kernel has."""
        return [ring for ring in (self.operands, self.accumulators, self.partials) if ring is not None]


def make_barriers(graph: tuple[Edge, ...], base: cute.Pointer, *, addresses: bool = False) -> Barriers:
    """The rings of a graph, one after the other from ``base`` on. addresses: whether they are :class:`AddressRing`."""
    rings = {}
    for name, first in first_barriers(graph).items():
        edge = next(edge for edge in graph if edge.name == name)
        rings[name] = Ring(edge, base, first)
        if addresses:
            start = base.toint() + 8 * first
            rings[name] = AddressRing(edge, base, first, start, start + 8 * edge.stages)
    return Barriers(**rings)


def initialise(barriers: Barriers) -> None:
    """Initialises every barrier, in one thread."""
    for ring in barriers.rings:
        for stage in range(ring.edge.stages):
            ring.initialise(stage)
    mbarrier.fence_initialised()


@cute.jit
def initialise_in_turn(barriers: Barriers, turn: Int32, warps: cutlass.Constexpr[int]):
    """Initialises the barriers in ``warps`` warps, a stage each in turn; one thread takes 10 ns for each barrier."""
    with cute.arch.elect_one():
        for ring in barriers.rings:
            for first in cutlass.range_constexpr(0, ring.edge.stages, warps):
                stage = first + turn
                if stage < ring.edge.stages:
                    ring.initialise(stage)
        mbarrier.fence_initialised()

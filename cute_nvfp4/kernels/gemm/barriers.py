"""The barriers of a kernel on the device: where they lie, their initialisation, and where a role is in their rings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...ptx import mbarrier
from .pipeline_graph import Edge, first_barriers


class PipelineState(NamedTuple):
    """Where a role is in a ring: at a stage, and in a phase of its barriers."""

    stage: Int32
    phase: Int32


@dataclass(frozen=True)
class Ring:
    """The barriers of one edge of the graph: a *full* one for each stage, then the *empty* ones, if it has any.

    base: pointer to the first barrier of the kernel; first: index of the edge's own first.
    """

    edge: Edge
    base: cute.Pointer
    first: int

    def full_pointer(self, stage: Any = 0) -> cute.Pointer:
        """The *full* barrier of a stage, as copies take it."""
        return self.base + (self.first + stage)

    def full(self, stage: Any = 0) -> Int32:
        """Shared address of the *full* barrier of a stage."""
        return self.full_pointer(stage).toint()

    def empty(self, stage: Any = 0) -> Int32:
        """Shared address of the *empty* barrier of a stage."""
        return (self.base + (self.first + self.edge.stages + stage)).toint()

    def start(self, stage: Int32 | int = 0) -> PipelineState:
        """The state of a role that begins with ``stage``."""
        return PipelineState(Int32(stage), Int32(0))

    def initialise(self, stage: Any) -> None:
        """One thread gives the barriers of a stage the counts that the graph derives for them."""
        mbarrier.initialise(self.full(stage), self.edge.full.count)
        if self.edge.empty is not None:
            mbarrier.initialise(self.empty(stage), self.edge.empty.count)

    def announce(self, stage: Any = 0) -> None:
        """Arrives at *full*, and says how many bytes asynchronous copies bring in this phase."""
        mbarrier.expect_bytes(self.full(stage), Int32(self.edge.full.tx_bytes))

    def advance(self, at: PipelineState, count: int = 1) -> PipelineState:
        """The state ``count`` stages further, a divisor of the ring's; the phase changes with every round."""
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
    """A ring that keeps where its full and empty barriers start: fewer additions for each address than from a pointer,
    and two registers more."""

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
    """The rings of a kernel; ``accumulators`` where they are in tensor memory, ``partials`` with split_k only."""

    operands: Ring
    accumulators: Ring | None = None
    partials: Ring | None = None

    @property
    def rings(self) -> list[Ring]:
        """The rings that the kernel has."""
        return [ring for ring in (self.operands, self.accumulators, self.partials) if ring is not None]


def make_barriers(graph: tuple[Edge, ...], base: cute.Pointer, *, addresses: bool = False) -> Barriers:
    """The rings of a graph, one after the other from ``base`` on; ``addresses``: as :class:`AddressRing`."""
    rings = {}
    for name, first in first_barriers(graph).items():
        edge = next(edge for edge in graph if edge.name == name)
        rings[name] = Ring(edge, base, first)
        if addresses:
            start = base.toint() + 8 * first
            rings[name] = AddressRing(edge, base, first, start, start + 8 * edge.stages)
    return Barriers(**rings)


def initialise(barriers: Barriers) -> None:
    """One thread initialises every barrier."""
    for ring in barriers.rings:
        for stage in range(ring.edge.stages):
            ring.initialise(stage)
    mbarrier.fence_initialised()


@cute.jit
def initialise_in_turn(barriers: Barriers, turn: Int32, warps: cutlass.Constexpr[int]):
    """``warps`` warps initialise a stage each in turn: one thread would take 10 ns for each barrier of a deep ring."""
    with cute.arch.elect_one():
        for ring in barriers.rings:
            for first in cutlass.range_constexpr(0, ring.edge.stages, warps):
                stage = first + turn
                if stage < ring.edge.stages:
                    ring.initialise(stage)
        mbarrier.fence_initialised()

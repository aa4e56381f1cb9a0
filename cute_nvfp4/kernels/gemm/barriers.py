"""The barriers of a kernel on the device: where they lie, their initialisation, and positions in their rings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...ptx import mbarrier
from .pipeline_graph import Edge, first_barriers


@dataclass(frozen=True)
class Ring:
    """The barriers of one edge of the graph: a *full* one for each stage, then the *empty* ones.

    base: pointer to the first barrier of the kernel; first: index of the edge's own first.
    """

    edge: Edge
    base: cute.Pointer
    first: int

    def full_pointer(self, stage: Any = 0) -> cute.Pointer:
        return self.base + (self.first + stage)

    def full(self, stage: Any = 0) -> Int32:
        """Shared address of the *full* barrier of a stage."""
        return self.full_pointer(stage).toint()

    def empty(self, stage: Any = 0) -> Int32:
        """Shared address of the *empty* barrier of a stage."""
        return (self.base + (self.first + self.edge.stages + stage)).toint()

    def announce(self, stage: Any = 0) -> None:
        """Arrives at *full*, and says how many bytes asynchronous copies bring in this phase."""
        mbarrier.expect_bytes(self.full(stage), Int32(self.edge.full.tx_bytes))

    def advance(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The next (stage, phase); the phase changes with every round."""
        if self.edge.stages == 1:
            return stage, phase ^ 1
        following = stage + 1
        last = following == self.edge.stages
        return cutlass.select_(last, Int32(0), following), cutlass.select_(last, phase ^ 1, phase)


@dataclass(frozen=True)
class Barriers:
    """The rings of a kernel; ``accumulators`` where they are in tensor memory, ``partials`` with split_k only."""

    operands: Ring
    accumulators: Ring | None = None
    partials: Ring | None = None


def make_barriers(graph: tuple[Edge, ...], base: cute.Pointer) -> Barriers:
    """Those of a graph, one after the other from ``base`` on."""
    first = first_barriers(graph)
    return Barriers(**{edge.name: Ring(edge, base, first[edge.name]) for edge in graph})


def initialise(barriers: Barriers) -> None:
    """One thread gives every barrier the count that the graph derives for it."""
    for ring in (barriers.operands, barriers.accumulators, barriers.partials):
        if ring is not None:
            for stage in range(ring.edge.stages):
                mbarrier.initialise(ring.full(stage), ring.edge.full.count)
                mbarrier.initialise(ring.empty(stage), ring.edge.empty.count)
    mbarrier.fence_initialised()

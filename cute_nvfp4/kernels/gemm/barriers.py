"""The barriers of a kernel on the device: where they lie, their initialisation, and positions in their rings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...ptx import mbarrier
from .config import GemmConfig
from .pipeline_graph import barrier_offsets, pipeline_graph
from .sm100.memory_plan import SharedPlan


@dataclass
class Barriers:
    """``base``: pointer to the first barrier. Edges and their barriers are those of ``graph.pipeline_graph``."""

    base: Any

    def pointer(self, config: GemmConfig, edge: str, which: str, index: Any = 0) -> cute.Pointer:
        """The *full* or *empty* barrier ``index`` of an edge."""
        full, empty = barrier_offsets(config, SharedPlan(config).stages)[edge]
        return self.base + ((full if which == "full" else empty) + index)

    def address(self, config: GemmConfig, edge: str, which: str, index: Any = 0) -> Int32:
        """The same as a shared address."""
        return self.pointer(config, edge, which, index).toint()


def initialise(config: GemmConfig, barriers: Barriers) -> None:
    """One thread gives every barrier the count that the graph derives for it."""
    depth = SharedPlan(config).stages
    for edge in pipeline_graph(config):
        for i in range(edge.stages or depth):
            mbarrier.initialise(barriers.address(config, edge.name, "full", i), edge.full.count)
            mbarrier.initialise(barriers.address(config, edge.name, "empty", i), edge.empty.count)
    mbarrier.fence_initialised()


@cute.jit
def advance(stages: cutlass.Constexpr[int], index, phase):
    """The next (index, phase) of a ring; the phase changes with every round."""
    if cutlass.const_expr(stages == 1):
        return index, phase ^ 1
    following = index + 1
    last = following == stages
    return cutlass.select_(last, Int32(0), following), cutlass.select_(last, phase ^ 1, phase)

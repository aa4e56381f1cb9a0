"""The warps of a CTA, its shared memory, and its pipelines: of operands only, for accumulators stay in registers."""

from __future__ import annotations

from dataclasses import dataclass

from .. import shared_plan
from ..config import GemmConfig
from ..pipeline_graph import Arrivals, Edge
from ..shared_plan import StagePlan

WARP = 32
MMA_WARPS = 8
LOAD_WARP = MMA_WARPS
THREADS = WARP * (MMA_WARPS + 1)
"""Eight warps multiply and store, one loads: 65536 / 288 registers a thread leave room for accumulators of 64."""


@dataclass(frozen=True)
class MmaSyncSharedPlan(shared_plan.SharedPlan):
    """The shared memory of an ``mma.sync`` kernel: stages and barriers, and nothing else."""

    def graph(self, stages: int) -> tuple[Edge, ...]:
        return pipelines(self.config, stages)


def pipelines(config: GemmConfig, stages: int = 0) -> tuple[Edge, ...]:
    """One edge: the loading warp fills a stage, and every warp that multiplies says that it has read it. ``stages``, or
    (0) as many as the plan has."""
    full = Arrivals((("the loader, which announces the bytes", 1),), StagePlan(config).loaded)
    empty = Arrivals((("warps that multiply", MMA_WARPS),))
    return (Edge("operands", "load", "mma", stages or MmaSyncSharedPlan(config).stages, full, empty),)

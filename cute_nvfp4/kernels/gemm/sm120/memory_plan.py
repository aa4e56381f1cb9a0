"""A CTA's warps, shared memory and pipelines; only operands have one, since accumulators stay in registers."""

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
"""Eight warps multiply and store, one loads. 65536 / 288 registers for each thread leave room for 64 accumulators."""


@dataclass(frozen=True)
class MmaSyncSharedPlan(shared_plan.SharedPlan):
    """The shared memory of an ``mma.sync`` kernel: stages and barriers only."""

    def graph(self, stages: int) -> tuple[Edge, ...]:
        return pipelines(self.config, stages)


def pipelines(config: GemmConfig, stages: int = 0) -> tuple[Edge, ...]:
    """The pipeline graph, with one edge: the loading warp fills a stage, and every MMA warp signals that it has read
    it. stages: of operands; 0 takes as many as the plan has."""
    full = Arrivals((("the loader, which announces the bytes", 1),), StagePlan(config).loaded)
    empty = Arrivals((("warps that multiply", MMA_WARPS),))
    return (Edge("operands", "load", "mma", stages or MmaSyncSharedPlan(config).stages, full, empty),)

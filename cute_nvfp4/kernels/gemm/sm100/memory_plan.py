"""The plans of tensor memory and of shared memory for a tcgen05 kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import explain
from .. import shared_plan
from ..config import GemmConfig
from ..pipeline_graph import Edge, Rings, pipeline_graph
from ..shared_plan import StagePlan
from .warp_roles import roles

TMEM_COLUMNS = 512
ATOM_COLUMNS = 4
"""Columns that one scale atom takes: a byte for each of 128 rows and 4 blocks along K, in 32 lanes."""


@dataclass(frozen=True)
class Tcgen05SharedPlan(shared_plan.SharedPlan):
    """The shared memory of a tcgen05 kernel."""

    def graph(self, stages: int) -> tuple[Edge, ...]:
        return pipelines(self.config, stages)


@dataclass(frozen=True)
class TensorPlan:
    """Columns of tensor memory: accumulators first, then the scales of every A, then those of every B."""

    config: GemmConfig

    @property
    def sfa(self) -> int:
        return ATOM_COLUMNS * StagePlan(self.config).atoms_k

    @property
    def sfb(self) -> int:
        return ATOM_COLUMNS * StagePlan(self.config).atoms_k * StagePlan(self.config).atoms_n

    @property
    def acc(self) -> int:
        """Columns of the accumulators of one work tile."""
        return self.config.products * self.config.tile_n

    @property
    def scales(self) -> int:
        count_a, count_b = self.config.counts
        return count_a * self.sfa + count_b * self.sfb

    @property
    def acc_stages(self) -> int:
        """Accumulator stages: the configured ones, or two if they fit, so that an epilogue overlaps the next MMAs."""
        return self.config.acc_stages or (2 if 2 * self.acc + self.scales <= TMEM_COLUMNS else 1)

    def sfa_column(self, index: int) -> int:
        return self.acc_stages * self.acc + index * self.sfa

    def sfb_column(self, index: int) -> int:
        return self.sfa_column(self.config.counts[0]) + index * self.sfb

    @property
    def used(self) -> int:
        return self.acc_stages * self.acc + self.scales

    @property
    def allocated(self) -> int:
        """Columns to allocate: tcgen05.alloc takes powers of two from 32 on."""
        return max(32, 1 << (self.used - 1).bit_length())

    @property
    def arithmetic(self) -> str:
        return (
            f"{self.acc_stages} accumulators of {self.config.products} x {self.config.tile_n} + "
            f"scales of A {self.config.counts[0]} x {self.sfa} + scales of B {self.config.counts[1]} x {self.sfb} = "
            f"{self.used} columns, "
            f"{self.allocated} allocated"
        )

    @property
    def reason(self) -> str:
        """Why tensor memory cannot hold the plan, or an empty string."""
        if self.config.acc_stages not in (0, 1, 2):
            return explain("acc_stages", got=self.config.acc_stages, expected="0 (as many as fit), 1 or 2")
        if self.used > TMEM_COLUMNS:
            return explain(
                "tensor memory",
                got=self.arithmetic,
                expected=f"at most {TMEM_COLUMNS} columns: {self.used - TMEM_COLUMNS} too many",
            )
        return ""


def pipelines(config: GemmConfig, stages: int = 0) -> tuple[Edge, ...]:
    """The pipeline graph of the kernel. stages: of operands; 0 takes as many as the plan has."""
    depth = stages or Tcgen05SharedPlan(config).stages
    rings = Rings(depth, StagePlan(config).loaded, TensorPlan(config).acc_stages, roles(config).epilogue)
    return pipeline_graph(config, rings)

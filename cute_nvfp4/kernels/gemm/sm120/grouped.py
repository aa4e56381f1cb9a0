"""The grouped GEMM on ``mma.sync``."""

from __future__ import annotations

from cutlass import Int32

from .. import grouped
from ..arguments import Operand
from ..group_source import GroupSource
from ..operands import Loads, OperandLoad
from .kernel import run_warps
from .loader import describe_operand
from .memory_plan import THREADS


class GroupedGemm(grouped.GroupedGemm):
    threads, launch = THREADS, {"min_blocks_per_mp": 1}

    def describe(self, which: int, operand: Operand, k: Int32, batch: Int32) -> OperandLoad:
        return describe_operand(self.config, which, operand, k, batch)

    def run(self, loads: Loads, problem: GroupSource) -> None:
        run_warps(self.config, loads, problem)

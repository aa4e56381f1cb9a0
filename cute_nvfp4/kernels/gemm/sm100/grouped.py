"""The grouped GEMM on tcgen05."""

from __future__ import annotations

from cutlass import Int32

from .. import grouped
from ..arguments import Operand
from ..group_source import GroupSource
from ..operands import Loads, OperandLoad
from .kernel import run_roles
from .operands import describe_operand, make_mma
from .warp_roles import ROLES


class GroupedGemm(grouped.GroupedGemm):
    threads, launch = ROLES.threads, {}

    def describe(self, which: int, operand: Operand, k: Int32, batch: Int32) -> OperandLoad:
        return describe_operand(self.config, make_mma(self.config), which, operand, k, batch)

    def run(self, loads: Loads, problem: GroupSource) -> None:
        run_roles(self.config, loads, None, problem)

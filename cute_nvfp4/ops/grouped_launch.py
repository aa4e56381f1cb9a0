"""The grouped kernel for block-scaled operands: its records, and its launch for a list of products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.gemm.arguments import Group, GroupedArguments, GroupFactor, GroupTable, Output
from ..kernels.gemm.grouped_config import can_implement_grouped
from ..lazy import ByGeneration, Lazily
from ..planning.gemm_problem import Plan
from ..planning.grouped import GroupedProblem, plan_for_groups
from ..runtime.backend import sm_count
from ..runtime.kernel import Kernel
from ..target import Target
from .checks import DTYPE_NAMES
from .gemm_launch import operand_record
from .list_launch import ListLaunch, ListRequest, Part


def aligned(out: torch.Tensor) -> bool:
    """Whether all rows start and end at multiples of 16 bytes."""
    stride = out.stride(0) if out.shape[0] > 1 else 0
    return (out.data_ptr() | stride * out.element_size() | out.shape[1] * out.element_size()) % 16 == 0


def group_record(plan: Plan, a: Any, b: Any, out: torch.Tensor, names: tuple[str, str] = ("", "")) -> Group:
    """The kernel's record of a group. names: the arguments that hold the operands; without them it has no addresses."""
    pair = zip((a, b), names)
    first, second = (operand_record(*x) for x in (reversed([*pair]) if plan.swap else pair))
    stride = out.stride(0) if out.shape[0] > 1 else 0
    return Group(first, second, first.rows, second.rows, a.k, 0, stride)


def planned_groups(problem: GroupedProblem, target: Target, device: torch.device, config: Plan | None) -> Plan:
    """The plan for all groups on ``device``: ``config``, or the best one."""
    return plan_for_groups(problem, target.arch, sm_count(target, device), config)


_HOST = ByGeneration(
    sm100=Lazily("kernels.gemm.sm100.host", "Tcgen05GroupedGemm"),
    sm120=Lazily("kernels.gemm.sm120.host", "MmaSyncGroupedGemm"),
)
KERNEL = Kernel("grouped_gemm", GroupedArguments, _HOST, can_implement_grouped)
compile_grouped_gemm = KERNEL.compile


class BlockScaledList(ListLaunch):
    """The launch of a list of products with block-scaled operands."""

    kernel, names_an_output = KERNEL, True

    def _plan(self, r: ListRequest, strides: Sequence[Sequence[int]]) -> tuple[Plan, Sequence[int]]:
        a, b = r.pairs[0]
        problem = GroupedProblem(
            sizes=tuple((a.rows, b.rows, a.k) for a, b in r.pairs),
            a_format=a.format.name,
            b_format=b.format.name,
            out=DTYPE_NAMES[r.outs[0].dtype],
            vector=all(map(aligned, r.outs)),
            factors=len(strides[0]),
        )
        plan = planned_groups(problem, r.target, r.outs[0].device, r.config)
        sides = (1, 0) if plan.swap else (0, 1)
        self.operands = tuple(Part(side, name) for side in sides for name in ("data", "scale"))
        return plan, range(len(r.pairs))

    _record = staticmethod(group_record)

    def _arguments(self, plan: Plan, factors: tuple[tuple[GroupFactor, ...], ...], padding: int) -> GroupedArguments:
        count, first = len(self._groups), self._groups[0]
        listed = plan.config.maps != "parameters"
        return GroupedArguments(
            groups=GroupTable(0, count, 0) if listed else (*self._groups, *[first._replace(m=0, n=0)] * padding),
            a=first.a if listed else None,
            b=first.b if listed else None,
            k=first.k if listed else None,
            out=Output(0, 0, None, None, None),
            alpha=1.0,
            factors=factors[0],
            batch=1,
            workers=plan.workers,
        )

    @staticmethod
    def _row(group: Group, addresses: tuple[int, ...]) -> tuple[int, ...]:
        """A row of the table on the device (``GroupedConfig.words``).

        addresses: those of A's data and scales, of B's data and scales, and of the output.
        """
        a, sfa, b, sfb, out = addresses
        return (group.m, group.n, group.k, out, group.stride, a, group.a.row_stride, sfa, b, group.b.row_stride, sfb)

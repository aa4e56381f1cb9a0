"""Host functions on tcgen05, of one problem or of groups, all block-scaled.

C = alpha · (A · Bᵀ) + bias, or gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ).

The kernel is persistent and warp-specialised. In each CTA one warp loads stages of operands by TMA, one issues
block-scaled MMAs, and the epilogue warps store finished accumulators from tensor memory during the next tile's MMAs.

With two products, a stage holds the shared operand once and both of the others. Every MMA is issued twice, and the
epilogue joins two accumulators by a gate. The result may be NVFP4, as the next GEMM takes it for its A.
"""

from __future__ import annotations

from typing import Any, ClassVar

from cutlass import Int32

from .. import grouped, host
from ..arguments import Operand, Output
from ..operands import Loads, OperandLoad, TmaCopy
from ..problem import Problem
from .kernel import run_roles
from .operands import describe_operand, make_mma
from .output import describe_store
from .warp_roles import roles


class OnTcgen05(host.OnArchitecture):
    """The tcgen05 kernel's parts of a host function."""

    launch: ClassVar[dict[str, Any]] = {}

    @property
    def threads(self) -> int:
        return roles(self.config).threads

    def describe(self, which: int, operand: Operand, k: Int32, batch: Int32) -> OperandLoad:
        return describe_operand(self.config, make_mma(self.config), which, operand, k, batch)

    def describe_store(self, out: Output, m: Int32, n: Int32, batch: Int32) -> TmaCopy:
        return describe_store(self.config, out, m, n, batch)

    def run(self, loads: Loads, store: TmaCopy | None, problem: Problem) -> None:
        run_roles(self.config, loads, store, problem)


class Tcgen05Gemm(OnTcgen05, host.Gemm):
    """The host function and the kernel of one problem, plain or gated."""


class Tcgen05GroupedGemm(OnTcgen05, grouped.GroupedGemm):
    """The host function and the kernels of groups."""

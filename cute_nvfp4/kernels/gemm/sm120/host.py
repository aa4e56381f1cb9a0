"""Host functions on ``mma.sync``, of one problem or of groups, all block-scaled.

C = alpha · (A · Bᵀ) + bias, or gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ).

The kernel is persistent. In each CTA one warp loads stages of operands by TMA; eight warps multiply them, with
accumulators in registers, and store a finished tile while the next tile's stages arrive.
"""

from __future__ import annotations

from cutlass import Int32

from .. import grouped, host
from ..arguments import Operand
from ..operands import Loads, OperandLoad, TmaCopy
from ..problem import Problem
from .kernel import run_warps
from .loader import describe_operand
from .memory_plan import THREADS


class OnMmaSync(host.OnArchitecture):
    """The ``mma.sync`` kernel's parts of a host function; its threads store the output, not TMA."""

    threads, launch = THREADS, {"min_blocks_per_mp": 1}

    def describe(self, which: int, operand: Operand, k: Int32, batch: Int32) -> OperandLoad:
        return describe_operand(self.config, which, operand, k, batch)

    def run(self, loads: Loads, store: TmaCopy | None, problem: Problem) -> None:
        run_warps(self.config, loads, problem)


class MmaSyncGemm(OnMmaSync, host.Gemm):
    """The host function and the kernel of one problem, plain or gated."""


class MmaSyncGroupedGemm(OnMmaSync, grouped.GroupedGemm):
    """The host function and the kernels of groups."""

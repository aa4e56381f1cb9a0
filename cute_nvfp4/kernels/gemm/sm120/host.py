"""C = alpha · (A · Bᵀ) + bias, or gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ), block-scaled, on ``mma.sync``.

Persistent: in each CTA a warp loads stages of operands by TMA; eight warps multiply them, with accumulators in
registers, and store a finished tile while the next tile's stages arrive.
"""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from ..arguments import GemmArguments
from ..config import GemmConfig
from ..operands import Loads
from ..problem import OneProblem
from .kernel import run_warps
from .loader import describe_operand
from .memory_plan import THREADS


class Gemm:
    """The host function and the kernel of one :class:`GemmConfig`."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: GemmArguments, stream: CUstream):
        """Launches ``arguments.workers`` CTAs."""
        cfg = self.config
        k, batch = arguments.k, arguments.batch
        m, n = arguments.a[0].rows, arguments.b[0].rows
        loads = Loads(
            tuple(describe_operand(cfg, 0, x, k, batch) for x in arguments.a),
            tuple(describe_operand(cfg, 1, x, k, batch) for x in arguments.b),
        )
        # what only the host uses does not become a parameter of the kernel
        passed = arguments._replace(a=None, b=None, workers=None)
        self.kernel(loads, m, n, passed).launch(
            grid=(1, 1, arguments.workers),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            cooperative=cfg.scheduler == "stream_k",
            stream=stream,
        )

    @cute.kernel
    def kernel(self, loads: Loads, m: Int32, n: Int32, arguments: GemmArguments):
        run_warps(self.config, loads, OneProblem(self.config, arguments, m, n))

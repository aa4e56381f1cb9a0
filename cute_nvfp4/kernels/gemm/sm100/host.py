"""C = alpha · (A · Bᵀ) + bias, or gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ), block-scaled, on tcgen05.

Persistent and warp-specialised: in each CTA a warp loads stages of operands by TMA, a warp issues block-scaled MMAs,
and four warps take finished accumulators from tensor memory to the output while the next tile is being multiplied.

Of two products a stage holds the shared operand once and both of the others, every MMA is issued twice, and the
epilogue joins two accumulators by a gate. The result may leave as NVFP4: what the next GEMM takes as its A.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from ..arguments import GemmArguments
from ..config import GemmConfig
from ..operands import Loads, TmaCopy
from ..problem import OneProblem
from .kernel import run_roles
from .operands import describe_operand, make_mma
from .output import describe_store
from .warp_roles import ROLES


class Gemm:
    """The host function and the kernel of one :class:`GemmConfig`."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: GemmArguments, stream: CUstream):
        """Launches ``arguments.workers`` clusters."""
        cfg = self.config
        mma = make_mma(cfg)
        out, k, batch = arguments.out, arguments.k, arguments.batch
        m, n = arguments.a[0].rows, arguments.b[0].rows
        loads = Loads(
            tuple(describe_operand(cfg, mma, 0, x, k, batch) for x in arguments.a),
            tuple(describe_operand(cfg, mma, 1, x, k, batch) for x in arguments.b),
        )
        store = None
        if cutlass.const_expr(cfg.store == "tma"):
            store = describe_store(cfg, out, m, n, batch)
        cm, cn, ck = cfg.cluster_mnk
        # what only the host uses does not become a parameter of the kernel
        passed = arguments._replace(a=None, b=None, workers=None)
        self.kernel(loads, store, m, n, passed).launch(
            grid=(cm, cn, arguments.workers * ck),
            block=(ROLES.threads, 1, 1),
            cluster=(cm, cn, ck),
            # clusters that wait for one another must be on the device together, or not start
            cooperative=cfg.scheduler == "stream_k",
            stream=stream,
        )

    @cute.kernel
    def kernel(self, loads: Loads, store: TmaCopy | None, m: Int32, n: Int32, arguments: GemmArguments):
        run_roles(self.config, loads, store, OneProblem(self.config, arguments, m, n))

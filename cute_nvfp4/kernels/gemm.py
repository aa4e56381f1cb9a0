"""C = alpha · (A · Bᵀ) + bias for NVFP4, MXFP4 and MXFP8 on tcgen05: an assembly of the parts in ``core``.

Persistent and warp-specialised: in each CTA a warp loads stages of operands by TMA, a warp issues block-scaled MMAs,
and four warps take finished accumulators from tensor memory to the output while the next tile is being multiplied.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from .core.config import GemmConfig
from .core.kernel import run_roles
from .core.operands import Operand, describe_a, describe_b, make_mma
from .core.output import describe_store
from .core.roles import ROLES


class Gemm:
    """The host function and the kernel of one :class:`GemmConfig`."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        a: tuple,
        bs: tuple,
        c: cute.Pointer,
        c_strides: tuple[Int64, Int64],
        bias: cute.Pointer,
        bias_batch: Int64,
        alpha: Float32,
        factors: tuple,
        workspace: cute.Pointer,
        flags: cute.Pointer,
        k: Int32,
        batch: Int32,
        workers: Int32,
        stream: CUstream,
    ):
        """Launches ``workers`` clusters.

        a and each of bs: (data, scale, rows, row stride, batch stride, matrices), strides in elements; c_strides: (from
        one row, or column, to the next; batch); bias_batch: from one batch's bias to the next (0: one for all).
        """
        cfg = self.config
        mma = make_mma(cfg)
        operand_a, operands_b = Operand(*a), [Operand(*b) for b in bs]
        m, n = operand_a.rows, operands_b[0].rows
        loads_a = describe_a(cfg, mma, operand_a, k, batch)
        loads_b = tuple(describe_b(cfg, mma, b, k, batch) for b in operands_b)
        store = ()
        if cutlass.const_expr(cfg.store == "tma"):
            store = describe_store(cfg, c, m, n, batch, *c_strides)
        out = (c, m, n, *c_strides, store)
        finish = (alpha, factors, bias, bias_batch)
        cm, cn, ck = cfg.cluster_mnk
        self.kernel(loads_a, loads_b, out, finish, (workspace, flags), k, batch).launch(
            grid=(cm, cn, workers * ck),
            block=(ROLES.threads, 1, 1),
            cluster=(cm, cn, ck),
            # clusters that wait for one another must be on the device together, or not start
            cooperative=cfg.scheduler == "stream_k",
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, loads_a: tuple, loads_b: tuple, out: tuple, finish: tuple, partials: tuple, k: Int32, batch: Int32
    ):
        run_roles(self.config, loads_a, loads_b, out, finish, partials, k, batch)

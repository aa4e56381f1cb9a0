"""The host functions of the block-scaled GEMMs: they make a TMA copy for every operand, and launch the kernel.

The ``host`` module of an architecture derives one class from :class:`OnArchitecture`, and from it the host functions of
one problem (:class:`Gemm`) and of groups (``grouped.GroupedGemm``).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from .arguments import GemmArguments, Operand, Output
from .config import GemmConfig
from .operands import Loads, OperandLoad, TmaCopy
from .problem import OneProblem, Problem


class OnArchitecture:
    """What a host function asks of its architecture. threads: of a CTA; launch: further options of the launch."""

    threads: int
    launch: dict[str, Any]

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    def describe(self, which: int, operand: Operand, k: Int32, batch: Int32) -> OperandLoad:
        """The TMA loads of an A (``which`` 0) or a B (1), and of its scale factors."""
        raise NotImplementedError

    def describe_store(self, out: Output, m: Int32, n: Int32, batch: Int32) -> TmaCopy:
        """The TMA store of the output, for configurations with ``store`` "tma"."""
        raise NotImplementedError

    def run(self, loads: Loads, store: TmaCopy | None, problem: Problem) -> None:
        """Traces the body of the kernel: everything that a CTA does."""
        raise NotImplementedError


class Gemm(OnArchitecture):
    """The host function and the kernel of one :class:`GemmConfig`."""

    @cute.jit
    def __call__(self, arguments: GemmArguments, stream: CUstream):
        """Launches ``arguments.workers`` clusters."""
        cfg = self.config
        out, k, batch = arguments.out, arguments.k, arguments.batch
        m, n = arguments.a[0].rows, arguments.b[0].rows
        loads = Loads(
            tuple(self.describe(0, x, k, batch) for x in arguments.a),
            tuple(self.describe(1, x, k, batch) for x in arguments.b),
        )
        store = None
        if cutlass.const_expr(cfg.store == "tma"):
            store = self.describe_store(out, m, n, batch)
        cm, cn, ck = cfg.cluster_mnk
        # arguments that only the host uses do not become kernel parameters
        passed = arguments._replace(a=None, b=None, workers=None)
        self.kernel(loads, store, m, n, passed).launch(
            grid=(cm, cn, arguments.workers * ck),
            block=(self.threads, 1, 1),
            cluster=(cm, cn, ck),
            # clusters that wait for one another must all be resident, or none starts
            cooperative=cfg.scheduler == "stream_k",
            stream=stream,
            **self.launch,
        )

    @cute.kernel
    def kernel(self, loads: Loads, store: TmaCopy | None, m: Int32, n: Int32, arguments: GemmArguments):
        self.run(loads, store, OneProblem(self.config, arguments, m, n))

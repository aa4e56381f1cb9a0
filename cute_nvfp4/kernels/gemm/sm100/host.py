"""What the GEMMs of whole tensors have in common on the host: descriptors of their operands, and the launch."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..config import GemmConfig
from .kernel import run_roles
from .operands import Operand, describe_a, describe_b, make_mma
from .output import describe_store
from .warp_roles import ROLES


class Assembly:
    """Base of a host function and its kernel for one :class:`GemmConfig`."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    @cute.jit
    def launch(self, operands_a: tuple, operands_b: tuple, out: tuple, finish: tuple, partials: tuple, sizes: tuple):
        """Launches ``workers`` clusters.

        operands_a, operands_b: the fields of an ``Operand`` each; out: pointer, elements from one row (or column) to
        the next and from one matrix to the next, and for a quantized output its scales and global scale; finish: the
        fields of a ``Finish``; partials: workspace and flags of stream-K; sizes: K, batch, workers, and the stream.
        """
        cfg = self.config
        k, batch, workers, stream = sizes
        mma = make_mma(cfg)
        sides = [Operand(*x) for x in operands_a], [Operand(*x) for x in operands_b]
        m, n = sides[0][0].rows, sides[1][0].rows
        loads_a = tuple(describe_a(cfg, mma, x, k, batch) for x in sides[0])
        loads_b = tuple(describe_b(cfg, mma, x, k, batch) for x in sides[1])
        pointer, stride, batch_stride, *extra = out
        store = tuple(extra)
        if cutlass.const_expr(cfg.store == "tma"):
            store = describe_store(cfg, pointer, m, n, batch, stride, batch_stride)
        places = (pointer, m, n, stride, batch_stride, store)
        cm, cn, ck = cfg.cluster_mnk
        self.kernel(loads_a, loads_b, places, finish, partials, k, batch).launch(
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

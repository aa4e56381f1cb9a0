"""C = alpha · (A · Bᵀ) + bias for NVFP4, MXFP4 and MXFP8 on tcgen05: an assembly of the parts in ``core``.

Persistent and warp-specialised: in each CTA a warp loads stages of operands by TMA, a warp issues block-scaled MMAs,
and four warps take finished accumulators from tensor memory to the output while the next tile is being multiplied.
"""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from .host import Assembly


class Gemm(Assembly):
    """The host function and the kernel of one ``GemmConfig``."""

    @cute.jit
    def __call__(
        self,
        a: tuple,
        b: tuple,
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
        """a, b: the fields of ``core.operands.Operand``; c_strides: elements from one row, or column, to the next, and
        from one matrix to the next; bias_batch: from one matrix's bias to the next (0: one for all); factors: pointers
        to numbers that multiply alpha."""
        finish = (alpha, (factors,), bias, bias_batch)
        self.launch((a,), (b,), (c, *c_strides), finish, (workspace, flags), (k, batch, workers, stream))

"""C = gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ) on tcgen05: the parts of ``gemm``, two accumulators, one load of A.

What differs from a GEMM: ``config.products`` is 2, so a stage holds A once and both B (or, where A and B change places,
B once and both A), every MMA is issued twice, and the epilogue joins two accumulators by a gate before it stores. The
result may leave as NVFP4: E2M1 data and blocked scales, what the next GEMM takes as its A.
"""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from .host import Assembly


class GatedGemm(Assembly):
    """The host function and the kernel of one ``GemmConfig`` with two products."""

    @cute.jit
    def __call__(
        self,
        one: tuple,
        two: tuple[tuple, tuple],
        c: tuple,
        alpha: Float32,
        factors: tuple[tuple, tuple],
        partials: tuple[cute.Pointer, cute.Pointer],
        sizes: tuple[Int32, Int32, Int32],
        stream: CUstream,
    ):
        """one: the fields of ``core.operands.Operand`` of the operand that both products share, two: of the others;
        c: as ``Assembly.launch`` has it; factors: for each product pointers to numbers that multiply alpha; partials:
        workspace and flags; sizes: K, batch, workers."""
        a, b = ((one,), two) if self.config.shared == "a" else (two, (one,))
        # there is no bias, and its pointer is never read
        finish = (alpha, factors, partials[0], Int32(0))
        self.launch(a, b, c, finish, partials, (*sizes, stream))

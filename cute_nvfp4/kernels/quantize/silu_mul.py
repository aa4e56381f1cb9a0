"""silu(gate) · up, quantized: the kernel of rows with two inputs.

The kernel computes the activation in fp32 from the words of two blocks and rounds it once to the inputs' dtype. It then
treats the result as words that it has read. Its silu is that of the GEMM's epilogue (``gemm.gates``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from ...ptx.arithmetic import mul_rn
from ..gemm.gates import silu
from .block.definition import from_f32, to_f32
from .fused import SiluMulArguments, SiluMulConfig
from .kernel import FusedLaunch, Matrices, address_of
from .row import QuantizeRow


class SiluMulQuantize(FusedLaunch, QuantizeRow):
    """The host function and the kernel of one :class:`SiluMulConfig`."""

    input_count = 2

    config: SiluMulConfig

    @cute.kernel
    def kernel(self, arguments: SiluMulArguments):
        self.quantize_rows(arguments.quantize, arguments)

    def extended(self, matrices: Matrices, extra: SiluMulArguments) -> Matrices:
        """``matrices`` with the tensors of up and of the values."""
        return matrices._replace(
            mOther=self.like_x(matrices, *extra.up),
            mValues=self.like_x(matrices, *extra.values) if self.config.values else None,
        )

    def inputs(self, matrices: Matrices) -> tuple[cute.Tensor, ...]:
        """The tensors of gate and up."""
        return matrices.mX, matrices.mOther

    @cute.jit
    def prepared(
        self, matrices: Matrices, words: list[Uint32], row: Int32, column: Int32, exists: Boolean
    ) -> tuple[Uint32, ...]:
        """silu(gate) · up of a block; it stores an existing block's values where the configuration says so."""
        half = len(words) // 2
        gate, up = to_f32(self.config, words[:half]), to_f32(self.config, words[half:])
        values = from_f32(self.config, [mul_rn(silu(x), y) for x, y in zip(gate, up)])
        if cutlass.const_expr(self.config.values):
            if exists:
                self.store(Int64(address_of(matrices.mValues, (row, column))), values)
        return values

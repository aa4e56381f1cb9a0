"""silu(gate) · up, or rmsnorm(x + residual) · weight, quantized to E4M3 with a scale for each row.

It is the kernel of rows, which computes the words between its loads and the search for the largest. A row stays in
registers. Values equal those of the kernels that quantize blocks (``silu_mul``, ``rmsnorm``): they are computed in fp32
and rounded once to the dtype of x.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.arithmetic import add_rn, fma_rn, mul_rn, rsqrt_approx
from ...ptx.memory import load_shared, store_global, store_shared
from ...ptx.move import f32_bits, f32_from_bits
from ...ptx.warp import sum_lanes
from ..arith import div, mod
from ..gemm.gates import silu
from .block.definition import from_f32, to_f32
from .config import WARP
from .fp8_config import VECTOR, Fp8ComputedArguments, Fp8ComputedConfig, OtherRows
from .fp8_rows import Fp8Rows

SUMS = 4
"""Partial sums of squares in a thread: independent chains of FMAs."""


class Fp8Computed(Fp8Rows):
    """The host function and the kernel of one :class:`Fp8ComputedConfig`."""

    config: Fp8ComputedConfig

    @cute.jit
    def __call__(self, arguments: Fp8ComputedArguments, stream: CUstream):
        """Launches one CTA for each row."""
        grid, rows = (arguments.rows.rows, 1, 1), arguments.rows._replace(rows=None)
        self.kernel(arguments._replace(rows=rows)).launch(grid=grid, block=(self.config.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments: Fp8ComputedArguments):
        cfg, rows = self.config, arguments.rows
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        words = self.words(rows.x.toint() + Int64(row) * rows.stride, rows.k, thread)
        if cutlass.const_expr(cfg.source == "silu_mul"):
            up = to_f32(cfg, self.of_row(arguments.up, rows.k, row, thread))
            words = from_f32(cfg, [mul_rn(silu(x), y) for x, y in zip(to_f32(cfg, words), up)])
        else:
            if cutlass.const_expr(cfg.residual):
                words = self.with_residual(arguments, words, row, thread)
            words = self.normed(arguments, words, thread)
        self.quantize(rows, row, thread, list(words))

    def of_row(self, matrix: OtherRows, k: Int32, row: Int32, thread: Int32) -> list[Uint32]:
        """A thread's words of a row of a matrix other than x."""
        return self.words(matrix.pointer.toint() + Int64(row) * matrix.stride, k, thread)

    @cute.jit
    def with_residual(self, arguments: Fp8ComputedArguments, words: list[Uint32], row: Int32, thread: Int32) -> Any:
        """x + residual, rounded to the dtype of x; it stores the sum, too."""
        cfg, k, out = self.config, arguments.rows.k, arguments.residual_out
        old = to_f32(cfg, self.of_row(arguments.residual, k, row, thread))
        found = from_f32(cfg, [add_rn(a, b) for a, b in zip(to_f32(cfg, words), old)])
        target = out.pointer.toint() + Int64(row) * out.stride
        for i in cutlass.range_constexpr(cfg.vectors):
            at = thread + i * cfg.threads
            if at < div(k, VECTOR):
                address = target + Int64(at) * (2 * VECTOR)
                store_global(address, list(found[8 * i : 8 * i + 4]))
                store_global(address + 16, list(found[8 * i + 4 : 8 * i + 8]))
        return found

    def normed(self, arguments: Fp8ComputedArguments, words: Any, thread: Int32) -> tuple[Uint32, ...]:
        """The words, normalised, times the weight, rounded once."""
        x = to_f32(self.config, words)
        total = self.sum_of_squares(x, thread)
        inverse = rsqrt_approx(fma_rn(total, arguments.inverse_k, arguments.eps))
        values = [mul_rn(one, inverse) for one in x]
        if arguments.weight is not None:
            weight = to_f32(self.config, self.words(arguments.weight.toint(), arguments.rows.k, thread))
            values = [mul_rn(y, w) for y, w in zip(values, weight)]
        return from_f32(self.config, values)

    @cute.jit
    def sum_of_squares(self, x: list[Float32], thread: Int32) -> Float32:
        """The sum of squares of the row, in every thread. The order of the sum depends on K only."""
        place = SmemAllocator().allocate_array(Float32, WARP, byte_alignment=16).toint()
        own = [mul_rn(a, a) for a in x[:SUMS]]
        for i in cutlass.range_constexpr(SUMS, len(x)):
            own[i % SUMS] = fma_rn(x[i], x[i], own[i % SUMS])
        total = sum_lanes(add_rn(add_rn(own[0], own[1]), add_rn(own[2], own[3])), WARP)
        warps, lane = self.config.warps, mod(thread, WARP)
        if cutlass.const_expr(warps > 1):
            if lane == 0:
                store_shared(place + 4 * div(thread, WARP), [f32_bits(total)])
            cute.arch.sync_threads()
            mine = f32_from_bits(load_shared(place + 4 * cutlass.min(lane, warps - 1), 4)[0])
            total = sum_lanes(cutlass.select_(lane < warps, mine, Float32(0.0)), WARP)
        return total

"""Quantizes rows of 16-bit floats to E4M3 with a float32 scale for each row, in one pass: a CTA or a warp keeps a row
in its registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.arithmetic import div_rn, max_abs_f32, mul_rn
from ...ptx.convert import bf16x2_to_f32, f16x2_to_f32
from ...ptx.encode import f32x4_to_8bit
from ...ptx.half import max_abs_halves
from ...ptx.memory import load_global_if, load_shared, store_global, store_shared
from ...ptx.move import f32_bits, f32_from_bits
from ...ptx.warp import max_lanes
from ...row_scaled import LARGEST, LEAST
from ..arith import div, mod
from .config import WARP
from .fp8_config import VECTOR, Fp8RowsArguments, Fp8RowsConfig


class Fp8Rows:
    """The host function and the kernel of one :class:`Fp8RowsConfig`."""

    def __init__(self, config: Fp8RowsConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: Fp8RowsArguments, stream: CUstream):
        """Launches one CTA for each ``config.rows`` rows."""
        cfg = self.config
        grid = (cute.ceil_div(arguments.rows, cfg.rows), 1, 1)
        passed = arguments if cfg.rows > 1 else arguments._replace(rows=None)
        block = (cfg.threads * cfg.rows, 1, 1)
        self.kernel(passed).launch(grid=grid, block=block, stream=stream, use_pdl=cfg.early)

    @cute.kernel
    def kernel(self, arguments: Fp8RowsArguments):
        # the GEMM of the result may start and load its weights meanwhile; it waits where it reads the result
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.config.rows > 1):
            row = row * self.config.rows + div(thread, WARP)
            if row < arguments.rows:
                self.take(arguments, row, mod(thread, WARP))
        else:
            self.take(arguments, row, thread)
        if cutlass.const_expr(self.config.early):
            # a launch that waits for this one must also be after the launch before this one
            cute.arch.griddepcontrol_wait()

    def take(self, arguments: Fp8RowsArguments, row: Int32, thread: Int32) -> None:
        """Quantizes one row, by the threads that share it."""
        words = self.words(arguments.x.toint() + Int64(row) * arguments.stride, arguments.k, thread)
        self.quantize(arguments, row, thread, words)

    def words(self, first: Int64, k: Int32, thread: Int32) -> list[Uint32]:
        """A thread's vectors of the row that starts at ``first``; zeros beyond its end."""
        cfg, size = self.config, 2 * VECTOR
        vectors = div(k, VECTOR)
        words: list[Uint32] = []
        for i in range(cfg.vectors):
            at = thread + i * cfg.threads
            exists = cutlass.select_(at < vectors, Int32(1), Int32(0))
            address = first + Int64(at) * size
            words += load_global_if(exists, address, 16) + load_global_if(exists, address + 16, 16)
        return words

    @cute.jit
    def quantize(self, arguments: Fp8RowsArguments, row: Int32, thread: Int32, words: list[Uint32]):
        """Quantizes and stores a row, of which each thread has some words."""
        cfg, vectors = self.config, div(arguments.k, VECTOR)
        largest = self.largest_of_row(max_abs_halves(words, cfg.dtype), thread)
        inverse = div_rn(Float32(LARGEST), largest)
        if thread == 0:
            store_global(arguments.scale.toint() + Int64(row) * 4, [f32_bits(div_rn(largest, Float32(LARGEST)))])
        target = arguments.data.toint() + Int64(row) * arguments.k
        for i in cutlass.range_constexpr(cfg.vectors):
            at = thread + i * cfg.threads
            if at < vectors:
                store_global(target + Int64(at) * VECTOR, self.encoded(words[8 * i : 8 * i + 8], inverse))

    @cute.jit
    def largest_of_row(self, value: Float32, thread: Int32) -> Float32:
        """The largest ``value`` of the threads that share a row, at least ``LEAST``; NaN if one of them is."""
        smem = SmemAllocator()
        place = smem.allocate_array(Float32, WARP, byte_alignment=16).toint()
        lane, warps = mod(thread, WARP), self.config.warps
        # bits of non-negative values are in the order of the values, and NaN's are the largest
        found = max_lanes(f32_bits(max_abs_f32(value, Float32(LEAST))))
        if cutlass.const_expr(warps > 1):
            if lane == 0:
                store_shared(place + 4 * div(thread, WARP), [found])
            cute.arch.sync_threads()
            found = max_lanes(load_shared(place + 4 * cutlass.min(lane, warps - 1), 4)[0])
        return f32_from_bits(found)

    def encoded(self, words: list[Uint32], inverse: Float32) -> list[Uint32]:
        """The sixteen E4M3 codes of eight words."""
        to_f32 = bf16x2_to_f32 if self.config.dtype == "bfloat16" else f16x2_to_f32
        values = [mul_rn(x, inverse) for word in words for x in to_f32(word)]
        return [f32x4_to_8bit(values[i : i + 4], "e4m3") for i in range(0, VECTOR, 4)]

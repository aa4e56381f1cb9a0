"""rmsnorm(x + residual) · weight, quantized: a row stays in registers from its load to its codes.

Work distribution. A CTA takes a row; thread t takes the blocks t, t + threads, … of it. Squares are summed in fp32: by
each thread in four chains of FMAs, then over the lanes of a warp, then over the warps through shared memory. The order
depends on K and the dtype only, so that a row's result does not depend on other rows. One barrier for each row is
enough, because the sums of the warps alternate between two places. Each thread then quantizes whole blocks, as all
kernels do.

The first row is loaded before the global scale is read, since in decoding the loads take most of a row's time. A CTA
that takes several rows loads the next one, with the weights, after it has quantized this one and its registers are
free; other CTAs of the SM compute meanwhile. Quads of lanes join the scales of four columns to a word.

Rows that only pad the blocked layout are walked like others: nothing is read for them, and their scales are zero.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.arithmetic import add_rn, fma_rn, mul_rn, rsqrt_approx
from ...ptx.memory import load_global_if, load_shared, store_global, store_global_byte, store_shared
from ...ptx.move import f32_bits, f32_from_bits
from ...ptx.warp import sum_lanes
from ...scale_layout import ATOM_COLS, ATOM_ROWS
from ..arith import div, mod
from .block.definition import from_f32, to_f32
from .block.quantize_block import quantize_block
from .config import ITEM_BYTES, WARP
from .fused import RmsnormArguments, RmsnormConfig
from .kernel import FusedLaunch, Matrices, QuantizeKernel, address_of, atom_row

# partial sums in a thread: independent chains of FMAs
_SUMS = 4


class RowWords(NamedTuple):
    """A thread's words of a row: its blocks of x, of the residual and of the weight (None without them)."""

    x: tuple[Uint32, ...]
    residual: tuple[Uint32, ...] | None
    weight: tuple[Uint32, ...] | None


class RmsnormQuantize(FusedLaunch, QuantizeKernel):
    """The host function and the kernel of one :class:`RmsnormConfig`."""

    config: RmsnormConfig

    @cute.kernel
    def kernel(self, arguments: RmsnormArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        # (WARPS, 2): the sums of the warps
        sums = smem.allocate_array(Float32, 2 * WARP, byte_alignment=16).toint()
        matrices, residual_out = self.tensors(arguments)

        words = self.load_row(arguments, matrices, cta, thread)
        context = self.context(arguments.quantize, smem, thread, cta)
        place = Int32(0)
        for row in cutlass.range(cta, arguments.quantize.walk.count, ctas, unroll=1):
            if cutlass.const_expr(cfg.residual):
                words = self.with_residual(words, residual_out, row, thread, matrices)
            total = self.sum_of_squares(words.x, sums + 4 * WARP * place, thread)
            inverse = rsqrt_approx(fma_rn(total, arguments.inverse_k, arguments.eps))
            for i in cutlass.range_constexpr(cfg.blocks):
                column = thread + i * cfg.threads
                exists = matrices.has(row, column)
                values = self.normed(words, inverse, i)
                if cutlass.const_expr(cfg.values):
                    if exists:
                        self.store(address_of(matrices.mValues, (row, column)), values)
                code, out = quantize_block(cfg, values, context)
                if exists:
                    self.store(address_of(matrices.mData, (row, column * cfg.out_bytes)), out)
                self.store_scale(matrices, row, column, Uint32(cutlass.select_(exists, code, Uint32(0))))
            words = self.load_row(arguments, matrices, row + ctas, thread)
            place = place ^ 1

    def tensors(self, arguments: RmsnormArguments) -> tuple[Matrices, cute.Tensor | None]:
        """The tensors of x, the residual, the values and the result; and the tensor of the new residual."""
        matrices = self.matrices(arguments.quantize, Int32(0))
        other, out, values = (
            None if matrix is None else self.like_x(matrices, *matrix)
            for matrix in (arguments.residual, arguments.residual_out, arguments.values)
        )
        return matrices._replace(mOther=other, mValues=values), out

    def columns(self, thread: Int32) -> list[Int32]:
        """The block columns of the thread."""
        return [thread + i * self.config.threads for i in range(self.config.blocks)]

    def load_row(self, arguments: RmsnormArguments, matrices: Matrices, row: Int32, thread: Int32) -> RowWords:
        """The thread's blocks of a row; zeros for blocks that do not exist."""

        def words(tensor: cute.Tensor | None) -> tuple[Uint32, ...] | None:
            if tensor is None:
                return None
            found = []
            for column in self.columns(thread):
                found += self.load(address_of(tensor, (row, column)), matrices.has(row, column))
            return tuple(found)

        return RowWords(words(matrices.mX), words(matrices.mOther), self.load_weight(arguments, thread))

    def load_weight(self, arguments: RmsnormArguments, thread: Int32) -> tuple[Uint32, ...] | None:
        """The words of the weights for the thread's blocks."""
        if arguments.weight is None:
            return None
        size = self.config.block * ITEM_BYTES[self.config.weight]
        width = min(self.config.vector_bytes, size)
        words = []
        for column in self.columns(thread):
            exists = cutlass.select_(column < arguments.quantize.columns, Int32(1), Int32(0))
            address = arguments.weight.toint() + Int64(column) * size
            for start in range(0, size, width):
                words += load_global_if(exists, address + start, width)
        return tuple(words)

    @cute.jit
    def with_residual(self, words: RowWords, out: cute.Tensor, row: Int32, thread: Int32, matrices: Matrices):
        """x + residual, rounded to the dtype of x; it stores the sum, too."""
        cfg = self.config
        sums = [add_rn(a, b) for a, b in zip(to_f32(cfg, words.x), to_f32(cfg, words.residual))]
        found, count = from_f32(cfg, sums), cfg.block_bytes // 4
        for i in cutlass.range_constexpr(self.config.blocks):
            column = thread + i * self.config.threads
            if matrices.has(row, column):
                self.store(address_of(out, (row, column)), found[i * count : (i + 1) * count])
        return words._replace(x=found)

    @cute.jit
    def sum_of_squares(self, words: tuple[Uint32, ...], sums: Int32, thread: Int32) -> Float32:
        """The sum of squares of the row, in every thread. sums: the address of the warps' sums."""
        x = to_f32(self.config, words)
        own = [mul_rn(a, a) for a in x[:_SUMS]]
        for i in cutlass.range_constexpr(_SUMS, len(x)):
            own[i % _SUMS] = fma_rn(x[i], x[i], own[i % _SUMS])
        total = sum_lanes(add_rn(add_rn(own[0], own[1]), add_rn(own[2], own[3])), WARP)
        warps, lane = self.config.warps, mod(thread, WARP)
        if cutlass.const_expr(warps > 1):
            if lane == 0:
                store_shared(sums + 4 * div(thread, WARP), [f32_bits(total)])
            cute.arch.sync_threads()
            mine = f32_from_bits(load_shared(sums + 4 * cutlass.min(lane, warps - 1), 4)[0])
            total = sum_lanes(cutlass.select_(lane < warps, mine, Float32(0.0)), WARP)
        return total

    def normed(self, words: RowWords, inverse: Float32, i: int) -> tuple[Uint32, ...]:
        """The words of the thread's ``i``-th block, normalised, times the weight, rounded once."""
        cfg, block = self.config, self.config.block

        def part(words: tuple[Uint32, ...], item_bytes: int) -> tuple[Uint32, ...]:
            count = block * item_bytes // 4
            return words[i * count : (i + 1) * count]

        values = [mul_rn(x, inverse) for x in to_f32(cfg, part(words.x, cfg.item_bytes))]
        if words.weight is not None:
            kind = cfg.with_dtype(cfg.weight)
            values = [mul_rn(y, w) for y, w in zip(values, to_f32(kind, part(words.weight, kind.item_bytes)))]
        return from_f32(cfg, values)

    @cute.jit
    def store_scale(self, matrices: Matrices, row: Int32, column: Int32, code: Uint32):
        """Stores the scale of a block, 0 for a block that does not exist."""
        cfg, exists = self.config, matrices.has(row, column)
        if cutlass.const_expr(cfg.layout == "blocked" or cfg.scale_word):
            # the lanes of a quad have four columns
            word = code << Uint32(8 * mod(column, ATOM_COLS))
            word = word | cute.arch.shuffle_sync_bfly(word, offset=1)
            word = word | cute.arch.shuffle_sync_bfly(word, offset=2)
            stored = (mod(column, ATOM_COLS) == 0) & (column < matrices.columns)
            if cutlass.const_expr(cfg.layout == "blocked"):
                place, atom = atom_row(mod(row, ATOM_ROWS)), div(row, ATOM_ROWS)
                if stored:
                    store_global(matrices.blocked_scale(place, atom, div(column, ATOM_COLS)), [word])
            else:
                if stored & exists:
                    store_global(address_of(matrices.mScale, (row, column)), [word])
        else:
            if exists:
                store_global_byte(address_of(matrices.mScale, (row, column)), code)

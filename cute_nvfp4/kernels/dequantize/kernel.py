"""value = element · scale · global scale, rounded as ``BlockScaledTensor.dequantize`` rounds, at memory bandwidth.

A warp takes four rows of a scale atom, 32 apart, whose scales are sixteen contiguous bytes, and as many columns as its
lanes store in sixteen bytes each.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32

from ...ptx.arithmetic import mul_rn
from ...ptx.convert import e2m1x8_to_f16x2, e4m3x2_to_f16x2, e5m2x2_to_f16x2, f16x2_to_f32
from ...ptx.encode import f32x2_to_16bit
from ...ptx.half import multiply_by_half
from ...ptx.memory import load_global, load_global_byte_if, load_global_if, store_global
from ...ptx.move import f32_bits, f32_from_bits, prmt
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, ATOM_SHAPE
from ..arith import ceil_div, div, mod
from ..quantize.config import WARP
from ..quantize.kernel import bytes_at
from .config import (
    LANE_ROWS,
    WARPS,
    DequantizeArguments,
    DequantizeConfig,
    GroupedDequantizeArguments,
    GroupedDequantizeConfig,
)

ROW_STEP = ATOM_SHAPE[0][0]
_ROW_BYTES = ATOM_BYTES // ROW_STEP


class Matrix(NamedTuple):
    """One matrix: addresses, sizes, and bytes between rows. scale_stride: bytes between rows of row-major scales."""

    data: Int64
    scale: Int64
    out: Int64
    rows: Int32
    k: Int32
    stride: Int64
    scale_stride: Int64


class Dequantize:
    """The host function and the kernel of one :class:`DequantizeConfig`."""

    def __init__(self, config: DequantizeConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: DequantizeArguments, stream: CUstream):
        ctas = self.config.ctas(arguments.rows, arguments.k)
        self.kernel(arguments._replace(batch=None)).launch(
            grid=(ctas, arguments.batch, 1), block=(WARP * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: DequantizeArguments):
        # the GEMM of these values may start, and waits where it reads them
        cute.arch.griddepcontrol_launch_dependents()
        _, batch, _ = cute.arch.block_idx()
        strides, scale_strides = arguments.data_strides, arguments.scale_strides
        matrix = Matrix(
            data=arguments.data.toint() + Int64(batch) * strides.batch,
            scale=arguments.scale.toint() + Int64(batch) * scale_strides.batch,
            out=arguments.out.toint() + Int64(batch) * arguments.out_batch_stride,
            rows=arguments.rows,
            k=arguments.k,
            stride=strides.row,
            scale_stride=scale_strides.row,
        )
        factor = None
        if cutlass.const_expr(self.config.global_scale):
            factor = f32_from_bits(load_global(arguments.global_scale.toint(), 4)[0])
        self.decode(matrix, factor)

    @cute.jit
    def decode(self, matrix: Matrix, factor: Float32 | None):
        """Decodes this CTA's part of a matrix."""
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane, warp = mod(thread, WARP), div(thread, WARP)
        # consecutive CTAs go along K first
        across = ceil_div(matrix.k, cfg.cta_columns)
        cta_row, cta_column = cta // across, cta % across
        place = cta_row * WARPS + warp
        atom, row_in_atom = div(place, ROW_STEP), mod(place, ROW_STEP)
        column = (cta_column * WARP + lane) * cfg.elements
        rows = [atom * ATOM_ROWS + row_in_atom + ROW_STEP * i for i in range(LANE_ROWS)]
        exist = [(row < matrix.rows) & (column < matrix.k) for row in rows]
        per_byte = cfg.format.elements_per_byte
        layout = cute.make_layout((matrix.rows, div(matrix.k, per_byte)), stride=(matrix.stride, 1))
        mX = bytes_at(matrix.data + div(column, per_byte), layout)  # (ROWS, BYTES), from the lane's on
        loaded = [self.load(mX[r, None].iterator.toint(), e) for r, e in zip(rows, exist)]
        scales = self.scales(matrix, rows, exist, atom, row_in_atom, column)
        for i in cutlass.range_constexpr(LANE_ROWS):
            words = self.values(loaded[i], scales[i], factor, column)
            if exist[i]:
                out_layout = cute.make_layout((matrix.rows, matrix.k), stride=(Int64(matrix.k), 1))  # (ROWS, K)
                at = cute.crd2idx((rows[i], column), out_layout)
                if cutlass.const_expr(cfg.order == "columns"):
                    store_global(matrix.out + at * (16 // cfg.elements), words)
                else:
                    self.store_in_order(matrix.out + (at - mod(column, 128)) * 2, mod(column, 128), words)

    def store_in_order(self, group: Int64, column: Int32, words: list[Uint32]) -> None:
        """Stores eight values of a row at ``column`` of the 128 columns that start at ``group``, in the order of MMA
        fragments: columns n and n + 4 are neighbours, and the next two lie 8 places further."""
        first = group + Int64(2 * (div(column, 16) % 2 * 64 + div(column, 8) % 2 * 32 + div(column, 32) * 2))
        for n in range(4):
            pair = prmt(words[n // 2], words[n // 2 + 2], 0x7632 if n % 2 else 0x5410)
            store_global(first + 16 * n, [pair])

    def load(self, address: Int64, exists: Boolean) -> list[Uint32]:
        """The words of a lane's elements of a row. Two lanes share a word where each has two bytes of it."""
        size = self.config.data_bytes
        address = address & ~Int64(3) if size < 4 else address
        return load_global_if(cutlass.select_(exists, Int32(1), Int32(0)), address, max(size, 4))

    def scales(
        self,
        matrix: Matrix,
        rows: list[Int32],
        exist: list[Boolean],
        atom: Int32,
        row_in_atom: Int32,
        column: Int32,
    ) -> list[Uint32]:
        """The codes of the scales of a lane's rows."""
        cfg, first = self.config, matrix.scale
        block = div(column, cfg.format.block)
        if cfg.layout == "rowmajor":
            found = [cutlass.select_(e, Int32(1), Int32(0)) for e in exist]
            layout = cute.make_layout((matrix.rows, div(matrix.k, cfg.format.block)), stride=(matrix.scale_stride, 1))
            mSF = bytes_at(first + block, layout)  # (ROWS, BLOCKS), from the lane's on
            return [load_global_byte_if(e, mSF[r, None].iterator.toint()) for r, e in zip(rows, found)]
        number = Int64(atom) * ceil_div(div(matrix.k, cfg.format.block), ATOM_COLS) + div(block, ATOM_COLS)
        # one row's predicate serves all four, since the padding of an atom may be read
        exists = cutlass.select_(column < matrix.k, Int32(1), Int32(0))
        words = load_global_if(exists, first + number * ATOM_BYTES + row_in_atom * _ROW_BYTES, _ROW_BYTES)
        shift = Uint32(mod(block, ATOM_COLS) * 8)
        return [(word >> shift) & Uint32(0xFF) for word in words]

    def values(self, words: list[Uint32], scale: Uint32, factor: Float32 | None, column: Int32) -> list[Uint32]:
        """The lane's values of one row, as sixteen bytes."""
        cfg = self.config
        pairs = self.pairs(words, column)
        if cfg.format.scale == "e4m3":
            # at most six significant bits, from 2**-10 to 2688: exact in binary16
            half = e4m3x2_to_f16x2(Uint16(scale))
            pairs = [multiply_by_half(pair, half, 0, "float16") for pair in pairs]
            if cfg.out == "float16" and factor is None:
                return pairs
        numbers = [x for pair in pairs for x in f16x2_to_f32(pair)]
        if cfg.format.scale == "ue8m0":
            power = ue8m0_to_f32(scale)
            numbers = [mul_rn(x, power) for x in numbers]
        if factor is not None:
            numbers = [mul_rn(x, factor) for x in numbers]
        if cfg.out == "float32":
            return [f32_bits(x) for x in numbers]
        return [f32x2_to_16bit(low, high, cfg.out) for low, high in zip(numbers[::2], numbers[1::2])]

    def pairs(self, words: list[Uint32], column: Int32) -> list[Uint32]:
        """A lane's elements, in pairs of binary16."""
        cfg = self.config
        if cfg.format.element == "e2m1":
            word = words[0]
            if cfg.data_bytes == 2:
                word = word >> Uint32(mod(column, 8) * 4)
            return e2m1x8_to_f16x2(word, cfg.arch)[: cfg.elements // 2]
        to_pair = {"e4m3": e4m3x2_to_f16x2, "e5m2": e5m2x2_to_f16x2}[cfg.format.element]
        return [to_pair(Uint16(half)) for word in words for half in (word & Uint32(0xFFFF), word >> Uint32(16))]


class GroupedDequantize(Dequantize):
    """The host function and the kernel of one :class:`GroupedDequantizeConfig`: blockIdx.y is the matrix."""

    config: GroupedDequantizeConfig

    @cute.jit
    def __call__(self, arguments: GroupedDequantizeArguments, stream: CUstream):
        """Launches as many CTAs for each matrix as the largest needs."""
        self.kernel(arguments._replace(ctas=None, count=None)).launch(
            grid=(arguments.ctas, arguments.count, 1), block=(WARP * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: GroupedDequantizeArguments):
        # the GEMM of these matrices may start, and waits where it reads them
        cute.arch.griddepcontrol_launch_dependents()
        cta, group, _ = cute.arch.block_idx()
        found = None
        for i, one in enumerate(arguments.groups):
            out = arguments.out.toint() + one.out_offset
            matrix = Matrix(one.data.toint(), one.scale.toint(), out, one.rows, one.k, one.stride, Int64(0))
            found = matrix if i == 0 else Matrix(*[cutlass.select_(group == i, x, y) for x, y in zip(matrix, found)])
        if cta < self.config.ctas(found.rows, found.k):
            self.decode(found, None)


def ue8m0_to_f32(code: Uint32) -> Float32:
    """2**(code − 127), subnormal for code 0; NaN for 255."""
    bits = cutlass.select_(code == Uint32(0), Uint32(1 << 22), code << Uint32(23))
    return f32_from_bits(cutlass.select_(code == Uint32(0xFF), Uint32(0x7FC00000), bits))

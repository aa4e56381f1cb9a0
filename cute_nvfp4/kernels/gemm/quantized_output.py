"""The output in NVFP4: E2M1 elements, and E4M3 scale factors in the blocked layout, with its padding.

``quantize_block`` quantizes the float32 results by the rule "max" and a given global scale: the bits are the same as
those of a float32 output that is quantized afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from ...formats import LARGEST_GLOBAL_SCALE, NVFP4, SMALLEST_GLOBAL_SCALE
from ...ptx.arithmetic import rcp_rn
from ...ptx.memory import store_global
from ...ptx.move import f32_bits
from ...scale_layout import ATOM_COLS, ATOM_ROWS, cute_layout
from ..quantize.block.quantize_block import quantize_block
from ..quantize.block.records import BlockContext, GlobalFactor
from ..quantize.config import QuantizeConfig
from .config import GemmConfig
from .epilogue import OutputMatrix, Position

_WORDS = NVFP4.block_bytes // 4


def global_scaling(global_scale: cute.Pointer) -> GlobalFactor:
    """Reads the global scale. An invalid one makes every output NaN. The rule "max" needs no other field."""
    value = cute.make_tensor(global_scale, cute.make_layout(1))[0]
    inside = (value >= SMALLEST_GLOBAL_SCALE) & (value <= LARGEST_GLOBAL_SCALE)
    value = cutlass.select_(inside, value, Float32(1.0))
    return GlobalFactor(value, rcp_rn(value), None, None, cutlass.select_(inside, Int32(1), Int32(0)))


class QuantizedBlocks(NamedTuple):
    """Quantized blocks of a row. scales: their codes, the first in the low byte; words: of eight elements each."""

    scales: Uint32
    words: list[Uint32]


def quantize_blocks(config: GemmConfig, values: list[Float32], scaling: GlobalFactor) -> QuantizedBlocks:
    """Quantizes float32 ``values``, whole blocks, by the rule "max"."""
    rule = QuantizeConfig(config.arch, dtype="float32")
    codes, words = Uint32(0), []
    for i in range(0, len(values), NVFP4.block):
        block = tuple(f32_bits(x) for x in values[i : i + NVFP4.block])
        code, found = quantize_block(rule, block, BlockContext(scaling))
        codes = codes | (code << Uint32(i // NVFP4.block * 8))
        words += found
    return QuantizedBlocks(codes, words)


@dataclass(frozen=True)
class QuantizedStore:
    """Stores of a row-major NVFP4 output. scale: pointer to its blocked scale factors."""

    config: GemmConfig
    scale: cute.Pointer
    scaling: GlobalFactor

    @cute.jit
    def write(self, values: cute.Tensor, at: Position, out: OutputMatrix, buffer: cutlass.Constexpr[int], warp: Int32):
        """Stores this thread's columns of a row, and their scale factors."""
        blocks = quantize_blocks(self.config, [values[i] for i in range(self.config.epi_tile_n)], self.scaling)
        self.write_data(out, blocks.words, at)
        self.write_scales(out, blocks.scales, at)

    @cute.jit
    def write_data(self, out: OutputMatrix, words: list, at: Position):
        """Stores the elements: all at once where rows are aligned to sixteen bytes, else block by block."""
        offset = Int64(at.batch) * out.batch_stride + Int64(at.row) * out.stride + at.column // 2
        first = out.pointer.toint() + offset
        step = len(words) if self.config.vector else _WORDS
        for i in cutlass.range_constexpr(0, len(words), step):
            if (at.row < out.m) & (at.column + 8 * (i + step) <= out.n):
                store_global(first + 4 * i, words[i : i + step])
            elif cutlass.const_expr(step > _WORDS):
                if (at.row < out.m) & (at.column + 8 * _WORDS <= out.n):
                    store_global(first, words[:_WORDS])

    @cute.jit
    def write_scales(self, out: OutputMatrix, codes: Uint32, at: Position):
        """Stores the scale factors, and zeros in the padding of rows and columns of the blocked layout."""
        row, count = at.row, self.config.epi_tile_n // NVFP4.block
        scales = out.n // NVFP4.block
        rest_m, rest_k = cute.ceil_div(out.m, ATOM_ROWS), cute.ceil_div(scales, ATOM_COLS)
        index = at.column // NVFP4.block
        kept = Uint32(0)
        for i in cutlass.range_constexpr(count):
            inside = (row < out.m) & (index + i < scales)
            kept = kept | cutlass.select_(inside, codes & Uint32(0xFF << 8 * i), Uint32(0))
        if (row < rest_m * ATOM_ROWS) & (index < rest_k * ATOM_COLS):
            matrix = Int64(rest_m) * rest_k * (ATOM_ROWS * ATOM_COLS)
            offset = cute.crd2idx((row, index, 0), cute_layout(out.m, scales))
            target = self.scale + (Int64(at.batch) * matrix + offset)
            if cutlass.const_expr(count == 2):
                pair = cute.recast_ptr(target.align(2), dtype=Uint16)
                cute.make_tensor(pair, cute.make_layout(1))[0] = kept.to(Uint16)
            else:
                cute.make_tensor(target, cute.make_layout(1))[0] = kept.to(Uint8)

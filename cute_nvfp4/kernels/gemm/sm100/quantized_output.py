"""An output that leaves as NVFP4: E2M1 elements, and E4M3 scales in the blocked layout, padding included.

What a block becomes is ``quantize_block``'s matter, with the rule "max" and a given global scale, of the float32
results: the bits are those of quantizing a float32 output.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from ....formats import LARGEST_GLOBAL_SCALE, NVFP4, SMALLEST_GLOBAL_SCALE
from ....ptx.arithmetic import rcp_rn
from ....ptx.memory import store_global
from ....ptx.move import f32_bits
from ....scale_layout import ATOM_COLS, ATOM_ROWS, cute_layout
from ...quantize.block.quantize_block import quantize_block
from ...quantize.block.records import BlockContext, GlobalFactor
from ...quantize.config import QuantizeConfig
from ..config import GemmConfig

_WORDS = NVFP4.block_bytes // 4


@cute.jit
def scaling(global_scale: cute.Pointer) -> GlobalFactor:
    """The global scale and its reciprocal; everything is NaN where it is out of range. Rule "max" needs no more."""
    value = cute.make_tensor(global_scale, cute.make_layout(1))[0]
    inside = (value >= SMALLEST_GLOBAL_SCALE) & (value <= LARGEST_GLOBAL_SCALE)
    value = cutlass.select_(inside, value, Float32(1.0))
    return GlobalFactor(value, rcp_rn(value), None, None, cutlass.select_(inside, Int32(1), Int32(0)))


def quantize_blocks(config: GemmConfig, values: list, known: GlobalFactor) -> tuple[Uint32, list]:
    """Blocks of a row: (codes of their scales, the first in the low byte; words of eight elements)."""
    rule = QuantizeConfig(config.arch, dtype="float32")
    codes, words = Uint32(0), []
    for i in range(0, len(values), NVFP4.block):
        block = tuple(f32_bits(x) for x in values[i : i + NVFP4.block])
        code, found = quantize_block(rule, block, BlockContext(known))
        codes = codes | (code << Uint32(i // NVFP4.block * 8))
        words += found
    return codes, words


@cute.jit
def write_blocks(
    config: cutlass.Constexpr[GemmConfig], out: Any, known: GlobalFactor, values: cute.Tensor, place: tuple
):
    """Stores this thread's piece of a row, and its scales."""
    row, column, batch = place
    codes, words = quantize_blocks(config, [values[i] for i in range(config.piece)], known)
    write_data(config, out, words, row, column, batch)
    write_scales(config, out, codes, row, column, batch)


@cute.jit
def write_data(config: cutlass.Constexpr[GemmConfig], out: Any, words: list, row, column, batch):
    """Elements: sixteen bytes at a time where rows are so aligned, else a block."""
    first = out.pointer.toint() + (Int64(batch) * out.batch_stride + Int64(row) * out.stride + column // 2)
    unit = len(words) if config.vector else _WORDS
    for i in cutlass.range_constexpr(0, len(words), unit):
        if (row < out.m) & (column + 8 * (i + unit) <= out.n):
            store_global(first + 4 * i, words[i : i + unit])
        elif cutlass.const_expr(unit > _WORDS):
            if (row < out.m) & (column + 8 * _WORDS <= out.n):
                store_global(first, words[:_WORDS])


@cute.jit
def write_scales(config: cutlass.Constexpr[GemmConfig], out: Any, codes: Uint32, row, column, batch):
    """Scales, and zeros where the blocked layout pads rows and columns."""
    count = config.piece // NVFP4.block
    scales = out.n // NVFP4.block
    rest_m, rest_k = cute.ceil_div(out.m, ATOM_ROWS), cute.ceil_div(scales, ATOM_COLS)
    index = column // NVFP4.block
    kept = Uint32(0)
    for i in cutlass.range_constexpr(count):
        inside = (row < out.m) & (index + i < scales)
        kept = kept | cutlass.select_(inside, codes & Uint32(0xFF << 8 * i), Uint32(0))
    if (row < rest_m * ATOM_ROWS) & (index < rest_k * ATOM_COLS):
        matrix = Int64(rest_m) * rest_k * (ATOM_ROWS * ATOM_COLS)
        offset = cute.crd2idx((row, index, 0), cute_layout(out.m, scales))
        target = out.quantized[0] + (Int64(batch) * matrix + offset)
        if cutlass.const_expr(count == 2):
            cute.make_tensor(cute.recast_ptr(target.align(2), dtype=Uint16), cute.make_layout(1))[0] = kept.to(Uint16)
        else:
            cute.make_tensor(target, cute.make_layout(1))[0] = kept.to(Uint8)

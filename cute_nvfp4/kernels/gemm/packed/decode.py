"""Decoding of packed weights (``weight_layout``), from shared memory to the registers of operand A."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32

from ....ptx.arithmetic import multiply_add, select_bits
from ....ptx.half import max_u16x2, mul_bf16x2, multiply_by_half
from ....ptx.memory import load_shared
from ....ptx.move import prmt
from ....weight_layout import DTYPES, LANES, LOAD_BYTES, STEPS, Packing, Shift
from ....weight_layout_fp8 import HALF_WORD, MAGNITUDES, SIGN_SHIFT, SIGNS, TABLES
from ...factors import Factor
from ..epilogue import product_factors

ROW_LANES = 4
"""Lanes that have elements of the same row."""
PAIR_SIGNS = 0x80008000
"""The sign bits of a pair of 16-bit floats."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _shifted(word: Uint32, shift: Shift) -> Uint32:
    kind, bits = shift
    if bits == 0:
        return word
    if kind == "left":
        return word << bits
    return word >> bits if kind == "right" else (word >> bits) | (word << (32 - bits))


def _registers(word: Uint32, packing: Packing) -> list[Uint32]:
    """Pairs of elements, before their scales."""
    found = []
    for shifts in packing.registers:
        value = _shifted(word, shifts[0])
        for shift in shifts[1:]:
            value = value ^ _shifted(word, shift)
        found.append(value & Uint32(packing.mask))
    return found


def _registers_of_fp8(word: Uint32, packing: Packing) -> list[Uint32]:
    """Pairs of elements, before their scales, of a word in the order of FP8's tables: columns 4c and 4c + 2 of rows g
    and g + 8, then columns 4c + 1 and 4c + 3. So x must have this order, too."""
    magnitudes, found = packing.mask & ~PAIR_SIGNS, []
    lowest = (magnitudes & -magnitudes).bit_length() - 1
    codes = prmt(word, Uint32(0), 0x4140), prmt(word, Uint32(0), 0x4342)
    for odd in range(2):
        for row in range(2):
            moved = (codes[row] << (lowest - 4 * odd)) & Uint32(magnitudes)
            signs = word << (8 * (1 - odd) + SIGN_SHIFT * row)
            found.append(select_bits(moved, signs, PAIR_SIGNS))
    return found


def _scales(word: Uint32, odd: int, packing: Packing) -> Uint32:
    """The scales of rows g (low half) and g + 8 of a block, from the word of its pair of blocks.

    A byte permutation and a multiplication take fewer instructions of the integer pipe, which decoding fills, than
    shifts and masks.
    """
    bytes_apart = prmt(word, Uint32(0), 0x4341 if odd else 0x4240)
    if packing.of_fp8:
        bytes_apart = bytes_apart & Uint32(0x007F007F)
    scales = multiply_add(bytes_apart, Uint32(1 << packing.scale_shift), Uint32(0x10001 * packing.scale_bits))
    return max_u16x2(scales, Uint32(0x10001 * packing.least_scale)) if packing.least_scale else scales


class PackedLane(NamedTuple):
    """A lane's words of one packed tile. codes: those of each step in order. scales: a word for each two blocks."""

    codes: tuple[Uint32, ...]
    scales: tuple[Uint32, ...]


def load_lane(codes: Int32, scales: Int32, lane: Int32, packing: Packing) -> PackedLane:
    """A lane's words of the slab with these shared addresses. The four lanes of a row load the same scales."""
    loads = [load_shared(codes + (i * LANES + lane) * LOAD_BYTES, LOAD_BYTES) for i in range(packing.step_words)]
    row = lane // ROW_LANES * packing.row_scale_bytes
    words = load_shared(scales + row, packing.row_scale_bytes)
    return PackedLane(tuple(word for load in loads for word in load), tuple(words))


def decode_step(packed: PackedLane, step: int, packing: Packing) -> list[Uint32]:
    """The four registers of A of one step: pairs of 16-bit floats, the weights divided by ``packing.factor``."""
    dtype, count, block = DTYPE_NAMES[packing.dtype], packing.step_words, step // packing.block_steps
    registers = _registers_of_fp8 if packing.of_fp8 else _registers
    pairs = [pair for word in packed.codes[step * count :][:count] for pair in registers(word, packing)]
    if packing.boost:
        pairs = [mul_bf16x2(pair, Uint32(0x10001 * (packing.boost + 127 << 7))) for pair in pairs]
    scale = _scales(packed.scales[block // 2], block % 2, packing)
    return [multiply_by_half(pair, scale, i % 2, dtype) for i, pair in enumerate(pairs)]


def decode_block(packed: PackedLane, step: int, packing: Packing) -> list[Uint32]:
    """The registers of A of rows g and g + 8 of sixteen columns: four E4M3 elements each, by a table for each row.

    Two multiply-adds make a table, in a pipe that decoding leaves free. PRMT takes the codes as selectors.
    """
    word, block = packed.codes[step], step // packing.block_steps
    scales = packed.scales[block // 2]
    selectors, found = word & Uint32(MAGNITUDES), []
    for row in range(2):
        scale = prmt(scales, Uint32(0), 0x4440 + 2 * row + block % 2)
        lower, upper = (multiply_add(scale, Uint32(factor), Uint32(addend)) for factor, addend in TABLES)
        magnitudes = prmt(lower, upper, selectors >> Uint32(HALF_WORD * row))
        signs = word << Uint32(SIGN_SHIFT * row)
        # bit 7 of each byte of the table is arbitrary
        found.append(select_bits(magnitudes, signs, SIGNS))
    return found


def decode_tile(tCrA: cute.Tensor, packed: PackedLane, packing: Packing) -> None:
    """Decodes a lane's part of one packed tile into ``tCrA`` (REGISTER, STEP), 32-bit words."""
    if packing.by_table:
        for block in range(STEPS):
            for row, register in enumerate(decode_block(packed, block, packing)):
                tCrA[block % 2 * 2 + row, block // 2] = register
        return
    for step in range(STEPS):
        for i, register in enumerate(decode_step(packed, step, packing)):
            tCrA[i, step] = register


def sum_factors(arguments: Any, left_out: float) -> tuple[Factor, ...]:
    """The factors of each product's sums: alpha, device scalars, and the power of two that decoding leaves out.

    Call it before the mainloop: each device scalar has the latency of global memory.
    """
    return tuple(product_factors(arguments.alpha, arguments.factors, left_out))

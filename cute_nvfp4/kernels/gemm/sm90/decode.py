"""Packed weights from shared memory to the registers of operand A (``weight_layout`` defines their bytes)."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ....ptx.arithmetic import multiply_add
from ....ptx.half import multiply_by_half
from ....ptx.memory import load_shared
from ....ptx.move import prmt
from ....weight_layout import (
    CODE_BYTES,
    DECODERS,
    DTYPES,
    LANE_BYTES,
    ROW_SCALE_BYTES,
    SLAB_ROWS,
    STEPS,
    WEIGHT_FACTOR,
    Decoder,
    Shift,
)
from ..epilogue import scaled_alphas

LANES = 32
ROW_LANES = 4
"""Lanes that have elements of one row."""


def _shifted(word: Uint32, shift: Shift) -> Uint32:
    kind, bits = shift
    if bits == 0:
        return word
    if kind == "left":
        return word << bits
    return word >> bits if kind == "right" else (word >> bits) | (word << (32 - bits))


def _registers(word: Uint32, decoder: Decoder) -> list[Uint32]:
    """Four pairs of elements, not scaled yet."""
    found = []
    for shifts in decoder.registers:
        value = _shifted(word, shifts[0])
        for shift in shifts[1:]:
            value = value ^ _shifted(word, shift)
        found.append(value & Uint32(decoder.mask))
    return found


def _scales(word: Uint32, odd: int, decoder: Decoder) -> Uint32:
    """The scales of rows g (low half) and g + 8 of a step, from the word of its pair of steps.

    A byte permutation and a multiplication: fewer instructions of the integer pipe, which decoding fills, than shifts
    and masks.
    """
    bytes_apart = prmt(word, Uint32(0), 0x4341 if odd else 0x4240)
    return multiply_add(bytes_apart, Uint32(1 << decoder.scale_shift), Uint32(0x10001 * decoder.scale_bits))


class PackedLane(NamedTuple):
    """A lane's words of one packed tile: codes, one a step; scales, one for two steps."""

    codes: tuple[Uint32, ...]
    scales: tuple[Uint32, ...]


def load_lane(tile: Int32, slab: Int32, lane: Int32, code_bytes: int = CODE_BYTES) -> PackedLane:
    """Those of ``slab`` of the packed tile at a shared address, or of a part that has so many bytes of codes; the four
    lanes of a row have the same scales."""
    codes = load_shared(tile + slab * (LANES * LANE_BYTES) + lane * LANE_BYTES, LANE_BYTES)
    row = code_bytes + slab * (SLAB_ROWS // 2 * ROW_SCALE_BYTES) + lane // ROW_LANES * ROW_SCALE_BYTES
    return PackedLane(tuple(codes), tuple(load_shared(tile + row, ROW_SCALE_BYTES)))


def decode_step(packed: PackedLane, step: int, dtype: str) -> list[Uint32]:
    """The four registers of A of one step: pairs of ``dtype``, 2**-7 times the weights."""
    decoder = DECODERS[DTYPES[dtype]]
    pairs = _registers(packed.codes[step], decoder)
    scale = _scales(packed.scales[step // 2], step % 2, decoder)
    return [multiply_by_half(pair, scale, i % 2, dtype) for i, pair in enumerate(pairs)]


def decode_tile(tCrA: cute.Tensor, packed: PackedLane, dtype: str) -> None:
    """Decodes a lane's part of one tile into ``tCrA`` (REGISTER, STEP), 32-bit words."""
    for step in range(STEPS):
        for i, register in enumerate(decode_step(packed, step, dtype)):
            tCrA[i, step] = register


def product_alphas(arguments: Any) -> tuple[Float32, ...]:
    """Of each product what multiplies its sums: alpha, device scalars, and what decoding leaves out.

    To be asked for before it is needed: each device scalar is as far away as memory.
    """
    return tuple(scaled_alphas(arguments.alpha * Float32(WEIGHT_FACTOR), arguments.factors))

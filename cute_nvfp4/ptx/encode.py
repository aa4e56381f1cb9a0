"""Conversions to E2M1, E4M3, E5M2, binary16 and bf16 (PTX ISA, "cvt"), and to E2M1 without its instruction.

An f16x2 is a ``Uint32``, whose low half is the element with the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Uint16, Uint32

from ..target import Architecture
from ._asm import HALVES, asm, literal

# 1.5 · 2**23: added to a value below 2**22, it rounds it to an integer, ties to even, in the low bits of the sum
_ROUNDER = 1.5 * 2.0**23
# in both halves, for an E2M1 value times 2**-14 as binary16: half a unit in the last place; the bits of code and sign
HALF_UNIT = 0x01000100
CODE_AND_SIGN = 0x8E008E00


def f32x2_to_e4m3x2(low: Float32, high: Float32) -> Uint16:
    """Two E4M3 codes: nearest, ties to even, saturating. PTX 7.8, sm_89 or later: ``cvt.rn.satfinite.e4m3x2.f32``."""
    text = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
    return asm(text, [Uint16], [Float32(high), Float32(low)])[0]


def f32x4_to_8bit(values: Sequence[Float32], element: str) -> Uint32:
    """Four E4M3 or E5M2 codes in a word: nearest, ties to even, saturating. PTX 7.8, sm_89 or later."""
    text = "{ .reg .b16 l, h; " + f"cvt.rn.satfinite.{element}x2.f32 l, $2, $1; "
    text += f"cvt.rn.satfinite.{element}x2.f32 h, $4, $3; mov.b32 $0, {{l, h}}; }}"
    return asm(text, [Uint32], [Float32(x) for x in values])[0]


def f32x2_to_f16x2_rz(low: Float32, high: Float32) -> Uint32:
    """Two values as f16, rounded toward zero. PTX 6.0, sm_80 or later: ``cvt.rz.f16x2.f32``."""
    return asm("cvt.rz.f16x2.f32 $0, $1, $2;", [Uint32], [Float32(high), Float32(low)])[0]


def f32_to_f16_twice(a: Float32) -> Uint32:
    """``a`` as f16 in both halves, rounded to nearest. PTX 6.0, sm_80 or later: ``cvt.rn.f16x2.f32``."""
    return asm("cvt.rn.f16x2.f32 $0, $1, $1;", [Uint32], [Float32(a)])[0]


def f32x2_to_16bit(low: Float32, high: Float32, dtype: str) -> Uint32:
    """Two values as ``dtype``, "float16" or "bfloat16": nearest, ties to even; infinity beyond its range.

    PTX 7.0, sm_80 or later: ``cvt.rn.f16x2.f32``, ``cvt.rn.bf16x2.f32``.
    """
    return asm(f"cvt.rn.{HALVES[dtype]}x2.f32 $0, $1, $2;", [Uint32], [Float32(high), Float32(low)])[0]


def pack_e2m1_halves(halves: Sequence[Uint32]) -> Uint32:
    """Eight E2M1 codes from four words of two binary16 values each, which are E2M1 values times 2**-14.

    In a half, bit 15 is the sign and bits 9 to 11 are the code's magnitude. Bits 12 to 14 must be clear; the others
    are unused.
    """
    # bytes 1 and 3 of each word: sign in bit 7, code in bits 1 to 3
    text = "{ .reg .b32 p, q, e, o, s, t; prmt.b32 p, $1, $2, 0x7351; prmt.b32 q, $3, $4, 0x7351; "
    text += "prmt.b32 e, p, q, 0x5410; prmt.b32 o, p, q, 0x7632; "
    # codes to the upper halves of bytes; lop3 0xE4: the first where the third is set, else the second
    text += "shl.b32 s, e, 3; lop3.b32 s, s, e, 0x70707070, 0xE4; shr.u32 s, s, 4; "
    text += "shl.b32 t, o, 3; lop3.b32 t, t, o, 0x70707070, 0xE4; lop3.b32 $0, s, t, 0x0F0F0F0F, 0xE4; }"
    return asm(text, [Uint32], [Uint32(x) for x in halves])[0]


def f32_to_e2m1x8(values: Sequence[Float32]) -> Uint32:
    """E2M1 codes of eight values, element 0 in the low nibble. PTX 8.6, sm_100a: ``cvt.rn.satfinite.e2m1x2.f32``."""
    text = "{ .reg .b8 b0, b1, b2, b3; "
    for i in range(4):
        text += f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 + 2 * i}, ${1 + 2 * i}; "
    return asm(text + "mov.b32 $0, {b0, b1, b2, b3}; }", [Uint32], [Float32(x) for x in values])[0]


def _by_instruction() -> str:
    """The block that computes ``$0`` = the codes of ``$1 … $8`` times ``$9``. PTX 8.6, sm_100a."""
    text = "{ .reg .b8 b0, b1, b2, b3; .reg .f32 x, y; "
    for i in range(4):
        text += f"mul.rn.f32 x, ${1 + 2 * i}, $9; mul.rn.f32 y, ${2 + 2 * i}, $9; "
        text += f"cvt.rn.satfinite.e2m1x2.f32 b{i}, y, x; "
    return text + "mov.b32 $0, {b0, b1, b2, b3}; }"


def _by_ramps() -> str:
    """The block that computes the codes of :func:`_by_instruction` without that instruction, by saturating FMAs.

    Let y = |x · factor|, and let a, b and c rise from 0 to 1 while y goes from 0 to 2, 2 to 4 and 4 to 6: they are y/2,
    y/2 − 1 and y/2 − 2, saturated, all exact. The code's magnitude is 4·a + 2·b + c, rounded to the nearest integer,
    ties to even. Each ramp is added to an accumulator whose unit is one code, so that each sum rounds as E2M1 does: a
    sum starts from an even code wherever its ramp has left zero. Four elements share one accumulator, in which element
    i has its unit at 16**i.
    """
    text = "{ .reg .f32 m, y, a, b, c, t, h, n1, n2; .reg .b32 g0, g1, p, q, e, o, s<9>; "
    text += f"mov.f32 h, {literal(0.5)}; mov.f32 n1, {literal(-1.0)}; mov.f32 n2, {literal(-2.0)}; "
    for group in range(2):
        for i in reversed(range(4)):
            unit = 16.0**i
            text += f"abs.f32 m, ${1 + 4 * group + i}; mul.rn.f32 y, m, $9; mul.rn.sat.f32 a, y, h; "
            text += "fma.rn.sat.f32 b, y, h, n1; fma.rn.sat.f32 c, y, h, n2; "
            if i == 3:
                text += f"mov.f32 t, {literal(_ROUNDER * unit)}; "
            else:
                text += f"add.rn.f32 t, t, {literal(_ROUNDER * unit - _ROUNDER * unit * 16)}; "
            for ramp, weight in (("a", 4), ("b", 2), ("c", 1)):
                text += f"fma.rn.f32 t, {ramp}, {literal(weight * unit)}, t; "
        text += f"mov.b32 g{group}, t; "
    text += "prmt.b32 g0, g0, g1, 0x5410; "
    # the bytes with the signs, of the even elements and of the odd ones
    text += "".join(f"mov.b32 s{i}, ${i}; " for i in range(1, 9))
    text += "prmt.b32 p, s1, s3, 0x0073; prmt.b32 q, s5, s7, 0x0073; prmt.b32 e, p, q, 0x5410; "
    text += "prmt.b32 p, s2, s4, 0x0073; prmt.b32 q, s6, s8, 0x0073; prmt.b32 o, p, q, 0x5410; "
    return text + "shr.u32 e, e, 4; lop3.b32 e, e, o, 0x0F0F0F0F, 0xE4; lop3.b32 $0, e, 0x88888888, g0, 0xEA; }"


def f32_to_e2m1_by_ramps(y: Float32) -> Uint32:
    """The E2M1 code of one value in the low bits, equal to :func:`scaled_to_e2m1x8`'s on every architecture."""
    text = "{ .reg .f32 m, a, b, c, t; .reg .b32 g, s; abs.f32 m, $1; "
    text += f"mul.rn.sat.f32 a, m, {literal(0.5)}; fma.rn.sat.f32 b, m, {literal(0.5)}, {literal(-1.0)}; "
    text += f"fma.rn.sat.f32 c, m, {literal(0.5)}, {literal(-2.0)}; mov.f32 t, {literal(_ROUNDER)}; "
    for ramp, weight in (("a", 4.0), ("b", 2.0), ("c", 1.0)):
        text += f"fma.rn.f32 t, {ramp}, {literal(weight)}, t; "
    text += "mov.b32 g, t; and.b32 g, g, 7; mov.b32 s, $1; shr.u32 s, s, 28; and.b32 s, s, 8; or.b32 $0, g, s; }"
    return asm(text, [Uint32], [Float32(y)])[0]


def scaled_to_e2m1x8(values: Sequence[Float32], factor: Float32, arch: Architecture) -> Uint32:
    """E2M1 codes of eight products value · factor, each rounded to fp32 first; element 0 in the low nibble.

    Nearest, ties to even, saturating at ±6; zero keeps the value's sign. ``factor`` is positive. NaN gives any code.
    sm_100a: ``cvt.rn.satfinite.e2m1x2.f32`` (PTX 8.6); sm_90a: about nine FMAs for each element.
    """
    text = _by_instruction() if arch.has_fp4_convert else _by_ramps()
    return asm(text, [Uint32], [Float32(x) for x in (*values, factor)])[0]

"""Exact conversions from E2M1, E4M3, E5M2, binary16 and bf16 (PTX ISA, "cvt").

An f16x2 is a ``Uint32``, whose low half is the element with the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint16, Uint32

from ..target import Architecture
from ._asm import asm

# Magnitudes of E2M1, doubled to be integers: 0, 1, 2, 3 | 4, 6, 8, 12, one in each byte, code 0 in the lowest
E2M1_DOUBLED_MAGNITUDES = [0x03020100, 0x0C080604]
_DOUBLED_NEGATED = [0xFDFEFF00, 0xF4F8FAFC]


def _decode_fp4_instruction() -> str:
    """``cvt.rn.f16x2.e2m1x2`` on each byte (the low nibble becomes the low half). PTX 8.6, sm_100a."""
    unpack = "{ .reg .b8 x0, x1, x2, x3; mov.b32 {x0, x1, x2, x3}, $4; "
    return unpack + "".join(f"cvt.rn.f16x2.e2m1x2 ${i}, x{i}; " for i in range(4)) + "}"


def _decode_integer(shift_left: int) -> str:
    """Moves two nibbles, 16 bits apart, to the tops of two halves: sign to bit 15, exponent and mantissa to 11..9.

    Read as binary16 that is the value times 2⁻¹⁴, subnormal 0.5 included, and the product with 2¹⁴ is exact.
    """
    text = f"shl.b32 s, $4, {shift_left}; shr.u32 m, s, 3; and.b32 m, m, 0x0E000E00; "
    # lop3 0xEA: (s & 0x80008000) | m
    return text + "lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.f16x2 {out}, m, k; "


def _decode_fp4_integer() -> str:
    """Decodes nibbles (i, i+4) in pairs, then orders them with ``prmt``: sm_90a has no FP4 conversion."""
    text = "{ .reg .b32 s, m, k, p0, p1, p2, p3; mov.b32 k, 0x74007400; "
    text += "".join(_decode_integer(12 - 4 * i).replace("{out}", f"p{i}") for i in range(4))
    # p0 = (e0, e4), p1 = (e1, e5), …: low halves make pairs 0 and 1, high halves pairs 2 and 3
    text += "prmt.b32 $0, p0, p1, 0x5410; prmt.b32 $1, p2, p3, 0x5410; "
    return text + "prmt.b32 $2, p0, p1, 0x7632; prmt.b32 $3, p2, p3, 0x7632; }"


def e2m1x8_to_f16x2(word: Uint32, arch: Architecture) -> list[Uint32]:
    """Decodes eight E2M1 elements (element 0 in the low nibble of ``word``) to four f16x2 in element order.

    sm_100a (PTX 8.6): ``cvt.rn.f16x2.e2m1x2``, one instruction for two elements. sm_90a (PTX 4.3): shifts,
    ``lop3``, an exact ``mul.rn.f16x2`` and ``prmt``, since NVVM and ptxas refuse FP4 conversions there.
    """
    text = _decode_fp4_instruction() if arch.has_fp4_convert else _decode_fp4_integer()
    return asm(text, [Uint32] * 4, [Uint32(word)])


# The high bytes of the magnitudes of E2M1 as binary16; the low ones are zero.
_HIGH_BYTES = [0x3E3C3800, 0x46444240]


def e2m1x8_to_f16x2_by_table(word: Uint32) -> list[Uint32]:
    """Converts as :func:`e2m1x8_to_f16x2` does, with tables: thirteen integer instructions (PTX 2.0, any sm).

    A ``prmt`` whose selectors are the nibbles looks up the high bytes of four magnitudes. Another ``prmt`` replicates
    the signs of these elements over bytes (selectors 8, 12 | 9, 13 of the word shifted by four and of the word itself).
    """
    text = "{ .reg .b32 m, h, l, s, u, v; and.b32 m, $4, 0x77777777; shr.u32 h, m, 16; shl.b32 l, $4, 4; "
    for out, selector, signs in (("u", "m", "0xD9C8"), ("v", "h", "0xFBEA")):
        # lop3 0xEA: (s & 0x80808080) | out
        text += f"prmt.b32 {out}, $5, $6, {selector}; prmt.b32 s, l, $4, {signs}; "
        text += f"lop3.b32 {out}, s, 0x80808080, {out}, 0xEA; "
    for i, (source, bytes_of) in enumerate((("u", "0x1404"), ("u", "0x3424"), ("v", "0x1404"), ("v", "0x3424"))):
        text += f"prmt.b32 ${i}, {source}, 0, {bytes_of}; "
    return asm(text + "}", [Uint32] * 4, [Uint32(word), *map(Uint32, _HIGH_BYTES)])


def e2m1x8_to_s8x4_signs_apart(word: Uint32, table: Sequence[Any] = E2M1_DOUBLED_MAGNITUDES) -> list[Uint32]:
    """Decodes eight E2M1 elements to doubled magnitudes in bytes, positive and negative elements apart.

    Returns (p0, p1, n0, n1). Byte i of p0 (elements 0–3) and p1 (4–7) is 2·max(x, 0), that of n0 and n1 2·max(−x, 0):
    x = (p − n) / 2. A ``prmt`` whose selectors are the nibbles looks up four magnitudes (PTX 2.0, any sm). A selector
    with its top bit set yields the sign of the selected byte, which is 0 for every magnitude, so that the element's
    own sign bit zeroes the elements of the other sign. Seven instructions and no mask.
    (Shifts as ``mul.hi.u32``, which spare the integer pipe, were slower on an H200.)

    table: ``E2M1_DOUBLED_MAGNITUDES``, or registers that hold it.
    """
    text = "{ .reg .b32 h, n, m; shr.u32 h, $4, 16; xor.b32 n, $4, 0x88888888; shr.u32 m, n, 16; "
    for i, selector in enumerate(("$4", "h", "n", "m")):
        text += f"prmt.b32 ${i}, $5, $6, {selector}; "
    return asm(text + "}", [Uint32] * 4, [Uint32(word), *map(Uint32, table)])


def e2m1x8_to_s8x4(word: Uint32) -> list[Uint32]:
    """Decodes eight E2M1 elements to doubled signed bytes: two words of four, in element order. Any sm (PTX 2.0).

    It looks magnitudes up as :func:`e2m1x8_to_s8x4_signs_apart` does, and negated magnitudes for the negative elements.
    A mask of the element's sign, which ``prmt`` replicates over a byte (selectors 9, 8 | 13, 12 of the word shifted by
    four and of the word itself), clears the second lookup where the element is positive.
    """
    text = "{ .reg .b32 h, n, m, l, s, t; "
    text += "shr.u32 h, $2, 16; xor.b32 n, $2, 0x88888888; shr.u32 m, n, 16; shl.b32 l, $2, 4; "
    for i, (positive, negative, signs) in enumerate((("$2", "n", "0xD9C8"), ("h", "m", "0xFBEA"))):
        text += f"prmt.b32 s, l, $2, {signs}; prmt.b32 t, $5, $6, {negative}; and.b32 t, t, s; "
        text += f"prmt.b32 s, $3, $4, {positive}; or.b32 ${i}, s, t; "
    tables = E2M1_DOUBLED_MAGNITUDES + _DOUBLED_NEGATED
    return asm(text + "}", [Uint32] * 2, [Uint32(word), *map(Uint32, tables)])


def e4m3x2_to_f16x2(pair: Uint16) -> Uint32:
    """Decodes two E4M3 elements. PTX 7.8, sm_89 or later: ``cvt.rn.f16x2.e4m3x2``; NaN (0x7F, 0xFF) gives NaN."""
    return asm("cvt.rn.f16x2.e4m3x2 $0, $1;", [Uint32], [Uint16(pair)])[0]


def e5m2x2_to_f16x2(pair: Uint16) -> Uint32:
    """Decodes two E5M2 elements. PTX 7.8, sm_89 or later: ``cvt.rn.f16x2.e5m2x2``; infinities and NaN are kept."""
    return asm("cvt.rn.f16x2.e5m2x2 $0, $1;", [Uint32], [Uint16(pair)])[0]


def e4m3x4_to_f16x2(word: Uint32) -> list[Uint32]:
    """Decodes four E4M3 elements (a 32-bit word) to two f16x2 in order. PTX 7.8, sm_89 or later."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
    return asm(text, [Uint32] * 2, [Uint32(word)])


def f16x2_to_f32(pair: Uint32) -> list[Float32]:
    """Both halves of an f16x2 as fp32. PTX 1.0, sm_53 or later for f16 registers."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return asm(text, [Float32] * 2, [Uint32(pair)])


def bits_to_f32(bits: Int32) -> Float32:
    """The fp32 value with the bits ``bits``. PTX 1.0: ``mov.b32``."""
    return asm("mov.b32 $0, $1;", [Float32], [Int32(bits)])[0]


def bf16x2_to_f32(pair: Uint32) -> list[Float32]:
    """Both halves of a bf16x2 as fp32: a shift and a mask."""
    text = "{ .reg .b32 l, h; shl.b32 l, $2, 16; and.b32 h, $2, 0xFFFF0000; mov.b32 $0, l; mov.b32 $1, h; }"
    return asm(text, [Float32] * 2, [Uint32(pair)])


def bf16x2_to_f32_by_product(pair: Uint32, two_16: Uint32, sign: Uint32) -> list[Float32]:
    """Converts finite pairs as :func:`bf16x2_to_f32` does, on the FMA pipe (PTX 7.0, sm_80: ``fma.rn.bf16x2``).

    A product with ``two_16`` = 2**16 replaces the shift, and a product with (0, 1) in bf16 the mask: adding ``sign`` =
    2**31, which is (0, −0), leaves +0 and the high half. The compiler must know neither value.
    """
    text = "{ .reg .b32 l, h, m; mul.lo.u32 l, $2, $3; mov.b32 m, 0x3F800000; fma.rn.bf16x2 h, $2, m, $4; "
    return asm(text + "mov.b32 $0, l; mov.b32 $1, h; }", [Float32] * 2, [*map(Uint32, (pair, two_16, sign))])

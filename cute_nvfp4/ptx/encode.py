"""Encodes to E2M1 and E4M3, magnitudes of packed halves, and fp32 arithmetic that the compiler may not contract.

f16x2 and bf16x2 values travel as ``Uint32``: the low half is the element with the lower index.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int64, Uint16, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from ..target import Architecture
from ._asm import asm, refs

# 1.5 · 2**23: added to a number below 2**22 it rounds it to an integer, ties to even, and shows it in its low bits
_ROUNDER = 1.5 * 2.0**23
# of an E2M1 value times 2**-14 as binary16: half a unit of its last place, in both halves; and its code and sign
HALF_UNIT = 0x01000100
CODE_AND_SIGN = 0x8E008E00


def _hex(value: float) -> str:
    """``value`` as PTX writes single-precision constants."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


@dsl_user_op
def mul_rn(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a · b, rounded: never made part of an FMA. PTX 1.4: ``mul.rn.f32``."""
    return asm("mul.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def add_rn(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a + b, rounded: never made part of an FMA. PTX 1.4: ``add.rn.f32``."""
    return asm("add.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def sub_rn(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a − b, rounded: never made part of an FMA. PTX 1.4: ``sub.rn.f32``."""
    return asm("sub.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def fma_rn(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a · b + c, rounded once. PTX 2.0: ``fma.rn.f32``."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [Float32(x) for x in (a, b, c)], loc=loc, ip=ip)[0]


@dsl_user_op
def abs_f32(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """|a|. PTX 1.0: ``abs.f32``."""
    return asm("abs.f32 $0, $1;", [Float32], [Float32(a)], loc=loc, ip=ip)[0]


@dsl_user_op
def max_abs_f32(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """max(|a|, |b|), NaN if one of them is. PTX 7.0, sm_80 or later: ``max.NaN.f32``."""
    text = "{ .reg .f32 x, y; abs.f32 x, $1; abs.f32 y, $2; max.NaN.f32 $0, x, y; }"
    return asm(text, [Float32], [Float32(a), Float32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def rcp_rn(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """1 / a, rounded to nearest. PTX 2.0: ``rcp.rn.f32``."""
    return asm("rcp.rn.f32 $0, $1;", [Float32], [Float32(a)], loc=loc, ip=ip)[0]


@dsl_user_op
def div_rn(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a / b, rounded to nearest. PTX 2.0: ``div.rn.f32``."""
    return asm("div.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def div_rn_constant(a: Float32, b: float, *, loc: Any = None, ip: Any = None) -> Float32:
    """a / b, rounded to nearest, for a constant ``b`` and a quotient that is normal (or a power of two ``b``).

    The product with RN(1/b), corrected by its own remainder (Markstein, "Computation of elementary functions on the
    IBM RISC System/6000 processor", 1990): three instructions.
    """
    if b == 2.0 ** round(math.log2(b)):
        return mul_rn(a, Float32(1.0 / b), loc=loc, ip=ip)
    inverse = _hex(1.0 / b)
    text = f"{{ .reg .f32 q, r; mul.rn.f32 q, $1, {inverse}; fma.rn.f32 r, q, {_hex(-b)}, $1; "
    text += f"fma.rn.f32 $0, r, {inverse}, q; }}"
    return asm(text, [Float32], [Float32(a)], loc=loc, ip=ip)[0]


@dsl_user_op
def f32_bits(a: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The bits of ``a``. PTX 1.0: ``mov.b32``."""
    return asm("mov.b32 $0, $1;", [Uint32], [Float32(a)], loc=loc, ip=ip)[0]


@dsl_user_op
def f32_from_bits(a: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The number that has the bits ``a``. PTX 1.0: ``mov.b32``."""
    return asm("mov.b32 $0, $1;", [Float32], [Uint32(a)], loc=loc, ip=ip)[0]


@dsl_user_op
def prmt(a: Uint32, b: Uint32, selector: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Four bytes of ``a`` (0–3) and ``b`` (4–7), chosen by the nibbles of ``selector``. PTX 2.0: ``prmt.b32``."""
    return asm("prmt.b32 $0, $1, $2, $3;", [Uint32], [Uint32(a), Uint32(b), Uint32(selector)], loc=loc, ip=ip)[0]


@dsl_user_op
def bf16x2_to_f32(pair: Uint32, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Both halves of a bf16x2 in fp32: a shift and a mask."""
    text = "{ .reg .b32 l, h; shl.b32 l, $2, 16; and.b32 h, $2, 0xFFFF0000; mov.b32 $0, l; mov.b32 $1, h; }"
    return asm(text, [Float32] * 2, [Uint32(pair)], loc=loc, ip=ip)


@dsl_user_op
def bf16x2_to_f32_by_product(
    pair: Uint32, two_16: Uint32, sign: Uint32, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """As :func:`bf16x2_to_f32` for finite numbers, for the FMA pipe. PTX 7.0, sm_80 or later: ``fma.rn.bf16x2``.

    The shift is a product with ``two_16`` = 2**16, the mask with (0, 1) in bf16, to which ``sign`` = 2**31 is added:
    that is (0, −0); +0 and what was there are left. The compiler must know neither number.
    """
    text = "{ .reg .b32 l, h, m; mul.lo.u32 l, $2, $3; mov.b32 m, 0x3F800000; fma.rn.bf16x2 h, $2, m, $4; "
    return asm(
        text + "mov.b32 $0, l; mov.b32 $1, h; }", [Float32] * 2, [*map(Uint32, (pair, two_16, sign))], loc=loc, ip=ip
    )


@dsl_user_op
def add_by_fma(a: Uint32, b: Any, one: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """a + b as a · ``one`` + b, for the FMA pipe: the compiler must not know that ``one`` is 1."""
    return asm("mad.lo.u32 $0, $1, $2, $3;", [Uint32], [Uint32(a), Uint32(one), Uint32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def per_lane(a: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """``a``, of which the compiler then does not know that it is the same in all lanes (PTX 1.3: ``%laneid``).

    It keeps such a number where products with constants can have it, not in a uniform register.
    """
    text = "{ .reg .b32 l; mov.u32 l, %laneid; shr.u32 l, l, 5; add.u32 $0, $1, l; }"
    return asm(text, [Uint32], [Uint32(a)], loc=loc, ip=ip)[0]


@dsl_user_op
def opaque(a: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """``a``, of which the compiler forgets how it was computed, and so keeps it. PTX 1.0: ``mov.b64``."""
    return asm("mov.b64 $0, $1;", [Int64], [Int64(a)], volatile=True, loc=loc, ip=ip)[0]


@dsl_user_op
def take_if_positive(
    value: Float32, second: Sequence[Uint32], first: Sequence[Uint32], one: Uint32, *, loc: Any = None, ip: Any = None
) -> list[Uint32]:
    """``second`` if ``value`` is positive, else ``first``: by products with ``one``, for the FMA pipe (PTX 1.0).

    As with :func:`add_by_fma` the compiler must not know that it is 1.
    """
    n = len(first)
    text = f"{{ .reg .pred p; setp.gt.f32 p, ${n}, 0f00000000; " + "".join(
        f"mov.b32 ${i}, ${n + 1 + i}; @p mad.lo.u32 ${i}, ${2 * n + 1 + i}, ${3 * n + 1}, 0; " for i in range(n)
    )
    operands = [Float32(value), *map(Uint32, first), *map(Uint32, second), Uint32(one)]
    return asm(text + "}", [Uint32] * n, operands, loc=loc, ip=ip)


@dsl_user_op
def max_abs_where_different(
    largest: Sequence[Float32], values: Sequence[Float32], a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """max(largest, |value|) of two pairs, where the halves of ``a`` and ``b`` (f16x2) differ; else ``largest``.

    ``setp.ne.f16x2``: PTX 4.2, sm_53 or later.
    """
    text = "{ .reg .pred p, q; .reg .f32 x, y; setp.ne.f16x2 p|q, $6, $7; abs.f32 x, $4; abs.f32 y, $5; "
    text += "mov.f32 $0, $2; mov.f32 $1, $3; @p max.f32 $0, $0, x; @q max.f32 $1, $1, y; }"
    operands = [*map(Float32, largest), *map(Float32, values), Uint32(a), Uint32(b)]
    return asm(text, [Float32] * 2, operands, loc=loc, ip=ip)


@dsl_user_op
def max_abs_halves(words: Sequence[Uint32], half: str, *, loc: Any = None, ip: Any = None) -> Float32:
    """The largest magnitude in a power of two of words of ``half`` ("f16", "bf16") pairs, in fp32; NaN if there is one.

    ``max.NaN.xorsign.abs.{f16x2,bf16x2}``: PTX 7.2, sm_86 or later.
    """
    text = f"{{ .reg .b32 m<{len(words)}>; .reg .b16 a, b; "
    text += "".join(f"mov.b32 m{i}, ${1 + i}; " for i in range(len(words)))
    distance = len(words) // 2
    while distance:
        text += "".join(f"max.NaN.xorsign.abs.{half}x2 m{i}, m{i}, m{i + distance}; " for i in range(distance))
        distance //= 2
    text += f"mov.b32 {{a, b}}, m0; max.NaN.xorsign.abs.{half} a, a, b; "
    if half == "bf16":
        text += "mov.b16 b, 0; mov.b32 m0, {b, a}; mov.b32 $0, m0; abs.f32 $0, $0; }"
    else:
        text += "cvt.f32.f16 $0, a; abs.f32 $0, $0; }"
    return asm(text, [Float32], [Uint32(w) for w in words], loc=loc, ip=ip)[0]


@dsl_user_op
def f32x2_to_e4m3x2(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint16:
    """Two E4M3 codes: nearest, ties to even, saturating. PTX 7.8, sm_89 or later: ``cvt.rn.satfinite.e4m3x2.f32``."""
    text = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
    return asm(text, [Uint16], [Float32(high), Float32(low)], loc=loc, ip=ip)[0]


@dsl_user_op
def f32x4_to_8bit(values: Sequence[Float32], element: str, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Four E4M3 or E5M2 codes in a word: nearest, ties to even, saturating. PTX 7.8, sm_89 or later."""
    text = "{ .reg .b16 l, h; " + f"cvt.rn.satfinite.{element}x2.f32 l, $2, $1; "
    text += f"cvt.rn.satfinite.{element}x2.f32 h, $4, $3; mov.b32 $0, {{l, h}}; }}"
    return asm(text, [Uint32], [Float32(x) for x in values], loc=loc, ip=ip)[0]


@dsl_user_op
def f32x2_to_f16x2_rz(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two numbers as f16, toward zero. PTX 6.0, sm_80 or later: ``cvt.rz.f16x2.f32``."""
    return asm("cvt.rz.f16x2.f32 $0, $1, $2;", [Uint32], [Float32(high), Float32(low)], loc=loc, ip=ip)[0]


@dsl_user_op
def f32_to_f16_twice(a: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """``a`` in both halves, to nearest. PTX 6.0, sm_80 or later: ``cvt.rn.f16x2.f32``."""
    return asm("cvt.rn.f16x2.f32 $0, $1, $1;", [Uint32], [Float32(a)], loc=loc, ip=ip)[0]


@dsl_user_op
def pack_e2m1_halves(halves: Sequence[Uint32], *, loc: Any = None, ip: Any = None) -> Uint32:
    """Eight E2M1 codes from four words of two binary16 numbers each, which are the codes' values times 2**-14.

    In a half the sign is bit 15 and the code's other bits are bits 9 to 11; the rest is not looked at, but bits 12 to
    14 must be clear.
    """
    # bytes 1 and 3 of each word: sign in bit 7, code in bits 1 to 3
    text = "{ .reg .b32 p, q, e, o, s, t; prmt.b32 p, $1, $2, 0x7351; prmt.b32 q, $3, $4, 0x7351; "
    text += "prmt.b32 e, p, q, 0x5410; prmt.b32 o, p, q, 0x7632; "
    # codes to the upper halves of bytes; lop3 0xE4: the first where the third is set, else the second
    text += "shl.b32 s, e, 3; lop3.b32 s, s, e, 0x70707070, 0xE4; shr.u32 s, s, 4; "
    text += "shl.b32 t, o, 3; lop3.b32 t, t, o, 0x70707070, 0xE4; lop3.b32 $0, s, t, 0x0F0F0F0F, 0xE4; }"
    return asm(text, [Uint32], [Uint32(x) for x in halves], loc=loc, ip=ip)[0]


@dsl_user_op
def f32_to_e2m1x8(values: Sequence[Float32], *, loc: Any = None, ip: Any = None) -> Uint32:
    """E2M1 codes of eight numbers, element 0 in the low nibble. PTX 8.6, sm_100a: ``cvt.rn.satfinite.e2m1x2.f32``."""
    text = "{ .reg .b8 b0, b1, b2, b3; "
    for i in range(4):
        text += f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 + 2 * i}, ${1 + 2 * i}; "
    return asm(text + "mov.b32 $0, {b0, b1, b2, b3}; }", [Uint32], [Float32(x) for x in values], loc=loc, ip=ip)[0]


def _by_instruction() -> str:
    """``$0`` = codes of ``$1 … $8`` times ``$9``: PTX 8.6, sm_100a."""
    text = "{ .reg .b8 b0, b1, b2, b3; .reg .f32 x, y; "
    for i in range(4):
        text += f"mul.rn.f32 x, ${1 + 2 * i}, $9; mul.rn.f32 y, ${2 + 2 * i}, $9; "
        text += f"cvt.rn.satfinite.e2m1x2.f32 b{i}, y, x; "
    return text + "mov.b32 $0, {b0, b1, b2, b3}; }"


def _by_ramps() -> str:
    """The same without the instruction, in FMAs that saturate.

    With y = |x · factor| the code's magnitude is the nearest integer, ties to even, to 4·a + 2·b + c, where a, b and c
    rise from 0 to 1 while y goes from 0 to 2, 2 to 4 and 4 to 6 (y/2, y/2 − 1 and y/2 − 2, saturated: all exact). Each
    is added to an accumulator whose unit is one code, so that each sum rounds as E2M1 does: a sum starts from an even
    code wherever its ramp has left zero. The accumulator of four elements has its unit at 16**i of element i.
    """
    text = "{ .reg .f32 m, y, a, b, c, t, h, n1, n2; .reg .b32 g0, g1, p, q, e, o, s<9>; "
    text += f"mov.f32 h, {_hex(0.5)}; mov.f32 n1, {_hex(-1.0)}; mov.f32 n2, {_hex(-2.0)}; "
    for group in range(2):
        for i in reversed(range(4)):
            unit = 16.0**i
            text += f"abs.f32 m, ${1 + 4 * group + i}; mul.rn.f32 y, m, $9; mul.rn.sat.f32 a, y, h; "
            text += "fma.rn.sat.f32 b, y, h, n1; fma.rn.sat.f32 c, y, h, n2; "
            if i == 3:
                text += f"mov.f32 t, {_hex(_ROUNDER * unit)}; "
            else:
                text += f"add.rn.f32 t, t, {_hex(_ROUNDER * unit - _ROUNDER * unit * 16)}; "
            for ramp, weight in (("a", 4), ("b", 2), ("c", 1)):
                text += f"fma.rn.f32 t, {ramp}, {_hex(weight * unit)}, t; "
        text += f"mov.b32 g{group}, t; "
    text += "prmt.b32 g0, g0, g1, 0x5410; "
    # the bytes with the signs, of even and of odd elements
    text += "".join(f"mov.b32 s{i}, ${i}; " for i in range(1, 9))
    text += "prmt.b32 p, s1, s3, 0x0073; prmt.b32 q, s5, s7, 0x0073; prmt.b32 e, p, q, 0x5410; "
    text += "prmt.b32 p, s2, s4, 0x0073; prmt.b32 q, s6, s8, 0x0073; prmt.b32 o, p, q, 0x5410; "
    return text + "shr.u32 e, e, 4; lop3.b32 e, e, o, 0x0F0F0F0F, 0xE4; lop3.b32 $0, e, 0x88888888, g0, 0xEA; }"


@dsl_user_op
def f32_to_e2m1_by_ramps(y: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The E2M1 code of one number, in the low bits, as :func:`scaled_to_e2m1x8` has it, on any architecture."""
    text = "{ .reg .f32 m, a, b, c, t; .reg .b32 g, s; abs.f32 m, $1; "
    text += f"mul.rn.sat.f32 a, m, {_hex(0.5)}; fma.rn.sat.f32 b, m, {_hex(0.5)}, {_hex(-1.0)}; "
    text += f"fma.rn.sat.f32 c, m, {_hex(0.5)}, {_hex(-2.0)}; mov.f32 t, {_hex(_ROUNDER)}; "
    for ramp, weight in (("a", 4.0), ("b", 2.0), ("c", 1.0)):
        text += f"fma.rn.f32 t, {ramp}, {_hex(weight)}, t; "
    text += "mov.b32 g, t; and.b32 g, g, 7; mov.b32 s, $1; shr.u32 s, s, 28; and.b32 s, s, 8; or.b32 $0, g, s; }"
    return asm(text, [Uint32], [Float32(y)], loc=loc, ip=ip)[0]


@dsl_user_op
def scaled_to_e2m1x8(
    values: Sequence[Float32], factor: Float32, arch: Architecture, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """E2M1 codes of eight products value · factor (rounded to fp32 first), element 0 in the low nibble.

    Nearest, ties to even, saturating at ±6; the sign of zero is that of the value. ``factor`` is positive; a NaN gives
    any code. sm_100a: ``cvt.rn.satfinite.e2m1x2.f32`` (PTX 8.6); sm_90a: nine FMAs or so an element.
    """
    text = _by_instruction() if arch.has_fp4_convert else _by_ramps()
    return asm(text, [Uint32], [Float32(x) for x in (*values, factor)], loc=loc, ip=ip)[0]


@dsl_user_op
def store_global(address: Any, words: Sequence[Any], *, loc: Any = None, ip: Any = None) -> None:
    """Stores one, two or four 32-bit words to global memory, aligned to their bytes (PTX 1.0)."""
    source = refs(1, len(words)) if len(words) > 1 else "$1"
    suffix = {1: ".b32", 2: ".v2.b32", 4: ".v4.b32"}[len(words)]
    asm(f"st.global{suffix} [$0], {source};", [], [Int64(address), *map(Uint32, words)], volatile=True, loc=loc, ip=ip)


@dsl_user_op
def store_global_byte(address: Any, word: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Stores the low byte of ``word`` to global memory (PTX 1.0)."""
    asm("st.global.b8 [$0], $1;", [], [Int64(address), Uint32(word)], volatile=True, loc=loc, ip=ip)


@dsl_user_op
def round_even(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``a`` rounded to an integer, ties to even. PTX 1.0: ``cvt.rni.f32.f32``."""
    return asm("cvt.rni.f32.f32 $0, $1;", [Float32], [Float32(a)], loc=loc, ip=ip)[0]


@dsl_user_op
def copy_sign(magnitude: Float32, sign: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """|magnitude| with the sign of ``sign``. PTX 2.0: ``copysign.f32``."""
    return asm("copysign.f32 $0, $1, $2;", [Float32], [Float32(sign), Float32(magnitude)], loc=loc, ip=ip)[0]


@dsl_user_op
def multiply_wide(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """High and low word of a · b. PTX 1.0: ``mul.hi.u32``, ``mul.lo.u32``."""
    text = "mul.hi.u32 $0, $2, $3; mul.lo.u32 $1, $2, $3;"
    return asm(text, [Uint32] * 2, [Uint32(a), Uint32(b)], loc=loc, ip=ip)


@dsl_user_op
def max_lanes(value: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The largest ``value`` of a warp, in every lane. PTX 7.0, sm_80 or later: ``redux.sync.max.u32``."""
    text = "redux.sync.max.u32 $0, $1, 0xFFFFFFFF;"
    return asm(text, [Uint32], [Uint32(value)], volatile=True, loc=loc, ip=ip)[0]


@dsl_user_op
def atomic_max_global(address: Any, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Raises a word of global memory to ``value``. PTX 1.2: ``red.global.max.u32``."""
    text = "red.relaxed.gpu.global.max.u32 [$0], $1;"
    asm(text, [], [Int64(address), Uint32(value)], volatile=True, loc=loc, ip=ip)

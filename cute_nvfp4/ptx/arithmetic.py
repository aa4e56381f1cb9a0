"""Arithmetic on one value in a register (PTX ISA, "Integer Arithmetic Instructions", "Floating Point Instructions").

The compiler may not contract these instructions: a product and a sum stay two roundings.
"""

from __future__ import annotations

import math
from typing import Any

from cutlass import Float32, Uint32

from ._asm import asm, literal


def mul_rn(a: Float32, b: Float32) -> Float32:
    """a · b, rounded and never fused into an FMA. PTX 1.4: ``mul.rn.f32``."""
    return asm("mul.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])[0]


def add_rn(a: Float32, b: Float32) -> Float32:
    """a + b, rounded and never fused into an FMA. PTX 1.4: ``add.rn.f32``."""
    return asm("add.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])[0]


def sub_rn(a: Float32, b: Float32) -> Float32:
    """a − b, rounded and never fused into an FMA. PTX 1.4: ``sub.rn.f32``."""
    return asm("sub.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])[0]


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """a · b + c, rounded once. PTX 2.0: ``fma.rn.f32``."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [Float32(x) for x in (a, b, c)])[0]


def multiply_add(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """The low 32 bits of a · b + c, as an instruction that the compiler may not turn into shifts. ``mad.lo.u32``."""
    return asm("mad.lo.u32 $0, $1, $2, $3;", [Uint32], [Uint32(x) for x in (a, b, c)])[0]


def abs_f32(a: Float32) -> Float32:
    """|a|. PTX 1.0: ``abs.f32``."""
    return asm("abs.f32 $0, $1;", [Float32], [Float32(a)])[0]


def max_abs_f32(a: Float32, b: Float32) -> Float32:
    """max(|a|, |b|), NaN if either is NaN. PTX 7.0, sm_80 or later: ``max.NaN.f32``."""
    text = "{ .reg .f32 x, y; abs.f32 x, $1; abs.f32 y, $2; max.NaN.f32 $0, x, y; }"
    return asm(text, [Float32], [Float32(a), Float32(b)])[0]


def rcp_rn(a: Float32) -> Float32:
    """1 / a, rounded to nearest. PTX 2.0: ``rcp.rn.f32``."""
    return asm("rcp.rn.f32 $0, $1;", [Float32], [Float32(a)])[0]


def rsqrt_approx(a: Float32) -> Float32:
    """1 / sqrt(a) with a relative error of at most 2⁻²²·⁹; infinity for 0. PTX 1.4: ``rsqrt.approx.f32``."""
    return asm("rsqrt.approx.f32 $0, $1;", [Float32], [Float32(a)])[0]


def div_rn(a: Float32, b: Float32) -> Float32:
    """a / b, rounded to nearest. PTX 2.0: ``div.rn.f32``."""
    return asm("div.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])[0]


def div_rn_constant(a: Float32, b: float) -> Float32:
    """a / b, rounded to nearest, for a constant ``b`` and a quotient that is normal (or a power of two ``b``).

    Three instructions: the product with RN(1/b), corrected by its remainder (Markstein, "Computation of elementary
    functions on the IBM RISC System/6000 processor", 1990).
    """
    if b == 2.0 ** round(math.log2(b)):
        return mul_rn(a, Float32(1.0 / b))
    inverse = literal(1.0 / b)
    text = f"{{ .reg .f32 q, r; mul.rn.f32 q, $1, {inverse}; fma.rn.f32 r, q, {literal(-b)}, $1; "
    text += f"fma.rn.f32 $0, r, {inverse}, q; }}"
    return asm(text, [Float32], [Float32(a)])[0]


def round_even(a: Float32) -> Float32:
    """``a`` rounded to an integer, ties to even. PTX 1.0: ``cvt.rni.f32.f32``."""
    return asm("cvt.rni.f32.f32 $0, $1;", [Float32], [Float32(a)])[0]


def copy_sign(magnitude: Float32, sign: Float32) -> Float32:
    """|magnitude| with the sign of ``sign``. PTX 2.0: ``copysign.f32``."""
    return asm("copysign.f32 $0, $1, $2;", [Float32], [Float32(sign), Float32(magnitude)])[0]


def multiply_wide(a: Uint32, b: Uint32) -> list[Uint32]:
    """High and low word of a · b. PTX 1.0: ``mul.hi.u32``, ``mul.lo.u32``."""
    text = "mul.hi.u32 $0, $2, $3; mul.lo.u32 $1, $2, $3;"
    return asm(text, [Uint32] * 2, [Uint32(a), Uint32(b)])


def add_by_fma(a: Uint32, b: Any, one: Uint32) -> Uint32:
    """a + b, computed as a · ``one`` + b on the FMA pipe: the compiler must not know that ``one`` is 1."""
    return asm("mad.lo.u32 $0, $1, $2, $3;", [Uint32], [Uint32(a), Uint32(one), Uint32(b)])[0]


def add_product_of_half(halves: Uint32, factors: Uint32, addend: Uint32) -> Uint32:
    """addend + low half · byte 0 + high half · byte 1 of ``factors``. PTX 5.0: ``dp2a.lo.u32.u32``."""
    return asm("dp2a.lo.u32.u32 $0, $1, $2, $3;", [Uint32], [Uint32(x) for x in (halves, factors, addend)])[0]


def select_bits(a: Uint32, b: Uint32, mask: int) -> Uint32:
    """The bits of ``b`` under ``mask``, those of ``a`` elsewhere, in one instruction: ``lop3.b32`` (PTX 4.3, sm_50 or
    later)."""
    return asm(f"lop3.b32 $0, $1, $2, 0x{mask:X}, 0xD8;", [Uint32], [Uint32(a), Uint32(b)])[0]

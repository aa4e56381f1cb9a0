"""Arithmetic on two values in a register, f16x2 and bf16x2 (PTX ISA, "Half Precision Floating Point Instructions").

A pair is a ``Uint32``, whose low half is the element with the lower index.

A sum of eight products of two E2M1 elements is a multiple of 0.25 of magnitude at most 8 · 36 = 288. It needs eleven
bits and is exact in binary16. :func:`fma_e2m1` therefore rounds nothing when its accumulator starts at zero and takes
one block of 16 elements (eight terms in each half).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Uint32

from ..target import Architecture
from ._asm import HALVES, asm
from .convert import e2m1x8_to_f16x2


def fma_f16x2(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """a · b + c in both halves, each rounded once. PTX 4.2, sm_53 or later: ``fma.rn.f16x2``."""
    return asm("fma.rn.f16x2 $0, $1, $2, $3;", [Uint32], [Uint32(x) for x in (a, b, c)])[0]


def mul_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """a · b in both halves. PTX 4.2, sm_53 or later: ``mul.rn.f16x2``."""
    return asm("mul.rn.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)])[0]


def mul_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """a · b in both halves. PTX 7.8, sm_90 or later: ``mul.rn.bf16x2``."""
    return asm("mul.rn.bf16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)])[0]


def max_u16x2(a: Uint32, b: Uint32) -> Uint32:
    """The larger of two unsigned 16-bit integers in both halves. PTX 8.0, sm_90 or later: ``max.u16x2``."""
    return asm("max.u16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)])[0]


def min_abs_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """The smaller magnitude of two f16, with the product of their signs. PTX 7.2, sm_86: ``min.xorsign.abs.f16x2``."""
    return asm("min.xorsign.abs.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)])[0]


def distance_from_halves(a: Uint32, least: Uint32) -> Uint32:
    """min(``least``, ||a| − 1| − 1/2|) in both halves, in units of 2⁻¹⁴: how far |a| is from 1/2 or 3/2.

    Exact below 2. PTX 7.0, sm_80 or later: ``abs.f16x2``, ``sub.rn.f16x2``, ``min.f16x2``.
    """
    text = "{ .reg .b32 t, c; mov.b32 c, 0x04000400; abs.f16x2 t, $1; sub.rn.f16x2 t, t, c; abs.f16x2 t, t; "
    text += "mov.b32 c, 0x02000200; sub.rn.f16x2 t, t, c; abs.f16x2 t, t; min.f16x2 $0, t, $2; }"
    return asm(text, [Uint32], [Uint32(a), Uint32(least)])[0]


def max_abs_halves(words: Sequence[Uint32], dtype: str) -> Float32:
    """The largest magnitude in ``words``, pairs of ``dtype``, as fp32; NaN if any value is. len(words): a power of two.

    ``max.NaN.xorsign.abs.{f16x2,bf16x2}``: PTX 7.2, sm_86 or later.
    """
    half = HALVES[dtype]
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
    return asm(text, [Float32], [Uint32(w) for w in words])[0]


def max_abs_where_different(
    largest: Sequence[Float32], values: Sequence[Float32], a: Uint32, b: Uint32
) -> list[Float32]:
    """max(largest, |value|) of two pairs, where the halves of ``a`` and ``b`` (f16x2) differ; else ``largest``.

    ``setp.ne.f16x2``: PTX 4.2, sm_53 or later.
    """
    text = "{ .reg .pred p, q; .reg .f32 x, y; setp.ne.f16x2 p|q, $6, $7; abs.f32 x, $4; abs.f32 y, $5; "
    text += "mov.f32 $0, $2; mov.f32 $1, $3; @p max.f32 $0, $0, x; @q max.f32 $1, $1, y; }"
    operands = [*map(Float32, largest), *map(Float32, values), Uint32(a), Uint32(b)]
    return asm(text, [Float32] * 2, operands)


def _fused(words: int) -> str:
    """The block that adds to ``$1`` the products of ``words`` E2M1 words (from ``$2``) with the f16x2 after them."""
    text = "{ .reg .b8 x0, x1, x2, x3; .reg .b32 d, s; mov.b32 s, $1; "
    for w in range(words):
        text += f"mov.b32 {{x0, x1, x2, x3}}, ${2 + w}; "
        for i in range(4):
            text += f"cvt.rn.f16x2.e2m1x2 d, x{i}; fma.rn.f16x2 s, d, ${2 + words + 4 * w + i}, s; "
    return text + "mov.b32 $0, s; }"


def fma_e2m1(acc: Any, words: Sequence[Any], b: Sequence[Any], arch: Architecture) -> Uint32:
    """acc + Σ aᵢ·bᵢ over the E2M1 elements of ``words`` (eight in each); ``b`` has four f16x2 for each word.

    The low half of the result sums the even elements, the high half the odd ones. sm_100a (PTX 8.6): one block of four
    ``cvt.rn.f16x2.e2m1x2`` and four ``fma.rn.f16x2`` for each word. sm_90a: the integer decode.
    """
    if arch.has_fp4_convert:
        operands = [Uint32(x) for x in (acc, *words, *b)]
        return asm(_fused(len(words)), [Uint32], operands)[0]
    pairs = [pair for word in words for pair in e2m1x8_to_f16x2(word, arch)]
    for pair, factors in zip(pairs, b):
        acc = fma_f16x2(pair, factors, acc)
    return acc


def multiply_by_half(pair: Uint32, factors: Uint32, high: int, dtype: str) -> Uint32:
    """Both 16-bit values of ``pair`` times one half of ``factors``: the high one if ``high``.

    dtype: "bfloat16" (``mul.rn.bf16x2``, PTX 7.8, sm_90 or later) or "float16". ptxas selects the half within the
    instruction: HMUL2 with ``.H0_H0`` or ``.H1_H1``.
    """
    half = "hi" if high else "lo"
    text = (
        "{ .reg .b16 lo, hi; .reg .b32 both; mov.b32 {lo, hi}, $2; "
        f"mov.b32 both, {{{half}, {half}}}; mul.rn.{HALVES[dtype]}x2 $0, $1, both; }}"
    )
    return asm(text, [Uint32], [Uint32(pair), Uint32(factors)])[0]

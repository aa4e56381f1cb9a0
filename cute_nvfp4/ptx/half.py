"""Arithmetic of two numbers a register, f16x2 and bf16x2 (PTX ISA, "Half Precision Floating Point Instructions").

They travel as ``Uint32``: the low half is the element with the lower index.

A sum of eight products of two E2M1 elements is a multiple of 0.25 of magnitude at most 8 · 36 = 288: it needs
eleven bits and is exact in binary16, so :func:`fma_e2m1x16` rounds nothing when the accumulator starts at zero and
takes one block of 16 elements (eight terms in each half).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from ..target import Architecture
from ._asm import asm
from .convert import e2m1x8_to_f16x2


@dsl_user_op
def fma_f16x2(a: Uint32, b: Uint32, c: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """a · b + c in both halves, each rounded once. PTX 4.2, sm_53 or later: ``fma.rn.f16x2``."""
    return asm("fma.rn.f16x2 $0, $1, $2, $3;", [Uint32], [Uint32(x) for x in (a, b, c)], loc=loc, ip=ip)[0]


@dsl_user_op
def mul_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """a · b in both halves. PTX 4.2, sm_53 or later: ``mul.rn.f16x2``."""
    return asm("mul.rn.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def sub_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """a − b of f16, rounded. PTX 4.2, sm_53: ``sub.rn.f16x2``."""
    return asm("sub.rn.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def sum_abs_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """|a| + b of f16, rounded. PTX 6.5, sm_53: ``abs.f16x2``, ``add.rn.f16x2``."""
    text = "{ .reg .b32 m; abs.f16x2 m, $1; add.rn.f16x2 $0, m, $2; }"
    return asm(text, [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def min_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The smaller of two f16. PTX 7.0, sm_80: ``min.f16x2``."""
    return asm("min.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def min_abs_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The smaller magnitude of two f16, with the product of their signs. PTX 7.2, sm_86: ``min.xorsign.abs.f16x2``."""
    return asm("min.xorsign.abs.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]


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


def _fused(words: int) -> str:
    """``$0`` = ``$1`` + the products of ``words`` words of E2M1 (from ``$2``) with f16x2 (after them)."""
    text = "{ .reg .b8 x0, x1, x2, x3; .reg .b32 d, s; mov.b32 s, $1; "
    for w in range(words):
        text += f"mov.b32 {{x0, x1, x2, x3}}, ${2 + w}; "
        for i in range(4):
            text += f"cvt.rn.f16x2.e2m1x2 d, x{i}; fma.rn.f16x2 s, d, ${2 + words + 4 * w + i}, s; "
    return text + "mov.b32 $0, s; }"


def _decode_fma(acc: Any, words: Sequence[Any], b: Sequence[Any], arch: Architecture, loc: Any, ip: Any) -> Uint32:
    if arch.has_fp4_convert:
        operands = [Uint32(x) for x in (acc, *words, *b)]
        return asm(_fused(len(words)), [Uint32], operands, loc=loc, ip=ip)[0]
    for w, word in enumerate(words):
        for i, pair in enumerate(e2m1x8_to_f16x2(word, arch, loc=loc, ip=ip)):
            acc = fma_f16x2(pair, b[4 * w + i], acc, loc=loc, ip=ip)
    return acc


@dsl_user_op
def fma_e2m1x8(
    acc: Uint32, word: Uint32, b: Sequence[Any], arch: Architecture, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """acc + Σ aᵢ·bᵢ over the eight E2M1 elements of ``word`` and the four f16x2 of ``b``; even and odd i apart.

    sm_100a (PTX 8.6): four ``cvt.rn.f16x2.e2m1x2`` and four ``fma.rn.f16x2`` in one block; sm_90a: the integer
    decode. The even elements are summed in the low half of the result, the odd ones in the high half.
    """
    return _decode_fma(acc, [word], b, arch, loc, ip)


@dsl_user_op
def fma_e2m1x16(
    acc: Uint32, words: Sequence[Any], b: Sequence[Any], arch: Architecture, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """As :func:`fma_e2m1x8` for a whole block of 16: two words and eight f16x2. Exact if ``acc`` is zero."""
    return _decode_fma(acc, words, b, arch, loc, ip)

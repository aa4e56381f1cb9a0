"""f16x2 arithmetic, and decode and FMA fused in one block of PTX for 8 and 16 elements.

A sum of eight products of two E2M1 elements is a multiple of 0.25 of magnitude at most 8 · 36 = 288: it needs
eleven bits and is exact in binary16, so the blocks below round nothing when the accumulator starts at zero and
takes one block of 16 elements (eight terms in each half).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Uint32
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

"""Estimates, in fp32, of a block's error under a scale, for all elements together; :mod:`.optimal` compares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....ptx.arithmetic import add_by_fma, add_rn, fma_rn, mul_rn
from ....ptx.encode import CODE_AND_SIGN, HALF_UNIT
from ....ptx.half import min_abs_f16x2
from ....ptx.mma import add_diagonal
from ....ptx.move import f32_from_bits
from ...arith import mod
from .fast_path import cut_to_f16
from .optimal_definition import ERROR_MARGIN
from .scale_table import scale_value

# the exponent of the unit of products in binary16, in which E2M1's smallest normal value is the smallest normal value
UNIT_EXPONENT, _SIX_F16X2 = -14, 0x0E000E00
BIAS, MANTISSA_BITS = 127, 23
INFINITY = 0x7F800000
LEAST_NORMAL_CODE = 8


class Units(NamedTuple):
    """1, hidden from the compiler (:class:`HiddenConstants`), and −1 on a diagonal."""

    one: Uint32
    minus_one: Uint32


class Estimated(NamedTuple):
    """The result of estimates: the best scale's code, its error and the next error; the code below all scales tried;
    whether every step was regular. Errors are in units of (global scale · 2**-14)²."""

    code: Int32
    best: Float32
    next_best: Float32
    lower: Int32
    regular: Boolean


def power(exponent: Int32) -> Float32:
    """2**exponent, for the exponent of a normal number."""
    return f32_from_bits(Uint32(exponent + BIAS) << Uint32(MANTISSA_BITS))


def two_least(keys: Sequence[Uint32]) -> tuple[Uint32, Uint32]:
    """The two least of ``keys``."""
    least, second = cutlass.min(keys[0], keys[1]), cutlass.max(keys[0], keys[1])
    for key in keys[2:]:
        second = cutlass.min(second, cutlass.max(least, key))
        least = cutlass.min(least, key)
    return least, second


def products(x: Sequence[Float32], multiplier: Float32) -> list[Float32]:
    """x · multiplier, in units of 2**-14."""
    return [mul_rn(a, multiplier) for a in x]


def squares(x: Sequence[Float32], multiplier: Float32, units: Units, clip: bool = False) -> Float32:
    """Σ (y − E2M1(y))² for y = x · multiplier, y in units of 2**-14. Unless ``clip``, |y| < 7. Ties go either way."""
    y = products(x, multiplier)
    halves = cut_to_f16(y)
    if clip:
        halves = [min_abs_f16x2(half, Uint32(_SIX_F16X2)) for half in halves]
    q = [add_by_fma(half, HALF_UNIT, units.one) & Uint32(CODE_AND_SIGN) for half in halves]
    difference = add_diagonal(q, units.minus_one, y)
    chains = [mul_rn(d, d) for d in difference[:2]]
    for i, d in enumerate(difference[2:]):
        chains[i % 2] = fma_rn(d, d, chains[i % 2])
    return add_rn(chains[0], chains[1])


def multiplier_of(code: Int32, inverses: Float32) -> Float32:
    """1 / (global scale · scale) · 2**-14 for a normal scale. inverses: the lanes' in :class:`OptimalScales`."""
    inverse = cute.arch.shuffle_sync(inverses, mod(code, 8))
    return mul_rn(inverse, power((10 + UNIT_EXPONENT) - (code >> 3)))


def error_of(x: Sequence[Float32], code: Int32, inverses: Float32, units: Units) -> Float32:
    """The error under the normal scale ``code``."""
    value = scale_value(Uint32(code))
    return mul_rn(squares(x, multiplier_of(code, inverses), units, clip=True), mul_rn(value, value))


def may_be_better(top: Float32, code: Int32, best: Float32) -> Boolean:
    """Whether the scale ``code`` can be better, by the error of the largest element alone, which it clips."""
    clipped = fma_rn(scale_value(Uint32(cutlass.max(code, 0))), Float32(-6.0 * 2.0**UNIT_EXPONENT), top)
    return mul_rn(mul_rn(clipped, clipped), Float32(1 / ERROR_MARGIN)) <= best


@cute.jit
def below(
    x: tuple[Float32, ...], top: Float32, start: Estimated, more: Boolean, inverses: Float32, units: Units
) -> Estimated:
    """Tries scales from ``start.lower`` down, while the error of the largest element alone does not exceed the best.

    more: whether there is a scale to try. top: the largest magnitude, in units of the global scale.
    """
    code, best, next_best, lower, regular = start
    top = mul_rn(top, Float32(2.0**UNIT_EXPONENT))
    while cute.arch.vote_any_sync(more):
        # lanes without a scale to try evaluate any scale
        error = error_of(x, cutlass.select_(more, lower, Int32(64)), inverses, units)
        error = cutlass.select_(more, error, f32_from_bits(Uint32(INFINITY)))
        next_best = cute.arch.fmin(next_best, cute.arch.fmax(best, error))
        code = cutlass.select_(error < best, lower, code)
        best = cute.arch.fmin(best, error)
        lower = cutlass.select_(more, lower - 1, lower)
        more = more & may_be_better(top, lower, best)
        # the fast path takes no subnormal scale
        regular = regular & ((lower >= LEAST_NORMAL_CODE) | (cutlass.select_(more, Int32(0), Int32(1)) != 0))
        more = more & (lower >= LEAST_NORMAL_CODE)
    return Estimated(code, best, next_best, lower, regular)

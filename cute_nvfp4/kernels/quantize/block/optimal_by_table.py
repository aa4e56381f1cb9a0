"""Estimates of ``optimal`` from the error table (:mod:`.error_table`), or in fp32 where they are too close."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....ptx.arithmetic import fma_rn, mul_rn
from ....ptx.move import f32_bits, f32_from_bits
from .error_table import ERROR_UNIT, SIGNIFICANDS, lookup, lower_errors, octave_errors
from .optimal_definition import ERROR_MARGIN, LARGEST_CODE, lowest_bit
from .optimal_estimates import INFINITY, UNIT_EXPONENT, Estimated, Units, below, error_of, power, two_least
from .records import BlockContext
from .scale_table import scale_value

# entries have a relative error of 2**-11: estimates that are nearer than this part of the best (and of top², for the
# elements that they leave out) are undecided
_NEAR, _NEAR_TOP = 2.0**-10 + 2.0**-13, 2.0**-18
# scales below the octave in the table; and, in parts of top², by how much less the squares of 15 elements of scale / 5
# can be under the next one: scale' · (scale / 5 − scale' / 4) each, scale' ≥ 8 / 11 · scale ≥ 8 / 77 · top
_LOWER, _LEFT_OUT = 2, 1 / 128
_EXPONENT_BIAS = 7


def _clipped(top: Float32, unit: Float32, code: Int32, best: Float32) -> Boolean:
    """:func:`may_be_better`, in units of the table."""
    value = mul_rn(scale_value(Uint32(cutlass.max(code, 0))), unit)
    error = fma_rn(value, Float32(-6.0), top)
    return mul_rn(mul_rn(error, error), Float32(1 / ERROR_MARGIN)) <= best


@cute.jit
def by_table(
    words: tuple[Uint32, ...],
    x: tuple[Float32, ...],
    top: Float32,
    lowest: Int32,
    regular: Boolean,
    context: BlockContext,
    units: Units,
) -> Estimated:
    """The best scale of a block. top: the largest magnitude, in units of the global scale; lowest: the code of the
    octave's first scale. All lanes of a warp call it together."""
    table, inverses = context.errors, context.optimal.inverse
    lowest = cutlass.select_(regular, lowest, Int32(64))
    exponent = (lowest >> 3) - _EXPONENT_BIAS
    unit = mul_rn(power(-exponent), Float32(ERROR_UNIT**0.5))
    found = lookup(words, lowest, regular, context.factor, table)
    keys = [(f32_bits(e) & Uint32(0xFFFFFFF8)) | Uint32(i) for i, e in enumerate(octave_errors(found, table))]
    least, second = two_least(keys)
    code = lowest + Int32((least - Uint32(lowest)) & Uint32(7))
    best, next_best = f32_from_bits(least), f32_from_bits(second)

    # the two scales below the octave
    scaled_top = mul_rn(top, unit)
    wanted = regular & _clipped(scaled_top, unit, lowest - 1, best)
    lower = []
    for n, error in enumerate(lower_errors(found, table, wanted)):
        error = cutlass.select_(wanted, error, f32_from_bits(Uint32(INFINITY)))
        lower.append(error)
        next_best = cute.arch.fmin(next_best, cute.arch.fmax(best, error))
        code = cutlass.select_(error < best, lowest - 1 - n, code)
        best = cute.arch.fmin(best, error)
    # the fast path takes no subnormal scale, and no scale that does not exist
    regular = regular & (~wanted | (lowest >= 8 + _LOWER)) & (code <= LARGEST_CODE)
    top_squared = mul_rn(scaled_top, scaled_top)
    # elements that the table leaves out, at most scale / 5 each, may have a little less error under still smaller
    # scales
    reach = fma_rn(top_squared, Float32(_LEFT_OUT), best)
    more = wanted & regular & _clipped(scaled_top, unit, lowest - 1 - _LOWER, reach)
    limit = fma_rn(top_squared, Float32(_NEAR_TOP), mul_rn(best, Float32(1 + _NEAR)))
    again = regular & (~(next_best > limit) | more)
    back = mul_rn(f32_from_bits(Uint32(0x7F000000) - f32_bits(unit)), Float32(2.0**UNIT_EXPONENT))
    best = mul_rn(best, mul_rn(back, back))
    next_best = f32_from_bits(Uint32(INFINITY))
    below_all = lowest - 1 - _LOWER
    if cute.arch.vote_any_sync(again):
        # scales whose estimates are near the best, one bit for each, are estimated in fp32
        mask = Uint32(0)
        for i, error in enumerate([*(f32_from_bits(key) for key in keys), *lower]):
            mask = mask | cutlass.select_(again & (error <= limit), Uint32(1 << i), Uint32(0))
        start = _nearest(x, lowest, mask, inverses, units)
        started = cutlass.select_(more, below_all, Int32(64))
        exact = Estimated(start.code, start.best, start.next_best, started, regular)
        exact = below(x, top, exact, more, inverses, units)
        code = cutlass.select_(again, exact.code, code)
        best = cutlass.select_(again, exact.best, best)
        next_best = cutlass.select_(again, exact.next_best, next_best)
        regular = exact.regular
        below_all = cutlass.select_(more, exact.lower, below_all)
    return Estimated(code, best, next_best, below_all, regular)


@cute.jit
def _nearest(x: tuple[Float32, ...], lowest: Int32, mask: Uint32, inverses: Float32, units: Units) -> Estimated:
    """The best of the scales whose bits ``mask`` has: the octave's, by significand, then those below it."""
    infinity = f32_from_bits(Uint32(INFINITY))
    code, best, next_best = Int32(64), infinity, infinity
    while cute.arch.vote_any_sync(mask != 0):
        bit = lowest_bit(mask)
        place = cutlass.select_(bit < len(SIGNIFICANDS), (bit - lowest) & 7, Int32(len(SIGNIFICANDS) - 1) - bit)
        tried = cutlass.select_(mask != 0, cutlass.min(lowest + place, LARGEST_CODE), Int32(64))
        error = cutlass.select_(mask != 0, error_of(x, tried, inverses, units), infinity)
        next_best = cute.arch.fmin(next_best, cute.arch.fmax(best, error))
        code = cutlass.select_(error < best, tried, code)
        best = cute.arch.fmin(best, error)
        mask = mask & (mask - Uint32(1))
    return Estimated(code, best, next_best, lowest, Boolean(True))

"""The rule ``optimal`` in registers: of all E4M3 scales, the one with a block's least sum of squared errors.

Errors are estimated for all elements of a block together, in fp32 (:mod:`.optimal_estimates`) or from a table of the
errors of all bf16 values (:mod:`.optimal_by_table`). The definition (:mod:`.optimal_definition`) decides where
estimates are closer than all roundings together, and in irregular cases.

* With y = x / (global scale · scale), a scale under which all |y| < 3.5 is no better than half of it, whose values
  between −3 and 3 include those of the scale. The candidates therefore are an octave of eight scales, one for each
  significand m = 8 … 15: those under which the largest |y| is in [3.5, 7), where nothing saturates. Smaller scales are
  tried as long as the error of the largest element alone, clipped to 6, does not exceed the best error.
* y · 2⁻¹⁴ is truncated to binary16, in which bits 9 to 11 are E2M1's codes, subnormals included. Adding half a unit
  rounds it, ties aside. The tensor cores subtract four of these values at a time from the products in fp32.
* An estimate is off by at most 2⁻¹⁸ · top · √E + 2⁻¹⁹ · E, where ``top`` is the largest magnitude. y has three
  roundings, the definition's products and differences two, and the sum in the tensor cores is allowed one: 2⁻²¹ |y| in
  all. Of that the sum of squares gets 2 Σ |d| 2⁻²¹ |y| ≤ 2⁻²⁰ √E · √(Σ y²), where √(Σ y²) ≤ 4 max |y|; sums are off by
  2⁻¹⁹.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ....ptx.arithmetic import add_by_fma, fma_rn, mul_rn, rcp_rn
from ....ptx.encode import HALF_UNIT, pack_e2m1_halves
from ....ptx.half import distance_from_halves, fma_f16x2
from ....ptx.mma import MINUS_ONE_F16, diagonal
from ....ptx.move import f32_bits, f32_from_bits
from ...arith import mod
from ..config import QuantizeConfig
from .definition import to_f32
from .error_table import SIGNIFICANDS
from .fast_path import cut_to_f16
from .optimal_by_table import by_table
from .optimal_definition import LARGEST_CODE, encode, search_by_lanes
from .optimal_estimates import (
    BIAS,
    MANTISSA_BITS,
    UNIT_EXPONENT,
    Estimated,
    Units,
    below,
    error_of,
    may_be_better,
    multiplier_of,
    power,
    products,
    squares,
    two_least,
)
from .records import BlockContext, Draw, GlobalFactor, OptimalScales
from .scale_table import NONE, ODD, RAISING, scale_value

# products of this magnitude or more would be rounded to more than E2M1's largest value
_LARGEST_PRODUCT = 7.0
_NAN = 0x7FFFFFFF
# the exponents with which windows may begin; at the largest, some of the window's scales do not exist
_LEAST_EXPONENT, _LARGEST_EXPONENT = -6, 8
_LARGEST_GLOBAL_SCALE = 2.0**100
# estimates that are closer than this part of top · √E + E are undecided; top² / 16 + 5 E, which is not less, stands for
# that sum. The second is for estimates under a scale and twice that scale
_NEAR, _NEAR_DOUBLE = 2.0**-17, 2.0**-16
# least E, in parts of top²: below it estimates may be off by more than ``ERROR_MARGIN`` allows for, 2**-11 · E
_LEAST_PART = 2.0**-14
# elements nearer than this to 1/2 or 3/2 (1/4 − 2**-8, in units of 2**-24) are not almost ties
_CLEAR = 0xFC


class _Window(NamedTuple):
    """The best of eight scales: its code, its error, and the next error, in units of (global scale · 2**-14)²."""

    code: Int32
    error: Float32
    next_error: Float32


class _Found(NamedTuple):
    """The result of the search.

    code: of the best scale. decided: 0 if it may be wrong. lowest: the least code that may be right. inside: whether
    products with the reciprocal of its scale are below 7. multiplier: that reciprocal times 2**-14.
    """

    code: Uint32
    decided: Int32
    lowest: Int32
    inside: Int32
    multiplier: Float32


class _Tie:
    """The ways to round ties under a scale."""

    # half up: no element can be a tie that goes down (1/4, 5/4, 5/2, 5)
    HALF_UP = 0
    # to even: some element can, and truncation to binary16 separates it from its neighbours
    TO_EVEN = 1
    # by the definition
    BY_DEFINITION = 2


def optimal_scales(config: QuantizeConfig, factor: GlobalFactor, lane: Int32) -> OptimalScales:
    """The values that depend on the global scale only. Under a scale only one significand of elements can be a tie."""
    divisor = mul_rn(factor.value, (mod(lane, 8) + 8).to(Float32))
    inverse = rcp_rn(divisor)
    all_inverses = tuple(cute.arch.shuffle_sync(inverse, i) for i in range(len(SIGNIFICANDS)))
    if config.item_bytes == 4:
        return OptimalScales(all_inverses, inverse, Uint32(_Tie.HALF_UP))
    spare = 16 if config.dtype == "bfloat16" else 13
    even = beside = Boolean(False)
    for tie in (1.0, 1.25):
        below = f32_bits(mul_rn(divisor, Float32(tie))) & Uint32(0xFFFFFFFF << spare & 0xFFFFFFFF)
        # the last value up to the tie, the first value from it on, and the next
        for step in range(3):
            product = mul_rn(f32_from_bits(below + Uint32(step << spare)), inverse)
            even = even | (product == Float32(tie))
            beside = beside | ((product > Float32(tie)) & (product < Float32(tie * (1 + 2.0**-8))))
    to_even = cutlass.select_(beside, Uint32(_Tie.BY_DEFINITION), Uint32(_Tie.TO_EVEN))
    return OptimalScales(all_inverses, inverse, cutlass.select_(even, to_even, Uint32(_Tie.HALF_UP)))


def _window(
    x: Sequence[Float32], least_scale: Float32, inverses: Sequence[Float32], regular: Boolean, units: Units
) -> _Window:
    """The best of the eight scales from ``least_scale`` on; the error of a missing scale is infinity or NaN."""
    bits = f32_bits(least_scale)
    exponent = Int32(bits >> Uint32(MANTISSA_BITS)) - BIAS
    significand = f32_from_bits((bits & Uint32((1 << MANTISSA_BITS) - 1)) | Uint32((BIAS + 3) << MANTISSA_BITS))
    exponent = cutlass.select_(regular, exponent, Int32(0))
    nan = f32_from_bits(Uint32(_NAN))
    scale = power((3 + UNIT_EXPONENT) - exponent)
    half = cutlass.select_(exponent == _LARGEST_EXPONENT, nan, mul_rn(scale, Float32(0.5)))
    keys = []
    for i, m in enumerate(SIGNIFICANDS):
        low = significand <= Float32(float(m))
        chosen = cutlass.select_(low, scale, half)
        if m == 15:
            # E4M3 has no 480
            missing = cutlass.select_(low, exponent, exponent + 1) >= _LARGEST_EXPONENT
            chosen = cutlass.select_(missing, nan, chosen)
        weight = cutlass.select_(low, Float32(float(m * m)), Float32(float(4 * m * m)))
        error = mul_rn(squares(x, mul_rn(inverses[i], chosen), units), weight)
        # the lowest bits are the index of the scale
        keys.append((f32_bits(error) & Uint32(0xFFFFFFF8)) | Uint32(i))
    best, second = two_least(keys)
    unit = power(exponent - 3)
    unit = mul_rn(unit, unit)
    lowest = _code_from(bits)
    code = lowest + Int32((best - Uint32(lowest)) & Uint32(7))
    return _Window(code, mul_rn(f32_from_bits(best), unit), mul_rn(f32_from_bits(second), unit))


def _code_from(bits: Uint32) -> Int32:
    """The E4M3 code of the least scale that is not below a value in 2**-6 … 448, from that value's bits."""
    return Int32((bits + Uint32((1 << 20) - 1)) >> Uint32(20)) - ((BIAS - 7) << 3)


@cute.jit
def _search(
    config: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    x: tuple[Float32, ...],
    largest: Float32,
    context: BlockContext,
) -> _Found:
    """Searches by estimates. All lanes of a warp call it together."""
    factor, scales = context.factor, context.optimal
    units = Units(context.constants.one, diagonal(MINUS_ONE_F16, cute.arch.lane_idx()))
    # in units of the global scale
    top = mul_rn(largest, factor.inverse)
    least_scale = mul_rn(top, Float32((1 + 2.0**-18) / _LARGEST_PRODUCT))
    regular = (least_scale >= Float32(2.0**_LEAST_EXPONENT)) & (least_scale < Float32(2.0 ** (_LARGEST_EXPONENT + 1)))
    regular = regular & (factor.value <= Float32(_LARGEST_GLOBAL_SCALE))
    lowest = _code_from(f32_bits(least_scale))
    if cutlass.const_expr(config.error_table):
        code, best, next_best, lower, regular = by_table(words, x, top, lowest, regular, context, units)
    else:
        code, best, next_best = _window(x, least_scale, scales.all_inverses, regular, units)
        start = Estimated(code, best, next_best, lowest - 1, regular)
        more = regular & may_be_better(mul_rn(top, Float32(2.0**UNIT_EXPONENT)), lowest - 1, best)
        code, best, next_best, lower, regular = below(x, top, start, more, scales.inverse, units)
    top = mul_rn(top, Float32(2.0**UNIT_EXPONENT))
    code = cutlass.select_(regular, code, Int32(64))
    multiplier = multiplier_of(code, scales.inverse)
    top_squared = mul_rn(top, top)
    spread = fma_rn(top_squared, Float32(1 / 16), mul_rn(best, Float32(5.0)))
    certain = regular & (best > mul_rn(top_squared, Float32(_LEAST_PART))) & (best < Float32(float("inf")))
    # scales twice as large
    twice = code + 8 <= LARGEST_CODE
    unclear = regular & twice & ~_has_clear_halves(x, multiplier)
    if cute.arch.vote_any_sync(unclear):
        if cutlass.const_expr(config.error_table):
            # without codes of 1/2 and 3/2, twice the scale has the same errors, bit by bit; and if another element is
            # 1/2 or 3/2 there, four times the scale has more
            halves = _has_halves(x, multiplier, units.one) != 0
            unclear = unclear & (halves | ~_has_clear_halves(x, mul_rn(multiplier, Float32(0.5))))
            if cute.arch.vote_any_sync(unclear):
                # the table leaves out elements that are zero under all candidates
                error = error_of(x, code, scales.inverse, units)
                certain = certain & _is_certain(x, code, multiplier, spread, error, unclear, units)
        else:
            certain = certain & _is_certain(x, code, multiplier, spread, best, unclear, units)
    only_one = next_best > fma_rn(spread, Float32(_NEAR), best)
    decided = cutlass.select_(only_one & certain, Int32(1), Int32(0))
    inside = cutlass.select_(regular & (code >= lowest), Int32(1), Int32(0))
    return _Found(Uint32(code), decided, cutlass.select_(certain, lower + 1, Int32(0)), inside, multiplier)


@cute.jit
def _is_certain(
    x: tuple[Float32, ...],
    code: Int32,
    multiplier: Float32,
    spread: Float32,
    error: Float32,
    unclear: Boolean,
    units: Units,
) -> Boolean:
    """Whether ``unclear`` is not set, or twice the scale of ``code`` (four times, if twice gives the same) is certainly
    worse. error: under the scale itself."""
    # without codes of 1/2 and 3/2, the elements are those under twice the scale, and so are the errors, bit by bit
    unlike = unclear & (_has_halves(x, multiplier, units.one) != 0)
    limit = fma_rn(spread, Float32(_NEAR_DOUBLE), error)
    above = _scaled_up(x, code, multiplier, units, 4)
    if cute.arch.vote_any_sync(unlike):
        above = cutlass.select_(unlike, _scaled_up(x, code, multiplier, units, 2), above)
    apart = (above > limit) | (code + cutlass.select_(unlike, Int32(8), Int32(16)) > LARGEST_CODE)
    return apart | (cutlass.select_(unclear, Int32(0), Int32(1)) != 0)


def _scaled_up(x: Sequence[Float32], code: Int32, multiplier: Float32, units: Units, times: int) -> Float32:
    """The error under the scale that is ``times`` (2 or 4) times the scale of ``code``."""
    value = mul_rn(scale_value(Uint32(code)), Float32(float(times)))
    return mul_rn(squares(x, mul_rn(multiplier, Float32(1 / times)), units), mul_rn(value, value))


def _has_halves(x: Sequence[Float32], multiplier: Float32, one: Uint32) -> Uint32:
    """Nonzero if some element of x · multiplier, in units of 2**-14 and of magnitude below 7, is 1/2 or 3/2."""
    found = Uint32(0)
    for half in cut_to_f16(products(x, multiplier)):
        code = add_by_fma(half, HALF_UNIT, one)
        found = found | (code & ((code >> Uint32(2)) ^ Uint32(0xFFFFFFFF)))
    return found & Uint32(0x02000200)


def _has_clear_halves(x: Sequence[Float32], multiplier: Float32) -> Boolean:
    """Whether some element is 1/2 or 3/2 and not almost a tie: a little less and a little more round to it, too.

    Under twice the scale it would be 0, 1 or 2, and its square larger by (1/4 − |d|) · scale² ≥ 2⁻⁹ · scale².
    """
    least = Uint32(0x7BFF7BFF)
    for half in cut_to_f16(products(x, multiplier)):
        least = distance_from_halves(half, least)
    return (least & Uint32(0xFFFF) < Uint32(_CLEAR)) | (least >> Uint32(16) < Uint32(_CLEAR))


@cute.jit
def optimal(
    config: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    largest: Float32,
    context: BlockContext,
    index: Int64,
    valid: Boolean,
):
    """(scale code, two words of codes, whether the caller has to :func:`search` the block) of a block of finite
    elements. Only the error table leaves blocks to the caller. All lanes of a warp call it together."""
    factor = context.factor
    x = tuple(to_f32(config, words))
    found = _search(config, words, x, largest, context)
    live = valid & (largest > Float32(0.0))
    undecided = (found.decided == 0) & live
    code = Uint32(cutlass.select_(live, found.code, Uint32(0)))
    if cutlass.const_expr(not config.error_table):
        if cute.arch.vote_any_sync(undecided):
            last = cutlass.select_(undecided, Int32(LARGEST_CODE), Int32(-1))
            best = search_by_lanes(config, words, largest, factor, found.lowest, last)
            code = Uint32(cutlass.select_(undecided, best, code))
    draw = Draw(context.seed, index, 0)
    if cutlass.const_expr(config.arch.has_fp4_convert or config.stochastic or config.item_bytes == 4):
        low, high = encode(config, words, code, factor, draw)
    else:
        tie = cute.arch.shuffle_sync(context.optimal.ties, mod(Int32(code), 8))
        low, high = _encode_in_f16(x, found.multiplier, tie, context.constants.one)
        low = Uint32(cutlass.select_(live, low, Uint32(0)))
        high = Uint32(cutlass.select_(live, high, Uint32(0)))
        tie = cutlass.select_(found.inside != 0, tie, Uint32(_Tie.BY_DEFINITION))
        again = tie > Uint32(_Tie.TO_EVEN)
        again = live & (again & ~undecided if config.error_table else again | undecided)
        if cute.arch.vote_any_sync(again):
            low_again, high_again = encode(config, words, code, factor, draw)
            low = Uint32(cutlass.select_(again, low_again, low))
            high = Uint32(cutlass.select_(again, high_again, high))
    return code, (low, high), undecided


@cute.jit
def _encode_in_f16(x: tuple[Float32, ...], multiplier: Float32, tie: Uint32, one: Uint32):
    """Two words of codes of x · multiplier, in units of 2**-14 and of magnitude below 7. tie: of its scale."""
    even = tie & Uint32(_Tie.TO_EVEN)
    # half a unit, or one bit less where ties at even codes go down and odd codes are raised
    unit = Uint32(HALF_UNIT) - even * Uint32(0x00010001)
    # (8): f16x2, two elements each
    halves = cute.make_rmem_tensor(8, Uint32)
    for i, half in enumerate(cut_to_f16(products(x, multiplier))):
        halves[i] = add_by_fma(half, unit, one)
    if cute.arch.vote_any_sync(even != 0):
        raised = Uint32(NONE) + even * Uint32(ODD - NONE)
        for i in cutlass.range_constexpr(8):
            halves[i] = fma_f16x2(halves[i] & raised, Uint32(RAISING), halves[i])
    codes = [halves[i] for i in range(8)]
    return Uint32(pack_e2m1_halves(codes[:4])), Uint32(pack_e2m1_halves(codes[4:]))

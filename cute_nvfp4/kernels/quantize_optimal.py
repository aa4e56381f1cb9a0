"""The rule ``optimal``: of all E4M3 scales the one under which a block's sum of squares is least."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from ..ptx.convert import e4m3x2_to_f16x2, f16x2_to_f32
from ..ptx.diagonal import add_diagonal, diagonal, min_abs_f16x2
from ..ptx.encode import (
    CODE_AND_SIGN,
    HALF_UNIT,
    abs_f32,
    add_by_fma,
    add_rn,
    f32_bits,
    f32_from_bits,
    f32x2_to_e4m3x2,
    f32x2_to_f16x2_rz,
    fma_rn,
    mul_rn,
    pack_e2m1_halves,
    rcp_rn,
    sub_rn,
)
from .arith import mod
from .quantize_config import QuantizeConfig
from .quantize_exact import exact_candidate, scales, to_f32, wanted_scale

_LARGEST_CODE = 0x7E
# relative margins on errors and on scales, as in ``quantization.search``: wider costs time, never bits
_ERROR_MARGIN, _SCALE_MARGIN = 1 + 2.0**-10, 2.0**-10
# products are times this in binary16, where the smallest normal number then is E2M1's
_UNIT_EXPONENT, _MINUS_ONE_F16, _SIX_F16X2 = -14, 0xBC00, 0x0E000E00
_BIAS, _MANTISSA_BITS = 127, 23
_NAN, _INFINITY = 0x7FFFFFFF, 0x7F800000
_UNROLL = 1
# the exponents that scales of a window may begin with, and from which on some of them do not exist
_LEAST_EXPONENT, _LARGEST_EXPONENT = -6, 8
_LARGEST_GLOBAL_SCALE = 2.0**100
# estimates closer than this, relative to A·√E and to E, are not decided
_NEAR, _NEAR_DOUBLE, _LEAST_PART = 2.0**-17, 2.0**-16, 2.0**-20


def scale_value(code: Uint32) -> Float32:
    """The number that an E4M3 code stands for."""
    return f16x2_to_f32(e4m3x2_to_f16x2(Uint16(code)))[0]


def _nearest(config: QuantizeConfig) -> QuantizeConfig:
    """Errors are compared as if elements were rounded to the nearest, whatever is done with the winner."""
    return dataclasses.replace(config, stochastic=False)


def _evaluate(config: QuantizeConfig, x: tuple, code: Uint32, factor: tuple) -> tuple:
    """(error under a scale, step by step; part of it: of elements that are 0 under this scale and all larger ones)."""
    value = scale_value(code)
    _, error = exact_candidate(_nearest(config), list(x), value, factor, ())
    quarter = mul_rn(mul_rn(factor[0], value), Float32((1 - _SCALE_MARGIN) / 4))
    lost = Float32(0.0)
    for a in x:
        scaled = mul_rn(a, factor[3])
        lost = fma_rn(scaled, cutlass.select_(abs_f32(a) < quarter, scaled, Float32(0.0)), lost)
    return error, lost


@cute.jit
def search_exactly(
    config: cutlass.Constexpr, words: tuple, largest: Float32, factor: tuple, first: Int32, last: Int32
) -> Uint32:
    """The best scale's code, by the definition: the candidates ``first`` … ``last``, ascending, after the formula's.

    Below a first one the largest element is clipped so much that its error alone exceeds the formula's; after a
    last one, elements that become zero have more of an error than the best, or all do. All lanes go together.
    """
    x = tuple(to_f32(config, list(words)))
    _, inverse, mantissa, shift = factor
    best = Uint32(scales(_nearest(config), wanted_scale(config, largest, inverse))[0][0])
    least, _ = _evaluate(config, x, best, factor)
    reach = sub_rn(mul_rn(largest, shift), mul_rn(cute.math.sqrt(least), Float32(_ERROR_MARGIN)))
    lowest = cute.arch.fmax(mul_rn(reach, Float32((1 - _SCALE_MARGIN) / 6)), Float32(0.0)) / mantissa
    # one less than the nearest code is below it
    code = Int32(Uint32(f32x2_to_e4m3x2(lowest, Float32(0.0))))
    code = cutlass.max(code - 1, first)
    last = cutlass.select_(least > Float32(0.0), last, Int32(-1))
    while cute.arch.vote_any_sync(code <= last):
        candidate = Uint32(cutlass.min(code, _LARGEST_CODE))
        error, lost = _evaluate(config, x, candidate, factor)
        better = (error < least) & (code <= last)
        least = cutlass.select_(better, error, least)
        best = Uint32(cutlass.select_(better, candidate, best))
        nothing = mul_rn(largest, Float32(5.0)) < mul_rn(factor[0], scale_value(candidate))
        over = (lost > mul_rn(least, Float32(_ERROR_MARGIN))) | nothing
        last = cutlass.select_(over, Int32(-1), last)
        code = code + 1
    return best


def _power(exponent: Int32) -> Float32:
    """2**exponent, a normal number."""
    return f32_from_bits(Uint32(exponent + _BIAS) << Uint32(_MANTISSA_BITS))


def _squares(x: tuple, multiplier: Float32, minus: Uint32, one: Uint32, clip: bool = False) -> Float32:
    """Σ (y − E2M1(y))², y = x · multiplier, in units of 2**-14. |y| < 7, unless ``clip``. Ties go either way."""
    y = [mul_rn(a, multiplier) for a in x]
    halves = [f32x2_to_f16x2_rz(low, high) for low, high in zip(y[0::2], y[1::2])]
    if clip:
        halves = [min_abs_f16x2(half, Uint32(_SIX_F16X2)) for half in halves]
    q = [add_by_fma(half, HALF_UNIT, one) & Uint32(CODE_AND_SIGN) for half in halves]
    difference = add_diagonal(q, minus, y)
    chains = [mul_rn(d, d) for d in difference[:4]]
    for i, d in enumerate(difference[4:]):
        chains[i % 4] = fma_rn(d, d, chains[i % 4])
    return add_rn(add_rn(chains[0], chains[1]), add_rn(chains[2], chains[3]))


def _halved_codes(x: tuple, multiplier: Float32, one: Uint32) -> cutlass.Boolean:
    """Whether no element of x · multiplier, in units of 2**-14 and of magnitude below 7, is 1/2 or 3/2."""
    y = [mul_rn(a, multiplier) for a in x]
    found = Uint32(0)
    for low, high in zip(y[0::2], y[1::2]):
        code = add_by_fma(f32x2_to_f16x2_rz(low, high), HALF_UNIT, one)
        found = found | (code & ((code >> Uint32(2)) ^ Uint32(0xFFFFFFFF)))
    return (found & Uint32(0x02000200)) == Uint32(0)


def _multiplier(code: Int32, inverses: Float32) -> Float32:
    """1 / (global scale · scale) · unit of a normal scale."""
    inverse = cute.arch.shuffle_sync(inverses, mod(code, 8))
    return mul_rn(inverse, _power((10 + _UNIT_EXPONENT) - (code >> 3)))


@cute.jit
def _window(x: tuple, place: tuple, inverses: Float32, minus: Uint32, one: Uint32):
    """The least and the next error (bits of fp32) of eight scales in a row, the lowest bits being m - 8."""
    significand, power, half, missing = place
    nan = f32_from_bits(Uint32(_NAN))
    key, second = Uint32(_INFINITY), Uint32(_INFINITY)
    number = Float32(8.0)
    for i in cutlass.range(8, unroll=_UNROLL):
        low = significand <= number
        chosen = cutlass.select_(low, power, half)
        chosen = cutlass.select_(number == missing, nan, chosen)
        weight = cutlass.select_(low, number, mul_rn(number, Float32(2.0)))
        inverse = cute.arch.shuffle_sync(inverses, i)
        error = mul_rn(mul_rn(_squares(x, mul_rn(inverse, chosen), minus, one), weight), weight)
        other = (f32_bits(error) & Uint32(0xFFFFFFF8)) | Uint32(i)
        second = cutlass.min(second, cutlass.max(key, other))
        key = cutlass.min(key, other)
        number = add_rn(number, Float32(1.0))
    return key, second


@cute.jit
def search(config: cutlass.Constexpr, x: tuple, largest: Float32, factor: tuple, inverses: Float32, one: Uint32):
    """(code, whether it may be wrong, the least code that may be the right one, whether products with its reciprocal
    are below 7, that reciprocal times 2**-14)."""
    minus = diagonal(_MINUS_ONE_F16, cute.arch.lane_idx())
    # in units of the global scale
    top = mul_rn(largest, factor[1])
    least_scale = mul_rn(top, Float32((1 + 2.0**-18) / 7))
    bits = f32_bits(least_scale)
    exponent = Int32(bits >> Uint32(_MANTISSA_BITS)) - _BIAS
    regular = (exponent >= _LEAST_EXPONENT) & (exponent <= _LARGEST_EXPONENT)
    regular = regular & (factor[0] <= Float32(_LARGEST_GLOBAL_SCALE))
    significand = f32_from_bits((bits & Uint32((1 << _MANTISSA_BITS) - 1)) | Uint32((_BIAS + 3) << _MANTISSA_BITS))
    nan = f32_from_bits(Uint32(_NAN))
    power = _power(cutlass.select_(regular, (3 + _UNIT_EXPONENT) - exponent, Int32(0)))
    half = mul_rn(power, Float32(0.5))
    half = cutlass.select_(exponent == _LARGEST_EXPONENT, nan, half)
    # 480, which E4M3 does not have
    end = cutlass.select_(significand <= Float32(15.0), exponent, exponent + 1)
    missing = cutlass.select_(end >= _LARGEST_EXPONENT, Float32(15.0), Float32(0.0))
    key, second = _window(x, (significand, power, half, missing), inverses, minus, one)
    unit = _power(cutlass.select_(regular, exponent - 3, Int32(0)))
    unit = mul_rn(unit, unit)
    best, next_best = mul_rn(f32_from_bits(key), unit), mul_rn(f32_from_bits(second), unit)
    lowest = Int32((bits + Uint32((1 << 20) - 1)) >> Uint32(20)) - ((_BIAS - 7) << 3)
    code = lowest + Int32((key - Uint32(lowest)) & Uint32(7))

    # below the window, as far as the largest element alone is no worse than the best
    top = mul_rn(top, Float32(2.0**_UNIT_EXPONENT))
    lower = lowest - 1
    more = regular & _may_be_better(top, lower, best)
    while cute.arch.vote_any_sync(more):
        # lanes that are done, or have nothing to do, evaluate something
        candidate = cutlass.select_(more, lower, Int32(64))
        value = scale_value(Uint32(candidate))
        error = mul_rn(_squares(x, _multiplier(candidate, inverses), minus, one, clip=True), mul_rn(value, value))
        error = cutlass.select_(more, error, f32_from_bits(Uint32(0x7F800000)))
        next_best = cute.arch.fmin(next_best, cute.arch.fmax(best, error))
        code = cutlass.select_(error < best, candidate, code)
        best = cute.arch.fmin(best, error)
        lower = cutlass.select_(more, lower - 1, lower)
        more = more & _may_be_better(top, lower, best)
        # subnormal scales are not for this way
        regular = regular & ((lower >= 8) | (cutlass.select_(more, Int32(0), Int32(1)) != 0))
        more = more & (lower >= 8)

    # the scale twice as large
    spread = fma_rn(top, cute.math.sqrt(best), best)
    safe = cutlass.select_(regular, code, Int32(64))
    value = scale_value(Uint32(safe)) * Float32(2.0)
    multiplier = _multiplier(safe, inverses)
    error = mul_rn(_squares(x, mul_rn(multiplier, Float32(0.5)), minus, one), mul_rn(value, value))
    limit = fma_rn(spread, Float32(_NEAR_DOUBLE), best)
    apart = (error > limit) | (safe + 8 > _LARGEST_CODE)
    if cute.arch.vote_any_sync(regular & (error <= limit)):
        # without codes of 1/2 and 3/2 the elements are those under twice the scale: so are the errors, bit by bit
        value = mul_rn(value, Float32(2.0))
        error = mul_rn(_squares(x, mul_rn(multiplier, Float32(0.25)), minus, one), mul_rn(value, value))
        alike = _halved_codes(x, multiplier, one)
        apart = apart | (alike & ((error > limit) | (safe + 16 > _LARGEST_CODE)))
    # infinity: the window had no scale
    sound = (best > mul_rn(mul_rn(top, top), Float32(_LEAST_PART))) & (best < Float32(float("inf")))
    certain = regular & apart & sound
    alone = next_best > fma_rn(spread, Float32(_NEAR), best)
    first = cutlass.select_(certain, lower + 1, Int32(0))
    doubtful = cutlass.select_(alone & certain, Int32(0), Int32(1))
    return Uint32(code), doubtful, first, regular & (code >= lowest), multiplier


def _may_be_better(top: Float32, code: Int32, best: Float32) -> cutlass.Boolean:
    """Whether the error that the largest element has for being clipped leaves a chance."""
    clipped = fma_rn(scale_value(Uint32(cutlass.max(code, 0))), Float32(-6.0 * 2.0**_UNIT_EXPONENT), top)
    return mul_rn(mul_rn(clipped, clipped), Float32(1 / _ERROR_MARGIN)) <= best


@cute.jit
def optimal(
    config: cutlass.Constexpr,
    words: tuple,
    largest: Float32,
    factor: tuple,
    quick: tuple,
    seed: tuple,
    index: Int64,
    sound,
):
    """(scale code, two words of codes) of a block, if its numbers are finite; ``quick``: as for :func:`usual`."""
    x = tuple(to_f32(config, list(words)))
    inverses, ties = _lane_entries(config, factor, cute.arch.lane_idx())
    one = quick[2][0]
    code, doubtful, first, inside, multiplier = search(config, x, largest, factor, inverses, one)
    live = sound & (largest > Float32(0.0))
    doubtful = (doubtful != 0) & live
    code = Uint32(cutlass.select_(live, code, Uint32(0)))
    if cute.arch.vote_any_sync(doubtful):
        last = cutlass.select_(doubtful, Int32(_LARGEST_CODE), Int32(-1))
        found = search_exactly(config, words, largest, factor, first, last)
        code = Uint32(cutlass.select_(doubtful, found, code))
    if cutlass.const_expr(config.arch.has_fp4_convert or config.stochastic or config.item_bytes == 4):
        low, high = encode(config, words, code, factor, seed, index)
    else:
        tie = cute.arch.shuffle_sync(ties, mod(Int32(code), 8))
        low, high = _encode_by_halves(x, multiplier, tie)
        low = Uint32(cutlass.select_(live, low, Uint32(0)))
        high = Uint32(cutlass.select_(live, high, Uint32(0)))
        again = live & (doubtful | (cutlass.select_(inside, tie, Uint32(2)) > Uint32(1)))
        if cute.arch.vote_any_sync(again):
            first_word, second_word = encode(config, words, code, factor, seed, index)
            low = Uint32(cutlass.select_(again, first_word, low))
            high = Uint32(cutlass.select_(again, second_word, high))
    return code, low, high


def _lane_entries(config: QuantizeConfig, factor: tuple, lane: Int32) -> tuple:
    """Of the significand m = 8 + lane % 8 of scales: 1 / (global scale · m); how ties are to be rounded.

    0: half up, because no element can be a tie that goes down (1/4, 5/4, 5/2, 5); 1: to even, because some can, and
    are told apart from their neighbours when they are cut to binary16; 2: by other means. Only one significand of an
    element's can give a tie.
    """
    divisor = mul_rn(factor[0], (mod(lane, 8) + 8).to(Float32))
    inverse = rcp_rn(divisor)
    if config.item_bytes == 4:
        return inverse, Uint32(0)
    spare = 16 if config.dtype == "bfloat16" else 13
    even = beside = cutlass.Boolean(False)
    for tie in (1.0, 1.25):
        below = f32_bits(mul_rn(divisor, Float32(tie))) & Uint32(0xFFFFFFFF << spare & 0xFFFFFFFF)
        # on or before the tie, on or after it, and the next
        for step in range(3):
            product = mul_rn(f32_from_bits(below + Uint32(step << spare)), inverse)
            even = even | (product == Float32(tie))
            beside = beside | ((product > Float32(tie)) & (product < Float32(tie * (1 + 2.0**-8))))
    return inverse, cutlass.select_(even, cutlass.select_(beside, Uint32(2), Uint32(1)), Uint32(0))


def _encode_by_halves(x: tuple, multiplier: Float32, tie: Uint32) -> tuple:
    """Two words of codes of x · multiplier, in units of 2**-14, of magnitude below 7; ``tie``: of its scale."""
    y = [mul_rn(a, multiplier) for a in x]
    even = tie & Uint32(1)
    # half a unit, or a bit less of it where ties of even codes go down
    mask, unit = even * Uint32(0x00010001), Uint32(HALF_UNIT) - even * Uint32(0x00010001)
    halves = [f32x2_to_f16x2_rz(low, high) for low, high in zip(y[0::2], y[1::2])]
    halves = [half + unit + ((half >> Uint32(9)) & mask) for half in halves]
    return Uint32(pack_e2m1_halves(halves[:4])), Uint32(pack_e2m1_halves(halves[4:]))


def encode(config: QuantizeConfig, words: tuple, code: Uint32, factor: tuple, seed: tuple, index: Int64) -> tuple:
    """Two words of codes under the scale ``code``."""
    plain = dataclasses.replace(config, choice="")
    found, _ = exact_candidate(plain, to_f32(config, list(words)), scale_value(code), factor, (seed, index, 0))
    return Uint32(found[0]), Uint32(found[1])

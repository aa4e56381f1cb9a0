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
_NAN = 0x7FFFFFFF
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


def _multiplier(code: Int32, inverses: Float32) -> Float32:
    """1 / (global scale · scale) · unit of a normal scale."""
    inverse = cute.arch.shuffle_sync(inverses, mod(code, 8))
    return mul_rn(inverse, _power((10 + _UNIT_EXPONENT) - (code >> 3)))


def _lane_inverses(factor: tuple, lane: Int32) -> Float32:
    """1 / (global scale · m), lane l having m = 8 + l % 8."""
    return rcp_rn(mul_rn(factor[0], (mod(lane, 8) + 8).to(Float32)))


def _window(x: tuple, place: tuple, inverses: Float32, minus: Uint32, one: Uint32) -> tuple:
    """The least and the next error (bits of fp32) of eight scales in a row, the lowest bits being m - 8."""
    significand, exponent, power, half = place
    nan = f32_from_bits(Uint32(_NAN))
    keys = []
    for m in range(8, 16):
        low = significand <= Float32(float(m))
        chosen = cutlass.select_(low, power, half)
        if m == 15:
            # 480, which E4M3 does not have
            beyond = cutlass.select_(low, exponent, exponent + 1) >= _LARGEST_EXPONENT
            chosen = cutlass.select_(beyond, nan, chosen)
        inverse = cute.arch.shuffle_sync(inverses, m - 8)
        weight = cutlass.select_(low, Float32(float(m * m)), Float32(float(4 * m * m)))
        error = mul_rn(_squares(x, mul_rn(inverse, chosen), minus, one), weight)
        keys.append((f32_bits(error) & Uint32(0xFFFFFFF8)) | Uint32(m - 8))
    key, second = cutlass.min(keys[0], keys[1]), cutlass.max(keys[0], keys[1])
    for other in keys[2:]:
        second = cutlass.min(second, cutlass.max(key, other))
        key = cutlass.min(key, other)
    return key, second


@cute.jit
def search(config: cutlass.Constexpr, words: tuple, largest: Float32, factor: tuple, one: Uint32):
    """(code, whether it may be wrong, the least code that may be the right one)."""
    x = tuple(to_f32(config, list(words)))
    lane = cute.arch.lane_idx()
    minus = diagonal(_MINUS_ONE_F16, lane)
    inverses = _lane_inverses(factor, lane)
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
    key, second = _window(x, (significand, exponent, power, half), inverses, minus, one)
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
        regular = regular & ((lower >= 8) | (more == False))
        more = more & (lower >= 8)

    # the scale twice as large
    spread = fma_rn(top, cute.math.sqrt(best), best)
    safe = cutlass.select_(regular, code, Int32(64))
    value = scale_value(Uint32(safe)) * Float32(2.0)
    error = mul_rn(_squares(x, mul_rn(_multiplier(safe, inverses), Float32(0.5)), minus, one), mul_rn(value, value))
    apart = (error > fma_rn(spread, Float32(_NEAR_DOUBLE), best)) | (safe + 8 > _LARGEST_CODE)
    # infinity: the window had no scale
    certain = regular & apart & (best > mul_rn(mul_rn(top, top), Float32(_LEAST_PART))) & (best < Float32(float("inf")))
    alone = next_best > fma_rn(spread, Float32(_NEAR), best)
    return Uint32(code), (alone & certain) == False, cutlass.select_(certain, lower + 1, Int32(0))


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
    """(scale code, two words of codes) of a block, if its numbers are finite."""
    code, doubtful, first = search(config, words, largest, factor, quick[2][0])
    live = sound & (largest > Float32(0.0))
    doubtful = doubtful & live
    code = Uint32(cutlass.select_(live, code, Uint32(0)))
    if cute.arch.vote_any_sync(doubtful):
        found = search_exactly(
            config, words, largest, factor, first, cutlass.select_(doubtful, Int32(_LARGEST_CODE), Int32(-1))
        )
        code = Uint32(cutlass.select_(doubtful, found, code))
    one, two = encode(config, words, code, factor, seed, index)
    return code, one, two


def encode(config: QuantizeConfig, words: tuple, code: Uint32, factor: tuple, seed: tuple, index: Int64) -> tuple:
    """Two words of codes under the scale ``code``."""
    plain = dataclasses.replace(config, choice="")
    found, _ = exact_candidate(plain, to_f32(config, list(words)), scale_value(code), factor, (seed, index, 0))
    return Uint32(found[0]), Uint32(found[1])

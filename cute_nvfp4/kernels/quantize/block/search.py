"""The search for a block's best E4M3 scale as ``cute_nvfp4.quantization.search`` defines it, scale by scale."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from ....ptx.arithmetic import abs_f32, fma_rn, mul_rn, sub_rn
from ....ptx.convert import e4m3x2_to_f16x2, f16x2_to_f32
from ....ptx.encode import f32x2_to_e4m3x2
from ..config import QuantizeConfig
from .definition import exact_candidate, scales, to_f32, wanted_scale

LARGEST_CODE = 0x7E
# relative margins on errors and on scales, as in ``quantization.search``: wider costs time, never bits
ERROR_MARGIN, _SCALE_MARGIN = 1 + 2.0**-10, 2.0**-10


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
    reach = sub_rn(mul_rn(largest, shift), mul_rn(cute.math.sqrt(least), Float32(ERROR_MARGIN)))
    lowest = cute.arch.fmax(mul_rn(reach, Float32((1 - _SCALE_MARGIN) / 6)), Float32(0.0)) / mantissa
    # one less than the nearest code is below it
    code = Int32(Uint32(f32x2_to_e4m3x2(lowest, Float32(0.0))))
    code = cutlass.max(code - 1, first)
    last = cutlass.select_(least > Float32(0.0), last, Int32(-1))
    while cute.arch.vote_any_sync(code <= last):
        candidate = Uint32(cutlass.min(code, LARGEST_CODE))
        error, lost = _evaluate(config, x, candidate, factor)
        better = (error < least) & (code <= last)
        least = cutlass.select_(better, error, least)
        best = Uint32(cutlass.select_(better, candidate, best))
        nothing = mul_rn(largest, Float32(5.0)) < mul_rn(factor[0], scale_value(candidate))
        over = (lost > mul_rn(least, Float32(ERROR_MARGIN))) | nothing
        last = cutlass.select_(over, Int32(-1), last)
        code = code + 1
    return best


def encode(config: QuantizeConfig, words: tuple, code: Uint32, factor: tuple, seed: tuple, index: Int64) -> tuple:
    """Two words of codes under the scale ``code``."""
    plain = dataclasses.replace(config, choice="")
    found, _ = exact_candidate(plain, to_f32(config, list(words)), scale_value(code), factor, (seed, index, 0))
    return Uint32(found[0]), Uint32(found[1])

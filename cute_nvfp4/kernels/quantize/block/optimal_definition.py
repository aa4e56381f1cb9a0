"""The search for a block's best E4M3 scale, scale by scale, as ``cute_nvfp4.quantization.search`` defines it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ....ptx.arithmetic import abs_f32, fma_rn, mul_rn, sub_rn
from ....ptx.encode import f32x2_to_e4m3x2
from ..config import QuantizeConfig
from .definition import candidate_scales, encode_elements, to_f32, try_candidate, wanted_scale
from .records import Draw, GlobalFactor
from .scale_table import scale_value

LARGEST_CODE = 0x7E
# relative margins on errors and on scales, as in ``quantization.search``: wider costs time, never bits
ERROR_MARGIN, _SCALE_MARGIN = 1 + 2.0**-10, 2.0**-10


class _Error(NamedTuple):
    """The error of a block, and the part of it that elements have which are 0 under this scale and all larger ones."""

    total: Float32
    lost: Float32


def _nearest(config: QuantizeConfig) -> QuantizeConfig:
    """Errors are compared as if elements were rounded to the nearest, whatever is done with the winner."""
    return replace(config, stochastic=False)


def _evaluate(config: QuantizeConfig, x: Sequence[Float32], code: Uint32, factor: GlobalFactor) -> _Error:
    """The error under a scale, step by step."""
    value = scale_value(code)
    _, error = try_candidate(_nearest(config), x, value, factor)
    quarter = mul_rn(mul_rn(factor.value, value), Float32((1 - _SCALE_MARGIN) / 4))
    lost = Float32(0.0)
    for a in x:
        scaled = mul_rn(a, factor.shift)
        lost = fma_rn(scaled, cutlass.select_(abs_f32(a) < quarter, scaled, Float32(0.0)), lost)
    return _Error(error, lost)


@cute.jit
def search_by_definition(
    config: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    largest: Float32,
    factor: GlobalFactor,
    first: Int32,
    last: Int32,
) -> Uint32:
    """The best scale's code, by the definition: the candidates ``first`` … ``last``, ascending, after the formula's.

    Below a first one the largest element is clipped so much that its error alone exceeds the formula's; after a
    last one, elements that become zero have more of an error than the best, or all do. All lanes go together.
    """
    x = to_f32(config, words)
    best = Uint32(candidate_scales(_nearest(config), wanted_scale(config, largest, factor)).codes[0])
    least = _evaluate(config, x, best, factor).total
    reach = sub_rn(mul_rn(largest, factor.shift), mul_rn(cute.math.sqrt(least), Float32(ERROR_MARGIN)))
    lowest = cute.arch.fmax(mul_rn(reach, Float32((1 - _SCALE_MARGIN) / 6)), Float32(0.0)) / factor.significand
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
        nothing = mul_rn(largest, Float32(5.0)) < mul_rn(factor.value, scale_value(candidate))
        over = (lost > mul_rn(least, Float32(ERROR_MARGIN))) | nothing
        last = cutlass.select_(over, Int32(-1), last)
        code = code + 1
    return best


def encode(
    config: QuantizeConfig, words: Sequence[Uint32], code: Uint32, factor: GlobalFactor, draw: Draw
) -> tuple[Uint32, Uint32]:
    """Two words of codes under the scale ``code``."""
    first, second = encode_elements(config, to_f32(config, words), scale_value(code), factor, draw)
    return Uint32(first), Uint32(second)

"""4/6 decided by sums of errors in any order, wherever the order of the definition cannot change the outcome.

Errors are in units of the scale: r = element − y. They do not depend on which element a tie is rounded to. Where no
instruction converts to E2M1, y · 2⁻¹⁴ therefore may be truncated to binary16 and rounded half up (:mod:`.fast_path`).

Bounds, for n elements: y has three roundings from x / (global scale · scale) and is at most 7, so it is off by at most
ε = 2⁻¹⁹, which covers the definition's roundings, too. A sum S of squares then is off by 2 ε √(n S) + n ε², a sum of
magnitudes by n ε; adding up is off by less than 2⁻¹⁶ of the sum. Candidates whose errors differ by more than twice that
compare alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....ptx.arithmetic import abs_f32, add_rn, fma_rn, mul_rn, rcp_rn, sub_rn
from ....ptx.convert import f16x2_to_f32
from ....ptx.encode import CODE_AND_SIGN, HALF_UNIT, f32_to_e2m1x8
from ..config import QuantizeConfig
from .definition import candidate_scales, decode, encode_elements, ordered_sum, to_f32, wanted_scale
from .fast_path import cut_to_f16
from .records import BlockResult, GlobalFactor
from .scale_table import LEAST_WANTED, UNIT, is_usable, largest_wanted

# sums of errors that are accumulated side by side
CHAINS = 4
_EPSILON = 2.0**-19
_LEAST_DIFFERENCE = 2.0**-14


def decides_by_sums(config: QuantizeConfig) -> bool:
    """Whether this decides for ``config``. abs_max has equal errors often, and random codes are not the nearest."""
    return config.fast_path and config.choice in ("mse", "mae") and not config.stochastic


def multipliers(config: QuantizeConfig, values: Sequence[Float32], factor: GlobalFactor) -> list[Float32]:
    """The factors of elements for :func:`add_errors` under the scales ``values``."""
    inverses = [rcp_rn(mul_rn(factor.value, value)) for value in values]
    return inverses if config.arch.has_fp4_convert else [mul_rn(inverse, Float32(UNIT)) for inverse in inverses]


def add_errors(
    config: QuantizeConfig, x: Sequence[Float32], multiplier: Float32, sums: Sequence[Float32]
) -> list[Float32]:
    """``sums``, with the errors of ``x`` added to them in turn."""
    y = [mul_rn(a, multiplier) for a in x]
    if config.arch.has_fp4_convert:
        words = [f32_to_e2m1x8(y[i : i + 8]) for i in range(0, len(y), 8)]
        elements = decode(words, config.arch)
    else:
        pairs = [(half + Uint32(HALF_UNIT)) & Uint32(CODE_AND_SIGN) for half in cut_to_f16(y)]
        elements = [q for pair in pairs for q in f16x2_to_f32(pair)]
    difference = [sub_rn(q, a) for q, a in zip(elements, y)]
    sums = list(sums)
    for i, d in enumerate(difference):
        place = i % len(sums)
        sums[place] = fma_rn(d, d, sums[place]) if config.choice == "mse" else add_rn(sums[place], abs_f32(d))
    return sums


def compare(
    config: QuantizeConfig,
    sums: Sequence[Float32],
    values: Sequence[Float32],
    wanted: Float32,
    factor: GlobalFactor,
    n: int,
) -> tuple[Boolean, Boolean]:
    """(whether 4 is better, whether that is certain), from both candidates' sums over ``n`` elements."""
    unit = 1.0 if config.arch.has_fp4_convert else UNIT
    squares = [mul_rn(v, v) for v in values]
    weights = squares if config.choice == "mse" else values
    weighted = [mul_rn(total, weight) for total, weight in zip(sums, weights)]
    distance = abs_f32(sub_rn(weighted[0], weighted[1]))
    clear = distance > mul_rn(cute.arch.fmax(weighted[0], weighted[1]), Float32(_LEAST_DIFFERENCE))
    if config.choice == "mse":
        # (8 ε)² n S scale⁴; S must be large enough for n ε² to be a small part of it
        bounds = [mul_rn(error, square) for error, square in zip(weighted, squares)]
        bound = mul_rn(cute.arch.fmax(bounds[0], bounds[1]), Float32(n * (8 * _EPSILON * unit) ** 2))
        enough = cute.arch.fmax(sums[0], sums[1]) > Float32(64 * n * (_EPSILON * unit) ** 2)
        clear = clear & enough & (mul_rn(distance, distance) > bound)
    else:
        clear = clear & (distance > mul_rn(cute.arch.fmax(values[0], values[1]), Float32(4 * n * _EPSILON * unit)))
    # in this range a scale is rounded by at most a sixth, so that no element is further from zero than 7
    inside = (wanted >= Float32(LEAST_WANTED)) & (wanted <= largest_wanted(is_usable(factor._replace(valid=Int32(1)))))
    return weighted[1] < weighted[0], clear & inside


def by_sums(config: QuantizeConfig, words: Sequence[Uint32], largest: Float32, factor: GlobalFactor) -> BlockResult:
    """Quantizes a block of finite elements."""
    x = to_f32(config, words)
    wanted = wanted_scale(config, largest, factor)
    codes, values = candidate_scales(config, wanted)
    none = [Float32(0.0)] * CHAINS
    sums = [ordered_sum(add_errors(config, x, multiplier, none)) for multiplier in multipliers(config, values, factor)]
    take_four, decided = compare(config, sums, values, wanted, factor, len(x))
    value = cutlass.select_(take_four, values[1], values[0])
    found = encode_elements(config, x, value, factor)
    code = Uint32(cutlass.select_(take_four, codes[1], codes[0]))
    return BlockResult(code, tuple(map(Uint32, found)), decided)

"""A block of 16 elements under an E4M3 scale, computed as ``cute_nvfp4.quantization.blocks`` defines it.

This is the slow path, which is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64, Uint32

from ....ptx.arithmetic import abs_f32, add_rn, div_rn_constant, max_abs_f32, mul_rn, rcp_rn, sub_rn
from ....ptx.convert import bf16x2_to_f32, e2m1x8_to_f16x2, e4m3x2_to_f16x2, f16x2_to_f32
from ....ptx.encode import f32x2_to_16bit, f32x2_to_e4m3x2, scaled_to_e2m1x8
from ....ptx.half import max_abs_halves
from ....ptx.move import f32_bits, f32_from_bits
from ....target import Architecture
from ..config import QuantizeConfig
from ..random_bits import stochastic
from .records import BlockContext, BlockResult, Candidates, Draw, GlobalFactor


def to_f32(config: QuantizeConfig, words: Sequence[Uint32]) -> list[Float32]:
    """The elements of a block in fp32."""
    if config.dtype == "float32":
        return [f32_from_bits(word) for word in words]
    unpack = bf16x2_to_f32 if config.dtype == "bfloat16" else f16x2_to_f32
    return [x for word in words for x in unpack(word)]


def from_f32(config: QuantizeConfig, values: Sequence[Float32]) -> tuple[Uint32, ...]:
    """The words of a block: ``values``, rounded once to the dtype of x."""
    if config.dtype == "float32":
        return tuple(f32_bits(x) for x in values)
    return tuple(f32x2_to_16bit(low, high, config.dtype) for low, high in zip(values[0::2], values[1::2]))


def max_abs(values: Sequence[Float32]) -> Float32:
    """The largest magnitude of ``values``; NaN if one of them is."""
    return reduce(max_abs_f32, values)


def largest_magnitude(config: QuantizeConfig, words: Sequence[Uint32]) -> Float32:
    """The largest magnitude of a block; NaN if it contains one."""
    if config.dtype == "float32":
        return max_abs(to_f32(config, words))
    return max_abs_halves(words, config.dtype)


def wanted_scale(config: QuantizeConfig, largest: Float32, factor: GlobalFactor) -> Float32:
    """The scale of a block before it is rounded to E4M3.

    A subnormal quotient may be off by a bit, but times the inverse, at most 2**100, it is zero in E4M3 all the same.
    """
    return mul_rn(div_rn_constant(largest, config.top), factor.inverse)


def candidate_scales(config: QuantizeConfig, wanted: Float32) -> Candidates:
    """The candidate scales of a block: one, or 4/6's two."""
    if config.choice:
        pair = f32x2_to_e4m3x2(wanted, mul_rn(wanted, Float32(1.5)))
        codes = (Uint32(pair) & Uint32(0xFF), Uint32(pair) >> Uint32(8))
        return Candidates(codes, tuple(f16x2_to_f32(e4m3x2_to_f16x2(pair))))
    if config.min_scale:
        wanted = cute.arch.fmax(wanted, Float32(config.min_scale))
    pair = f32x2_to_e4m3x2(wanted, Float32(0.0))
    return Candidates((Uint32(pair),), tuple(f16x2_to_f32(e4m3x2_to_f16x2(pair))[:1]))


def ordered_sum(values: Sequence[Float32]) -> Float32:
    """The sum in the order of ``cute_nvfp4.quantization.block_request.ordered_sum``."""
    lanes = values[:8]
    for start in range(8, len(values), 8):
        lanes = [add_rn(a, b) for a, b in zip(lanes, values[start : start + 8])]
    return reduce(add_rn, lanes)


def block_error(choice: str, difference: Sequence[Float32]) -> Float32:
    """The error that the 4/6 rule ``choice`` compares, by the definition."""
    if choice == "abs_max":
        return max_abs(difference)
    return ordered_sum([abs_f32(d) if choice == "mae" else mul_rn(d, d) for d in difference])


def decode(words: Sequence[Uint32], arch: Architecture) -> list[Float32]:
    """The values of the E2M1 codes in ``words``."""
    return [x for word in words for pair in e2m1x8_to_f16x2(word, arch) for x in f16x2_to_f32(pair)]


def residuals(
    config: QuantizeConfig, x: Sequence[Float32], words: Sequence[Uint32], value: Float32, factor: GlobalFactor
) -> list[Float32]:
    """The errors of the codes in ``words`` under the scale ``value``, times the global scale's shift."""
    return [
        sub_rn(mul_rn(mul_rn(q, value), factor.significand), mul_rn(a, factor.shift))
        for q, a in zip(decode(words, config.arch), x)
    ]


def encode_elements(
    config: QuantizeConfig, x: Sequence[Float32], value: Float32, factor: GlobalFactor, draw: Draw | None = None
) -> list[Uint32]:
    """Two words of codes under the scale ``value``. draw: for stochastic rounding."""
    inverse = rcp_rn(mul_rn(factor.value, value))
    if config.stochastic:
        x = stochastic(config, [mul_rn(a, inverse) for a in x], draw)
        inverse = Float32(1.0)
    words = [scaled_to_e2m1x8(x[i : i + 8], inverse, config.arch) for i in (0, 8)]
    return [cutlass.select_(value == Float32(0.0), Uint32(0), word) for word in words]


def try_candidate(
    config: QuantizeConfig, x: Sequence[Float32], value: Float32, factor: GlobalFactor, draw: Draw | None = None
) -> tuple[list[Uint32], Float32]:
    """The words of codes under the scale ``value``, and the block's error."""
    words = encode_elements(config, x, value, factor, draw)
    return words, block_error(config.choice, residuals(config, x, words, value, factor))


@cute.jit
def _try_in_turn(
    config: cutlass.Constexpr, x: tuple[Float32, ...], candidates: Candidates, factor: GlobalFactor
) -> BlockResult:
    """The better of 4/6's two candidates, by a loop, which takes half the instructions where few blocks need them."""
    code, value = candidates.codes[0], candidates.values[0]
    taken, first, second, least = candidates.codes[0], Uint32(0), Uint32(0), Float32(0.0)
    for turn in cutlass.range(2, unroll=1):
        words, error = try_candidate(config, x, value, factor)
        better = (turn == 0) | (error < least)
        taken, least = Uint32(cutlass.select_(better, code, taken)), cutlass.select_(better, error, least)
        first = Uint32(cutlass.select_(better, words[0], first))
        second = Uint32(cutlass.select_(better, words[1], second))
        code, value = candidates.codes[1], candidates.values[1]
    return BlockResult(taken, (first, second), Boolean(True))


def by_definition(
    config: QuantizeConfig, words: Sequence[Uint32], largest: Float32, context: BlockContext, index: Int64
) -> BlockResult:
    """The block of finite elements, by the definition.

    index: of its first element in the result, for stochastic rounding. 4/6's second candidate draws from the stream
    after the first's.
    """
    x, factor = to_f32(config, words), context.factor
    candidates = candidate_scales(config, wanted_scale(config, largest, factor))
    if not config.choice:
        found = encode_elements(config, x, candidates.values[0], factor, Draw(context.seed, index, 0))
        return BlockResult(Uint32(candidates.codes[0]), tuple(map(Uint32, found)), Boolean(True))
    if not config.fast_path:
        return _try_in_turn(config, tuple(x), candidates, factor)
    (six, six_error), (four, four_error) = (
        try_candidate(config, x, value, factor, Draw(context.seed, index, stream))
        for stream, value in enumerate(candidates.values)
    )
    better = four_error < six_error
    code = Uint32(cutlass.select_(better, candidates.codes[1], candidates.codes[0]))
    found = tuple(Uint32(cutlass.select_(better, b, a)) for a, b in zip(six, four))
    return BlockResult(code, found, Boolean(True))

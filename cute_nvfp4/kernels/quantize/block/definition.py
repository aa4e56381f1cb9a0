"""A block of 16 elements under an E4M3 scale, step by step as ``cute_nvfp4.quantization.blocks`` defines it."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from ....ptx.arithmetic import abs_f32, add_rn, div_rn_constant, max_abs_f32, mul_rn, rcp_rn, sub_rn
from ....ptx.convert import bf16x2_to_f32, e2m1x8_to_f16x2, e4m3x2_to_f16x2, f16x2_to_f32
from ....ptx.encode import f32x2_to_e4m3x2, scaled_to_e2m1x8
from ....ptx.half import max_abs_halves
from ....ptx.move import f32_from_bits
from ..config import QuantizeConfig
from ..random_bits import stochastic


def to_f32(config: QuantizeConfig, words: list[Uint32]) -> list[Float32]:
    """The elements of a block."""
    if config.dtype == "float32":
        return [f32_from_bits(word) for word in words]
    unpack = bf16x2_to_f32 if config.dtype == "bfloat16" else f16x2_to_f32
    return [x for word in words for x in unpack(word)]


def largest_magnitude(config: QuantizeConfig, words: list[Uint32]) -> Float32:
    """The largest magnitude of a block, NaN if it holds one."""
    if config.dtype != "float32":
        return max_abs_halves(words, "bf16" if config.dtype == "bfloat16" else "f16")
    values = to_f32(config, words)
    largest = max_abs_f32(values[0], values[1])
    for x in values[2:]:
        largest = max_abs_f32(largest, x)
    return largest


def wanted_scale(config: QuantizeConfig, largest: Float32, inverse: Float32) -> Float32:
    """The scale before it is rounded to E4M3; ``inverse``: 1 / global scale.

    A subnormal quotient may be off by a bit; times the inverse, 2**100 at most, it is zero in E4M3 all the same.
    """
    return mul_rn(div_rn_constant(largest, config.top), inverse)


def scales(config: QuantizeConfig, wanted: Float32) -> tuple[list[Uint32], list[Float32]]:
    """Codes and values of the candidate scales: one, or the two of 4/6."""
    if config.choice:
        pair = f32x2_to_e4m3x2(wanted, mul_rn(wanted, Float32(1.5)))
        codes = [Uint32(pair) & Uint32(0xFF), Uint32(pair) >> Uint32(8)]
        return codes, f16x2_to_f32(e4m3x2_to_f16x2(pair))
    if config.min_scale:
        wanted = cute.arch.fmax(wanted, Float32(config.min_scale))
    pair = f32x2_to_e4m3x2(wanted, Float32(0.0))
    return [Uint32(pair)], f16x2_to_f32(e4m3x2_to_f16x2(pair))[:1]


def ordered_sum(values: list[Float32]) -> Float32:
    """The sum in the order of ``cute_nvfp4.quantization.blocks.ordered_sum``."""
    lanes = values[:8]
    for start in range(8, len(values), 8):
        lanes = [add_rn(a, b) for a, b in zip(lanes, values[start : start + 8])]
    total = lanes[0]
    for lane in lanes[1:]:
        total = add_rn(total, lane)
    return total


def error(choice: str, difference: list[Float32]) -> Float32:
    """What the 4/6 rule ``choice`` compares, step by step."""
    if choice == "abs_max":
        largest = max_abs_f32(difference[0], difference[1])
        for d in difference[2:]:
            largest = max_abs_f32(largest, d)
        return largest
    return ordered_sum([abs_f32(d) if choice == "mae" else mul_rn(d, d) for d in difference])


def decode(words: list[Uint32], arch: Any) -> list[Float32]:
    """Values of the E2M1 codes in ``words``."""
    return [x for word in words for pair in e2m1x8_to_f16x2(word, arch) for x in f16x2_to_f32(pair)]


def residuals(
    config: QuantizeConfig, x: list[Float32], words: list[Uint32], value: Float32, factor: tuple
) -> list[Float32]:
    """What the codes in ``words`` under the scale ``value`` are off by, times the global scale's shift."""
    _, _, mantissa, shift = factor
    return [sub_rn(mul_rn(mul_rn(q, value), mantissa), mul_rn(a, shift)) for q, a in zip(decode(words, config.arch), x)]


def exact_candidate(
    config: QuantizeConfig, x: list[Float32], value: Float32, factor: tuple, draw: tuple
) -> tuple[list[Uint32], Float32]:
    """Words of codes under the scale ``value``, and the error of the block (0 if nothing compares errors).

    draw: (seed, index, stream) for stochastic rounding.
    """
    inverse = rcp_rn(mul_rn(factor[0], value))
    scaled = x
    if config.stochastic:
        scaled = stochastic(config, [mul_rn(a, inverse) for a in x], *draw)
        inverse = Float32(1.0)
    words = [scaled_to_e2m1x8(scaled[i : i + 8], inverse, config.arch) for i in (0, 8)]
    words = [cutlass.select_(value == Float32(0.0), Uint32(0), word) for word in words]
    if not config.choice:
        return words, Float32(0.0)
    return words, error(config.choice, residuals(config, x, words, value, factor))


def encode_exactly(config: QuantizeConfig, words: list[Uint32], value: Float32, factor: tuple) -> tuple:
    """Two words of codes under the scale ``value``, whatever the ties."""
    x = to_f32(config, words)
    inverse = rcp_rn(mul_rn(factor[0], value))
    return tuple(Uint32(scaled_to_e2m1x8(x[i : i + 8], inverse, config.arch)) for i in (0, 8))


@cute.jit
def _in_turn(config: cutlass.Constexpr, x: tuple, codes: tuple, values: tuple, factor: tuple):
    """What :func:`exact` returns for the two candidates of 4/6: half the instructions, where few blocks need them."""
    code, value = codes[0], values[0]
    taken, first, second, least = codes[0], Uint32(0), Uint32(0), Float32(0.0)
    for turn in cutlass.range(2, unroll=1):
        words, found = exact_candidate(config, list(x), value, factor, ())
        better = (turn == 0) | (found < least)
        taken, least = Uint32(cutlass.select_(better, code, taken)), cutlass.select_(better, found, least)
        first = Uint32(cutlass.select_(better, words[0], first))
        second = Uint32(cutlass.select_(better, words[1], second))
        code, value = codes[1], values[1]
    return taken, first, second


def exact(
    config: QuantizeConfig, words: list[Uint32], largest: Float32, factor: tuple, seed: tuple, index: Int64
) -> tuple:
    """(scale code, two words of codes), step by step, of a block of finite numbers.

    seed, index: what :func:`stochastic` takes; the second candidate of 4/6 draws from the stream after the first's.
    """
    x = to_f32(config, words)
    codes, values = scales(config, wanted_scale(config, largest, factor[1]))
    if len(codes) == 2 and not config.usual:
        return _in_turn(config, tuple(x), tuple(map(Uint32, codes)), tuple(values), factor)
    found = [exact_candidate(config, x, value, factor, (seed, index, stream)) for stream, value in enumerate(values)]
    (first, second), code = found[0][0], codes[0]
    if len(found) == 2:
        four = found[1][1] < found[0][1]
        code = cutlass.select_(four, codes[1], code)
        first, second = (cutlass.select_(four, b, a) for a, b in zip((first, second), found[1][0]))
    return Uint32(code), Uint32(first), Uint32(second)

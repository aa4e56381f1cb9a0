"""The scale and the codes of one block of 16 elements under an E4M3 scale, in the registers of one thread.

The definition is ``cute_nvfp4.quantization.blocks``; every bit is the same. There are two ways through a block:

* the *exact* way follows the definition step by step;
* the *usual* way is cheaper and notices where it might differ, whereupon the exact one is taken.

What is cheaper, for 16-bit elements:

* on architectures without a conversion to E2M1, products y = x · (1 / (global scale · scale)), times 2⁻¹⁴, are cut to
  binary16, in which E2M1's codes are bits 9 to 11, subnormals included; half a unit is added, and that is rounding,
  except where y is exactly a tie, which must go to the even code. y comes from an x of 8 (bf16) or 11 (f16) significant
  bits: only one significand can give a given tie. It is found by multiplying, and tried, once for each of the eight
  significands that a scale can have; with most global scales nothing is a tie.
* 4/6 compares errors that it computes with fewer roundings than the definition. They decide where they differ
  by more than all roundings together can make up.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..ptx.convert import e2m1x8_to_f16x2, e4m3x2_to_f16x2, f16x2_to_f32
from ..ptx.encode import (
    CODE_AND_SIGN,
    HALF_UNIT,
    abs_f32,
    add_rn,
    bf16x2_to_f32,
    div_rn_constant,
    f32_bits,
    f32_from_bits,
    f32_to_e2m1x8,
    f32x2_to_e4m3x2,
    f32x2_to_f16x2_rz,
    fma_rn,
    max_abs_f32,
    max_abs_halves,
    mul_rn,
    pack_e2m1_halves,
    rcp_rn,
    rcp_rn_normal,
    scaled_to_e2m1x8,
    sub_rn,
)
from .quantize_config import QuantizeConfig

INFINITY = float("inf")
NAN_E4M3, NAN_CODES = 0x7F, 0x77777777
# products are times this in binary16, where the smallest normal number then is E2M1's
_SHIFT = 2.0**-14
# less by more than roundings can make up, and by less than elements that are not ties are away from them
_LOWERED_SHIFT = 2.0**-14 * (1 - 2.0**-22)
_NEAR = 2.0**-20
# scales wanted in this range are normal and not cut off, so that no product rounds to more than E2M1 has
_SMALLEST_NORMAL, _LARGEST_WANTED = 2.0**-6, 464.0
# global scales up to this keep the reciprocals of scales times _SHIFT normal
PLAIN_GLOBAL_SCALE = 2.0**100
# bits of a significand in fp32 that x does not have
_SPARE_BITS = {"bfloat16": 16, "float16": 13}
# 4/6: errors (in units of the scale) below this are not decided by the usual way, nor are differences below this part
_LEAST_ERROR = {"mse": 2.0**-8, "mae": 2.0**-3, "abs_max": 2.0**-6}
_LEAST_DIFFERENCE = 2.0**-12


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


def quick_error(choice: str, difference: list[Float32]) -> Float32:
    """The same with fewer roundings."""
    if choice == "abs_max":
        return error(choice, difference)
    total = Float32(0.0)
    for d in difference:
        total = add_rn(total, abs_f32(d)) if choice == "mae" else fma_rn(d, d, total)
    return total


def decode(words: list[Uint32], arch: Any) -> list[Float32]:
    """Values of the E2M1 codes in ``words``."""
    return [x for word in words for pair in e2m1x8_to_f16x2(word, arch) for x in f16x2_to_f32(pair)]


def exact_candidate(
    config: QuantizeConfig, x: list[Float32], value: Float32, factor: tuple
) -> tuple[list[Uint32], Float32]:
    """Words of codes under the scale ``value``, and the error of the block (0 if nothing compares errors)."""
    global_scale, _, mantissa, shift, _ = factor
    inverse = rcp_rn(mul_rn(global_scale, value))
    words = [scaled_to_e2m1x8(x[i : i + 8], inverse, config.arch) for i in (0, 8)]
    words = [cutlass.select_(value == Float32(0.0), Uint32(0), word) for word in words]
    if not config.choice:
        return words, Float32(0.0)
    difference = [
        sub_rn(mul_rn(mul_rn(q, value), mantissa), mul_rn(a, shift)) for q, a in zip(decode(words, config.arch), x)
    ]
    return words, error(config.choice, difference)


def encode_exactly(config: QuantizeConfig, words: list[Uint32], value: Float32, factor: tuple) -> tuple:
    """Two words of codes under the scale ``value``, whatever the ties."""
    x = to_f32(config, words)
    inverse = rcp_rn(mul_rn(factor[0], value))
    return tuple(scaled_to_e2m1x8(x[i : i + 8], inverse, config.arch) for i in (0, 8))


def exact(config: QuantizeConfig, words: list[Uint32], largest: Float32, factor: tuple) -> tuple:
    """(scale code, two words of codes), step by step, of a block of finite numbers."""
    x = to_f32(config, words)
    codes, values = scales(config, wanted_scale(config, largest, factor[1]))
    found = [exact_candidate(config, x, value, factor) for value in values]
    (first, second), code = found[0][0], codes[0]
    if len(found) == 2:
        four = found[1][1] < found[0][1]
        code = cutlass.select_(four, codes[1], code)
        first, second = (cutlass.select_(four, b, a) for a, b in zip((first, second), found[1][0]))
    return Uint32(code), Uint32(first), Uint32(second)


def _near(config: QuantizeConfig, divisor: Float32, inverse: Float32, tie: float) -> tuple:
    """Whether an element of a 16-bit type times ``inverse`` = 1 / ``divisor`` may be a tie; whether almost (or 0)."""
    spare = _SPARE_BITS[config.dtype]
    bits = f32_bits(mul_rn(divisor, Float32(tie))) + Uint32(1 << (spare - 1))
    significand = f32_from_bits(bits & Uint32(0xFFFFFFFF << spare & 0xFFFFFFFF))
    product = mul_rn(significand, inverse)
    distance = abs_f32(sub_rn(product, Float32(tie)))
    exact = distance == Float32(0.0)
    return exact, (distance < Float32(_NEAR)) & (distance > Float32(0.0))


@cute.jit
def tie_masks(config: cutlass.Constexpr, global_scale: Float32, lane: Int32):
    """What the usual way must know of ties under this global scale: two masks of eight bits, one for each
    significand that a scale can have (1, 9/8 … 15/8).

    lowered: ties are possible, but only those that go down: elements are to be multiplied by a little less.
    spoiled: ties in both directions are possible, or what is almost a tie, or reciprocals are not normal.
    """
    masks = (Uint32(0), Uint32(0))
    if cutlass.const_expr(config.sound_ties):
        significand = Float32(1.0) + (lane & 7).to(Float32) * Float32(0.125)
        large = global_scale > Float32(PLAIN_GLOBAL_SCALE)
        # a power of two more or less changes nothing but the range
        divisor = cutlass.select_(large, Float32(1.0), global_scale) * significand
        inverse = rcp_rn(divisor)
        # of ties 1/4, 5/4, 5/2 and 5 go down; 3/4, 7/4 and 7/2 go up, as all do that are cut and rounded half up
        (one, near_one), (five, near_five) = (_near(config, divisor, inverse, tie) for tie in (1.0, 1.25))
        (three, near_three), (seven, near_seven) = (_near(config, divisor, inverse, tie) for tie in (1.5, 1.75))
        down = one | five
        unsafe = three | seven | near_one | near_five | near_three | near_seven
        lowered = cute.arch.vote_ballot_sync(down)
        spoiled = cute.arch.vote_ballot_sync(large | (down & unsafe))
        masks = (Uint32(lowered), Uint32(spoiled))
    return masks


def _bit(mask: Uint32, code: Uint32) -> Any:
    """Bit ``code % 8`` of a mask that repeats every eight bits."""
    return ((mask >> (code & Uint32(7))) & Uint32(1)) != 0


def usual_candidate(
    config: QuantizeConfig, x: list[Float32], code: Uint32, value: Float32, factor: tuple
) -> tuple[list[Uint32], Any]:
    """Codes under a scale, packed or not (:func:`packed`), and the error of the block."""
    divisor = mul_rn(factor[0], value)
    if not config.sound_ties:
        inverse = rcp_rn(divisor)
        y = [mul_rn(a, inverse) for a in x]
        words = [f32_to_e2m1x8(y[i : i + 8]) for i in (0, 8)]
        if not config.choice:
            return words, None
        difference = [sub_rn(q, b) for q, b in zip(decode(words, config.arch), y)]
        return words, quick_error(config.choice, difference)
    lowered, _ = factor[4]
    shift = cutlass.select_(_bit(lowered, code), Float32(_LOWERED_SHIFT), Float32(_SHIFT))
    shifted = mul_rn(rcp_rn_normal(divisor), shift)
    y = [mul_rn(a, shifted) for a in x]
    halves = [f32x2_to_f16x2_rz(low, high) + Uint32(HALF_UNIT) for low, high in zip(y[0::2], y[1::2])]
    if not config.choice:
        return halves, None
    q = [a for pair in halves for a in f16x2_to_f32(pair & Uint32(CODE_AND_SIGN))]
    return halves, quick_error(config.choice, [sub_rn(a, b) for a, b in zip(q, y)])


def packed(config: QuantizeConfig, codes: list[Uint32]) -> list[Uint32]:
    """Two words of codes from what :func:`usual_candidate` returns."""
    return codes if not config.sound_ties else [pack_e2m1_halves(codes[i : i + 4]) for i in (0, 4)]


def usual(config: QuantizeConfig, words: list[Uint32], largest: Float32, factor: tuple) -> tuple:
    """(scale code, its value, two words of codes, whether that may be wrong or None)."""
    x = to_f32(config, words)
    wanted = wanted_scale(config, largest, factor[1])
    codes, values = scales(config, wanted)
    found = [usual_candidate(config, x, code, value, factor) for code, value in zip(codes, values)]
    doubtful = None
    if config.sound_ties:
        inside = (wanted >= Float32(_SMALLEST_NORMAL)) & (wanted <= Float32(_LARGEST_WANTED))
        if not config.choice:
            inside = inside & (_bit(factor[4][1], codes[0]) == False)  # noqa: E712
        doubtful = cutlass.select_(inside, Int32(0), Int32(1)) == 1
    if not config.choice:
        first, second = packed(config, found[0][0])
        return codes[0], values[0], first, second, doubtful
    (six, error_six), (four, error_four) = found
    power = 2 if config.choice == "mse" else 1
    unit = _SHIFT**power if config.sound_ties else 1.0
    weights = [mul_rn(value, value) if power == 2 else value for value in values]
    total_six, total_four = mul_rn(error_six, weights[0]), mul_rn(error_four, weights[1])
    least = Float32(_LEAST_ERROR[config.choice] * unit)
    larger = cute.arch.fmax(total_six, total_four)
    # false where something is not a number
    clear = (abs_f32(sub_rn(total_six, total_four)) > mul_rn(larger, Float32(_LEAST_DIFFERENCE))) & (
        cute.arch.fmin(error_six, error_four) > least
    )
    unclear = cutlass.select_(clear, Int32(0), Int32(1)) == 1
    doubtful = unclear if doubtful is None else unclear | doubtful
    take_four = total_four < total_six
    first, second = packed(config, [cutlass.select_(take_four, b, a) for a, b in zip(six, four)])
    code, value = (cutlass.select_(take_four, b, a) for a, b in (codes, values))
    return code, value, first, second, doubtful


@cute.jit
def quantize_block(config: cutlass.Constexpr, words: tuple, factor: tuple, valid: Int32):
    """(scale code, words of codes) of a block.

    words: its elements as they lie in memory. factor: (global scale, 1 / global scale, global scale · shift, shift,
    :func:`tie_masks`). valid: whether the global scale is a valid one.
    """
    largest = largest_magnitude(config, words)
    sound = (largest < Float32(INFINITY)) & (valid != 0)
    if cutlass.const_expr(config.dtype == "float32"):
        code, first, second = exact(config, words, largest, factor)
    else:
        code, value, first, second, doubtful = usual(config, words, largest, factor)
        zero = value == Float32(0.0)
        first = Uint32(cutlass.select_(zero, Uint32(0), first))
        second = Uint32(cutlass.select_(zero, Uint32(0), second))
        code = Uint32(code)
        if cutlass.const_expr(doubtful is not None):
            # blocks of zeros need no second look, nor do those with a scale of zero where no other is tried
            something = largest if cutlass.const_expr(config.choice) else value
            if doubtful & sound & (something > Float32(0.0)):
                code, first, second = exact(config, words, largest, factor)
            elif cutlass.const_expr(config.encodes_winner):
                # errors are the same whichever way a tie goes, so that only the codes taken are rounded again
                if _bit(factor[4][1], code) & (value > Float32(0.0)):
                    first, second = encode_exactly(config, words, value, factor)
    code = cutlass.select_(sound, code, Uint32(NAN_E4M3))
    first = cutlass.select_(sound, first, Uint32(NAN_CODES))
    second = cutlass.select_(sound, second, Uint32(NAN_CODES))
    return code, (first, second)

"""Stochastic rounding with Philox's bits, as ``cute_nvfp4.quantization.philox`` and ``rounding`` define it."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import Float32, Int32, Uint32

from ...ptx.arithmetic import add_rn, copy_sign, mul_rn, multiply_wide, round_even
from ...ptx.move import f32_bits, f32_from_bits
from .block.records import Draw
from .config import ELEMENTS, QuantizeConfig

# Philox4x32-10: multipliers, key increments, rounds
_MULTIPLIERS, _WEYL, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_BIAS, _MANTISSA_BITS = 127, 23


def philox(counter: Sequence[Uint32], key: Sequence[Uint32]) -> list[Uint32]:
    """Four random words from a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        if number:
            k0, k1 = k0 + Uint32(_WEYL[0]), k1 + Uint32(_WEYL[1])
        high0, low0 = multiply_wide(c0, Uint32(_MULTIPLIERS[0]))
        high1, low1 = multiply_wide(c2, Uint32(_MULTIPLIERS[1]))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


def stochastic(config: QuantizeConfig, y: Sequence[Float32], draw: Draw) -> list[Float32]:
    """``y``, rounded up or down at random to values of the element type (or to values that saturate in it).

    ``draw.index`` is the index of y[0] in the whole result, a multiple of four.
    """
    kind = ELEMENTS[config.element]
    least = Uint32(_BIAS + 1 - kind.exponent_bias)
    key = [Uint32(draw.seed.low), Uint32(draw.seed.high)]
    result = []
    for first in range(0, len(y), 4):
        group = (draw.index + first) >> 2
        counter = [Uint32(Int32(group)), Uint32(Int32(group >> 32)), Uint32(draw.stream), Uint32(0)]
        for value, bits in zip(y[first : first + 4], philox(counter, key)):
            uniform = mul_rn((bits >> Uint32(8)).to(Float32), Float32(2.0**-24))
            magnitude = f32_bits(value) & Uint32(0x7FFFFFFF)
            exponent = cutlass.max(magnitude >> Uint32(_MANTISSA_BITS), least)
            exponent = cutlass.min(exponent, Uint32(2 * _BIAS - 1))
            step = f32_from_bits((exponent - Uint32(kind.mantissa_bits)) << Uint32(_MANTISSA_BITS))
            inverse = f32_from_bits((Uint32(2 * _BIAS + kind.mantissa_bits) - exponent) << Uint32(_MANTISSA_BITS))
            steps = add_rn(mul_rn(f32_from_bits(magnitude), inverse), add_rn(uniform, Float32(-0.5)))
            # a zero takes the sign of the value
            result.append(mul_rn(mul_rn(round_even(steps), step), copy_sign(Float32(1.0), value)))
    return result

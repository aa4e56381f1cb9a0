"""A block of 32 elements under a UE8M0 scale, as ``cute_nvfp4.quantization.mx`` and ``blocks`` define it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cutlass
from cutlass import Float32, Int64, Uint32

from ....ptx.arithmetic import div_rn, mul_rn
from ....ptx.encode import f32x4_to_8bit, scaled_to_e2m1x8
from ....ptx.move import f32_bits, f32_from_bits
from ..arguments import Seed
from ..config import ELEMENTS, QuantizeConfig
from ..random_bits import stochastic
from .definition import to_f32
from .records import Draw

NAN_UE8M0 = 0xFF
_LARGEST, _BIAS, _MANTISSA_BITS = 254, 127, 23
_FRACTION, _HALF = (1 << _MANTISSA_BITS) - 1, 1 << (_MANTISSA_BITS - 1)


def scale_code(config: QuantizeConfig, largest: Float32) -> Uint32:
    """The scale's code, 0 … 254, for a block whose largest magnitude is ``largest``, which is finite."""
    kind = ELEMENTS[config.element]
    if config.exponent == "rceil":
        bits = f32_bits(div_rn(largest, Float32(config.top)))
        # the smallest scale, 2**-127, is the fp32 subnormal with fraction _HALF
        limit = cutlass.select_(bits > Uint32(_HALF), Uint32(0), Uint32(_HALF))
        above = cutlass.select_((bits & Uint32(_FRACTION)) > limit, Uint32(1), Uint32(0))
        return cutlass.min((bits >> Uint32(_MANTISSA_BITS)) + above, Uint32(_LARGEST))
    bits = f32_bits(largest)
    if config.exponent == "even":
        bits = bits + Uint32(1 << (_MANTISSA_BITS - kind.mantissa_bits - 1))
    exponent = bits >> Uint32(_MANTISSA_BITS)
    if config.exponent == "ceil":
        exponent = exponent + cutlass.select_((bits & Uint32(_FRACTION)) > Uint32(0), Uint32(1), Uint32(0))
    shift = Uint32(math.frexp(kind.max_value)[1] - 1)
    return cutlass.min(cutlass.max(exponent, shift) - shift, Uint32(_LARGEST))


def encode(config: QuantizeConfig, values: Sequence[Float32], factor: Float32) -> list[Uint32]:
    """The words of the codes of value · factor, rounded to nearest."""
    if config.element == "e2m1":
        return [scaled_to_e2m1x8(values[i : i + 8], factor, config.arch) for i in range(0, len(values), 8)]
    products = [mul_rn(a, factor) for a in values]
    return [f32x4_to_8bit(products[i : i + 4], config.element) for i in range(0, len(values), 4)]


def mx_block(
    config: QuantizeConfig, words: Sequence[Uint32], largest: Float32, seed: Seed | None, index: Int64
) -> tuple[Uint32, list[Uint32]]:
    """(scale code, words of codes) of a block of finite elements. index: of its first element in the result."""
    x = to_f32(config, words)
    code = scale_code(config, largest)
    # 2**(127 - code), subnormal for code 254
    exponent = (Uint32(2 * _BIAS) - code) << Uint32(_MANTISSA_BITS)
    inverse = f32_from_bits(cutlass.select_(code == Uint32(_LARGEST), Uint32(_HALF), exponent))
    if config.stochastic:
        y = [mul_rn(a, inverse) for a in x]
        return code, encode(config, stochastic(config, y, Draw(seed, index, 0)), Float32(1.0))
    return code, encode(config, x, inverse)

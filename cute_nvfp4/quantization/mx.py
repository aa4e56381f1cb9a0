"""Scales of the MX formats: the power of two for a block's largest magnitude, in each of the known modes.

floor, ceil, even: the modes of torchao; floor is that of the OCP Microscaling specification v1.0. rceil: NVIDIA's mode
(PTX ``cvt.rp.ue8m0x2`` of largest magnitude / largest element), the smallest power of two that clips nothing. All work
on bits, because a logarithm would misround next to powers of two.
"""

from __future__ import annotations

import math

import torch

from cute_nvfp4.formats import Format
from cute_nvfp4.quantization.rounding import _BIAS, _KINDS, _MANTISSA_BITS, divide
from cute_nvfp4.quantization.rules import Rule

_LARGEST = 254
_FRACTION = (1 << _MANTISSA_BITS) - 1
_HALF = 1 << (_MANTISSA_BITS - 1)


def mx_scale_codes(largest: torch.Tensor, rule: Rule, format: Format) -> torch.Tensor:
    """UE8M0 codes 0 … 254 (int32) for blocks with these largest magnitudes (float32, finite)."""
    if rule.exponent == "rceil":
        # the division rounds to nearest; if that gives a power of two, the largest element rounds to it
        divisor = format.max_value if rule.max_code is None else rule.max_code
        bits = divide(largest, divisor).view(torch.int32)
        # the smallest scale, 2**-127, is the float32 subnormal with fraction _HALF
        above = (bits & _FRACTION) > torch.where(bits > _HALF, 0, _HALF)
        return ((bits >> _MANTISSA_BITS) + above).clamp(max=_LARGEST)
    bits = largest.view(torch.int32)
    kind = _KINDS[format.element]
    if rule.exponent == "even":
        # half a step of the element type: a magnitude that would round up to the next power of two gets its scale
        bits = bits + (1 << (_MANTISSA_BITS - kind.mantissa_bits - 1))
    exponent = bits >> _MANTISSA_BITS
    if rule.exponent == "ceil":
        exponent = exponent + ((bits & _FRACTION) > 0)
    # frexp's mantissa is in [1/2, 1), ours in [1, 2)
    largest_exponent = math.frexp(kind.max_value)[1] - 1
    return (exponent - largest_exponent).clamp(0, _LARGEST)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in float32, for int32 exponents from −127 (subnormal) to 127."""
    # made from bits, because compilers of torch do not know torch.float8_e8m0fnu; 2**−127 is subnormal
    code = exponent + _BIAS
    return torch.where(code == 0, _HALF, code << _MANTISSA_BITS).to(torch.int32).view(torch.float32)

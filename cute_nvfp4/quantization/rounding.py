"""Rounds scaled elements to codes, to nearest or stochastically, and quickly to E2M1's values.

Blocks are element-major everywhere in this package: (elements of a block, blocks). A value for each block then
broadcasts over the first dimension, and sums over a block are sums of contiguous rows.

``divide``, ``reciprocal`` and ``rounded`` keep bits that ``torch.compile`` would change: Triton's float32 division is
approximate, and a product to which something is added becomes a fused multiply-add.
"""

from __future__ import annotations

import torch

from cute_nvfp4 import formats

_ENCODE = {"e2m1": formats.encode_e2m1, "e4m3": formats.encode_e4m3, "e5m2": formats.encode_e5m2}
_KINDS = {"e2m1": formats._E2M1, "e4m3": formats._E4M3, "e5m2": formats._E5M2}
NAN_CODES = {name: kind.nan_code for name, kind in _KINDS.items()}
"""The code that ``encode`` gives for NaN."""
_MANTISSA_BITS = 23
_BIAS = 127
_EXPONENT_MASK = 0x7F800000
_ONE = 0x3F800000
# adding 1.5 · 2**22 to a number below 2 rounds it to multiples of 0.5, E2M1's step there; each power of two more needs
# twice as much. The 1.5 keeps negative sums in the same binade.
_ROUNDER = 1.5 * 2.0**22


def divide(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by for a float32 tensor, rounded once, on any device, and in compiled code too."""
    if torch.compiler.is_compiling():
        # float64 has more than twice the bits, so rounding its quotient to float32 rounds only once (Figueroa, "When is
        # double rounding innocuous?", 1995). So does rounding the product with the divisor's reciprocal, for the few
        # divisors that occur, which are small multiples of powers of two
        return (x.to(torch.float64) / by).to(torch.float32)
    # by a tensor, because on a GPU torch divides by a Python number with a reciprocal, which rounds twice
    return x / torch.full_like(x, by)


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x for a float32 tensor, rounded once, on any device, and in compiled code too (see ``divide``)."""
    if torch.compiler.is_compiling():
        return (1.0 / x.to(torch.float64)).to(torch.float32)
    return 1.0 / x


def rounded(product: torch.Tensor) -> torch.Tensor:
    """``product``, which must not be NaN; it is rounded before anything is added to it."""
    if torch.compiler.is_compiling():
        # a compiler cannot remove a comparison whose outcome it does not know
        return torch.where(product == product, product, 0.0)
    return product


def encode(y: torch.Tensor, element: str) -> torch.Tensor:
    """Codes (``uint8``) of ``y``: nearest, ties to even, saturating; the sign of zero is kept."""
    return _ENCODE[element](y)


def encode_stochastic(y: torch.Tensor, uniform: torch.Tensor, element: str) -> torch.Tensor:
    """Codes of ``y`` (float32) rounded up or down at random: sign · round(|y| / step + (uniform − ½)) · step.

    ``uniform`` is in [0, 1). The step is that of the element type at y, so for y in range the expected value is y, to
    the resolution of ``uniform``; values out of range saturate. A zero has the sign of the product above, in which
    round(…) may be −0. NaN is treated as by ``encode``.
    """
    kind = _KINDS[element]
    magnitude = y.abs()
    exponent = ((magnitude.view(torch.int32) >> _MANTISSA_BITS) - _BIAS).clamp(1 - kind.exponent_bias, _BIAS - 1)
    step = ((exponent - kind.mantissa_bits + _BIAS) << _MANTISSA_BITS).view(torch.float32)
    inverse = ((kind.mantissa_bits - exponent + _BIAS) << _MANTISSA_BITS).view(torch.float32)
    # steps and their inverses are powers of two: the addition rounds, and then round() does, as intended
    rounded = torch.round(magnitude * inverse + (uniform - 0.5)) * step
    return encode(rounded * torch.copysign(torch.ones_like(y), y), element)


def round_e2m1(y: torch.Tensor) -> torch.Tensor:
    """The E2M1 value nearest to ``y`` (float32, finite), ties to even, saturating; zeros are +0. Takes six passes."""
    y = y.clamp(-6.0, 6.0)
    rounder = (y.view(torch.int32) & _EXPONENT_MASK).clamp_(min=_ONE).view(torch.float32) * _ROUNDER
    return y.add_(rounder).sub_(rounder)

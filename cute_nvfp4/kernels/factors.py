"""The factor of an accumulated sum: the product of alpha, device scalars and a power of two.

float32 may not hold that product even where it holds the result: 2⁻²⁰ · 2¹²¹ · 2⁷, or a sum times global scales of
3·10³⁸ and 3·10⁻³⁸ and an alpha of 10³⁰. A :class:`Factor` therefore is ``alpha`` · 2 ** ``shift``, and ``alpha`` has
all of the product's mantissa. ``shift`` is 0 where every intermediate product is a normal number; a few comparisons for
each factor decide that, none for each sum. Otherwise a sum is multiplied twice by 2 ** (shift / 2), then by ``alpha``.
Shifting up is exact or gives infinity, shifting down is exact or gives 0, so that the result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ..ptx.arithmetic import abs_f32
from ..ptx.move import f32_bits, f32_from_bits

_SMALLEST_NORMAL = 2.0**-126
_LARGEST = (2.0 - 2.0**-23) * 2.0**127
_BIAS = 127
_TO_NORMAL = 24
"""The exponent of a power of two that makes every subnormal number normal."""
_KEPT = -126, 123
"""The smallest and the largest exponent of ``alpha``. Its mantissa is a product of up to three values below 2, and one
more power of two may make the shift even."""
_SHIFT = 200
"""The largest shift: together with the exponents that ``alpha`` keeps, it makes any sum 0 or infinite."""


class Factor(NamedTuple):
    """``alpha`` · 2 ** ``shift``; the shift is even, or None where there is nothing to multiply by but ``alpha``."""

    alpha: Float32
    shift: Int32 | None = None


def factor_of(alpha: Float32, scalars: Sequence[Float32], power: float = 1.0) -> Factor:
    """The factor alpha · ``power`` · the scalars. power: a power of two; scalars: at most two."""
    product, products = alpha, []
    for x in [*([Float32(power)] if power != 1.0 else []), *scalars]:
        product = product * x
        products.append(abs_f32(product))
    if not products:
        return Factor(alpha)
    least = most = products[0]
    for x in products[1:]:
        least, most = cute.arch.fmin(least, x), cute.arch.fmax(most, x)
    normal = (least >= _SMALLEST_NORMAL) & (most <= _LARGEST)
    return Factor(*_unless(normal, product, [alpha, *scalars], round(math.log2(power))))


@cute.jit
def _unless(
    normal: Boolean, product: Float32, numbers: list[Float32], exponent: cutlass.Constexpr[int]
) -> tuple[Float32, Int32]:
    """``product`` with shift 0 where every intermediate product was normal, else the split product of ``numbers``."""
    alpha, shift = product, Int32(0)
    if not normal:
        alpha, shift = _split_product(numbers, exponent)
    return alpha, shift


def _split_product(numbers: list[Float32], exponent: int) -> tuple[Float32, Int32]:
    """The product of the values in ``numbers`` and 2 ** ``exponent``, as ``alpha`` and ``shift``."""
    mantissa, total = Float32(1.0), Int32(exponent)
    for x in numbers:
        part, power = _split(x)
        mantissa, total = mantissa * part, total + power
    kept = cutlass.min(cutlass.max(total, Int32(_KEPT[0])), Int32(_KEPT[1]))
    kept = kept + ((total - kept) & 1)
    shift = cutlass.min(cutlass.max(total - kept, Int32(-_SHIFT)), Int32(_SHIFT))
    size = abs_f32(mantissa)
    # 0, infinity and NaN need no shift; they would become NaN with a sum that a shift makes infinite or 0
    shift = cutlass.select_((size >= 1.0) & (size <= _LARGEST), shift, Int32(0))
    return mantissa * _power_of_two(kept), shift


def _split(x: Float32) -> tuple[Float32, Int32]:
    """The mantissa of ``x``, of magnitude 1 to 2, and its exponent; 0, infinity and NaN are their own mantissas."""
    small = abs_f32(x) < _SMALLEST_NORMAL
    bits = f32_bits(cutlass.select_(small, x * 2.0**_TO_NORMAL, x))
    biased = ((bits >> 23) & Uint32(0xFF)).to(Int32)
    number = (biased != 0) & (biased != 0xFF)
    mantissa = f32_from_bits((bits & Uint32(0x807FFFFF)) | Uint32(0x3F800000))
    exponent = biased - cutlass.select_(small, Int32(_BIAS + _TO_NORMAL), Int32(_BIAS))
    return cutlass.select_(number, mantissa, x), cutlass.select_(number, exponent, Int32(0))


def _power_of_two(exponent: Int32) -> Float32:
    """2 ** ``exponent``, for the exponent of a normal number."""
    return f32_from_bits((exponent + _BIAS).to(Uint32) << 23)


def scaled(total: Float32, factor: Factor) -> Float32:
    """One sum times its factor. It always multiplies by the shift: two products cost less than a branch where a thread
    has few sums."""
    if factor.shift is None:
        return total * factor.alpha
    half = _power_of_two(factor.shift >> 1)
    return total * half * half * factor.alpha


def apply_shift(values: cute.Tensor, factor: Factor, registers: Sequence[int]) -> None:
    """Multiplies ``registers`` of the sums by 2 ** ``factor.shift``; the loop runs zero times where the shift is 0."""
    if factor.shift is not None:
        _shifted(values, factor.shift, registers)


@cute.jit
def _shifted(values: cute.Tensor, shift: Int32, registers: cutlass.Constexpr[Sequence[int]]):
    half = _power_of_two(shift >> 1)
    for _ in cutlass.range(cutlass.select_(shift == 0, Int32(0), Int32(2)), unroll=1):
        _multiply(values, half, registers)


def _multiply(values: cute.Tensor, by: Float32, registers: Sequence[int]) -> None:
    for i in registers:
        values[i] = values[i] * by

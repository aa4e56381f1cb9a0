"""A block of 16 elements of a 16-bit type under an E4M3 scale: the usual way, cheaper than the definition's steps.

It gives the same bits, or says that it might not; the kernel then goes the exact way (:mod:`.quantize_exact`).

* What depends on a scale alone is looked up in shared memory (:mod:`.quantize_table`).
* Where no instruction converts to E2M1, products y = x · (1 / (global scale · scale)), times 2⁻¹⁴, are cut to binary16,
  in which E2M1's codes are bits 9 to 11, subnormals included; half a unit is added, and that is rounding, except where
  y is exactly a tie, which must go to the even code. y comes from an x of 8 (bf16) or 11 (f16) significant bits: only
  one significand can give a given tie. It is found by multiplying, and tried, for each scale. With scales under
  which only those ties are possible that go down, everything is multiplied by a little less.

4/6, which tries two scales, is in :mod:`.quantize_four_six`.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ....ptx.arithmetic import add_by_fma, mul_rn
from ....ptx.convert import bf16x2_to_f32_by_product
from ....ptx.encode import (
    HALF_UNIT,
    f32_to_e2m1x8,
    f32x2_to_e4m3x2,
    f32x2_to_f16x2_rz,
    pack_e2m1_halves,
    scaled_to_e2m1x8,
)
from ....ptx.memory import load_shared
from ....ptx.move import f32_from_bits, per_lane
from ..config import QuantizeConfig
from .definition import to_f32, wanted_scale
from .reciprocal_table import LEAST_WANTED


def units_of(config: QuantizeConfig, powers: tuple) -> tuple:
    """(1, 2**16, 2**31) from the kernel's argument (1, 2**16): unknown to the compiler.

    The integer pipe has half the lanes of the FMA pipe and more to do, so that sums, shifts and choices are made
    products.
    """
    # from another lane: what the compiler does not know to be uniform it keeps where products can have it; but searches
    # have no register to spare
    one = Uint32(powers[0]) if config.searches else per_lane(Uint32(powers[0]))
    return one, Uint32(powers[1]), one << Uint32(31)


def elements_of(config: QuantizeConfig, words: list[Uint32], units: tuple) -> list[Float32]:
    """A block's elements in fp32."""
    if config.dtype == "bfloat16":
        return [a for word in words for a in bf16x2_to_f32_by_product(word, *units[1:])]
    return to_f32(config, words)


def codes_of(
    config: QuantizeConfig, x: list[Float32], scaled: Callable[[Float32], Float32], one: Uint32
) -> tuple[list[Uint32], list[Float32]]:
    """Codes of ``scaled`` elements: halves where there is no conversion, else words; and the products."""
    y = [scaled(a) for a in x]
    if config.sound_ties:
        cut = [f32x2_to_f16x2_rz(low, high) for low, high in zip(y[0::2], y[1::2])]
        return [add_by_fma(half, HALF_UNIT, one) for half in cut], y
    return [f32_to_e2m1x8(y[i : i + 8]) for i in (0, 8)], y


def pack(config: QuantizeConfig, codes: list[Uint32]) -> list[Uint32]:
    """Two words of what :func:`codes_of` gives."""
    return [pack_e2m1_halves(codes[i : i + 4]) for i in (0, 4)] if config.sound_ties else codes


@cute.jit
def _encode(config: cutlass.Constexpr, x: tuple, reciprocal: Float32, quick: tuple):
    """Two words of codes of x · reciprocal, an entry of the table: exactly if ties are possible."""
    _, _, units, tied = quick
    first, second = Uint32(0), Uint32(0)
    if tied != 0:
        first = Uint32(scaled_to_e2m1x8(x[:8], reciprocal, config.arch))
        second = Uint32(scaled_to_e2m1x8(x[8:], reciprocal, config.arch))
    else:
        first, second = pack(config, codes_of(config, list(x), lambda a: mul_rn(a, reciprocal), units[0])[0])
    return first, second


def usual(config: QuantizeConfig, words: list[Uint32], largest: Float32, factor: tuple, quick: tuple) -> tuple:
    """(scale code, two words of codes, whether those may be wrong) of a block under one scale.

    quick: address of the table; :func:`largest_wanted`; :func:`units_of`; :func:`fill_table`'s result.
    """
    table, limit, units, tied = quick
    x = elements_of(config, words, units)
    wanted = wanted_scale(config, largest, factor[1])
    if config.min_scale:
        wanted = cute.arch.fmax(wanted, Float32(config.min_scale))
    code = Uint32(f32x2_to_e4m3x2(wanted, Float32(0.0)))
    reciprocal = f32_from_bits(load_shared(table + Int32(code << Uint32(2)), 4)[0])
    if not config.sound_ties:
        first, second = codes_of(config, x, lambda a: mul_rn(a, reciprocal), units[0])[0]
        return code, first, second, Int32(0)
    first, second = _encode(config, tuple(x), reciprocal, quick)
    inside = (wanted <= limit) & (wanted >= Float32(LEAST_WANTED)) | (tied != 0)
    return code, first, second, cutlass.select_(inside, Int32(0), Int32(1))

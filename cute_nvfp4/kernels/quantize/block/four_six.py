"""4/6 for a block of 16 elements of a 16-bit type: the usual way, cheaper than the definition's steps.

As in :mod:`.quantize_usual`, what depends on a scale alone is in a table, and products y = x · (1 / (global scale ·
scale)) are cut to binary16 and rounded there. The errors are those of y, in units of scale · global scale:

* d = y − q, q being the element: exact in fp32 (0, or Sterbenz), and a tensor core computes it, four of a lane at a
  time, as q · (−1) + y. For that the −1 are a diagonal matrix, so that the sums of products that a lane gets back
  have one term that is not zero: its own. (q is finite whatever x is: nothing of other lanes' blocks gets in.)
* ``mse`` compares t = scale² · Σ d² of the candidates, ``mae`` t = scale · Σ |d|, ``abs_max`` t = scale · max |d|. How
  far these are from the definition's values is bounded, and 4 and 6 are told apart only where they differ by more.
  The kernel does doubtful blocks again, the exact way.
* ``abs_max`` would often doubt: where scale₄ = 1.5 · scale₆ both may have the same value for the element with the
  largest error. Such elements are left out of the 6's: as they count for the 4, they cannot make it the better one.

The bounds, with u = 2⁻²⁴. y is x / (global scale · scale) times 1 + ε, with ε ≤ 2 u where the reciprocal is refined
and no tie is near, else ε ≤ 8 u (three roundings, and 4 u where it is lowered; a tie that goes the other way counts no
more). The definition rounds (q · scale) · global scale, and the difference. |y| < 7 and |q| ≤ 6, as scales are not
rounded by more than an eighth. So besides a relative ρ ≤ 24 u for sums and products, and in units of the scale,

* one |d| is off by less than 7 ε + 6 u, that is 20 u or 62 u; the sum of 16 by 16 times that;
* the norm √Σ d² is off by less than β = 28 ε + 24 u, that is 80 u or 248 u. With T the larger of t₆ and t₄ their
  difference is off by less than 2 √T (scale₆ β₆ + scale₄ β₄) + 4 ρ T
  ≤ (κ + 4 ρ) T + 2 (scale₆² β₆² + scale₄² β₄²) / κ, with κ = 2⁻¹⁶.

The table has the parts of the bound that belong to a scale. For T stands t₆, which changes the bound by that part of
it only.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ....ptx.arithmetic import abs_f32, add_rn, fma_rn, mul_rn
from ....ptx.convert import e2m1x8_to_f16x2
from ....ptx.encode import CODE_AND_SIGN, f32_to_f16_twice, f32x2_to_e4m3x2, scaled_to_e2m1x8
from ....ptx.half import max_abs_where_different, mul_f16x2
from ....ptx.memory import load_shared
from ....ptx.mma import add_diagonal
from ....ptx.move import f32_from_bits, prmt, take_if_positive
from ..config import QuantizeConfig
from .definition import wanted_scale
from .fast_path import codes_of, elements_of, pack
from .reciprocal_table import ODD, UNIT

# the part of an error that two errors must be apart, besides the margin of the table
_PARTS = {"mse": 3 * 2.0**-17, "mae": 2.0**-18, "abs_max": 2.0**-18}


def _elements(config: QuantizeConfig, codes: list[Uint32]) -> list[Uint32]:
    """The values of codes in f16x2, times ``UNIT`` where there is no conversion."""
    if config.sound_ties:
        return [half & Uint32(CODE_AND_SIGN) for half in codes]
    return [pair for word in codes for pair in e2m1x8_to_f16x2(word, config.arch)]


def _total(config: QuantizeConfig, d: list[Float32]) -> Float32:
    """Σ d² or Σ |d|, in two chains."""
    chains = []
    for first in (0, 1):
        part = d[first::2]
        if config.choice == "mse":
            chain = mul_rn(part[0], part[0])
            for a in part[1:]:
                chain = fma_rn(a, a, chain)
        else:
            chain = add_rn(abs_f32(part[0]), abs_f32(part[1]))
            for a in part[2:]:
                chain = add_rn(chain, abs_f32(a))
        chains.append(chain)
    return add_rn(*chains)


def _largest(d: list[Float32]) -> Float32:
    """max |d|, in two chains."""
    chains = [abs_f32(d[0]), abs_f32(d[1])]
    for i in range(2, len(d)):
        chains[i % 2] = cute.arch.fmax(chains[i % 2], abs_f32(d[i]))
    return cute.arch.fmax(*chains)


def _largest_of_different(d: list[Float32], q: list, ratio: Uint32) -> Float32:
    """max |d| of the elements that are not the same number under both scales; ``ratio``: the scales', in f16x2."""
    chains = [Float32(0.0), Float32(0.0)]
    for i, (six, four) in enumerate(zip(*q)):
        chains = max_abs_where_different(chains, d[2 * i : 2 * i + 2], six, mul_f16x2(four, ratio))
    return cute.arch.fmax(*chains)


def _compare(config: QuantizeConfig, q: list, y: list, entries: list, global_scale: Float32, minus: Uint32) -> tuple:
    """(what is positive if 4 is better, whether that is certain)."""
    six, four = (add_diagonal(pairs, minus, products) for pairs, products in zip(q, y))
    scales = [f32_from_bits(entry[1]) for entry in entries]
    if config.choice == "abs_max":
        undo = mul_rn(global_scale, Float32(1 / UNIT if config.sound_ties else 1.0))
        ratio = mul_rn(mul_rn(f32_from_bits(entries[0][0]), scales[1]), undo)
        six, four = _largest_of_different(six, q, f32_to_f16_twice(ratio)), _largest(four)
    else:
        six, four = _total(config, six), _total(config, four)
    total = mul_rn(six, scales[0])
    difference = fma_rn(four, -scales[1], total)
    bound = fma_rn(total, Float32(_PARTS[config.choice]), f32_from_bits(entries[0][2]))
    bound = add_rn(bound, f32_from_bits(entries[1][2]))
    # false where something is not a number, and where an entry is not to be used
    return difference, abs_f32(difference) > bound


@cute.jit
def _pack_winner(
    config: cutlass.Constexpr, x: tuple, taken: tuple, entries: tuple, take_four: cutlass.Boolean, tied: Int32
):
    """Two words of the codes that were taken; ``entries``: the candidates'; ``tied``: :func:`fill_table`'s result."""
    if cutlass.const_expr(not config.sound_ties):
        first, second = taken
    elif cutlass.const_expr(config.dtype == "float16"):
        first, second = pack(config, list(taken))
        if tied != 0:
            inverse = cutlass.select_(take_four, f32_from_bits(entries[1][0]), f32_from_bits(entries[0][0]))
            inverse = mul_rn(inverse, Float32(1 / UNIT))
            first = Uint32(scaled_to_e2m1x8(x[:8], inverse, config.arch))
            second = Uint32(scaled_to_e2m1x8(x[8:], inverse, config.arch))
            if inverse == Float32(0.0):
                first, second = Uint32(0), Uint32(0)
    else:
        halves = cute.make_rmem_tensor(8, Uint32)
        for i in cutlass.range_constexpr(8):
            halves[i] = taken[i]
        if tied != 0:
            mask = cutlass.select_(take_four, entries[1][3], entries[0][3])
            if tied == 1:
                for i in cutlass.range_constexpr(8):
                    # an odd code, and all ones after it
                    halves[i] = taken[i] + ((taken[i] >> Uint32(9)) & mask)
            else:
                nonzero = (mask >> Uint32(8)) & Uint32(ODD)
                lowest = (mask & Uint32(ODD)) | nonzero
                for i in cutlass.range_constexpr(8):
                    others = (taken[i] >> Uint32(10)) | (taken[i] >> Uint32(11))
                    halves[i] = taken[i] + (((taken[i] >> Uint32(9)) & lowest) | (others & nonzero))
        first, second = pack(config, [halves[i] for i in range(8)])
    return first, second


def four_six(config: QuantizeConfig, words: list[Uint32], largest: Float32, factor: tuple, quick: tuple) -> tuple:
    """(scale code, two words of codes, whether those are certain) of a block; all lanes of a warp do this together.

    quick: what :func:`.quantize_usual.usual` takes, and −1 on a :func:`.diagonal`.
    """
    table, _, units, tied, minus = quick
    x = elements_of(config, words, units)
    wanted = wanted_scale(config, largest, factor[1])
    both = Uint32(f32x2_to_e4m3x2(wanted, mul_rn(wanted, Float32(1.5))))
    places = [both << Uint32(4), both >> Uint32(4)]
    entries = [load_shared(table + Int32(place & Uint32(0xFF0)), 16) for place in places]
    found = []
    for entry in entries:
        inverse = f32_from_bits(entry[0])
        # +0 under a scale of zero, of which the entry is -0, so that all codes are 0; else -0, which changes nothing
        zero = mul_rn(inverse, Float32(-0.0))
        found.append(codes_of(config, x, lambda a, inverse=inverse, zero=zero: fma_rn(a, inverse, zero), units[0]))
    q = [_elements(config, halves) for halves, _ in found]
    difference, certain = _compare(config, q, [y for _, y in found], entries, factor[0], minus)
    taken = tuple(take_if_positive(difference, found[1][0], found[0][0], units[0]))
    take_four = difference > Float32(0.0)
    first, second = _pack_winner(config, tuple(x), taken, tuple(map(tuple, entries)), take_four, tied)
    code = prmt(both, both, cutlass.select_(take_four, Uint32(0x7771), Uint32(0x7770)))
    return code, first, second, certain

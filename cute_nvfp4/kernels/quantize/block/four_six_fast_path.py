"""The fast path of 4/6 for a block of 16 elements of a 16-bit type.

As in :mod:`.fast_path`, a table has what depends on a scale only, and products y = x · (1 / (global scale · scale)) are
truncated to binary16 and rounded there. Errors are those of y, in units of scale · global scale:

* d = y − q, where q is the element, is exact in fp32 (0, or Sterbenz). A tensor core computes it for four elements of a
  lane at a time, as q · (−1) + y. The −1 form a diagonal matrix, so that each sum of products that a lane gets back has
  one nonzero term, its own. (q is finite whatever x is, so that other lanes' blocks add nothing.)
* ``mse`` compares the candidates' t = scale² · Σ d², ``mae`` t = scale · Σ |d|, ``abs_max`` t = scale · max |d|. Their
  distance from the definition's values is bounded, and this path decides only where the candidates differ by more. The
  kernel quantizes undecided blocks again, by the definition.
* ``abs_max`` would often be undecided: where scale₄ = 1.5 · scale₆, both scales may give the same value to the element
  with the largest error. The 6's error leaves such elements out: they count for the 4, and so cannot make it better.

The bounds, with u = 2⁻²⁴. y is x / (global scale · scale) times 1 + ε. ε ≤ 2 u where the reciprocal is refined and no
tie is near, else ε ≤ 8 u (three roundings, and 4 u where the reciprocal is lowered; a tie that goes the other way adds
nothing). The definition rounds (q · scale) · global scale, and the difference. |q| ≤ 6. |y| < 7, since scales are
rounded by at most an eighth, and the largest scale is not used if more than 464 is wanted for the 6 (the 4, which wants
1.5 times that, is clipped, but its scale still is the 6's or a larger one). With a relative ρ ≤ 24 u for sums and
products, in units of the scale,

* one |d| is off by less than 7 ε + 6 u, that is 20 u or 62 u; the sum of 16 by 16 times that;
* the norm √Σ d² is off by less than β = 28 ε + 24 u, that is 80 u or 248 u. With T the larger of t₆ and t₄, their
  difference is off by less than 2 √T (scale₆ β₆ + scale₄ β₄) + 4 ρ T
  ≤ (κ + 4 ρ) T + 2 (scale₆² β₆² + scale₄² β₄²) / κ, with κ = 2⁻¹⁶.

The table has those parts of the bound that belong to a scale. t₆ stands for T, which changes the bound by no more than
its own part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....ptx.arithmetic import abs_f32, add_rn, fma_rn, mul_rn
from ....ptx.convert import e2m1x8_to_f16x2
from ....ptx.encode import CODE_AND_SIGN, f32_to_f16_twice, f32x2_to_e4m3x2, scaled_to_e2m1x8
from ....ptx.half import fma_f16x2, max_abs_where_different, mul_f16x2
from ....ptx.mma import add_diagonal
from ....ptx.move import prmt, take_if_positive
from ..config import QuantizeConfig
from .definition import largest_magnitude, wanted_scale
from .fast_path import elements, encode_scaled, pack
from .records import BlockContext, BlockResult, GlobalFactor
from .scale_table import FOURS, LARGEST_WANTED, RAISING, UNIT, TableEntry, load_entry

# the part of an error by which two errors must differ, besides the margins in the table
_PARTS = {"mse": 3 * 2.0**-17, "mae": 2.0**-18, "abs_max": 2.0**-18}


@dataclass(frozen=True)
class Candidate:
    """A block under one of the two scales: its table entry, the codes and products of :func:`encode_scaled`, and the
    codes' values in f16x2, times ``UNIT`` where no instruction converts to E2M1."""

    entry: TableEntry
    codes: list[Uint32]
    products: list[Float32]
    elements: list[Uint32]


def _elements(config: QuantizeConfig, codes: list[Uint32]) -> list[Uint32]:
    """The values of ``codes`` in f16x2, times ``UNIT`` where no instruction converts to E2M1."""
    if config.rounds_in_f16:
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


def _largest_of_different(d: list[Float32], six: list[Uint32], four: list[Uint32], ratio: Uint32) -> Float32:
    """max |d| of the elements whose values differ under the two scales. ratio: of the scales, in f16x2."""
    chains = [Float32(0.0), Float32(0.0)]
    for i, (a, b) in enumerate(zip(six, four)):
        chains = max_abs_where_different(chains, d[2 * i : 2 * i + 2], a, mul_f16x2(b, ratio))
    return cute.arch.fmax(*chains)


def _compare(
    config: QuantizeConfig,
    six: Candidate,
    four: Candidate,
    wanted: Float32,
    factor: GlobalFactor,
    minus_one: Uint32,
) -> tuple[Float32, Boolean]:
    """(a value that is positive if 4 is better, whether that is certain). wanted: the 6's scale before rounding."""
    six_d, four_d = (add_diagonal(c.elements, minus_one, c.products) for c in (six, four))
    if config.choice == "abs_max":
        undo = mul_rn(factor.value, Float32(1 / UNIT if config.rounds_in_f16 else 1.0))
        ratio = mul_rn(mul_rn(six.entry.reciprocal, four.entry.weight), undo)
        six_error = _largest_of_different(six_d, six.elements, four.elements, f32_to_f16_twice(ratio))
        four_error = _largest(four_d)
    else:
        six_error, four_error = _total(config, six_d), _total(config, four_d)
    total = mul_rn(six_error, six.entry.weight)
    difference = fma_rn(four_error, -four.entry.weight, total)
    bound = fma_rn(total, Float32(_PARTS[config.choice]), six.entry.margin)
    bound = add_rn(bound, four.entry.margin)
    # uncertain where something is NaN, where an entry must not be used, and where products may be too large
    return difference, (abs_f32(difference) > bound) & (wanted <= Float32(LARGEST_WANTED))


@cute.jit
def _pack_winner(
    config: cutlass.Constexpr,
    x: tuple[Float32, ...],
    codes: tuple[Uint32, ...],
    six: TableEntry,
    four: TableEntry,
    take_four: Boolean,
    ties: Int32,
):
    """Two words of the winner's ``codes``. six, four: the candidates' entries; ties: as in :class:`ScaleTable`."""
    if cutlass.const_expr(not config.rounds_in_f16):
        first, second = codes
    elif cutlass.const_expr(config.dtype == "float16"):
        first, second = pack(config, codes)
        if ties != 0:
            inverse = cutlass.select_(take_four, four.reciprocal, six.reciprocal)
            inverse = mul_rn(inverse, Float32(1 / UNIT))
            first = Uint32(scaled_to_e2m1x8(x[:8], inverse, config.arch))
            second = Uint32(scaled_to_e2m1x8(x[8:], inverse, config.arch))
            if inverse == Float32(0.0):
                first, second = Uint32(0), Uint32(0)
    else:
        # (8): f16x2, two elements each
        halves = cute.make_rmem_tensor(8, Uint32)
        for i in cutlass.range_constexpr(8):
            halves[i] = codes[i]
        if ties != 0:
            mask = cutlass.select_(take_four, four.raised, six.raised)
            for i in cutlass.range_constexpr(8):
                halves[i] = fma_f16x2(codes[i] & mask, Uint32(RAISING), codes[i])
        first, second = pack(config, [halves[i] for i in range(8)])
    return first, second


def _candidate(config: QuantizeConfig, x: list[Float32], entry: TableEntry, one: Uint32) -> Candidate:
    """The candidate for the elements ``x`` under the scale of ``entry``."""
    # +0 under a scale of zero, whose entry is -0, so that all codes are 0; else -0, which changes nothing
    zero = mul_rn(entry.reciprocal, Float32(-0.0))
    encoded = encode_scaled(config, x, lambda a: fma_rn(a, entry.reciprocal, zero), one)
    return Candidate(entry, encoded.codes, encoded.products, _elements(config, encoded.codes))


def four_six(config: QuantizeConfig, words: Sequence[Uint32], context: BlockContext) -> BlockResult:
    """Quantizes a block by 4/6, undecided where anything is not finite. All lanes of a warp call it together."""
    factor, one = context.factor, context.constants.one
    largest = largest_magnitude(config, words)
    x = elements(config, words, context.constants)
    wanted = wanted_scale(config, largest, factor)
    both = Uint32(f32x2_to_e4m3x2(wanted, mul_rn(wanted, Float32(1.5))))
    # byte offsets of 16-byte entries
    offsets = [(both << Uint32(4)) & Uint32(0xFF0), (both >> Uint32(4)) & Uint32(0xFF0)]
    tables = [context.table.address, context.table.address + FOURS]
    entries = [load_entry(table + Int32(offset)) for table, offset in zip(tables, offsets)]
    six, four = (_candidate(config, x, entry, one) for entry in entries)
    difference, decided = _compare(config, six, four, wanted, factor, context.minus_one)
    codes = tuple(take_if_positive(difference, four.codes, six.codes, one))
    take_four = difference > Float32(0.0)
    packed = _pack_winner(config, tuple(x), codes, six.entry, four.entry, take_four, context.table.ties)
    code = prmt(both, both, cutlass.select_(take_four, Uint32(0x7771), Uint32(0x7770)))
    return BlockResult(code, packed, decided)

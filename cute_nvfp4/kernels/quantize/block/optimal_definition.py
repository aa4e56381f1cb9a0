"""The search for a block's best E4M3 scale, scale by scale, as ``cute_nvfp4.quantization.search`` defines it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....ptx.arithmetic import abs_f32, fma_rn, mul_rn, sub_rn
from ....ptx.encode import f32x2_to_e4m3x2
from ....ptx.move import f32_bits, f32_from_bits
from ....ptx.warp import max_lanes
from ..config import WARP, QuantizeConfig
from .definition import candidate_scales, encode_elements, to_f32, try_candidate, wanted_scale
from .records import Draw, GlobalFactor
from .scale_table import scale_value

LARGEST_CODE = 0x7E
# relative margins of errors and of scales, as in ``quantization.search``: wider margins cost time, and change no bits
ERROR_MARGIN, _SCALE_MARGIN = 1 + 2.0**-10, 2.0**-10
_NONE = 0xFFFFFFFF
# blocks of a warp up to which it takes one after the other; above, each lane takes its own
_FEW = 8


class _Error(NamedTuple):
    """A block's error, and the part of it from elements that are 0 under this scale and all larger ones."""

    total: Float32
    lost: Float32


def _nearest(config: QuantizeConfig) -> QuantizeConfig:
    """``config`` with rounding to nearest: the search compares errors so, whatever rounds the winner's elements."""
    return replace(config, stochastic=False)


def _evaluate(config: QuantizeConfig, x: Sequence[Float32], code: Uint32, factor: GlobalFactor) -> _Error:
    """The error under a scale, by the definition."""
    value = scale_value(code)
    _, error = try_candidate(_nearest(config), x, value, factor)
    quarter = mul_rn(mul_rn(factor.value, value), Float32((1 - _SCALE_MARGIN) / 4))
    lost = Float32(0.0)
    for a in x:
        scaled = mul_rn(a, factor.shift)
        lost = fma_rn(scaled, cutlass.select_(abs_f32(a) < quarter, scaled, Float32(0.0)), lost)
    return _Error(error, lost)


@cute.jit
def search_by_lanes(
    config: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    largest: Float32,
    factor: GlobalFactor,
    first: Int32,
    last: Int32,
) -> Uint32:
    """The code of the best scale, by the definition: of the formula's scale, and the candidates ``first`` … ``last``.

    Below a certain first candidate the largest element is clipped so much that its error alone exceeds the formula's.
    After a certain last one, the elements that become zero have more than the best error, or all elements are zero. All
    lanes of a warp call it together.
    """
    x = to_f32(config, words)
    best, least, code = _start(config, x, largest, factor, first)
    last = cutlass.select_(least > Float32(0.0), last, Int32(-1))
    while cute.arch.vote_any_sync(code <= last):
        candidate = Uint32(cutlass.min(code, LARGEST_CODE))
        error, lost = _evaluate(config, x, candidate, factor)
        better = (error < least) & (code <= last)
        least = cutlass.select_(better, error, least)
        best = Uint32(cutlass.select_(better, candidate, best))
        over = _no_larger_one(candidate, lost, least, largest, factor)
        last = cutlass.select_(over, Int32(-1), last)
        code = code + 1
    return best


@cute.jit
def _search_by_warp(
    config: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    largest: Float32,
    factor: GlobalFactor,
    wanted: Boolean,
) -> Uint32:
    """Searches the lanes' ``wanted`` blocks one after the other, by the whole warp, with one scale in each lane.

    One block takes a tenth of the time of one lane, for which all others may wait at the end of a kernel.
    """
    lane = cute.arch.lane_idx()
    found = Uint32(0)
    left = Uint32(cute.arch.vote_ballot_sync(wanted))
    while left != Uint32(0):
        owner = lowest_bit(left)
        x = to_f32(config, tuple(cute.arch.shuffle_sync(word, owner) for word in words))
        block_largest = cute.arch.shuffle_sync(largest, owner)
        best, least, code = _start(config, x, block_largest, factor, Int32(0))
        code = cutlass.select_(least > Float32(0.0), code, Int32(LARGEST_CODE + 1))
        while code <= LARGEST_CODE:
            candidate = Uint32(cutlass.min(code + lane, LARGEST_CODE))
            error, lost = _evaluate(config, x, candidate, factor)
            bits = Uint32(cutlass.select_(error < least, f32_bits(error), Uint32(_NONE)))
            smallest = ~Uint32(max_lanes(~bits))
            # of equal errors the smallest scale's wins; candidates past the last repeat the last
            better = Uint32(cute.arch.vote_ballot_sync((bits == smallest) & (smallest != Uint32(_NONE))))
            any_better = better != Uint32(0)
            winner = cutlass.min(code + lowest_bit(better), LARGEST_CODE)
            best = Uint32(cutlass.select_(any_better, Uint32(winner), best))
            least = cutlass.select_(any_better, f32_from_bits(smallest), least)
            over = cute.arch.vote_any_sync(_no_larger_one(candidate, lost, least, block_largest, factor))
            code = cutlass.select_(over, Int32(LARGEST_CODE + 1), code + WARP)
        found = Uint32(cutlass.select_(lane == owner, best, found))
        left = left & (left - Uint32(1))
    return found


@cute.jit
def search(
    config: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    largest: Float32,
    factor: GlobalFactor,
    wanted: Boolean,
) -> Uint32:
    """The codes of the best scales of the lanes' ``wanted`` blocks, by the faster way. All lanes call it together."""
    best = Uint32(0)
    if cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(wanted))) <= _FEW:
        best = _search_by_warp(config, words, largest, factor, wanted)
    else:
        last = cutlass.select_(wanted, Int32(LARGEST_CODE), Int32(-1))
        best = search_by_lanes(config, words, largest, factor, Int32(0), last)
    return best


def _start(
    config: QuantizeConfig, x: Sequence[Float32], largest: Float32, factor: GlobalFactor, first: Int32
) -> tuple[Uint32, Float32, Int32]:
    """The formula's scale, its error, and the code of the first scale that may be better, at least ``first``."""
    best = Uint32(candidate_scales(_nearest(config), wanted_scale(config, largest, factor)).codes[0])
    least = _evaluate(config, x, best, factor).total
    reach = sub_rn(mul_rn(largest, factor.shift), mul_rn(cute.math.sqrt(least), Float32(ERROR_MARGIN)))
    lowest = cute.arch.fmax(mul_rn(reach, Float32((1 - _SCALE_MARGIN) / 6)), Float32(0.0)) / factor.significand
    # one less, because the nearest code may be above the bound
    code = Int32(Uint32(f32x2_to_e4m3x2(lowest, Float32(0.0))))
    return best, least, cutlass.max(code - 1, first)


def _no_larger_one(candidate: Uint32, lost: Float32, least: Float32, largest: Float32, factor: GlobalFactor) -> Boolean:
    """Whether no scale above ``candidate`` is better: the elements that it zeroes have more error, or all are zero."""
    nothing = mul_rn(largest, Float32(5.0)) < mul_rn(factor.value, scale_value(candidate))
    return (lost > mul_rn(least, Float32(ERROR_MARGIN))) | nothing


def lowest_bit(mask: Uint32) -> Int32:
    """The index of the lowest bit that is set; 32 if none is."""
    return Int32(cute.arch.popc((mask & (~mask + Uint32(1))) - Uint32(1)))


def encode(
    config: QuantizeConfig, words: Sequence[Uint32], code: Uint32, factor: GlobalFactor, draw: Draw
) -> tuple[Uint32, Uint32]:
    """Two words of codes under the scale ``code``."""
    first, second = encode_elements(config, to_f32(config, words), scale_value(code), factor, draw)
    return Uint32(first), Uint32(second)

"""One undecided block of 4/6, quantized by the definition by a whole warp: each lane has one element and one scale.

Few blocks are undecided, and the last of them makes all others wait at the end of a kernel; a warp takes a fraction of
the time of one lane. Lanes 0 to 15 try the 6's scale, the others the 4's. Steps and orders are those of
:mod:`.definition`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ....ptx.arithmetic import abs_f32, add_rn, mul_rn, rcp_rn, sub_rn
from ....ptx.convert import bf16x2_to_f32, e2m1x8_to_f16x2, f16x2_to_f32
from ....ptx.encode import f32_to_e2m1_by_ramps
from ....ptx.memory import load_global
from ....ptx.move import f32_bits, f32_from_bits
from ....ptx.warp import max_lanes
from ...arith import div, mod
from ..config import ELEMENTS, QuantizeConfig
from .definition import candidate_scales, wanted_scale
from .quantize_block import NAN_E4M3
from .records import BlockResult, GlobalFactor

_INFINITY_BITS = 0x7F800000


def _error(config: QuantizeConfig, d: Float32, lane: Int32) -> Float32:
    """The error of a block under the scale that the lane tries. d: the lane's residual."""
    if config.choice == "abs_max":
        largest = abs_f32(d)
        for distance in (8, 4, 2, 1):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=distance))
        return largest
    term = abs_f32(d) if config.choice == "mae" else mul_rn(d, d)
    term = add_rn(term, cute.arch.shuffle_sync_bfly(term, offset=8))
    first = lane & 16
    total = cute.arch.shuffle_sync(term, first)
    for i in range(1, 8):
        total = add_rn(total, cute.arch.shuffle_sync(term, first + i))
    return total


def by_whole_warp(config: QuantizeConfig, address: Int64, lane: Int32, factor: GlobalFactor) -> BlockResult:
    """The quantized block at ``address``, in every lane."""
    place = mod(lane, 16)
    word = load_global(address + Int64(div(place, 2) * 4), 4)[0]
    low, high = bf16x2_to_f32(word) if config.dtype == "bfloat16" else f16x2_to_f32(word)
    x = cutlass.select_(mod(lane, 2) == 0, low, high)
    bits = Uint32(max_lanes(f32_bits(abs_f32(x))))
    codes, values = candidate_scales(config, wanted_scale(config, f32_from_bits(bits), factor))
    value = cutlass.select_(lane < 16, values[0], values[1])
    y = mul_rn(x, rcp_rn(mul_rn(factor.value, value)))
    code = cutlass.select_(value == Float32(0.0), Uint32(0), f32_to_e2m1_by_ramps(y))
    q = f16x2_to_f32(e2m1x8_to_f16x2(code, config.arch)[0])[0]
    residual = sub_rn(mul_rn(mul_rn(q, value), factor.significand), mul_rn(x, factor.shift))
    own = _error(config, residual, lane)
    other = cute.arch.shuffle_sync_bfly(own, offset=16)
    take_four = cutlass.select_(lane < 16, other, own) < cutlass.select_(lane < 16, own, other)
    word = code << Uint32(4 * mod(lane, 8))
    for distance in (1, 2, 4):
        word = word | cute.arch.shuffle_sync_bfly(word, offset=distance)
    winner = cutlass.select_(take_four, Int32(16), Int32(0))
    words = [cute.arch.shuffle_sync(word, winner + first) for first in (0, 8)]
    scale = Uint32(cutlass.select_(take_four, codes[1], codes[0]))
    valid = (bits < Uint32(_INFINITY_BITS)) & (factor.valid != 0)
    nan_word = Uint32(ELEMENTS[config.element].nan_word)
    words = tuple(cutlass.select_(valid, word, nan_word) for word in words)
    return BlockResult(cutlass.select_(valid, scale, Uint32(NAN_E4M3)), words, Boolean(True))

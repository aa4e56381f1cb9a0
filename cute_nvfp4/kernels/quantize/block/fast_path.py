"""The fast path for a block of 16 elements of a 16-bit type under one E4M3 scale.

It gives the definition's bits with fewer instructions, or says that the block is undecided; the kernel then takes the
slow path (:mod:`.definition`).

* A table in shared memory has what depends on a scale only (:mod:`.scale_table`).
* Where no instruction converts to E2M1, products y = x · (1 / (global scale · scale)), times 2⁻¹⁴, are truncated to
  binary16, in which bits 9 to 11 are E2M1's codes, subnormals included. Adding half a unit rounds them, except where y
  is exactly a tie, which must go to the even code. Since x has 8 (bf16) or 11 (f16) significant bits, only one
  significand can give a certain tie; for each scale the table's code computes it and tries it. Under scales that only
  have ties that go down, the table's reciprocal is a little smaller.

:mod:`.four_six_fast_path` is 4/6's, which tries two scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

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
from ..arguments import Powers
from ..config import QuantizeConfig
from .definition import to_f32, wanted_scale
from .records import BlockContext, BlockResult, HiddenConstants
from .scale_table import LEAST_WANTED


class Encoded(NamedTuple):
    """Scaled elements and their codes: either f16x2 that contain the codes, or words of codes."""

    codes: list[Uint32]
    products: list[Float32]


def hidden_constants(config: QuantizeConfig, powers: Powers) -> HiddenConstants:
    """1, 2**16 and 2**31, from the kernel's argument."""
    # The compiler keeps a value that it does not know to be uniform where products can have it, so 1 comes from another
    # lane; but searches have no register to spare.
    one = Uint32(powers.one) if config.tries_all_scales else per_lane(Uint32(powers.one))
    return HiddenConstants(one, Uint32(powers.two_to_16), one << Uint32(31))


def elements(config: QuantizeConfig, words: Sequence[Uint32], constants: HiddenConstants) -> list[Float32]:
    """The elements of a block in fp32."""
    if config.dtype == "bfloat16":
        pairs = (bf16x2_to_f32_by_product(word, constants.two_to_16, constants.sign) for word in words)
        return [a for pair in pairs for a in pair]
    return to_f32(config, words)


def cut_to_f16(y: Sequence[Float32]) -> list[Uint32]:
    """``y`` in f16x2, truncated."""
    return [f32x2_to_f16x2_rz(low, high) for low, high in zip(y[0::2], y[1::2])]


def encode_scaled(
    config: QuantizeConfig, x: Sequence[Float32], scale: Callable[[Float32], Float32], one: Uint32
) -> Encoded:
    """The codes of ``scale(x)``: in f16x2 where no instruction converts to E2M1, else in words."""
    y = [scale(a) for a in x]
    if config.rounds_in_f16:
        return Encoded([add_by_fma(half, HALF_UNIT, one) for half in cut_to_f16(y)], y)
    return Encoded([f32_to_e2m1x8(y[i : i + 8]) for i in (0, 8)], y)


def pack(config: QuantizeConfig, codes: Sequence[Uint32]) -> list[Uint32]:
    """Two words of codes, from :func:`encode_scaled`'s."""
    return [pack_e2m1_halves(codes[i : i + 4]) for i in (0, 4)] if config.rounds_in_f16 else list(codes)


@cute.jit
def _encode(config: cutlass.Constexpr, x: tuple[Float32, ...], reciprocal: Float32, context: BlockContext):
    """Two words of codes of x · reciprocal (an entry of the table), by the definition if ties are possible."""
    first, second = Uint32(0), Uint32(0)
    if context.table.ties != 0:
        first = Uint32(scaled_to_e2m1x8(x[:8], reciprocal, config.arch))
        second = Uint32(scaled_to_e2m1x8(x[8:], reciprocal, config.arch))
    else:
        encoded = encode_scaled(config, x, lambda a: mul_rn(a, reciprocal), context.constants.one)
        first, second = pack(config, encoded.codes)
    return first, second


def one_scale(config: QuantizeConfig, words: Sequence[Uint32], largest: Float32, context: BlockContext) -> BlockResult:
    """Quantizes a block under the one scale of its rule."""
    table = context.table
    x = elements(config, words, context.constants)
    wanted = wanted_scale(config, largest, context.factor)
    if config.min_scale:
        wanted = cute.arch.fmax(wanted, Float32(config.min_scale))
    code = Uint32(f32x2_to_e4m3x2(wanted, Float32(0.0)))
    reciprocal = f32_from_bits(load_shared(table.address + Int32(code << Uint32(2)), 4)[0])
    if config.rounds_in_f16:
        found = _encode(config, tuple(x), reciprocal, context)
        decided = (wanted <= table.limit) & (wanted >= Float32(LEAST_WANTED)) | (table.ties != 0)
    else:
        found = encode_scaled(config, x, lambda a: mul_rn(a, reciprocal), context.constants.one).codes
        decided = Boolean(True)
    # a product with zero keeps its sign; under a scale of zero all codes are zero
    words = tuple(Uint32(cutlass.select_(code == Uint32(0), Uint32(0), word)) for word in found)
    return BlockResult(code, words, decided)

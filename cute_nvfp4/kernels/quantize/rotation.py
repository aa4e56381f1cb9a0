"""The rotation of ``cute_nvfp4.quantization.hadamard`` in the registers of one thread."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Uint32

from ...ptx.arithmetic import add_rn, mul_rn, sub_rn
from ...ptx.move import f32_bits
from .block.definition import to_f32
from .config import QuantizeConfig


def rotated_words(config: QuantizeConfig, words: Sequence[Uint32], signs: Uint32 | None) -> Sequence[Uint32]:
    """The fp32 bits of the elements in ``words``, rotated in groups of ``config.hadamard``; ``words`` itself for 0.

    signs: bit i is set where element i of a group is multiplied by −1. The order is: signs, additions at distance 1, 2,
    4, …, one product. The result has the dtype of ``config.after_rotation``.
    """
    size = config.hadamard
    if not size:
        return words
    x = to_f32(config, _with_signs(config, words, signs))
    result = []
    for first in range(0, len(x), size):
        result += _butterflies(x[first : first + size])
    return [f32_bits(value) for value in result]


def _with_signs(config: QuantizeConfig, words: Sequence[Uint32], signs: Uint32) -> list[Uint32]:
    """``words`` with changed signs: one operation for each word, with masks that are the same for all blocks."""
    if config.item_bytes == 4:
        masks = [_bit(signs, i, 31) for i in range(config.hadamard)]
    else:
        masks = [_bit(signs, i, 15) | _bit(signs, i + 1, 31) for i in range(0, config.hadamard, 2)]
    return [word ^ masks[i % len(masks)] for i, word in enumerate(words)]


def _bit(signs: Uint32, i: int, place: int) -> Uint32:
    """Bit ``i`` of ``signs``, moved to bit ``place`` of a word of zeros."""
    moved = signs << Uint32(place - i) if place >= i else signs >> Uint32(i - place)
    return moved & Uint32(1 << place)


def _butterflies(x: Sequence[Float32]) -> list[Float32]:
    """x · H / √n."""
    distance = 1
    while distance < len(x):
        x = [
            sub_rn(x[i - distance], value) if i & distance else add_rn(value, x[i + distance])
            for i, value in enumerate(x)
        ]
        distance *= 2
    return [mul_rn(value, Float32(len(x) ** -0.5)) for value in x]

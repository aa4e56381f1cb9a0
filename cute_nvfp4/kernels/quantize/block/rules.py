"""The scale and the codes of one block in the registers of one thread: the usual way, or the exact one."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ..config import ELEMENTS, QuantizeConfig
from ..rotation import rotated_words
from .definition import exact, largest_magnitude
from .fast_path import usual
from .four_six import four_six
from .four_six_bounds import compares, four_over_six
from .mx import NAN_UE8M0, mx_block
from .optimal import optimal

NAN_E4M3 = 0x7F
_INFINITY = float("inf")


def quantize_block(
    config: QuantizeConfig, words: tuple, factor: tuple, quick: tuple, valid: Int32, random: tuple, index: Int64
) -> tuple:
    """(scale code, words of codes) of a block.

    words: its elements as they lie in memory. factor: (global scale, 1 / global scale, global scale · shift, shift).
    quick: what :func:`usual` takes. valid: whether the global scale is a valid one. random: the seed's halves, which
    :func:`stochastic` takes with ``index``, that of the block's first element; and the signs of the rotation.
    """
    if config.hadamard:
        words, config = tuple(rotated_words(config, words, Uint32(random[2]))), config.of_rotated
    return encode_block(config, words, largest_magnitude(config, words), factor, quick, valid, random[:2], index)


@cute.jit
def encode_block(
    config: cutlass.Constexpr,
    words: tuple,
    largest: Float32,
    factor: tuple,
    quick: tuple,
    valid: Int32,
    seed: tuple,
    index: Int64,
):
    """As :func:`quantize_block`, of elements that are not to be rotated, and of which ``largest`` is the magnitude."""
    sound = (largest < Float32(_INFINITY)) & (valid != 0)
    nan_scale = NAN_E4M3
    if cutlass.const_expr(config.scale == "ue8m0"):
        nan_scale = NAN_UE8M0
        code, codes = mx_block(config, words, largest, seed, index)
    elif cutlass.const_expr(config.searches):
        code, first, second = optimal(config, words, largest, factor, quick, seed, index, sound)
        codes = [first, second]
    elif cutlass.const_expr(not config.has_usual_way and compares(config)):
        code, first, second, doubtful = four_over_six(config, words, largest, factor)
        if sound & (largest > Float32(0.0)) & (doubtful != 0):
            code, first, second = exact(config, words, largest, factor, seed, index)
        codes = [first, second]
    elif cutlass.const_expr(not config.has_usual_way):
        code, first, second = exact(config, words, largest, factor, seed, index)
        codes = [first, second]
    else:
        code, first, second, doubtful = usual(config, words, largest, factor, quick)
        # a product with zero keeps its sign, but under a scale of zero all codes are zero
        nothing = code == Uint32(0)
        first = Uint32(cutlass.select_(nothing, Uint32(0), first))
        second = Uint32(cutlass.select_(nothing, Uint32(0), second))
        # zeros need no second look
        again = sound & (largest > Float32(0.0))
        if again & (doubtful != 0):
            code, first, second = exact(config, words, largest, factor, seed, index)
        codes = [first, second]
    code = cutlass.select_(sound, code, Uint32(nan_scale))
    nan_word = Uint32(ELEMENTS[config.element].nan_word)
    return code, tuple(cutlass.select_(sound, word, nan_word) for word in codes)


def quantize_unless_doubtful(config: QuantizeConfig, words: tuple, factor: tuple, quick: tuple) -> tuple:
    """As :func:`quantize_block` of a variant that defers, and whether the result is certain.

    It is not where anything is not a number. All lanes of a warp do this together.
    """
    code, first, second, certain = four_six(config, words, largest_magnitude(config, words), factor, quick)
    return code, (first, second), certain

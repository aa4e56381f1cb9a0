"""The scale and the codes of one block, in the registers of one thread, by the fast or the slow path."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64, Uint32

from ..config import ELEMENTS, QuantizeConfig
from ..rotation import rotated_words
from .definition import by_definition, largest_magnitude
from .fast_path import one_scale
from .four_six_by_sums import by_sums, decides_by_sums
from .mx import NAN_UE8M0, mx_block
from .optimal import optimal
from .optimal_definition import encode, search
from .records import BlockContext, BlockResult

NAN_E4M3 = 0x7F
_INFINITY = float("inf")


def quantize_block(
    config: QuantizeConfig, words: Sequence[Uint32], context: BlockContext, index: Int64 | None = None
) -> tuple[Uint32, tuple[Uint32, ...]]:
    """(scale code, words of codes) of a block.

    words: its elements as they lie in memory. index: of its first element in the result, for stochastic rounding.
    """
    words, config = rotated_words(config, words, context.signs), config.after_rotation
    return encode_block(config, tuple(words), largest_magnitude(config, words), context, index)


def estimated_block(config: QuantizeConfig, words: Sequence[Uint32], context: BlockContext) -> BlockResult:
    """A block by ``optimal`` with its error table; :func:`searched_block` quantizes those that stay undecided."""
    largest = largest_magnitude(config, words)
    valid = (largest < Float32(_INFINITY)) & (context.factor.valid != 0)
    code, codes, undecided = optimal(config, tuple(words), largest, context, None, valid)
    code = cutlass.select_(valid, code, Uint32(NAN_E4M3))
    nan_word = Uint32(ELEMENTS[config.element].nan_word)
    return BlockResult(code, tuple(cutlass.select_(valid, word, nan_word) for word in codes), ~undecided)


def searched_block(
    config: QuantizeConfig, words: Sequence[Uint32], context: BlockContext, wanted: Boolean
) -> BlockResult:
    """A block by the definition of ``optimal``, where ``wanted``. All lanes of a warp call it together."""
    words, factor = tuple(words), context.factor
    code = search(config, words, largest_magnitude(config, words), factor, wanted)
    return BlockResult(code, encode(config, words, code, factor, None), Boolean(True))


@cute.jit
def encode_block(
    config: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    largest: Float32,
    context: BlockContext,
    index: Int64 | None,
):
    """Quantizes a block whose elements need no rotation any more. largest: their largest magnitude."""
    valid = (largest < Float32(_INFINITY)) & (context.factor.valid != 0)
    nan_scale = NAN_E4M3
    if cutlass.const_expr(config.scale == "ue8m0"):
        nan_scale = NAN_UE8M0
        code, codes = mx_block(config, words, largest, context.seed, index)
    elif cutlass.const_expr(config.tries_all_scales):
        code, codes, _ = optimal(config, words, largest, context, index, valid)
    else:
        if cutlass.const_expr(config.has_fast_path):
            found = one_scale(config, words, largest, context)
        elif cutlass.const_expr(decides_by_sums(config)):
            found = by_sums(config, words, largest, context.factor)
        else:
            found = by_definition(config, words, largest, context, index)
        if cutlass.const_expr(config.has_fast_path or decides_by_sums(config)):
            # zeros need no second try
            nonzero = valid & (largest > Float32(0.0))
            if nonzero & ~found.decided:
                found = by_definition(config, words, largest, context, index)
        code, codes = found.code, found.words
    code = cutlass.select_(valid, code, Uint32(nan_scale))
    nan_word = Uint32(ELEMENTS[config.element].nan_word)
    return code, tuple(cutlass.select_(valid, word, nan_word) for word in codes)

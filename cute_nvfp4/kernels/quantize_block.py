"""The scale and the codes of one block in the registers of one thread: the usual way, or the exact one."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from ..ptx.convert import e4m3x2_to_f16x2, f16x2_to_f32
from .quantize_config import ELEMENTS
from .quantize_exact import encode_exactly, exact, largest_magnitude
from .quantize_mx import NAN_UE8M0, mx_block
from .quantize_optimal import optimal
from .quantize_usual import usual

NAN_E4M3 = 0x7F
_INFINITY = float("inf")


@cute.jit
def quantize_block(
    config: cutlass.Constexpr, words: tuple, factor: tuple, quick: tuple, valid: Int32, seed: tuple, index: Int64
):
    """(scale code, words of codes) of a block.

    words: its elements as they lie in memory. factor: (global scale, 1 / global scale, global scale · shift, shift).
    quick: what :func:`usual` takes. valid: whether the global scale is a valid one. seed, index: what
    :func:`stochastic` takes, ``index`` being that of the block's first element.
    """
    largest = largest_magnitude(config, words)
    sound = (largest < Float32(_INFINITY)) & (valid != 0)
    nan_scale = NAN_E4M3
    if cutlass.const_expr(config.scale == "ue8m0"):
        nan_scale = NAN_UE8M0
        code, codes = mx_block(config, words, largest, seed, index)
    elif cutlass.const_expr(config.searches):
        code, first, second = optimal(config, words, largest, factor, quick, seed, index, sound)
        codes = [first, second]
    elif cutlass.const_expr(not config.has_usual_way):
        code, first, second = exact(config, words, largest, factor, seed, index)
        codes = [first, second]
    else:
        code, first, second, doubtful, tied = usual(config, words, largest, factor, quick)
        # a product with zero keeps its sign, but under a scale of zero all codes are zero
        nothing = code == Uint32(0)
        first = Uint32(cutlass.select_(nothing, Uint32(0), first))
        second = Uint32(cutlass.select_(nothing, Uint32(0), second))
        # zeros need no second look
        again = sound & (largest > Float32(0.0))
        if again & (doubtful != 0):
            code, first, second = exact(config, words, largest, factor, seed, index)
        elif cutlass.const_expr(config.encodes_winner):
            # errors are the same whichever way a tie goes: only the codes that were taken are rounded again
            if again & (tied != 0):
                value = f16x2_to_f32(e4m3x2_to_f16x2(Uint16(code)))[0]
                first, second = encode_exactly(config, words, value, factor)
        codes = [first, second]
    code = cutlass.select_(sound, code, Uint32(nan_scale))
    nan_word = Uint32(ELEMENTS[config.element].nan_word)
    return code, tuple(cutlass.select_(sound, word, nan_word) for word in codes)

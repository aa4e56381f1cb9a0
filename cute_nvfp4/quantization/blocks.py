"""Chooses the scale and the codes of every block: the core of all rules. Blocks are element-major (``rounding``).

Everything is float32, and every step is written out, because other implementations of this library compute the same
bits: division and multiplication in the order given, sums in the order of ``ordered_sum``, no fused multiply-add.
``divide``, ``reciprocal`` and ``rounded`` hold compiled code to that.
"""

from __future__ import annotations

import torch

from cute_nvfp4 import formats
from cute_nvfp4.formats import LARGEST_GLOBAL_SCALE, SMALLEST_GLOBAL_SCALE
from cute_nvfp4.quantization.block_request import Request, ordered_sum, residual
from cute_nvfp4.quantization.mx import mx_scale_codes, power_of_two
from cute_nvfp4.quantization.rounding import (
    _BIAS,
    NAN_CODES,
    divide,
    encode,
    encode_stochastic,
    reciprocal,
    rounded,
)
from cute_nvfp4.quantization.rules import Rule
from cute_nvfp4.quantization.search import search_e4m3, search_ue8m0

_NAN_E4M3, _NAN_UE8M0 = 0x7F, 0xFF


def global_scale_from_amax(amax: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The global scale for which the largest block's scale is ``rule.top_scale``: amax / full scale.

    ``amax`` is a float32 tensor of one element; the division rounds once. The result is at least 2**-100 (also for a
    tensor of zeros), so that nothing overflows; NaN stays.
    """
    largest = amax.clamp(min=rule.full_scale * SMALLEST_GLOBAL_SCALE)
    return divide(largest, rule.full_scale).clamp(max=LARGEST_GLOBAL_SCALE)


def quantize_blocks(x: torch.Tensor, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (B, n) and scale codes (n,), ``uint8``, of element-major blocks ``x`` (B, n) in float32.

    A block that holds NaN or infinity gets a NaN scale, which makes all of it NaN; so does every block if the global
    scale is NaN. A block whose scale is 0 has codes 0.
    """
    largest = x.abs().amax(0)
    poisoned = ~torch.isfinite(largest)
    if request.global_scale is not None:
        poisoned = poisoned | ~request.global_scale.valid
    # searches and bit arithmetic need finite values; their results for poisoned blocks are discarded
    sound, largest = (t.masked_fill(poisoned, 0) for t in (x, largest))
    choose = _scale_ue8m0 if request.global_scale is None else _scale_e4m3
    scale, codes = choose(sound, largest, request)
    nan_scale = _NAN_UE8M0 if request.global_scale is None else _NAN_E4M3
    return codes.masked_fill(poisoned, NAN_CODES[request.format.element]), scale.masked_fill(poisoned, nan_scale)


def _scale_e4m3(x: torch.Tensor, largest: torch.Tensor, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    rule, factor = request.rule, request.global_scale
    top = request.format.max_value if rule.max_code is None else rule.max_code
    wanted = divide(largest, top) * factor.inverse
    scale = formats.encode_e4m3(wanted.clamp(min=rule.min_scale))
    if rule.choice in ("optimal", "hessian"):
        scale = search_e4m3(x, largest, scale, request)
    elif rule.choice:
        return _four_over_six(x, scale, formats.encode_e4m3(wanted * 1.5), request)
    return scale, _codes(x, scale, request, 0)


def _codes(x: torch.Tensor, scale: torch.Tensor, request: Request, stream: int) -> torch.Tensor:
    """Codes of ``x`` under E4M3 scales: x · (1 / (global scale · scale)), rounded; 0 if the scale is 0."""
    value = formats.decode_e4m3(scale)
    y = x * reciprocal(request.global_scale.value * value)
    return _round(y, request, stream).masked_fill(value == 0, 0)


def _round(y: torch.Tensor, request: Request, stream: int) -> torch.Tensor:
    if request.uniform is None:
        return encode(y, request.format.element)
    return encode_stochastic(y, request.uniform(stream), request.format.element)


def _four_over_six(
    x: torch.Tensor, six: torch.Tensor, four: torch.Tensor, request: Request
) -> tuple[torch.Tensor, torch.Tensor]:
    """The better of two scales: one maps the largest magnitude to 6, the other to 4; a tie goes to 6."""
    candidates = []
    for stream, scale in enumerate((six, four)):
        codes = _codes(x, scale, request, stream)
        difference = residual(x, formats.decode_e2m1(codes), formats.decode_e4m3(scale), request.global_scale)
        candidates.append((_error(difference, request), scale, codes))
    (error_six, _, codes_six), (error_four, _, codes_four) = candidates
    take_four = error_four < error_six
    return torch.where(take_four, four, six), torch.where(take_four, codes_four, codes_six)


def _error(difference: torch.Tensor, request: Request) -> torch.Tensor:
    """The error of each block's residuals, as ``request.rule`` compares it."""
    if request.rule.choice == "abs_max":
        return difference.abs().amax(0)
    if request.rule.choice == "mae":
        return ordered_sum(difference.abs(), request.tile)
    return ordered_sum(rounded(difference * difference), request.tile)


def _scale_ue8m0(x: torch.Tensor, largest: torch.Tensor, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    scale = mx_scale_codes(largest, request.rule, request.format)
    if request.rule.choice:
        scale = search_ue8m0(x, largest, scale, request)
    # 2**(127 - code) is the exact reciprocal; that of code 254 is subnormal, and exact too
    y = x * power_of_two(_BIAS - scale)
    return scale.to(torch.uint8), _round(y, request, 0)

"""The request for quantizing blocks, and the arithmetic of errors that rules and searches share.

Every step is written out, as in ``blocks``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_nvfp4.formats import LARGEST_GLOBAL_SCALE, SMALLEST_GLOBAL_SCALE, Format
from cute_nvfp4.quantization.rounding import _BIAS, _MANTISSA_BITS, reciprocal, rounded
from cute_nvfp4.quantization.rules import Rule

_LANES = 8


@dataclass(frozen=True)
class GlobalScale:
    """A global scale and what follows from it, all as tensors without dimensions.

    value: the scale. inverse: its float32 reciprocal. shift: the power of two that brings it into [1, 2), so that
    errors can be squared without overflow; multiplying by it is exact. valid: whether the scale is in
    [2**-100, 2**118]; an invalid one makes everything NaN in the end, and counts as 1 until then.
    """

    value: torch.Tensor
    inverse: torch.Tensor
    shift: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor) -> GlobalScale:
        """Makes it from a float32 tensor of one element."""
        value = value.detach().reshape(())
        valid = (value >= SMALLEST_GLOBAL_SCALE) & (value <= LARGEST_GLOBAL_SCALE)
        value = torch.where(valid, value, 1.0)
        shift = ((2 * _BIAS - (value.view(torch.int32) >> _MANTISSA_BITS)) << _MANTISSA_BITS).view(torch.float32)
        return cls(value, reciprocal(value), shift, valid)


@dataclass(frozen=True)
class Request:
    """The arguments of ``quantize_blocks`` besides the blocks.

    global_scale: None for a format without one, else the global scale (1 if the user wants none).
    tile: whether a block is a square tile, whose sums must be the same for the transposed tile.
    uniform: from a stream number to values in [0, 1) in the blocks' shape, for stochastic rounding; None: to nearest.
    hessian: (groups, B, B) float32, for the rule "hessian"; block b belongs to group ``b % groups``.
    """

    format: Format
    rule: Rule
    global_scale: GlobalScale | None = None
    tile: bool = False
    uniform: Callable[[int], torch.Tensor] | None = None
    hessian: torch.Tensor | None = None


def residual(x: torch.Tensor, element: torch.Tensor, scale: torch.Tensor, factor: GlobalScale) -> torch.Tensor:
    """(element · scale) · global scale − x, times the global scale's ``shift``, which keeps squares in range."""
    # the other product is exact
    return rounded((element * scale) * (factor.value * factor.shift)) - x * factor.shift


def ordered_sum(values: torch.Tensor, tile: bool = False) -> torch.Tensor:
    """Sums over blocks, (B, n) to (n,), in an order that is part of the definition, so that ties fall the same way.

    There are eight lanes. Lane j adds elements j, j + 8, j + 16, … in turn; then lanes 0 … 7 are added in turn. That is
    the order in which torch adds 16 contiguous floats on a CPU with vectors, and so that of fouroversix. A square tile
    adds the sum of its row sums to that of its column sums, each in that order: twice the sum, and the same for the
    transposed tile.
    """
    if tile:
        side = round(values.shape[0] ** 0.5)
        square = values.unflatten(0, (side, side))
        return _lanes(_lanes(square.transpose(0, 1))) + _lanes(_lanes(square))
    return _lanes(values)


def _lanes(values: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, a multiple of eight, in the order of ``ordered_sum``."""
    lanes = values[:_LANES]
    for start in range(_LANES, values.shape[0], _LANES):
        lanes = lanes + values[start : start + _LANES]
    total = lanes[0]
    for lane in lanes[1:]:
        total = total + lane
    return total

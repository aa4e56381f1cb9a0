"""GPTQ for NVFP4: rounds weights one column after the other; later columns compensate each error.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ" (2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_nvfp4.formats import NVFP4, decode_e2m1, decode_e4m3, pack_e2m1
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.quantization.blocks import global_scale_from_amax
from cute_nvfp4.quantization.rounding import encode, reciprocal
from cute_nvfp4.quantization.rules import resolve_rule

_BLOCK = NVFP4.block
_LARGEST = 0x7E
"""The code of the largest E4M3 value."""
_LAZY = 128
"""The columns that are updated one by one; those after them are updated once for all of these."""
NEIGHBOURS = (0, -3, -2, -1, 1, 2, 3, 4, 5)
"""The E4M3 codes, relative to the rule's, from which a block's scale is chosen: about three quarters to one and a half
of the rule's scale."""


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    rule: str = "max",
    *,
    global_scale: torch.Tensor | None = None,
    damping: float = 0.01,
    neighbours: Sequence[int] = NEIGHBOURS,
) -> BlockScaledTensor:
    """``weight`` (N, K) in NVFP4 with the least error of its products with activations, as GPTQ finds it.

    hessian: XᵀX (K, K) of the activations, in float32 or float64. rule: gives a block's scale from its 16 columns when
    their turn comes; of this scale and its ``neighbours``, the one with the least error is taken, where each column's
    square is weighed as in GPTQ. global_scale: by default that of ``rule`` for the weight. damping: is added to the
    Hessian's diagonal, as a share of its mean. K is a multiple of 16. Scales are row-major.
    """
    w, (rows, k) = weight.to(torch.float32).clone(), weight.shape
    if global_scale is None:
        global_scale = global_scale_from_amax(w.abs().amax(), resolve_rule(rule, NVFP4))
    upper = _inverse_factor(hessian, damping).to(torch.float32)
    codes = torch.empty((rows, k), dtype=torch.uint8, device=w.device)
    scales = torch.empty((rows, k // _BLOCK), dtype=torch.uint8, device=w.device)
    for first in range(0, k, _LAZY):
        last = min(first + _LAZY, k)
        errors = torch.empty((rows, last - first), device=w.device)
        for column in range(first, last):
            if column % _BLOCK == 0:
                block = w[:, column : column + _BLOCK].contiguous()
                options = {"global_scale": global_scale, "scale_layout": "rowmajor", "backend": "reference"}
                start = quantize(block, rule=rule, **options).scale[:, 0]
                weights = upper.diagonal()[column : column + _BLOCK].square().reciprocal()
                scales[:, column // _BLOCK] = _best(block, start, neighbours, global_scale, weights)
                scale = decode_e4m3(scales[:, column // _BLOCK]) * global_scale
                inverse = torch.where(scale == 0, 0.0, reciprocal(scale))
            codes[:, column] = encode(w[:, column] * inverse, "e2m1")
            error = (w[:, column] - decode_e2m1(codes[:, column]) * scale) / upper[column, column]
            w[:, column:last] -= error[:, None] * upper[column, column:last]
            errors[:, column - first] = error
        w[:, last:] -= errors @ upper[first:last, last:]
    return BlockScaledTensor(pack_e2m1(codes), scales, global_scale)


def _best(
    block: torch.Tensor,
    start: torch.Tensor,
    neighbours: Sequence[int],
    global_scale: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The codes of the scales (N,) of blocks (N, 16) with the least weighted error, of ``start`` and its neighbours."""
    steps = torch.tensor(neighbours, dtype=torch.int16, device=block.device)
    found = (start.to(torch.int16)[:, None] + steps).clamp(0, _LARGEST).to(torch.uint8)
    scale = (decode_e4m3(found) * global_scale).unsqueeze(-1)
    y = block[:, None] * torch.where(scale == 0, 0.0, reciprocal(scale))
    errors = ((decode_e2m1(encode(y, "e2m1")) * scale - block[:, None]).square() * weights).sum(-1)
    return found.gather(1, errors.argmin(1, keepdim=True))[:, 0]


def output_error(weight: torch.Tensor, quantized: torch.Tensor, hessian: torch.Tensor) -> float:
    """|X Wᵀ − X W'ᵀ| / |X Wᵀ| for activations with this Hessian."""
    exact, other = weight.to(hessian.dtype), (weight - quantized).to(hessian.dtype)
    squares = [float(((x @ hessian) * x).sum().clamp(min=0)) for x in (other, exact)]
    return (squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0


def _mean_diagonal(hessian: torch.Tensor) -> torch.Tensor:
    """The mean of the diagonal, at least tiny, so that activations of zeros divide by something."""
    return hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper triangular U with UᵀU = (H + damping)⁻¹; row j says what column j's error does to later columns."""
    wide = hessian.to(torch.float64)
    wide = wide + damping * _mean_diagonal(wide) * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    return torch.linalg.cholesky(inverse, upper=True)

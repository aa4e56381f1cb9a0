"""AWQ: scales the columns of weights by their activations before rounding.

Lin, Tang, Tang, Yang, Dang and Han, "AWQ: Activation-aware Weight Quantization" (2023). Columns that meet large
activations are multiplied by a factor, and the activations divided by it, so that rounding costs these columns less.
Here the layer keeps the inverse factor (``NVFP4Linear.input_scale``, ModelOpt's ``pre_quant_scale``), and multiplies x
by it in each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_nvfp4.formats import NVFP4
from cute_nvfp4.nn.training import fake_quantize
from cute_nvfp4.quantization.blocks import global_scale_from_amax
from cute_nvfp4.quantization.rules import resolve_rule

POWERS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""The exponents of the activations' magnitudes that are tried; 0 leaves the columns as they are."""


def column_factors(
    weights: Sequence[torch.Tensor],
    x: torch.Tensor,
    rule: str = "max",
    input_rule: str | None = None,
    *,
    amax: torch.Tensor | None = None,
    powers: Sequence[float] = POWERS,
) -> torch.Tensor | None:
    """The factors (K,) of the columns of ``weights`` (N, K), which read the same x (rows, K); None if none is best.

    The factors are that power of the mean magnitudes of x with which the products have the least error, rounded to
    nearest.

    rule, input_rule: how weights and x are quantized; None leaves x. amax: the largest magnitudes (K,) of all x, if
    ``x`` is only a sample.
    """
    x = x.float()
    exact = [x @ w.float().T for w in weights]
    magnitudes = x.abs().mean(0)
    magnitudes = magnitudes.clamp(min=torch.finfo(torch.float32).tiny).maximum(magnitudes.max() * 1e-4)
    amax = x.abs().amax(0) if amax is None else amax
    best, found = float("inf"), None
    for power in powers:
        factors = magnitudes**power
        factors = factors / (factors.max() * factors.min()).sqrt()
        rows = x / factors
        if input_rule is not None:
            scale = global_scale_from_amax((amax / factors).amax(), resolve_rule(input_rule, NVFP4))
            rows = fake_quantize(rows, rule=input_rule, global_scale=scale)
        error = 0.0
        for w, y in zip(weights, exact):
            made = fake_quantize(w.float() * factors, rule=rule)
            error += float((rows @ made.T - y).square().sum() / y.square().sum().clamp(min=1e-30))
        if error < best:
            best, found = error, None if power == 0 else factors
    return found

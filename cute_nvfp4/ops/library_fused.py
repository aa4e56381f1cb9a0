"""The operators ``rmsnorm_quantize`` and ``silu_mul_quantize``.

Results that are not asked for are empty tensors: the global scale where it is not computed, the new residual without an
old one, the values that were quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..operand import BlockScaledTensor
from ..scale_layout import blocked_flat
from .fused import checked_quantization, new_results
from .operator import define, operand
from .rmsnorm_quantize import checked_inputs, rmsnorm_quantize
from .silu_mul_quantize import halves, silu_mul_quantize

_LAST = (
    'bool compute_global_scale=False, str format="nvfp4", str rule="max", str scale_layout="blocked", '
    'bool return_values=False, str backend="auto"'
)
_OUT = {"out": "Tensor(a!)", "out_scale": "Tensor(b!)", "out_global_scale": "Tensor(c!)?", "values_out": "Tensor(d!)?"}


def _run(
    function: Any,
    inputs: Mapping[str, Any],
    global_scale: torch.Tensor | None,
    *,
    compute_global_scale: bool = False,
    format: str = "nvfp4",
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_global_scale: torch.Tensor | None = None,
    values_out: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...] | None:
    """The results of ``function``, or nothing where they are written."""
    x = inputs.get("x", inputs.get("gate"))
    given = "auto" if compute_global_scale else global_scale
    result = None
    if out is not None:
        result = operand(out, out_scale, global_scale if out_global_scale is None else out_global_scale, format)
    found = function(**inputs, global_scale=given, format=format, out=result, **options)
    quantized, residual, values = (found, None, None) if isinstance(found, BlockScaledTensor) else _three(found)
    if out is not None:
        if values_out is not None:
            values_out.copy_(values)
        return None
    scale = blocked_flat(quantized.scale) if quantized.scale_layout == "blocked" else quantized.scale
    computed = quantized.global_scale if compute_global_scale else x.new_empty(0, dtype=torch.float32)
    rest = (x.new_empty(0) if t is None else t for t in (residual, values))
    return quantized.data, scale, computed, *rest


def _three(found: Any) -> tuple[Any, Any, Any]:
    """Of a ``RmsnormQuantized`` or ``SiluMulQuantized``."""
    return tuple(found) if len(found) == 3 else (found[0], None, found[1])


def _rmsnorm(
    x, weight=None, residual=None, global_scale=None, *, return_values=False, residual_out=None, **options: Any
) -> Any:
    inputs = {"x": x, "weight": weight, "residual": residual, "residual_out": residual_out}
    wanted = return_values or options.get("values_out") is not None
    return _run(rmsnorm_quantize, inputs, global_scale, return_normed=wanted, **options)


def _fake_rmsnorm(x, weight=None, residual=None, global_scale=None, *, eps=1e-6, **options: Any) -> Any:
    rows, _, _ = checked_inputs(x, weight, residual, eps, None)
    _check(rows, global_scale, **options)
    return new_results(x, x.shape, residual, **options)


define(
    "rmsnorm_quantize",
    f"Tensor x, Tensor? weight=None, Tensor? residual=None, Tensor? global_scale=None, *, float eps=1e-06, {_LAST}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    {**_OUT, "residual_out": "Tensor(e!)?"},
    _rmsnorm,
    _fake_rmsnorm,
)


def _silu_mul(gate, up=None, global_scale=None, *, return_values=False, **options: Any) -> Any:
    wanted = return_values or options.get("values_out") is not None
    found = _run(silu_mul_quantize, {"gate": gate, "up": up}, global_scale, return_activation=wanted, **options)
    # there is no residual
    return found if found is None else (*found[:3], found[4])


def _fake_silu_mul(gate, up=None, global_scale=None, **options: Any) -> Any:
    first, _ = halves(gate, up)
    _check(first, global_scale, **options)
    data, scale, computed, _, values = new_results(gate, (*gate.shape[:-1], first.shape[1]), None, **options)
    return data, scale, computed, values


def _check(
    values: torch.Tensor,
    given: torch.Tensor | None,
    *,
    compute_global_scale: bool = False,
    format: str = "nvfp4",
    rule: str = "max",
    scale_layout: str = "blocked",
    **options: Any,
) -> None:
    """Raises unless values like these can be quantized."""
    checked_quantization(values, format, rule, "auto" if compute_global_scale else given, scale_layout, None)


define(
    "silu_mul_quantize",
    f"Tensor gate, Tensor? up=None, Tensor? global_scale=None, *, {_LAST}",
    "(Tensor, Tensor, Tensor, Tensor)",
    _OUT,
    _silu_mul,
    _fake_silu_mul,
)

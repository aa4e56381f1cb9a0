"""The operators ``rmsnorm_quantize`` and ``silu_mul_quantize``.

Results that are not asked for are empty tensors: the global scale where it is not computed, the new residual without an
old one, the values that were quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...operand import BlockScaledTensor
from ...quantization.rules import resolve_format
from ...runtime.torch_private import is_exporting
from ...scale_layout import blocked_bytes, blocked_flat, blocked_view
from ..quantize_request import checked_global_scale
from .registration import define, operand

_OPS = torch.ops.cute_nvfp4
_LAST = (
    'bool compute_global_scale=False, str format="nvfp4", str rule="max", str scale_layout="blocked", '
    'bool return_values=False, str backend="auto"'
)
_OUT = {"out": "Tensor(a!)", "out_scale": "Tensor(b!)", "out_global_scale": "Tensor(c!)?", "values_out": "Tensor(d!)?"}


class Fused(NamedTuple):
    """What a fused operation gives: the operand, the new residual, what was quantized. The last two may be None."""

    quantized: BlockScaledTensor
    residual: torch.Tensor | None
    values: torch.Tensor | None


def call_fused(
    name: str,
    inputs: Mapping[str, torch.Tensor | None],
    shape: Sequence[int],
    kind: str,
    given: Any,
    options: Mapping[str, Any],
    out: BlockScaledTensor | None,
    residual_out: torch.Tensor | None = None,
) -> Fused:
    """The operator ``name`` of ``inputs``, x first. shape: of the values. kind: "given", "none" or "auto", the global
    scale. options: the operator's."""
    x, residual = next(iter(inputs.values())), inputs.get("residual")
    factor = checked_global_scale(given, x.device) if kind == "given" else None
    tensors = [None if t is None else t.detach() for t in (*inputs.values(), factor)]
    options = {**options, "compute_global_scale": kind == "auto"}
    operator, wants_values = getattr(_OPS, name), options["return_values"]
    if out is None and residual_out is None:
        data, scale, computed, *rest = operator.default(*tensors, **options)
        new, values = rest[0], rest[-1]
    else:
        data, scale, computed, new, values = _results(x, shape, residual, **options)
        if out is not None:
            data, scale = out.data, blocked_flat(out.scale) if out.scale.ndim == 6 else out.scale
            computed = out.global_scale
        written = {"out": data, "out_scale": scale, "values_out": values if wants_values else None}
        # the given one may be that of out, which is read then
        stored = kind == "auto" or (out is not None and computed is not given)
        written["out_global_scale"] = computed if stored else None
        if residual is not None:
            written["residual_out"] = new = new if residual_out is None else residual_out
        operator.out(*tensors, **options, **written)
    found = Fused(out, None if residual is None else new, values if wants_values else None)
    if out is not None:
        return found
    format = resolve_format(options["format"])
    # a view in six dimensions would make a program of its own for up to 128 rows
    if options["scale_layout"] == "blocked" and not is_exporting():
        scale = blocked_view(scale, data.shape[0], format.scale_columns(shape[-1]))
    return found._replace(quantized=BlockScaledTensor(data, scale, computed if kind == "auto" else factor, format))


def _results(
    x: torch.Tensor,
    shape: Sequence[int],
    residual: torch.Tensor | None,
    *,
    format: str = "nvfp4",
    scale_layout: str = "blocked",
    compute_global_scale: bool = False,
    return_values: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """New results: data, scales, global scale, residual, values. shape: of the values, (M, K) or (K,)."""
    kind, (rows, k) = resolve_format(format), (shape if len(shape) == 2 else (1, *shape))
    columns = kind.scale_columns(k)
    scales = (rows, columns) if scale_layout == "rowmajor" else blocked_bytes(rows, columns)
    return (
        x.new_empty((rows, kind.data_columns(k)), dtype=torch.uint8),
        x.new_empty(scales, dtype=torch.uint8),
        x.new_empty(() if compute_global_scale else 0, dtype=torch.float32),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(shape if return_values else 0),
    )


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
    from ..rmsnorm_quantize import rmsnorm_quantize

    inputs = {"x": x, "weight": weight, "residual": residual, "residual_out": residual_out}
    wanted = return_values or options.get("values_out") is not None
    return _run(rmsnorm_quantize, inputs, global_scale, return_normed=wanted, **options)


def _fake_rmsnorm(x, weight=None, residual=None, global_scale=None, *, eps=1e-6, **options: Any) -> Any:
    from ..rmsnorm_quantize import checked_inputs

    rows, _, _ = checked_inputs(x, weight, residual, eps, None)
    _check(rows, global_scale, **options)
    return _results(x, x.shape, residual, **options)


define(
    "rmsnorm_quantize",
    f"Tensor x, Tensor? weight=None, Tensor? residual=None, Tensor? global_scale=None, *, float eps=1e-06, {_LAST}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    {**_OUT, "residual_out": "Tensor(e!)?"},
    _rmsnorm,
    _fake_rmsnorm,
)


def _silu_mul(gate, up=None, global_scale=None, *, return_values=False, **options: Any) -> Any:
    from ..silu_mul_quantize import silu_mul_quantize

    wanted = return_values or options.get("values_out") is not None
    found = _run(silu_mul_quantize, {"gate": gate, "up": up}, global_scale, return_activation=wanted, **options)
    # there is no residual
    return found if found is None else (*found[:3], found[4])


def _fake_silu_mul(gate, up=None, global_scale=None, **options: Any) -> Any:
    from ..silu_mul_quantize import halves

    first, _ = halves(gate, up)
    _check(first, global_scale, **options)
    data, scale, computed, _, values = _results(gate, (*gate.shape[:-1], first.shape[1]), None, **options)
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
    from ..fused import checked_quantization

    checked_quantization(values, format, rule, "auto" if compute_global_scale else given, scale_layout, None)


define(
    "silu_mul_quantize",
    f"Tensor gate, Tensor? up=None, Tensor? global_scale=None, *, {_LAST}",
    "(Tensor, Tensor, Tensor, Tensor)",
    _OUT,
    _silu_mul,
    _fake_silu_mul,
)

"""The operators ``quantize`` and ``dequantize``."""

from __future__ import annotations

from typing import Any

import torch

from ..quantization.hadamard import Hadamard
from ..quantization.rules import resolve_format
from ..scale_layout import blocked_bytes, blocked_flat
from .dequantize import dequantize
from .operator import Gradient, define, operand
from .quantize import quantize
from .quantize_rows import check_rows, quantize_rows

_OPS = torch.ops.cute_nvfp4


def _quantize_rows(
    x: torch.Tensor, *, backend: str = "auto", out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows in E4M3, and their scales."""
    found = quantize_rows(x, backend)
    if out is None:
        return found.data, found.scale
    out.copy_(found.data)
    out_scale.copy_(found.scale)
    return None


def _fake_quantize_rows(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows(x)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], dtype=torch.float32)


define(
    "quantize_rows",
    'Tensor x, *, str backend="auto"',
    "(Tensor, Tensor)",
    {"out": "Tensor(a!)", "out_scale": "Tensor(b!)"},
    _quantize_rows,
    _fake_quantize_rows,
)


def _quantize(
    x,
    global_scale=None,
    *,
    compute_global_scale=False,
    format="nvfp4",
    rule="max",
    seed=None,
    signs=None,
    block_2d=False,
    scale_layout="blocked",
    backend="auto",
    out=None,
    out_scale=None,
    out_global_scale=None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Data, scales (blocked ones in one dimension) and the global scale, if it is computed."""
    if out is not None:
        scale = global_scale if out_global_scale is None else out_global_scale
        out = operand(out, out_scale, scale, format)
    # "auto" on a GPU that has no kernels shows only here: then torch gives the same bits
    found = quantize(
        x,
        format,
        rule,
        global_scale="auto" if compute_global_scale else global_scale,
        rounding="nearest" if seed is None else "stochastic",
        generator=seed,
        hadamard=None if signs is None else Hadamard(tuple(signs)),
        block_2d=block_2d,
        scale_layout=scale_layout,
        out=out,
        backend=backend,
    )
    if out is not None:
        return None
    scale = blocked_flat(found.scale) if scale_layout == "blocked" else found.scale
    return found.data, scale, found.global_scale if compute_global_scale else x.new_empty(0, dtype=torch.float32)


def _fake_quantize(
    x, global_scale=None, *, compute_global_scale=False, format="nvfp4", scale_layout="blocked", **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kind = resolve_format(format)
    *batch, rows, k = x.shape
    columns = kind.scale_columns(k)
    shape = blocked_bytes(rows, columns, *batch) if scale_layout == "blocked" else (*batch, rows, columns)
    return (
        x.new_empty((*batch, rows, kind.data_columns(k)), dtype=torch.uint8),
        x.new_empty(shape, dtype=torch.uint8),
        x.new_empty(() if compute_global_scale else 0, dtype=torch.float32),
    )


define(
    "quantize",
    'Tensor x, Tensor? global_scale=None, *, bool compute_global_scale=False, str format="nvfp4", str rule="max", '
    "SymInt? seed=None, int[]? signs=None, bool block_2d=False, "
    'str scale_layout="blocked", str backend="auto"',
    "(Tensor, Tensor, Tensor)",
    {"out": "Tensor(a!)", "out_scale": "Tensor(b!)", "out_global_scale": "Tensor(c!)?"},
    _quantize,
    _fake_quantize,
)


def _dequantize(data, scale, global_scale=None, *, format="nvfp4", out_dtype=None, out=None) -> torch.Tensor:
    x = operand(data, scale, global_scale, format)
    if out is not None:
        return out.copy_(dequantize(x, out.dtype))
    return dequantize(x, torch.float32 if out_dtype is None else out_dtype)


def _fake_dequantize(data, scale, global_scale=None, *, format="nvfp4", out_dtype=None) -> torch.Tensor:
    x = operand(data, scale, global_scale, format)
    return data.new_empty((*data.shape[:-1], x.k), dtype=torch.float32 if out_dtype is None else out_dtype)


def _keep(ctx: Any, given: dict[str, Any], options: dict[str, Any]) -> None:
    ctx.save_for_backward(given["data"], given["scale"])
    ctx.shape, ctx.format = given["global_scale"].shape, options["format"]


def _gradient(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor]:
    """Values are linear in the global scale: Σ gradient · element · scale, in float64."""
    values = _OPS.dequantize.default(*ctx.saved_tensors, format=ctx.format, out_dtype=torch.float64)
    return ((values * dy).sum().to(torch.float32).reshape(ctx.shape),)


define(
    "dequantize",
    'Tensor data, Tensor scale, Tensor? global_scale=None, *, str format="nvfp4", ScalarType? out_dtype=None',
    "Tensor",
    {"out": "Tensor(a!)"},
    _dequantize,
    _fake_dequantize,
    ("global_scale",),
)
Gradient(("global_scale",), _keep, _gradient).register("dequantize", ("data", "scale", "global_scale"))

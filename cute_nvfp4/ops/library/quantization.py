"""The operators ``quantize`` and ``dequantize``."""

from __future__ import annotations

from typing import Any

import torch

from ...operand import BlockScaledTensor
from ...quantization.hadamard import Hadamard
from ...quantization.rules import resolve_format
from ...runtime.torch_private import is_exporting
from ...scale_layout import blocked_bytes, blocked_flat, blocked_view
from ..quantize_request import QuantizeRequest
from .registration import LIBRARY, NAMESPACE, define, operand

_OPS = torch.ops.cute_nvfp4


def quantize(
    request: QuantizeRequest,
    given: torch.Tensor | None,
    computed: bool,
    seed: int | None,
    out: BlockScaledTensor | None,
    backend: str,
) -> BlockScaledTensor:
    """``request`` by the operator: matrices (L, MN, K), as the request has them. given: the global scale, if any."""
    x, format = request.source.matrices, request.format
    signs = None if request.source.rotation is None else list(request.source.rotation.signs)
    options = {"compute_global_scale": computed, "seed": seed, "signs": signs, "block_2d": request.tile}
    options |= {"format": format.name, "rule": request.rule.name, "scale_layout": request.scale_layout}
    options["backend"] = backend
    blocked = request.scale_layout == "blocked"
    if out is None:
        data, scale, found = _OPS.quantize.default(x, given, **options)
        # a view in six dimensions would make a program of its own for up to 128 rows
        if blocked and not is_exporting():
            scale = blocked_view(scale, x.shape[1], format.scale_columns(x.shape[2]), x.shape[0])
        return BlockScaledTensor(data, scale, found if computed else given, format)
    data, scale = (t if t.ndim != 2 else t.unsqueeze(0) for t in (out.data, out.scale))
    scale = blocked_flat(scale) if scale.ndim == 6 else scale
    written = None if out.global_scale is given else out.global_scale
    _OPS.quantize.out(x, given, **options, out=data, out_scale=scale, out_global_scale=written)
    return out


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
    from ..quantize import quantize

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
    from ..dequantize import dequantize

    x = operand(data, scale, global_scale, format)
    if out is not None:
        return out.copy_(dequantize(x, out.dtype))
    return dequantize(x, torch.float32 if out_dtype is None else out_dtype)


def _fake_dequantize(data, scale, global_scale=None, *, format="nvfp4", out_dtype=None) -> torch.Tensor:
    x = operand(data, scale, global_scale, format)
    return data.new_empty((*data.shape[:-1], x.k), dtype=torch.float32 if out_dtype is None else out_dtype)


def _keep(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: torch.Tensor) -> None:
    data, scale, global_scale = inputs
    ctx.save_for_backward(data, scale)
    ctx.shape, ctx.format = global_scale.shape, keyword_only_inputs["format"]


def _gradient(ctx: Any, dy: torch.Tensor) -> tuple[None, None, torch.Tensor]:
    """Values are linear in the global scale: Σ gradient · element · scale, in float64."""
    values = _OPS.dequantize.default(*ctx.saved_tensors, format=ctx.format, out_dtype=torch.float64)
    return None, None, (values * dy).sum().to(torch.float32).reshape(ctx.shape)


define(
    "dequantize",
    'Tensor data, Tensor scale, Tensor? global_scale=None, *, str format="nvfp4", ScalarType? out_dtype=None',
    "Tensor",
    {"out": "Tensor(a!)"},
    _dequantize,
    _fake_dequantize,
    ("global_scale",),
)
torch.library.register_autograd(f"{NAMESPACE}::dequantize", _gradient, setup_context=_keep, lib=LIBRARY)

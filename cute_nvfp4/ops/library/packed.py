"""The operator ``packed_gemm``: ``gemm`` and ``gated_gemm`` with a prepared weight."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import OperandError
from ...formats import FORMATS
from ...operand import BlockScaledTensor
from ...prepared_weight import PreparedWeight
from ...reference import GATES
from ..checks import check_dtype, split_alpha
from .registration import LIBRARY, NAMESPACE, call, define, either, operand, refuse_gradients, tensors_of

_OP = torch.ops.cute_nvfp4


def packed_gemm(
    a: Any,
    b: PreparedWeight,
    alpha: Any,
    bias: Any,
    out: Any,
    out_dtype: Any,
    config: Any,
    backend: str,
    gate: str = "",
) -> torch.Tensor:
    """``ops.packed_gemm.packed_gemm`` by its operator."""
    numbers = isinstance(a, torch.Tensor)
    data, scale, factor = (a, None, None) if numbers else (*tensors_of("a", a), a.global_scale)
    scalar, alpha_tensor = split_alpha(alpha, b.device)
    tensors = (data, scale, b.packed, factor, b.global_scale, b.up_global_scale, alpha_tensor, bias)
    options = {
        "gate": gate,
        "rows": b.rows,
        "dtype": b.dtype,
        "packing": b.packing,
        "alpha": scalar,
        "out_dtype": out_dtype,
        "backend": backend,
    }
    options |= {} if numbers else {"a_format": a.format.name}
    result = call(_OP.packed_gemm, tensors, options, config, None if out is None else {"out": out})
    return result if out is None else out


def _packed_gemm(
    a,
    a_scale,
    b,
    a_global_scale=None,
    b_global_scale=None,
    up_global_scale=None,
    alpha_tensor=None,
    bias=None,
    *,
    rows: int,
    dtype: torch.dtype,
    alpha=1.0,
    gate="",
    packing="nvfp4",
    out=None,
    out_dtype=None,
    a_format="nvfp4",
    backend="auto",
) -> torch.Tensor:
    from ..packed_gemm import packed_gemm

    x: torch.Tensor | BlockScaledTensor = a if a_scale is None else operand(a, a_scale, a_global_scale, a_format)
    k = _k(a, a_scale, a_format)
    weight = PreparedWeight(b, rows, k, dtype, b_global_scale, bool(gate), up_global_scale, packing)
    return packed_gemm(x, weight, either(alpha, alpha_tensor), bias, out, out_dtype, None, backend, gate)


def _k(a: torch.Tensor, a_scale: torch.Tensor | None, a_format: str) -> int:
    """K, of numbers or of bytes of elements."""
    return a.shape[-1] * (1 if a_scale is None else FORMATS[a_format].elements_per_byte)


def _fake(
    a,
    a_scale,
    b,
    a_global_scale=None,
    b_global_scale=None,
    up_global_scale=None,
    alpha_tensor=None,
    bias=None,
    *,
    rows,
    dtype,
    alpha=1.0,
    gate="",
    packing="nvfp4",
    out_dtype=None,
    a_format="nvfp4",
    backend="auto",
) -> torch.Tensor:
    k = _k(a, a_scale, a_format)
    weight = PreparedWeight(b, rows, k, dtype, b_global_scale, bool(gate), up_global_scale, packing)
    if a.ndim != 2 or (a_scale is None and a.dtype is not dtype):
        raise OperandError.of("a", got=f"{a.dtype}, shape {tuple(a.shape)}", expected=f"{dtype} (M, {weight.k})")
    out_dtype = dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype)
    return a.new_empty((a.shape[0], rows), dtype=out_dtype)


define(
    "packed_gemm",
    "Tensor a, Tensor? a_scale, Tensor b, Tensor? a_global_scale=None, Tensor? b_global_scale=None, "
    "Tensor? up_global_scale=None, Tensor? alpha_tensor=None, Tensor? bias=None, *, int rows, ScalarType dtype, "
    'float alpha=1.0, str gate="", str packing="nvfp4", ScalarType? out_dtype=None, str a_format="nvfp4", '
    'str backend="auto"',
    "Tensor",
    {"out": "Tensor(a!)"},
    _packed_gemm,
    _fake,
    ("a", "bias"),
)
_TENSORS = tuple(x.name for x in _OP.packed_gemm.default._schema.arguments if not x.kwarg_only)
_A, _B, _FACTOR, _UP, _ALPHA, _BIAS = (
    _TENSORS.index(x) for x in ("a", "b", "b_global_scale", "up_global_scale", "alpha_tensor", "bias")
)


def gradient_of_x(
    dy: torch.Tensor, x: torch.Tensor | None, values: torch.Tensor, alpha: float | torch.Tensor, gate: str
) -> torch.Tensor:
    """That of x, alpha · dy · weight in float32; of gated products, which need x, both are done again."""
    dy = dy.float()
    if not gate:
        return dy @ values * alpha
    products = x.float() @ values.mT * alpha
    both = torch.stack(torch.func.vjp(lambda a, b: GATES[gate](a) * b, *products)[1](dy))
    return (both @ values * alpha).sum(0)


def _keep(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: torch.Tensor) -> None:
    refuse_gradients({name: x for name, x in zip(_TENSORS, inputs) if name not in ("a", "bias")})
    a, bias = inputs[_A], inputs[_BIAS]
    gated = bool(keyword_only_inputs["gate"])
    ctx.save_for_backward(inputs[_B], inputs[_FACTOR], inputs[_UP], inputs[_ALPHA], a if gated else None)
    ctx.like, ctx.k = (a.dtype, None if bias is None else bias.dtype), a.shape[-1]
    ctx.options = keyword_only_inputs


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple:
    """Those of a and of bias; products and sums in float32."""
    packed, factor, up, alpha, a = ctx.saved_tensors
    dtype, bias_dtype = ctx.like
    found = [None] * len(_TENSORS)
    if ctx.needs_input_grad[_A]:
        gate = ctx.options["gate"]
        rows, dtype, packing = (ctx.options[name] for name in ("rows", "dtype", "packing"))
        weight = PreparedWeight(packed, rows, ctx.k, dtype, factor, bool(gate), up, packing)
        scale = ctx.options.get("alpha", 1.0) if alpha is None else alpha.reshape(())
        found[_A] = gradient_of_x(dy, a, weight.dequantize(torch.float32), scale, gate).to(dtype)
    if bias_dtype is not None:
        found[_BIAS] = dy.sum(0, dtype=torch.float32).to(bias_dtype)
    return tuple(found)


torch.library.register_autograd(f"{NAMESPACE}::packed_gemm", _gradients, setup_context=_keep, lib=LIBRARY)

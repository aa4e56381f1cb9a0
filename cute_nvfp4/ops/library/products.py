"""The operators ``gemv``, ``gemm``, ``gated_gemm`` and ``gated_gemm_quantized``."""

from __future__ import annotations

from typing import Any

import torch

from ...formats import NVFP4
from ..checks import check_product, number, split_alpha
from .registration import LIBRARY, NAMESPACE, call, define, either, new, operand, refuse_gradients, tensors_of

_OPS = torch.ops.cute_nvfp4
_PAIR = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? a_global_scale=None, Tensor? b_global_scale=None"
_FORMATS = 'str a_format="nvfp4", str b_format="nvfp4"'
_LAST = 'ScalarType? out_dtype=None, str backend="auto"'
_OUT = {"out": "Tensor(a!)"}


def gemv(a: Any, b: Any, alpha: Any, out: Any, out_dtype: Any, backend: str, config: Any) -> torch.Tensor:
    """``ops.gemv.gemv`` by its operator."""
    tensors = *tensors_of("a", a), *tensors_of("b", b), a.global_scale, b.global_scale
    options = {"alpha": number("alpha", alpha), "out_dtype": out_dtype, "backend": backend}
    result = call(_OPS.gemv, tensors, options, config, None if out is None else {"out": out})
    return result if out is None else out


def _gemv(
    a, a_scale, b, b_scale, a_global_scale=None, b_global_scale=None, *, out_dtype=None, **options: Any
) -> torch.Tensor:
    from ..gemv import gemv

    x, y = operand(a, a_scale, a_global_scale), operand(b, b_scale, b_global_scale)
    return gemv(x, y, out_dtype=out_dtype, **options)


def _fake_gemv(
    a, a_scale, b, b_scale, a_global_scale=None, b_global_scale=None, *, out_dtype=None, **options: Any
) -> torch.Tensor:
    x, y = operand(a, a_scale, a_global_scale), operand(b, b_scale, b_global_scale)
    check_product(x, {"b": y}, (NVFP4,))
    return new(a, a.shape[:-1], out_dtype)


define("gemv", f"{_PAIR}, *, float alpha=1.0, {_LAST}", "Tensor", _OUT, _gemv, _fake_gemv)


def gemm(a: Any, b: Any, alpha: Any, bias: Any, out: Any, out_dtype: Any, config: Any, backend: str) -> torch.Tensor:
    """``ops.gemm.gemm`` by its operator."""
    tensors = [*tensors_of("a", a), *tensors_of("b", b), a.global_scale, b.global_scale]
    scalar, alpha_tensor = split_alpha(alpha, a.device)
    options = {"alpha": scalar, "a_format": a.format.name, "b_format": b.format.name}
    options |= {"out_dtype": out_dtype, "backend": backend}
    result = call(_OPS.gemm, [*tensors, alpha_tensor, bias], options, config, None if out is None else {"out": out})
    return result if out is None else out


def _gemm(
    a,
    a_scale,
    b,
    b_scale,
    a_global_scale=None,
    b_global_scale=None,
    alpha_tensor=None,
    bias=None,
    *,
    alpha=1.0,
    a_format="nvfp4",
    b_format="nvfp4",
    **options: Any,
) -> torch.Tensor:
    from ..gemm import gemm

    x, y = operand(a, a_scale, a_global_scale, a_format), operand(b, b_scale, b_global_scale, b_format)
    return gemm(x, y, alpha=either(alpha, alpha_tensor), bias=bias, **options)


def _fake_gemm(
    a,
    a_scale,
    b,
    b_scale,
    a_global_scale=None,
    b_global_scale=None,
    alpha_tensor=None,
    bias=None,
    *,
    alpha=1.0,
    a_format="nvfp4",
    b_format="nvfp4",
    out_dtype=None,
    backend="auto",
) -> torch.Tensor:
    x, y = operand(a, a_scale, a_global_scale, a_format), operand(b, b_scale, b_global_scale, b_format)
    check_product(x, {"b": y})
    return new(a, (*a.shape[:-1], b.shape[-2]), out_dtype)


define(
    "gemm",
    f"{_PAIR}, Tensor? alpha_tensor=None, Tensor? bias=None, *, float alpha=1.0, {_FORMATS}, {_LAST}",
    "Tensor",
    _OUT,
    _gemm,
    _fake_gemm,
    ("bias",),
)

_GEMM_TENSORS = tuple(x.name for x in _OPS.gemm.default._schema.arguments if not x.kwarg_only)
_BIAS = _GEMM_TENSORS.index("bias")


def _keep_bias(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: torch.Tensor) -> None:
    refuse_gradients({name: x for name, x in zip(_GEMM_TENSORS, inputs) if name != "bias"})
    bias = inputs[_BIAS]
    ctx.like = None if bias is None else (bias.ndim, bias.dtype)


def _bias_gradient(ctx: Any, dy: torch.Tensor) -> tuple:
    """The gradient of bias, (N,) or (L, N), of that of the result, (M, N) or (L, M, N); summed in float32."""
    gradients = [None] * len(_GEMM_TENSORS)
    ndim, dtype = ctx.like
    dims = -2 if ndim == 2 else tuple(range(dy.ndim - 1))
    gradients[_BIAS] = dy.sum(dims, dtype=torch.float32).to(dtype)
    return tuple(gradients)


torch.library.register_autograd(f"{NAMESPACE}::gemm", _bias_gradient, setup_context=_keep_bias, lib=LIBRARY)

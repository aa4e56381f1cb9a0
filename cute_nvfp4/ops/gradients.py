"""Gradients of a global scale, of bias, and of x of products with prepared weights, which are frozen.

Gradients of x are products with the decoded weights, computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..grouped_rows import clamped
from ..reference import GATES
from .operator import LIBRARY, NAMESPACE, TAGS, Gradient, weight_of

_WEIGHT = ("b", "b_global_scale", "up_global_scale", "alpha_tensor")


def _keep_operand(ctx: Any, tensors: dict[str, Any], options: dict[str, Any]) -> None:
    ctx.save_for_backward(tensors["data"], tensors["scale"])
    ctx.shape, ctx.format = tensors["global_scale"].shape, options["format"]


def _of_global_scale(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor]:
    """The gradient of the global scale: values are linear in it, so Σ dy · element · scale, in float64."""
    dequantize = torch.ops.cute_nvfp4.dequantize.default
    values = dequantize(*ctx.saved_tensors, format=ctx.format, out_dtype=torch.float64)
    return ((values * dy).sum().to(torch.float32).reshape(ctx.shape),)


GLOBAL_SCALE = Gradient(("global_scale",), _keep_operand, _of_global_scale)


def _keep_bias(ctx: Any, tensors: dict[str, Any], options: dict[str, Any]) -> None:
    bias = tensors["bias"]
    ctx.like = None if bias is None else (bias.ndim, bias.dtype)


def _of_bias(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor]:
    """The gradient of bias, (N,) or (L, N), from dy, (M, N) or (L, M, N)."""
    ndim, dtype = ctx.like
    return (dy.sum(-2 if ndim == 2 else tuple(range(dy.ndim - 1)), dtype=torch.float32).to(dtype),)


BIAS = Gradient(("bias",), _keep_bias, _of_bias)


def _of_x(dy: torch.Tensor, x: torch.Tensor | None, values: torch.Tensor, alpha: Any, gate: str) -> torch.Tensor:
    """alpha · dy · weight; a gated product needs x, because both of its products are computed again."""
    dy = dy.float()
    if not gate:
        return dy @ values * alpha
    products = x.float() @ values.mT * alpha
    both = torch.stack(torch.func.vjp(lambda a, b: GATES[gate](a) * b, *products)[1](dy))
    return (both @ values * alpha).sum(0)


def _alpha(options: dict[str, Any], alpha: torch.Tensor | None, group: int = 0) -> float | torch.Tensor:
    return options.get("alpha", 1.0) if alpha is None else alpha.reshape(-1)[group if alpha.numel() > 1 else 0]


def _keep_x(ctx: Any, tensors: dict[str, Any], options: dict[str, Any]) -> None:
    a, bias = tensors["a"], tensors.get("bias")
    ctx.save_for_backward(*(tensors[name] for name in _WEIGHT), a if options["gate"] else None, tensors.get("offsets"))
    ctx.k, ctx.bias, ctx.options = a.shape[-1], None if bias is None else bias.dtype, options


def _of_x_and_bias(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    packed, factor, up, alpha, a, _ = ctx.saved_tensors
    of_a = of_bias = None
    if ctx.needs_input_grad[0]:
        weight = weight_of(packed, ctx.options["rows"], ctx.k, factor, up, ctx.options)
        found = _of_x(dy, a, weight.dequantize(torch.float32), _alpha(ctx.options, alpha), ctx.options["gate"])
        of_a = found.to(weight.dtype)
    if ctx.bias is not None:
        of_bias = dy.sum(0, dtype=torch.float32).to(ctx.bias)
    return of_a, of_bias


PREPARED = Gradient(("a", "bias"), _keep_x, _of_x_and_bias)


def _keep_list(ctx: Any, tensors: dict[str, Any], options: dict[str, Any]) -> None:
    weights = [x for name in _WEIGHT[:3] for x in tensors[name]]
    ctx.save_for_backward(*weights, tensors["alpha_tensor"], *(tensors["a"] if options["gate"] else ()))
    ctx.options, ctx.count = options, len(tensors["a"])


def _of_list(ctx: Any, dys: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor | None]]:
    count, saved, options = ctx.count, ctx.saved_tensors, ctx.options
    packed, factors, ups = (saved[i * count :][:count] for i in range(3))
    alpha, *xs = saved[3 * count :]
    found: list[torch.Tensor | None] = [None] * count
    for i, wanted in enumerate(ctx.needs_input_grad[0]):
        if wanted:
            weight = weight_of(packed[i], options["rows"][i], options["k"][i], factors[i], ups[i], options)
            values, x = weight.dequantize(torch.float32), xs[i] if xs else None
            found[i] = _of_x(dys[i], x, values, _alpha(options, alpha, i), options["gate"]).to(weight.dtype)
    return (found,)


LIST = Gradient(("a",), _keep_list, _of_list)

# this is an operator because it reads the offsets
LIBRARY.define(
    "packed_rows_gradient(Tensor dy, Tensor? a, Tensor offsets, Tensor b, Tensor? b_global_scale, "
    "Tensor? up_global_scale, Tensor? alpha_tensor, *, int rows, int k, ScalarType dtype, float alpha, str gate, "
    "str packing) -> Tensor",
    tags=TAGS,
)


def _rows_gradient(
    dy: torch.Tensor,
    a: torch.Tensor | None,
    offsets: torch.Tensor,
    b: torch.Tensor,
    b_global_scale: torch.Tensor | None,
    up_global_scale: torch.Tensor | None,
    alpha_tensor: torch.Tensor | None,
    *,
    rows: int,
    k: int,
    **options: Any,
) -> torch.Tensor:
    """The gradient of a (T, K); rows of no group get zeros. Waits for the device: the host loops over the groups."""
    found = dy.new_zeros((dy.shape[0], k), dtype=options["dtype"])
    for e, (start, end) in enumerate(pairwise(clamped(offsets, dy.shape[0]).tolist())):
        if start < end:
            weight = weight_of(b[e], rows, k, b_global_scale, up_global_scale, options)
            x, values = None if a is None else a[start:end], weight.dequantize(torch.float32)
            of_x = _of_x(dy[start:end], x, values, _alpha(options, alpha_tensor, e), options["gate"])
            found[start:end] = of_x.to(weight.dtype)
    return found


def _fake_rows_gradient(dy: torch.Tensor, *args: Any, k: int, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    return dy.new_empty((dy.shape[0], k), dtype=dtype)


LIBRARY.impl("packed_rows_gradient", _rows_gradient, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::packed_rows_gradient", _fake_rows_gradient, lib=LIBRARY)


def _of_rows(ctx: Any, dy: torch.Tensor, *others: Any) -> tuple[torch.Tensor]:
    packed, factor, up, alpha, a, offsets = ctx.saved_tensors
    names = ("rows", "dtype", "gate", "packing")
    options = {name: ctx.options[name] for name in names} | {"alpha": ctx.options.get("alpha", 1.0), "k": ctx.k}
    operator = torch.ops.cute_nvfp4.packed_rows_gradient
    return (operator(dy, a, offsets, packed, factor, up, alpha, **options),)


ROWS = Gradient(("a",), _keep_x, _of_rows)

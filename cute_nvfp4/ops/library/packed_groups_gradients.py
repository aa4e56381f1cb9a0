"""Gradients of x of grouped products with prepared weights, which are frozen: products with the decoded weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ...prepared_weight import PreparedWeight
from ..grouped_rows import clamped
from .packed import gradient_of_x
from .packed_groups import LIST_TENSORS, ROWS_TENSORS
from .registration import LIBRARY, NAMESPACE, TAGS, refuse_gradients

_OP = torch.ops.cute_nvfp4


def _keep_list(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: list[torch.Tensor]) -> None:
    given = dict(zip(LIST_TENSORS, inputs))
    a = given.pop("a")
    refuse_gradients(given)
    kept = [*given["b"], *given["b_global_scale"], *given["up_global_scale"], given["alpha_tensor"]]
    ctx.save_for_backward(*kept, *(a if keyword_only_inputs["gate"] else ()))
    ctx.options, ctx.count = keyword_only_inputs, len(a)
    ctx.others = tuple([None] * len(x) if _is_tensors(x) else None for x in inputs[1:])


def _is_tensors(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(y, torch.Tensor) for y in x)


def _gradients_list(ctx: Any, dys: list[torch.Tensor]) -> tuple:
    """Those of all a, in float32, then rounded."""
    count, saved = ctx.count, ctx.saved_tensors
    packed, factors, ups = (saved[i * count :][:count] for i in range(3))
    alpha, *xs = saved[3 * count :]
    found = []
    for i, wanted in enumerate(ctx.needs_input_grad[0]):
        if not wanted:
            found.append(None)
            continue
        rows, k, dtype, gate, packing = (ctx.options[name] for name in ("rows", "k", "dtype", "gate", "packing"))
        weight = PreparedWeight(packed[i], rows[i], k[i], dtype, factors[i], bool(gate), ups[i], packing)
        values, scale = weight.dequantize(torch.float32), _alpha(ctx.options.get("alpha", 1.0), alpha, i)
        found.append(gradient_of_x(dys[i], xs[i] if xs else None, values, scale, gate).to(dtype))
    return found, *ctx.others


def _alpha(alpha: float, tensor: torch.Tensor | None, group: int) -> float | torch.Tensor:
    return alpha if tensor is None else tensor.reshape(-1)[group if tensor.numel() > 1 else 0]


torch.library.register_autograd(
    f"{NAMESPACE}::packed_grouped_gemm", _gradients_list, setup_context=_keep_list, lib=LIBRARY
)

# an operator of its own, because it reads the offsets
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
    dtype: torch.dtype,
    alpha: float,
    gate: str,
    packing: str,
) -> torch.Tensor:
    """That of a (T, K), zeros for rows of no group. Waits for the device: a group's rows are a host's loop."""
    found = dy.new_zeros((dy.shape[0], k), dtype=dtype)
    for e, (start, end) in enumerate(pairwise(clamped(offsets, dy.shape[0]).tolist())):
        if start == end:
            continue
        weight = PreparedWeight(b[e], rows, k, dtype, b_global_scale, bool(gate), up_global_scale, packing)
        x, values = None if a is None else a[start:end], weight.dequantize(torch.float32)
        of_x = gradient_of_x(dy[start:end], x, values, _alpha(alpha, alpha_tensor, e), gate)
        found[start:end] = of_x.to(dtype)
    return found


def _fake_rows_gradient(dy: torch.Tensor, *args: Any, k: int, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    return dy.new_empty((dy.shape[0], k), dtype=dtype)


LIBRARY.impl("packed_rows_gradient", _rows_gradient, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::packed_rows_gradient", _fake_rows_gradient, lib=LIBRARY)


def _keep_rows(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: tuple) -> None:
    given = dict(zip(ROWS_TENSORS, inputs))
    a = given.pop("a")
    refuse_gradients(given)
    names = ("offsets", "b", "b_global_scale", "up_global_scale", "alpha_tensor")
    ctx.save_for_backward(a if keyword_only_inputs["gate"] else None, *(given[name] for name in names))
    ctx.mark_non_differentiable(output[1])
    ctx.options, ctx.k = keyword_only_inputs, a.shape[1]


def _gradients_rows(ctx: Any, dy: torch.Tensor, _: Any) -> tuple:
    names = ("rows", "dtype", "gate", "packing")
    options = {name: ctx.options[name] for name in names} | {"alpha": ctx.options.get("alpha", 1.0), "k": ctx.k}
    return _OP.packed_rows_gradient(dy, *ctx.saved_tensors, **options), *[None] * (len(ROWS_TENSORS) - 1)


torch.library.register_autograd(
    f"{NAMESPACE}::packed_grouped_gemm_contiguous", _gradients_rows, setup_context=_keep_rows, lib=LIBRARY
)

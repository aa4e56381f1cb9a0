"""gemm and gated_gemm with a prepared weight: check, plan, launch. Numbers (bfloat16, float16) or NVFP4 times packed
NVFP4."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from ..errors import OperandError
from ..operand import span_bytes
from ..planning.packed import PackedPlan
from ..prepared_weight import PreparedWeight
from ..reference import GATES
from ..runtime.apart import Apart
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.simulating import world
from .calls import Preparation, as_alpha, operand_key, output_key, preparable, tensor_key
from .checks import check_overlap, checked_output, refuse_config, split_alpha
from .dispatch import by_operator, increment_versions, is_plain
from .library.packed import packed_gemm as packed_operator
from .packed_launch import PackedCall
from .packed_operands import Request, X, check_bias, check_products, check_x, everything_read, x_parts


def packed_gemm(
    x: X,
    weight: PreparedWeight,
    alpha: float | torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: PackedPlan | None,
    backend: Backend,
    gate: str = "",
) -> torch.Tensor:
    """``gemm`` or ``gated_gemm`` of a prepared weight. A ``Request``, which a call that was planned before does not
    make."""
    if gate or not (alpha is bias is None and is_plain(x, out, weight.global_scale)):
        operands, numbers = ((weight,), x) if isinstance(x, Tensor) else ((x, weight), None)
        if by_operator(operands, numbers, alpha, bias, out, weight.up_global_scale):
            return packed_operator(x, weight, alpha, bias, out, out_dtype, config, backend, gate)
    call = _calls.find(_key(x, weight, alpha, bias, out, out_dtype, config, backend, gate))
    if call is None:
        call = planned(Request(x, weight, alpha, bias, out, out_dtype, config, backend, gate))
    result = call(x, weight, alpha, bias, out)
    if out is not None and is_grad_enabled():
        increment_versions((out,))
    return result


def _key(
    x: X,
    weight: PreparedWeight,
    alpha: Any,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: PackedPlan | None,
    backend: Backend,
    gate: str,
) -> tuple:
    """All that a plan depends on."""
    kept = weight.key
    return (
        tensor_key(x) if isinstance(x, Tensor) else operand_key(x),
        kept,
        output_key(out),
        out_dtype,
        None if alpha is None else tensor_key(alpha),
        None if bias is None else tensor_key(bias),
        gate,
        backend,
        config,
        world(kept.on_cpu),
    )


def planned(request: Request) -> Callable[..., torch.Tensor]:
    """The call for this request: the one that was planned for others like it, or a new one."""
    key = _key(*request)
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(request)
    return call


def prepared(request: Request) -> Preparation:
    """A request planned, for ``prepare``."""
    call = preparable(planned(request), PackedCall)
    x, weight, alpha, bias, out = request[:5]
    scalar, alpha = as_alpha(alpha)
    out = call.new() if out is None else out
    scratch = call.own_scratch()
    count = len(x_parts(x))
    slots = {"a": [(None, 1)] if count == 1 else [("data", 1), ("scale", 2)], "b": [("packed", 0)]}
    # weight, x, out, bias, alpha; of each product device scalars: alpha's tensor, global scales of x and the weight
    at = count + 2 + (bias is not None) + 1
    sizes = {0: span_bytes(weight.packed)} | {1 + i: span_bytes(part) for i, part in enumerate(x_parts(x))}
    if bias is not None:
        sizes[count + 2] = span_bytes(bias)
    for part in ("global_scale", "up_global_scale")[: len(weight.global_scales)]:
        factors = {"a": ("global_scale", getattr(x, "global_scale", None)), "b": (part, getattr(weight, part))}
        for name, (own, factor) in ({"alpha": ("", alpha)} | factors).items():
            if factor is not None:
                sizes[at] = 4
                if name != "alpha":
                    slots[name].append((own, at))
                at += 1
    return Preparation(
        call.launch,
        call.values(x, weight, scalar, alpha, bias, out, scratch),
        {"a": x, "b": weight, "out": out},
        slots | {"out": [(None, count + 1)]},
        Apart(sizes, ((count + 1, span_bytes(out)),)),
        lambda given: (given["a"], given["b"], alpha, bias, given["out"], scratch),
    )


_calls = Bounded()


def _plan(request: Request) -> Callable[..., torch.Tensor]:
    """The call for this request and all like it, which it checks."""
    x, weight, alpha, bias, out, out_dtype, config, backend, gate = request
    check_products(weight, gate)
    m = check_x(x, weight)
    _, alpha = split_alpha(alpha, weight.device)
    check_bias(bias, weight)
    if out is None and out_dtype is None:
        out_dtype = weight.dtype
    out = checked_output(everything_read(x, weight, alpha, bias), weight.device, (m, weight.rows), out, out_dtype)
    if weight.rows > 1 and out.stride(1) != 1:
        raise OperandError.of("strides of out", got=out.stride(), expected="1 along N, the rows of a prepared weight")
    target = resolve(backend, weight.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference, dtype=out.dtype, gate=gate)
    return PackedCall(request._replace(alpha=alpha, out=out), target)


def _reference(
    x: X,
    weight: PreparedWeight,
    alpha: Any,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    gate: str,
) -> torch.Tensor:
    scalar, alpha = as_alpha(alpha)
    if out is not None:
        check_overlap(everything_read(x, weight, alpha, bias), out)
    wide = x.to(torch.float64) if isinstance(x, torch.Tensor) else x.dequantize(torch.float64)
    exact = wide @ weight.dequantize(torch.float64).mT * (scalar if alpha is None else alpha.double())
    if gate:
        exact = GATES[gate](exact[0]) * exact[1]
    if bias is not None:
        exact = exact + bias.double()
    exact = exact.to(dtype)
    return exact if out is None else out.copy_(exact)

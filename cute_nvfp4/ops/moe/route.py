"""route: chooses the experts of each token and their weights, in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import OperandError, OperandTypeError
from ...kernels.moe.config import LEAST_SUM, MAX_ROUTED, MAX_TOP, SCORINGS, WARP, RouteArguments, RouteConfig
from ...lazy import Lazily
from ...runtime.backend import Backend, resolve
from ...runtime.kernel import Kernel
from ...target import Target
from ...tensors import check_tensor
from ..arguments import TENSOR, TYPED, Argument
from ..checks import DTYPE_NAMES, check_memory, number, reads
from ..operation import Operation
from ..planned import PlannedCall, allocator
from .maps import ID_DTYPES

PREFERRED = {"topk_ids": torch.int32, "topk_weights": torch.float32}
"""The dtypes of new outputs if the caller asks for none."""


class Routes(NamedTuple):
    """What a router chose: topk_ids and topk_weights, (T, k) each."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device of both tensors."""
        return self.topk_ids.device


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction: torch.Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    ids_dtype: torch.dtype | None = None,
    out: Routes | tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: Backend = "auto",
) -> Routes:
    """The ``top_k`` experts of each token, the largest first, and their weights, as ``moe`` takes them.

    Args:
        logits: (T, E), bfloat16, float16 or float32, contiguous along E, of at most 1024 experts.
        top_k: the number of experts of a token, at most 32.
        scoring: "softmax": weights are exp(logit) over the sum of all experts'; "sigmoid": 1 / (1 + exp(−logit)).
        renormalize: whether a token's weights are divided by their sum. For "softmax" they then are the softmax of the
            chosen logits: softmax before or after the choice makes no difference.
        correction: None, or (E,), float32, added to the sigmoids that choose, and to no weight.
        scale: multiplies the weights.
        dtype: the dtype of the weights, float32 (None), bfloat16 or float16.
        ids_dtype: the dtype of the ids, int32 (None) or int64.
        out: None, or tensors for ids and weights, (T, k), contiguous; their dtypes are used.
        backend: as for ``gemm``.

    The logits themselves choose, or sigmoids in float32 if there is a correction. Among equal ones the expert with the
    lower number comes first; NaN comes before all. Weights are computed in float32 and rounded once. Equal inputs give
    equal bits. One launch runs, with a warp for each token; autograd does not follow it.

    Returns:
        ``topk_ids`` (T, k) and ``topk_weights`` (T, k).

    Raises:
        OperandError, OperandTypeError: tensors or options do not fit, or a tensor requires a gradient.
        TargetError: the backend is unknown, or cannot run tensors of this device.
    """
    out = Routes(*out) if isinstance(out, (tuple, list)) and len(out) == 2 else out
    return ROUTE.call(logits, top_k, scoring, renormalize, correction, scale, dtype, ids_dtype, out, backend)


def _check(r: Any) -> Routes:
    logits = r.logits
    check_tensor("logits", logits, dtypes=DTYPE_NAMES)
    if logits.ndim != 2 or len(logits) < 1 or not 1 <= logits.shape[1] <= MAX_ROUTED:
        expected = f"(T, E) with T ≥ 1 and E up to {MAX_ROUTED}"
        raise OperandError.of("shape of logits", got=tuple(logits.shape), expected=expected)
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise OperandError.of("strides of logits", got=logits.stride(), expected="1 along E")
    if isinstance(r.top_k, bool) or not isinstance(r.top_k, int):
        raise OperandTypeError.of("top_k", got=type(r.top_k).__name__, expected="int")
    most = min(MAX_TOP, logits.shape[1])
    if not 1 <= r.top_k <= most:
        raise OperandError.of("top_k", got=r.top_k, expected=f"1 to {most}")
    if r.scoring not in SCORINGS:
        raise OperandError.of("scoring", got=repr(r.scoring), expected=" or ".join(map(repr, SCORINGS)))
    if not isinstance(r.renormalize, bool):
        raise OperandTypeError.of("renormalize", got=type(r.renormalize).__name__, expected="bool")
    number("scale", r.scale)
    _check_correction(r)
    return _checked_output(r)


def _check_correction(r: Any) -> None:
    """Raises unless the correction fits."""
    bias = r.correction
    if bias is None:
        return
    shapes = [r.logits.shape[1:]]
    check_tensor("correction", bias, dtypes=[torch.float32], shapes=shapes, device=r.logits.device)
    if r.scoring != "sigmoid":
        raise OperandError.of("correction", got=f"one with scoring {r.scoring!r}", expected="scoring 'sigmoid' with it")
    if not bias.is_contiguous():
        raise OperandError.of("strides of correction", got=bias.stride(), expected="1")


def _checked_output(r: Any) -> Routes:
    """The caller's outputs, checked, or new ones."""
    shape, device = (len(r.logits), r.top_k), r.logits.device
    outs = (None, None) if r.out is None else r.out
    if r.out is not None and not isinstance(r.out, Routes):
        raise OperandTypeError.of("out", got=type(r.out).__name__, expected="tensors for ids and weights")
    made = []
    for name, allowed, dtype, x in zip(Routes._fields, (ID_DTYPES, DTYPE_NAMES), (r.ids_dtype, r.dtype), outs):
        if x is not None:
            check_tensor(f"out.{name}", x, shapes=[shape], device=device)
            if not x.is_contiguous():
                raise OperandError.of(f"strides of out.{name}", got=x.stride(), expected="contiguous")
        found = x.dtype if x is not None else dtype or PREFERRED[name]
        if found not in allowed or dtype not in (None, found):
            expected = " or ".join(map(str, allowed)) if dtype in (None, found) else f"{dtype}, as asked for"
            raise OperandTypeError.of(f"dtype of {name}", got=found, expected=expected)
        made.append(torch.empty(shape, dtype=found, device=device) if x is None else x)
    if r.out is not None:
        _check_memory(r)
        return r.out
    return Routes(*made)


def _check_memory(r: Any) -> None:
    """Raises if a part of the output overlaps an input, or the other part."""
    check_memory(reads(r), r.out, *Routes._fields)


def _plan(r: Any, target: Target) -> PlannedCall:
    tokens, experts = r.logits.shape
    ids, weights = r.out
    config = RouteConfig(
        logits=DTYPE_NAMES[r.logits.dtype],
        weights=DTYPE_NAMES[weights.dtype],
        ids=ID_DTYPES[ids.dtype],
        per_lane=-(-experts // WARP),
        scoring=r.scoring,
        renormalized=r.renormalize,
        corrected=r.correction is not None,
        arch=target.arch,
    )
    arguments = RouteArguments(
        logits="logits",
        correction=None if r.correction is None else "correction",
        ids="out.topk_ids",
        weights="out.topk_weights",
        tokens=tokens,
        experts=experts,
        top=r.top_k,
        stride=r.logits.stride(0),
        scale=float(r.scale),
    )
    new_ids, new_weights = (allocator(torch.empty_like(x)) for x in r.out)

    def new(*args: Any) -> Routes:
        return Routes(new_ids(), new_weights())

    return ROUTE.planned(KERNEL, config, target, arguments, r, new_of=new)


def _reference(r: Any) -> Routes:
    """Computes the choice by a stable sort, and the weights in float64."""
    logits = r.logits.detach()
    scores = logits if r.correction is None else logits.float().sigmoid() + r.correction.detach()
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, : r.top_k]
    wide = logits.double()
    weights = (wide.sigmoid() if r.scoring == "sigmoid" else wide.softmax(-1)).gather(1, ids)
    if r.renormalize and r.scoring == "softmax":
        weights = wide.gather(1, ids).softmax(-1)
    elif r.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    out = _checked_output(r)
    out.topk_ids.copy_(ids)
    out.topk_weights.copy_(weights * float(r.scale))
    return out


_OUT = "({}, {})".format(*(TENSOR.key.format(x=f"{{x}}.{name}") for name in Routes._fields))
KERNEL = Kernel("moe_route", RouteArguments, Lazily("kernels.moe.route", "Route"))
ROUTE = Operation(
    route,
    {
        **{"logits": TENSOR, "correction": TENSOR, "top_k": TYPED, "renormalize": TYPED},
        **{"out": Argument(f"(None if {{x}} is None else {_OUT})")},
    },
    check=_check,
    reference=_reference,
    plan=_plan,
    target=lambda request, out: resolve(request.backend, request.logits.device),
    store=None,
    overlaps=_check_memory,
    count="increment_versions(out)",
)

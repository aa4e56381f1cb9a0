"""expert_product: one of the two products of the experts, with prepared weights; its rows are slots."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from ...kernels.gemm.routed_config import RoutedConfig
from ...kernels.gemm.sm90.grouped_arguments import RoutedRows
from ...planning.packed_groups import stays_in_16_bits
from ...prepared_weight import PreparedWeight
from ...reference import times
from ...row_scaled import by_rows
from ...runtime.backend import Backend
from ...target import Target
from ...weight_layout import packed_rows
from ..arguments import ANY_WEIGHT, STATUS, TENSOR
from ..checks import DTYPE_NAMES, exact_alpha
from ..operation import Operation
from ..planned import PlannedCall
from ..prepared_weight.operands import exact_values, natural_dtype
from ..prepared_weight.rows import plan_prepared_rows
from .experts import ActivationFunction
from .maps import ID_DTYPES, Maps, routing_maps


def expert_product(
    a: torch.Tensor,
    b: PreparedWeight,
    offsets: torch.Tensor | None,
    slots: torch.Tensor,
    top: int,
    gathered: bool,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: ActivationFunction | None = None,
    row_weights: torch.Tensor | None = None,
    added: bool = False,
    first: int = 0,
    out: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    config: Any = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """weight · activation(alphaₑ · row · b[e]ᵀ + bias[e]) for the rows of each expert e, (slots, N).

    Rows are in the order of the routing maps, which give ``offsets`` (E + 1) and ``slots``; a token has ``top`` slots.
    Row r is ``a[slots[r] // top]`` if rows are ``gathered``, else ``a[r]``; its weight is ``row_weights`` of its slot,
    or 1. bias: (E, N), or (E, 2 N) for gate and up. activation: of two matrices it makes one. Rows of no slot are not
    written. added: adds rows to those of their tokens in ``out`` (T, N), in any order, and rounds each sum.

    Rows for experts packed for FP8 are rounded to FP8. Only rows so few that they stream are multiplied in 16 bits, and
    so are the weights (``planning.packed_groups.stays_in_16_bits``).

    Without ``offsets``, ``slots`` are the ids of their experts, ``first`` is the id of expert 0, and the kernel sorts
    up to 32 slots itself (``planning.packed_groups.sorts_slots``).
    """
    rows = a, b, offsets, slots, top, gathered, alpha, bias, activation, row_weights, added, first
    return EXPERT_PRODUCT.run(*rows, out, status, config, backend)


def in_16_bits(weight: PreparedWeight, slots: int) -> bool:
    """Whether experts packed for FP8 are multiplied in 16 bits, given so many rows."""
    return stays_in_16_bits(slots, weight.batch, packed_rows(weight.rows, weight.gated), weight.k)


def _check(r: Any) -> torch.Tensor:
    if r.out is not None:
        return r.out
    return torch.empty((len(r.slots), r.b.rows), dtype=natural_dtype(r.a, r.b), device=r.b.device)


def _plan(r: Any, target: Target) -> PlannedCall:
    f, weights = r.activation, r.row_weights
    routed = RoutedConfig(
        gathered=r.gathered,
        biased=r.bias is not None,
        weighted="" if weights is None else DTYPE_NAMES[weights.dtype],
        activation="" if f is None or f.name == "silu" else f.name,
        added=r.added,
        constants=(f.alpha, f.limit) if f is not None and f.name == "clamped_swiglu" else (),
    )
    ids = ID_DTYPES[r.slots.dtype] if r.offsets is None else ""
    names = "row_weights" if routed.weighted else None, "bias" if routed.biased else None
    record = RoutedRows("slots", r.top, *names, r.first if ids else None) if _routes(r) else None
    return plan_prepared_rows(EXPERT_PRODUCT, r, target, "silu" if r.b.gated else "", routed, record, ids)


def _routes(r: Any) -> bool:
    """Whether the kernel needs to know the slots of its rows."""
    return r.gathered or any(x is not None for x in (r.bias, r.activation, r.row_weights))


def _reference(r: Any) -> torch.Tensor:
    """Computes expert by expert in float64. It reads the offsets, so it waits for the device."""
    offsets, of_rows = r.offsets, r.slots
    if offsets is None:
        maps = Maps.of(routing_maps(r.slots, r.b.batch, r.first, backend="reference"), r.b.batch)
        offsets, of_rows = maps.offsets, maps.slots
    edges, out = offsets.tolist(), r.out.double() if r.added else torch.zeros_like(r.out, dtype=torch.float64)
    x, weights = exact_values(r.a, r.b)
    if r.b.row_factor is not None:
        if in_16_bits(r.b, len(r.slots)):
            weights = replace(r.b, global_scale=None, up_global_scale=None).unrounded()
        else:
            x = by_rows(r.a).dequantize(torch.float64)
    for e, (start, end) in enumerate(pairwise(edges)):
        if start == end:
            continue
        slots = of_rows[start:end].long()
        rows, matrices = (
            (x[slots // r.top] if r.gathered else x[start:end]),
            (weights[e] if r.b.gated else [weights[e]]),
        )
        scales = r.b.global_scales
        product = torch.cat(
            [times(rows @ w.mT, exact_alpha(r.alpha, e), scale) for w, scale in zip(matrices, scales)], dim=1
        )
        if r.bias is not None:
            product = product + r.bias[e].double()
        if r.activation is not None:
            product = r.activation(product)
        if r.row_weights is not None:
            product = product * r.row_weights.reshape(-1)[slots, None].double()
        if r.added:
            out.index_add_(0, slots // r.top, product)
        else:
            out[start:end] = product
    return out


EXPERT_PRODUCT = Operation(
    expert_product,
    {
        **{"a": TENSOR, "b": ANY_WEIGHT, "offsets": TENSOR, "slots": TENSOR, "alpha": TENSOR},
        **{"bias": TENSOR, "row_weights": TENSOR, "status": STATUS},
    },
    check=_check,
    reference=_reference,
    plan=_plan,
)

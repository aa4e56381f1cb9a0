"""summed_product: the second product of one token's experts, and the sum of its rows."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.gemm.sm90.arguments import PackedWeight
from ...kernels.moe.summed_config import MOST_WARPS, SummedArguments, SummedConfig, can_sum
from ...lazy import Lazily
from ...planning.summed import tiles_of_warp
from ...prepared_weight import PreparedWeight
from ...runtime.backend import Backend
from ...runtime.kernel import Kernel
from ...target import Target
from ..arguments import ANY_WEIGHT, TENSOR, TYPED
from ..checks import DTYPE_NAMES
from ..operation import Operation
from ..planned import PlannedCall
from ..prepared_weight.operands import factors_of_products
from ..prepared_weight.rows import factors_of_groups
from .maps import ID_DTYPES
from .product import expert_product
from .rows import combined


def summed_product(
    a: torch.Tensor,
    b: PreparedWeight,
    ids: torch.Tensor,
    row_weights: torch.Tensor,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    first: int = 0,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """shared + Σ over the experts of this GPU of weight · (alphaₑ · row · b[e]ᵀ + bias[e]), (1, N), for one token.

    a: (top, K), rows in the order of their experts. ids: (top,), the id of each slot's expert. first: the id of expert
    0. row_weights: (1, top). Sums are in fp32, in a fixed order, and rounded once.
    """
    return SUMMED.run(a, b, ids, row_weights, alpha, bias, shared, first, out, backend)


def _check(r: Any) -> torch.Tensor:
    return r.a.new_empty((1, r.b.rows)) if r.out is None else r.out


def _plan(r: Any, target: Target) -> PlannedCall:
    b, (top, k) = r.b, r.a.shape
    scalar, factors = factors_of_products(r, 1)
    config = SummedConfig(
        dtype=DTYPE_NAMES[r.a.dtype],
        packing=b.packing,
        ids=ID_DTYPES[r.ids.dtype],
        weights=DTYPE_NAMES[r.row_weights.dtype],
        top=top,
        biased=r.bias is not None,
        shared=r.shared is not None,
        factors=len(factors[0]),
        warps=MOST_WARPS,
        tiles=tiles_of_warp(top * b.packed.shape[-2]),
        arch=target.arch,
    )
    arguments = SummedArguments(
        rows="a",
        weight=PackedWeight("b.packed", b.rows, b.packed.shape[-2], b.packed.stride(0)),
        k=k,
        ids="ids",
        weights="row_weights",
        experts=b.batch,
        first=r.first,
        alpha=scalar,
        factors=factors_of_groups(r, factors)[0],
        bias=None if r.bias is None else "bias",
        shared=None if r.shared is None else "shared",
        out="out",
    )
    return SUMMED.planned(KERNEL, config, target, arguments, r)


def _reference(r: Any) -> torch.Tensor:
    """Computes each product and the sum. It reads the ids, so it waits for the device."""
    top = len(r.ids)
    args = None, r.ids, top, False, r.alpha, r.bias, None, r.row_weights
    rows = expert_product(
        r.a, r.b, *args, first=r.first, out=r.a.new_empty((top, r.b.rows)).double(), backend="reference"
    )
    options = r.b.batch, top, r.shared, r.out, "reference", r.first
    return combined(rows, None, None, r.ids, *options)


KERNEL = Kernel("moe_summed", SummedArguments, Lazily("kernels.moe.summed", "Summed"), can_sum)
SUMMED = Operation(
    summed_product,
    {
        **{"a": TENSOR, "b": ANY_WEIGHT, "ids": TENSOR, "row_weights": TENSOR, "alpha": TENSOR, "bias": TENSOR},
        **{"shared": TENSOR, "first": TYPED},
    },
    check=_check,
    reference=_reference,
    plan=_plan,
)

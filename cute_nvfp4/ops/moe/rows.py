"""The small operations on rows of a mixture of experts: gather, activation and combination.

They do not check their tensors: ``moe`` does. Rows are bfloat16 or float16 and start at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.moe.config import (
    ActivationArguments,
    ActivationConfig,
    CombineArguments,
    CombineConfig,
    GatherArguments,
    GatherConfig,
    can_activate,
)
from ...lazy import Lazily
from ...runtime.backend import Backend
from ...runtime.kernel import Kernel
from ...target import Target
from ..arguments import TENSOR
from ..checks import DTYPE_NAMES
from ..operation import Operation
from ..planned import PlannedCall
from .experts import ActivationFunction
from .maps import ID_DTYPES, Maps, routing_maps


def _rows(r: Any, like: torch.Tensor, count: int, columns: int) -> torch.Tensor:
    """The output of a request: the caller's, or new rows with the dtype of ``like``."""
    return like.new_empty((count, columns)) if r.out is None else r.out


def gathered(
    x: torch.Tensor, maps: torch.Tensor, experts: int, top: int, out: torch.Tensor | None, backend: Backend
) -> torch.Tensor:
    """Rows (T · top, H): those of x (T, H) in the order of experts, and zeros after the last."""
    return GATHER.call(x, maps, experts, top, out, backend)


def _plan_gathered(r: Any, target: Target) -> PlannedCall:
    size, stride = r.x.element_size(), r.x.stride(0) if len(r.x) > 1 else r.x.shape[1]
    row = r.x.shape[1] * size
    arguments = GatherArguments("x", "maps", "out", len(r.x) * r.top, r.experts, r.top, row, stride * size)
    return GATHER.planned(GATHER_KERNEL, GatherConfig(target.arch), target, arguments, r)


def _gather_reference(r: Any) -> torch.Tensor:
    maps, out = Maps.of(r.maps, r.experts), torch.zeros_like(r.out)
    last = int(maps.offsets[-1])
    out[:last] = r.x[maps.slots[:last].long() // r.top]
    return out


def activated(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    maps: torch.Tensor,
    experts: int,
    activation: ActivationFunction,
    out: torch.Tensor | None,
    backend: Backend,
) -> torch.Tensor:
    """The activation (rows, I) of a product [gate, up] (rows, 2 I), or of a single matrix (rows, I).

    The bias of each row's expert is added first; all is in fp32 and rounded once. Rows after the last are zeros.
    """
    return ACTIVATE.call(product, bias, maps, experts, activation, out, backend)


def _plan_activated(r: Any, target: Target) -> PlannedCall:
    f, biased = r.activation, r.bias is not None
    config = ActivationConfig(f.name, DTYPE_NAMES[r.product.dtype], biased, f.alpha, f.limit, target.arch)
    slots, inner = r.out.shape
    arguments = ActivationArguments("product", "bias" if biased else None, "maps", "out", slots, r.experts, inner)
    return ACTIVATE.planned(ACTIVATE_KERNEL, config, target, arguments, r)


def _activation_reference(r: Any) -> torch.Tensor:
    maps, out = Maps.of(r.maps, r.experts), torch.zeros_like(r.out)
    last = int(maps.offsets[-1])
    values = r.product[:last].double()
    if r.bias is not None:
        values = values + r.bias[maps.experts[:last].long()].double()
    out[:last] = r.activation(values).to(out.dtype)
    return out


def combined(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    maps: torch.Tensor,
    experts: int,
    top: int,
    shared: torch.Tensor | None,
    out: torch.Tensor | None,
    backend: Backend,
    offset: int | None = None,
) -> torch.Tensor:
    """shared + Σ over the ``top`` slots of each token, in order, of weight · (row + bias of its expert), (T, H).

    rows: (T · top, H). weights: (T, top), or None if rows contain weight and bias already. shared: (T, H), or None.
    Sums are in fp32 and rounded once; slots without a row are left out. offset: None, or the id of expert 0; then
    ``maps`` are the ids of the experts of up to 32 slots, and there is no bias.
    """
    return COMBINE.call(rows, weights, bias, maps, experts, top, shared, out, backend, offset)


def _plan_combined(r: Any, target: Target) -> PlannedCall:
    tokens, hidden, biased = len(r.out), r.rows.shape[1], r.bias is not None
    names = ("" if x is None else DTYPE_NAMES[x.dtype] for x in (r.rows, r.weights, r.out))
    stride = (r.out.stride(0) if tokens > 1 else hidden) * r.out.element_size()
    arguments = CombineArguments(
        rows="rows",
        weights=None if r.weights is None else "weights",
        bias="bias" if biased else None,
        shared=None if r.shared is None else "shared",
        maps="maps",
        out="out",
        tokens=tokens,
        experts=r.experts,
        hidden=hidden,
        stride=stride,
        shared_stride=None if r.shared is None else r.shared.stride(0) * r.shared.element_size(),
        first=r.offset,
    )
    ids = "" if r.offset is None else ID_DTYPES[r.maps.dtype]
    config = CombineConfig(*names, biased, r.top, r.shared is not None, target.arch, ids)
    return COMBINE.planned(COMBINE_KERNEL, config, target, arguments, r)


def _combine_reference(r: Any) -> torch.Tensor:
    whole = r.maps if r.offset is None else routing_maps(r.maps, r.experts, r.offset, backend="reference")
    maps = Maps.of(whole, r.experts)
    row = maps.rows.view(-1, r.top).long()
    here = row >= 0
    row = row.clamp(min=0)
    values = r.rows[row].double()
    if r.bias is not None:
        expert = torch.where(here, maps.experts[row].long(), 0)
        values = values + r.bias[expert].double()
    # the values of slots without a row may be anything
    weights = 1.0 if r.weights is None else r.weights.double()[..., None]
    sums = torch.where(here[..., None], values * weights, 0.0).sum(1)
    return sums if r.shared is None else sums + r.shared.double()


GATHER_KERNEL = Kernel("moe_gather", GatherArguments, Lazily("kernels.moe.rows", "Gather"))
ACTIVATE_KERNEL = Kernel("moe_activation", ActivationArguments, Lazily("kernels.moe.rows", "Activation"), can_activate)
COMBINE_KERNEL = Kernel("moe_combine", CombineArguments, Lazily("kernels.moe.rows", "Combine"))
GATHER = Operation(
    gathered,
    {"x": TENSOR, "maps": TENSOR},
    check=lambda r: _rows(r, r.x, len(r.x) * r.top, r.x.shape[1]),
    reference=_gather_reference,
    plan=_plan_gathered,
)
ACTIVATE = Operation(
    activated,
    {"product": TENSOR, "bias": TENSOR, "maps": TENSOR},
    check=lambda r: _rows(r, r.product, len(r.product), r.product.shape[1] // r.activation.halves),
    reference=_activation_reference,
    plan=_plan_activated,
)
COMBINE = Operation(
    combined,
    {"rows": TENSOR, "weights": TENSOR, "bias": TENSOR, "maps": TENSOR, "shared": TENSOR},
    check=lambda r: _rows(r, r.rows, len(r.rows) // r.top, r.rows.shape[1]),
    reference=_combine_reference,
    plan=_plan_combined,
)

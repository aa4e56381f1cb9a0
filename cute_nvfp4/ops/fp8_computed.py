"""``rmsnorm_quantize`` and ``silu_mul_quantize`` of rows in FP8: E4M3 with a float32 scale for each row, one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import OperandError
from ..kernels.quantize.fp8_config import (
    Fp8ComputedArguments,
    Fp8ComputedConfig,
    Fp8RowsArguments,
    OtherRows,
    can_implement,
    rows_config,
)
from ..lazy import Lazily
from ..reference import silu_mul_reference
from ..row_scaled import FP8, RowScaledTensor, by_rows
from ..runtime.backend import Backend
from ..runtime.kernel import Kernel
from ..target import Target
from ..tensors import check_tensor
from .arguments import TYPED, Argument
from .checks import DTYPE_NAMES, check_memory, check_overlap
from .fused import same
from .operation import quantizing
from .planned import PlannedCall, allocator
from .quantize_request import MATRIX
from .quantize_rows import check_rows, quantize_rows, rows_of, stored

Result = tuple[RowScaledTensor, "torch.Tensor | None"]


def computed_rows(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor | None,
    source: str,
    eps: float,
    out: RowScaledTensor | None,
    residual_out: torch.Tensor | None,
    backend: Backend,
) -> Result:
    """silu(x) · other (source "silu_mul"), or rmsnorm(x + other) · weight ("rmsnorm"), quantized by rows; and the new
    residual, if there was one. All (M, K), bfloat16 or float16, weight (K,) of the same dtype."""
    if is_dynamo_compiling():
        values, new = computed(x, other, weight, source, eps)
        return quantize_rows(values, None, backend), new
    return COMPUTED_ROWS.call(x, other, weight, source, eps, out, residual_out, backend)


def refuse_options(global_scale: Any, rule: str, scale_layout: str, returned: bool) -> None:
    """Raises for what rows in FP8 do not have."""
    if (global_scale, rule, scale_layout, returned) != (None, "max", "blocked", False):
        got = f"global_scale={global_scale!r}, rule={rule!r}, scale_layout={scale_layout!r}, values wanted {returned}"
        raise OperandError.of(f"options for {FP8}", got=got, expected="global_scale=None, and no other option")


def computed(
    x: torch.Tensor, other: torch.Tensor | None, weight: torch.Tensor | None, source: str, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values in float64, rounded once to the dtype of x; and x + other, where rows are normed."""
    if source == "silu_mul":
        return silu_mul_reference(x, other), None
    rows = x if other is None else x + other
    wide = rows.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.double()).to(x.dtype), None if other is None else rows


def _check(r: Any) -> RowScaledTensor | None:
    check_tensor("x", r.x)
    like = {"dtypes": [r.x.dtype], "device": r.x.device}
    other = "up" if r.source == "silu_mul" else "residual"
    for name, x in (("x", r.x), (other, r.other), ("new residual", r.residual_out)):
        if x is not None:
            check_tensor(name, x, shapes=[r.x.shape], **like)
            check_rows(x)
    weight = r.weight
    if weight is not None:
        check_tensor(f"weight for {FP8}", weight, shapes=[r.x.shape[1:]], **like)
        if not weight.is_contiguous() or weight.data_ptr() % 16:
            got = f"address {weight.data_ptr():#x}, stride {weight.stride(0)}"
            raise OperandError.of(f"weight for {FP8}", got=got, expected="contiguous, at a multiple of 16 bytes")
    if r.residual_out is not None and r.other is None:
        raise OperandError.of("residual_out", got="one, without a residual", expected="None")
    return r.out


def _plan(r: Any, target: Target) -> PlannedCall:
    rows, k = r.x.shape
    like, made = rows_of(r.x)
    norm, item = r.source == "rmsnorm", r.x.element_size()
    residual = norm and r.other is not None
    more = {"source": r.source, "residual": residual, "weighted": r.weight is not None}
    config = Fp8ComputedConfig(**vars(rows_config(DTYPE_NAMES[r.x.dtype], k, target.arch)), **more)
    dense = torch.empty(r.x.shape, dtype=r.x.dtype, device=r.x.device)
    new = dense if r.residual_out is None else r.residual_out
    other = None if r.other is None else OtherRows("other", r.other.stride(0) * item)
    arguments = Fp8ComputedArguments(
        rows=Fp8RowsArguments("x", "out.data", "out.scale", rows, k, r.x.stride(0) * item),
        up=None if norm else other,
        residual=other if residual else None,
        residual_out=OtherRows("residual_out", new.stride(0) * item) if residual else None,
        weight=None if r.weight is None else "weight",
        eps=r.eps if norm else None,
        inverse_k=1.0 / k if norm else None,
    )
    options: dict[str, Any] = {"new": {"residual_out": allocator(dense)}} if residual else {}
    options |= {"new_of": made, "result": "(out, residual_out)"}
    given = r._replace(out=like if r.out is None else r.out)
    return COMPUTED_ROWS.planned(KERNEL, config, target, arguments, given, **options)


def _reference(r: Any) -> Result:
    given = (None if x is None else x.detach() for x in (r.x, r.other, r.weight))
    values, new = computed(*given, r.source, r.eps)
    return stored(by_rows(values), r.out), new if r.residual_out is None else r.residual_out.copy_(new)


def _check_memory(r: Any) -> None:
    """Raises if a part of the output overlaps what is read, or the other part; the new residual may be x or the old."""
    read = {"x": r.x, "other": r.other, "weight": r.weight}
    if r.residual_out is not None:
        # a thread reads its elements before it writes them
        check_overlap({name: None if same(x, r.residual_out) else x for name, x in read.items()}, r.residual_out)
    if r.out is not None:
        check_memory(read | {"residual_out": r.residual_out}, r.out)


KERNEL = Kernel(
    "quantize_fp8_computed", Fp8ComputedArguments, Lazily("kernels.quantize.fp8_computed", "Fp8Computed"), can_implement
)
COMPUTED_ROWS = quantizing(
    computed_rows,
    {
        **{"x": MATRIX, "eps": TYPED, **dict.fromkeys(("other", "weight", "residual_out"), MATRIX.or_none())},
        "out": Argument("(None if {x} is None else {x}.key)"),
    },
    check=_check,
    reference=_reference,
    plan=_plan,
    overlaps=_check_memory,
    outs=("out", "residual_out"),
    count="(out and increment_versions((out.data, out.scale)), "
    "None if residual_out is None else increment_versions((residual_out,)))",
)

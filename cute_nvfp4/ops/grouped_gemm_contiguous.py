"""grouped_gemm_contiguous: multiplies the rows of each group by its matrix of a stack, block-scaled or prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..grouped_rows import GroupedRows, clamped, wrong_offset
from ..kernels.gemm.arguments import GroupedArguments, GroupFactor, GroupOffsets, Output
from ..operand import BlockScaledTensor
from ..planning.gemm_problem import Plan
from ..planning.grouped import GroupedProblem
from ..prepared_weight import PreparedWeight
from ..reference import gemm_reference
from ..row_scaled import RowScaledTensor, by_rows
from ..runtime.backend import Backend
from ..scale_layout import ATOM_ROWS
from ..target import Target
from .arguments import ACTIVATIONS, ANY_WEIGHT, STATUS, TENSOR
from .checks import (
    DTYPE_NAMES,
    check_alpha,
    check_format,
    check_formats,
    checked_output,
    exact_alpha,
    factors_of,
    reads,
    refuse_gate,
)
from .gemm_launch import check_operands, check_signs_of
from .grouped_launch import KERNEL, aligned, group_record, planned_groups
from .groups import check_rows_contiguous, checked_status, status_of, store_rows
from .operation import Operation
from .planned import PlannedCall
from .prepared_weight.operands import exact_product, exact_values, natural_dtype
from .prepared_weight.pack_then_multiply import packed_first
from .prepared_weight.plain import can_read_stack, plan_stack
from .prepared_weight.rows import check_prepared_rows, offsets_of, plan_prepared_rows


def grouped_gemm_contiguous(
    a: GroupedRows | RowScaledTensor | torch.Tensor,
    b: BlockScaledTensor | PreparedWeight,
    *,
    offsets: Sequence[int] | torch.Tensor | None = None,
    gate: str = "",
    alpha: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    status: torch.Tensor | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Multiplies the rows of group e of A by matrix e of a stack B: C[r] = alphaₑ · A[r] · B[e]ᵀ, (T, N).

    Args:
        a: rows (T, K) of E groups, with offsets; b: (E, N, K); formats as in ``gemm``. A group may have no rows. Or b
            is a ``PreparedWeight`` (E, N, K), and a (T, K) has its dtype, or is NVFP4; for float8_e4m3fn a is a
            ``RowScaledTensor``, or has 16-bit rows, which the same call quantizes.
        offsets: the groups' offsets, as in ``GroupedRows``, if a has none of its own.
        gate: for a prepared weight of gate and up: the result is gate(A · gateᵀ) ∘ (A · upᵀ), as in ``gated_gemm``.
        alpha: a number, or a float32 tensor on the operands' device of one element, or of one for each group.
        out, out_dtype, config, backend: as in ``grouped_gemm``. Rows of no group are not written.
        status: (1,) int32 on the device. The kernel writes 0; or i + 1 if offsets[i] is the first offset that is
            negative, less than the one before it, or more than T; or -1 if ``a.scale`` has fewer atoms than the groups
            need. The kernel replaces each offset by the largest so far, within 0 … T, and reads missing scales as
            zeros, so it never touches memory out of bounds.

    The host never reads the offsets and never waits. The plan assumes that groups have equally many rows.

    Raises:
        OperandError, OperandTypeError: as ``gemm``.
    """
    if isinstance(b, PreparedWeight):
        offsets = offsets_of(a, offsets)
    return CONTIGUOUS.call(a, b, offsets, gate, alpha, out, out_dtype, status, config, backend)


def _check(r: Any) -> torch.Tensor:
    b = r.b
    if isinstance(b, PreparedWeight):
        rows, default = check_prepared_rows(r), natural_dtype(r.a, b)
    else:
        rows, default = _check_block_scaled(r), torch.float16
    check_alpha(r.alpha, b.device, b.batch)
    dtype = default if r.out is None and r.out_dtype is None else r.out_dtype
    out = checked_output(reads(r), b.device, (rows, b.rows), r.out, dtype)
    check_rows_contiguous("out", out)
    checked_status(r.status, b.device)
    return out


def _check_block_scaled(r: Any) -> int:
    """The rows of a; raises unless the operands can be multiplied."""
    a, b = r.a, r.b
    refuse_gate(r.gate)
    if r.offsets is not None:
        raise OperandError.of("offsets", got=type(r.offsets).__name__, expected="None: GroupedRows have their own")
    if not isinstance(a, GroupedRows) or not isinstance(b, BlockScaledTensor):
        got = f"{type(a).__name__} and {type(b).__name__}"
        raise OperandTypeError.of("a and b", got=got, expected="GroupedRows and BlockScaledTensor")
    same = {
        "K of a and b": (a.k, b.k),
        "groups of a and matrices of b": (a.groups, b.batch),
        "device of a and b": (a.device, b.device),
    }
    for what, (left, right) in same.items():
        if left != right:
            raise OperandError.of(what, got=f"{left} and {right}", expected="the same")
    for name, operand in (("a", a), ("b", b)):
        check_format(name, operand)
    check_formats("a", a, "b", b)
    return a.rows


def _pack_then_multiply(dtype: torch.dtype, a: GroupedRows, b: BlockScaledTensor, *args: Any) -> torch.Tensor:
    """The planned call on sm_90a for a stack that each call packs. dtype: that of a new result."""
    _, gate, alpha, out, _, status, config, backend = args
    options = out, dtype if out is None else None, status, config, backend
    return CONTIGUOUS(a, packed_first(b, backend), a.offsets, gate, alpha, *options)


def _plan(r: Any, target: Target) -> PlannedCall | Callable[..., torch.Tensor]:
    if isinstance(r.b, PreparedWeight):
        return plan_prepared_rows(CONTIGUOUS, r, target, r.gate)
    if target.arch.generation == "sm90" and can_read_stack(r.a, r.b):
        return plan_stack(CONTIGUOUS, r, target)
    if target.arch.generation == "sm90":
        return functools.partial(_pack_then_multiply, r.out.dtype)
    a, b, out = r.a, r.b, r.out
    check_operands({"a": a, "b": b}, target.backend)
    scalar, factors = factors_of(r, "a", "b")
    problem = GroupedProblem(
        sizes=((a.rows, b.rows, a.k),),
        a_format=a.format.name,
        b_format=b.format.name,
        out=DTYPE_NAMES[out.dtype],
        vector=aligned(out),
        factors=len(factors),
        stack=b.batch,
    )
    plan = planned_groups(problem, target, a.device, r.config)
    group = group_record(plan, a, b, out, ("a", "b"))
    # alpha may have one factor for each group; a global scale is one for all
    strides = [int(f == "alpha" and r.alpha.numel() > 1) for f in factors]
    arguments = GroupedArguments(
        groups=GroupOffsets("a.offsets", a.groups, a.rows, a.atoms, "status"),
        a=group.a,
        b=group.b,
        k=group.k,
        out=Output("out", group.stride, None, None, None),
        alpha=scalar,
        factors=tuple(map(GroupFactor, factors, strides)),
        batch=b.batch,
        workers=plan.workers,
    )
    before = check_signs_of if target.backend == "sim" else None
    return CONTIGUOUS.planned(KERNEL, plan.config, target, arguments, r, new=status_of(b.device), before=before)


def _reference(r: Any) -> tuple[Sequence[int], torch.Tensor]:
    """Computes group by group in float64. It reads the offsets, so it waits for the device."""
    a, b, out = r.a, r.b, torch.empty_like(r.out)
    offsets = a.offsets if r.offsets is None else r.offsets
    prepared = isinstance(b, PreparedWeight)
    edges = clamped(offsets, len(out)).tolist()
    if prepared:
        if b.row_factor is not None:
            a = (by_rows(a) if isinstance(a, torch.Tensor) else a).dequantize(torch.float64)
        x, weights = exact_values(a, b)
    else:
        scales = b.rowmajor_scale()
    atom = 0
    for e, (start, end) in enumerate(pairwise(edges)):
        alpha = exact_alpha(r.alpha, e)
        if prepared:
            out[start:end] = exact_product(a, b, alpha, r.gate, (x[start:end], weights[e])).to(out.dtype)
        elif end > start:
            weight = BlockScaledTensor(b.data[e] if b.is_batched else b.data, scales[e], b.global_scale, b.format)
            rows = a.matrix(start, end, atom)
            out[start:end] = gemm_reference(rows, weight, alpha=alpha, out_dtype=out.dtype)
        atom += -(-(end - start) // ATOM_ROWS)
    wrong = wrong_offset(offsets.tolist(), len(out))
    if not prepared and atom > a.atoms:
        wrong = wrong or -1
    checked_status(r.status, b.device).fill_(wrong)
    return edges, out


CONTIGUOUS = Operation(
    grouped_gemm_contiguous,
    {"a": ACTIVATIONS, "b": ANY_WEIGHT, "offsets": TENSOR, "alpha": TENSOR, "status": STATUS},
    check=_check,
    reference=_reference,
    plan=_plan,
    store=store_rows,
)

"""grouped_gemm_contiguous with a stack of prepared weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...kernels.gemm.arguments import GroupFactor
from ...kernels.gemm.sm90.arguments import Activations, PackedWeight, Result
from ...kernels.gemm.sm90.grouped_arguments import GroupedWgmmaArguments, PackedGroup, RowsOfGroups
from ...kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig, can_implement_groups
from ...operand import BlockScaledTensor, row_alignment
from ...planning.packed import PackedPlan
from ...planning.packed_groups import PackedGroups, choose_groups
from ...prepared_weight import PreparedWeight
from ...reference import GATES
from ...runtime.backend import Backend, sm_count
from ...runtime.kernel import Kernel
from ...target import Target
from ..arguments import ACTIVATIONS, STATUS, TENSOR, WEIGHT
from ..checks import DTYPE_NAMES, checked_output, reads, split_alpha
from ..grouped_rows import GroupedRows, checked_offsets, checked_status, clamped, status_of, wrong_offset
from ..groups import alpha_of_group, store_rows
from ..operation import Operation
from ..planned import PlannedCall
from .operands import check_decodable, check_products, check_x, decoded, factors_of_products, row_stride

Rows = torch.Tensor | GroupedRows


def prepared_rows(
    a: Rows,
    b: PreparedWeight,
    offsets: torch.Tensor,
    alpha: float | torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    status: torch.Tensor | None,
    config: PackedPlan | None,
    backend: Backend,
    gate: str = "",
) -> torch.Tensor:
    """``grouped_gemm_contiguous`` of a stack of prepared weights. offsets: those of ``offsets_of``."""
    return PREPARED_ROWS(a, b, offsets, alpha, out, out_dtype, status, config, backend, gate)


def offsets_of(a: Rows, offsets: Sequence[int] | torch.Tensor | None) -> torch.Tensor:
    """The offsets of the groups, which ``GroupedRows`` have themselves, on their device."""
    if isinstance(a, GroupedRows):
        if offsets is not None:
            raise OperandError.of("offsets", got=type(offsets).__name__, expected="None: GroupedRows have their own")
        return a.offsets
    if not isinstance(a, torch.Tensor):
        raise OperandTypeError.of("a", got=type(a).__name__, expected="torch.Tensor or GroupedRows")
    if offsets is None:
        raise OperandError.of("offsets", got="None", expected="E + 1 numbers of rows, for a of numbers")
    return checked_offsets(offsets, a)


def _check(r: Any) -> torch.Tensor:
    a, b = r.a, r.b
    check_products(b, r.gate)
    floats = a
    if isinstance(a, GroupedRows):
        check_decodable(a, b)
        floats = torch.empty((a.rows, a.k), dtype=b.dtype, device=a.device)
    rows = check_x(floats, b, stack=True)
    groups = r.offsets.shape[0] - 1
    if groups != b.batch:
        raise OperandError.of("groups of a and matrices of b", got=f"{groups} and {b.batch}", expected="the same")
    split_alpha(r.alpha, b.device, groups)
    dtype = b.dtype if r.out is None and r.out_dtype is None else r.out_dtype
    out = checked_output(reads(r), b.device, (rows, b.rows), r.out, dtype)
    if b.rows > 1 and out.stride(1) != 1:
        raise OperandError.of("stride of out along N", got=out.stride(1), expected="1")
    checked_status(r.status, b.device)
    return out


def _plan(r: Any, target: Target) -> PlannedCall:
    a, b, out = r.a, r.b, r.out
    floats = isinstance(a, torch.Tensor)
    scalar, factors = factors_of_products(r, len(b.global_scales))
    problem = PackedGroups(
        sizes=((out.shape[0], b.rows, b.k),),
        stack=b.batch,
        dtype=DTYPE_NAMES[b.dtype],
        out=DTYPE_NAMES[out.dtype],
        vector=row_alignment(out, 16) >= 16,
        factors=len(factors[0]),
        gate=r.gate,
        packing=b.packing,
    )
    plan = choose_groups(problem, target.arch, sm_count(target, b.device), r.config)
    rows, k_tiles = out.shape[0], b.packed.shape[-2]

    def of_group(path: str) -> GroupFactor:
        return GroupFactor(path, int(path == "alpha" and r.alpha.numel() > 1))

    arguments = GroupedWgmmaArguments(
        groups=RowsOfGroups("offsets", b.batch, "status"),
        one=PackedGroup(
            PackedWeight("b.packed", b.rows, k_tiles, b.packed.stride(0)),
            Activations("a" if floats else "decoded", rows, row_stride(a.stride(0) if floats else b.k, rows, b.k), 0),
            Result("out", out.stride(0), 0),
            b.k,
        ),
        alpha=scalar,
        factors=tuple(tuple(map(of_group, some)) for some in factors),
        workers=plan.workers,
    )
    extra, dtype, backend = None, b.dtype, target.backend
    if not floats:
        like = torch.empty((rows, b.k), dtype=dtype, device="meta")
        extra = "decoded", lambda given, kept: decoded(given[0], dtype, backend), like
    return PREPARED_ROWS.planned(KERNEL, plan.config, target, arguments, r, new=status_of(b.device), extra=extra)


def _reference(r: Any) -> tuple[Sequence[int], torch.Tensor]:
    """Group by group in float64. Reads the offsets, so it waits for the device."""
    a, out, weights = r.a, torch.empty_like(r.out), r.b.dequantize(torch.float64)
    if isinstance(a, torch.Tensor):
        x = a.double()
    else:
        x = BlockScaledTensor(a.data, a.rowmajor_scale(), a.global_scale, a.format).dequantize(torch.float64)
    edges = clamped(r.offsets, len(x)).tolist()
    for e, (start, end) in enumerate(pairwise(edges)):
        exact = x[start:end] @ weights[e].mT * alpha_of_group(r.alpha, e)
        out[start:end] = (GATES[r.gate](exact[0]) * exact[1] if r.gate else exact).to(out.dtype)
    checked_status(r.status, r.b.device).fill_(wrong_offset(r.offsets.tolist(), len(x)))
    return edges, out


def _host(config: GroupedWgmmaConfig) -> Callable[..., Any]:
    if config.arch.generation == "sm120":
        from ...kernels.gemm.sm120.packed import GroupedPackedGemm

        return GroupedPackedGemm(config)
    from ...kernels.gemm.sm90.grouped import GroupedWgmma

    return GroupedWgmma(config)


KERNEL = Kernel("grouped_wgmma", GroupedWgmmaArguments, _host, can_implement_groups)
compile_grouped_wgmma = KERNEL.compile
PREPARED_ROWS = Operation(
    prepared_rows,
    {"a": ACTIVATIONS, "b": WEIGHT, "offsets": TENSOR, "alpha": TENSOR, "status": STATUS},
    check=_check,
    reference=_reference,
    plan=_plan,
    store=store_rows,
)

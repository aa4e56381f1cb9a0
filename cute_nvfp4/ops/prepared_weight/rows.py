"""grouped_gemm_contiguous with a stack of prepared weights: what is checked, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...grouped_rows import GroupedRows, checked_offsets
from ...kernels.gemm.arguments import GroupFactor, PartialSums
from ...kernels.gemm.packed.grouped_stream_config import GroupedStreamArguments
from ...kernels.gemm.packed.grouped_stream_config import can_implement_groups as can_stream_groups
from ...kernels.gemm.sm90.arguments import Activations, OutputRows, PackedWeight
from ...kernels.gemm.sm90.grouped_arguments import GroupedWgmmaArguments, PackedGroup, RoutedRows, RowsOfGroups
from ...kernels.gemm.sm90.grouped_config import can_implement_groups
from ...lazy import ByGeneration, Lazily
from ...operand import row_alignment
from ...planning.packed_groups import PackedGroups, RoutedGroups, choose_groups
from ...row_scaled import RowScaledTensor
from ...runtime.backend import sm_count
from ...runtime.kernel import Kernel
from ...target import Target
from ..checks import DTYPE_NAMES
from ..groups import status_of
from ..operation import Operation
from ..planned import PlannedCall
from ..scratch import scratch_for
from .activations import XRows
from .operands import MMA_DTYPES, check_decodable, check_products, check_x, decoded, factors_of_products

Rows = torch.Tensor | GroupedRows | RowScaledTensor


def offsets_of(a: Rows, offsets: Sequence[int] | torch.Tensor | None) -> torch.Tensor:
    """The offsets of the groups, which ``GroupedRows`` have themselves, on their device."""
    if isinstance(a, GroupedRows):
        if offsets is not None:
            raise OperandError.of("offsets", got=type(offsets).__name__, expected="None: GroupedRows have their own")
        return a.offsets
    if not isinstance(a, (torch.Tensor, RowScaledTensor)):
        expected = "torch.Tensor, GroupedRows or RowScaledTensor"
        raise OperandTypeError.of("a", got=type(a).__name__, expected=expected)
    if offsets is None:
        raise OperandError.of("offsets", got="None", expected="E + 1 numbers of rows, for a that has none")
    return checked_offsets(offsets, a if isinstance(a, torch.Tensor) else a.data)


def check_prepared_rows(r: Any) -> int:
    """Raises unless the rows of a request can be multiplied with its stack of weights; their number."""
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
    return rows


def plan_prepared_rows(
    operation: Operation,
    r: Any,
    target: Target,
    gate: str,
    routed: RoutedGroups | None = None,
    slots: RoutedRows | None = None,
    ids: str = "",
) -> PlannedCall:
    """The planned call of a request. routed, slots: where rows are slots of a mixture of experts. ids: as in
    ``PackedGroups``."""
    a, b, out = r.a, r.b, r.out
    scalar, factors = factors_of_products(r, len(b.global_scales))
    rows = out.shape[0] if slots is None else len(r.slots)
    # rows of experts are not quantized where they stream
    in_fp8 = routed is not None and b.row_factor is not None and isinstance(a, torch.Tensor)
    floats = DTYPE_NAMES[a.dtype] if in_fp8 else ""
    problem = PackedGroups(
        sizes=((rows, b.rows, b.k),),
        stack=b.batch,
        dtype=MMA_DTYPES[b.dtype],
        out=DTYPE_NAMES[out.dtype],
        vector=row_alignment(out, 16) >= 16,
        factors=len(factors[0]),
        gate=gate,
        packing=b.packing,
        routed=routed,
        promoted=b.promoted,
        decoded=isinstance(a, GroupedRows),
        ids=ids,
        floats=floats,
    )
    plan = choose_groups(problem, target.arch, sm_count(target, b.device), r.config)
    x = XRows.in_16_bits(a, b) if floats and plan.streams else XRows.of(a, b, target.arch)

    def of_group(path: str) -> GroupFactor:
        return GroupFactor(path, int(path == "alpha" and r.alpha.numel() > 1))

    groups = RowsOfGroups(None if problem.ids else "offsets", b.batch, "status")
    one = PackedGroup(
        PackedWeight("b.packed", b.rows, b.packed.shape[-2], b.packed.stride(0)),
        Activations(x.data, rows, x.stride, 0),
        x.scales,
        OutputRows("out", out.stride(0), 0),
        b.k,
    )
    of_groups = tuple(tuple(map(of_group, some)) for some in factors)
    if plan.streams:
        sums = PartialSums("scratch.sums", "scratch.flags")
        streamed = GroupedStreamArguments(groups, one, slots, scalar, of_groups, sums, plan.workers)
        options = {"new": status_of(b.device), "extra": scratch_for(plan.scratch(b.rows), target, b.device)}
        return operation.planned(STREAM_GROUPS, plan.config, target, streamed, r, **options)
    arguments = GroupedWgmmaArguments(groups, one, slots, x.floats, scalar, of_groups, plan.workers)
    extra, dtype, backend = None, b.dtype, target.backend
    if x.places:
        extra = scratch_for((0, 0), target, b.device, **x.places)
    elif isinstance(a, GroupedRows):
        like = torch.empty((rows, b.k), dtype=dtype, device="meta")
        extra = "decoded", lambda given, kept: decoded(given[0], dtype, backend), like
    kernel, first = KERNEL if routed is None else ROUTED, x.first
    if first is not None:
        # the launch before makes the routing maps; or the rows, of experts
        first = replace(first, early=routed is not None, resident=routed is None)
    config = replace(plan.config, first=first)
    return operation.planned(kernel, config, target, arguments, r, extra=extra, new=status_of(b.device))


_GROUPS = ByGeneration(
    sm90=Lazily("kernels.gemm.sm90.grouped", "GroupedWgmma"),
    sm100=Lazily("kernels.gemm.sm100.packed", "GroupedTensorPackedGemm"),
    sm120=Lazily("kernels.gemm.sm120.packed", "GroupedPackedGemm"),
)
_ROUTED = ByGeneration(
    sm90=Lazily("kernels.gemm.sm90.routed", "RoutedWgmma"),
    sm100=Lazily("kernels.gemm.sm100.packed", "RoutedTensorPackedGemm"),
    sm120=Lazily("kernels.gemm.sm120.packed", "RoutedPackedGemm"),
)
KERNEL = Kernel("grouped_wgmma", GroupedWgmmaArguments, _GROUPS, can_implement_groups)
ROUTED = Kernel("moe_product", GroupedWgmmaArguments, _ROUTED, can_implement_groups)
_STREAM = Lazily("kernels.gemm.packed.grouped_stream", "GroupedStream")
STREAM_GROUPS = Kernel("stream_groups", GroupedStreamArguments, _STREAM, can_stream_groups)

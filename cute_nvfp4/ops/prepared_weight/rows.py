"""grouped_gemm_contiguous with a stack of prepared weights: the checks, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...grouped_rows import GroupedRows, checked_offsets
from ...kernels.gemm.arguments import GroupFactor
from ...kernels.gemm.packed.grouped_stream_config import GroupedStreamArguments
from ...kernels.gemm.packed.grouped_stream_config import can_implement_groups as can_stream_groups
from ...kernels.gemm.routed_config import RoutedConfig
from ...kernels.gemm.sm90.arguments import Activations, OutputRows, PackedWeight, RowWeight
from ...kernels.gemm.sm90.grouped_arguments import GroupedWgmmaArguments, PackedGroup, RoutedRows, RowsOfGroups
from ...kernels.gemm.sm90.grouped_config import can_implement_groups
from ...lazy import ByGeneration, Lazily
from ...planning.packed import PackedPlan
from ...planning.packed_groups import PackedGroups, choose_groups
from ...row_scaled import RowScaledTensor
from ...runtime.backend import sm_count
from ...runtime.kernel import Kernel
from ...target import Target
from ..checks import DTYPE_NAMES
from ..groups import status_of
from ..operation import Operation
from ..planned import PlannedCall
from ..scratch import partial_sums, scratch_for
from .operands import XRows, check_decodable, check_products, check_x, factors_of_products, of_problem

Rows = torch.Tensor | GroupedRows | RowScaledTensor


def offsets_of(a: Rows, offsets: Sequence[int] | torch.Tensor | None) -> torch.Tensor:
    """The offsets of the groups, on the device of a; ``GroupedRows`` have their own."""
    if isinstance(a, GroupedRows):
        if offsets is not None:
            raise OperandError.of("offsets", got=type(offsets).__name__, expected="None: GroupedRows have their own")
        return a.offsets
    if not isinstance(a, (torch.Tensor, RowScaledTensor)):
        expected = "torch.Tensor, GroupedRows or RowScaledTensor"
        raise OperandTypeError.of("a", got=type(a).__name__, expected=expected)
    if offsets is None:
        raise OperandError.of("offsets", got="None", expected="E + 1 row numbers, because a has no offsets")
    return checked_offsets(offsets, a if isinstance(a, torch.Tensor) else a.data)


def check_prepared_rows(r: Any) -> int:
    """The number of rows; raises unless they can be multiplied with the stack of weights."""
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
    routed: RoutedConfig | None = None,
    slots: RoutedRows | None = None,
    ids: str = "",
) -> PlannedCall:
    """The planned call of a request.

    routed: given if rows are slots of a mixture of experts. slots: given if the kernel must know which slots. ids: as
    in ``PackedGroups``.
    """
    a, b, out = r.a, r.b, r.out
    scalar, factors = factors_of_products(r, len(b.global_scales))
    rows = out.shape[0] if slots is None else len(r.slots)
    # the streaming kernel reads rows of experts in 16 bits
    in_fp8 = routed is not None and b.row_factor is not None and isinstance(a, torch.Tensor)
    floats = DTYPE_NAMES[a.dtype] if in_fp8 else ""
    problem = PackedGroups(
        sizes=((rows, b.rows, b.k),),
        stack=b.batch,
        gate=gate,
        routed=routed,
        decoded=isinstance(a, GroupedRows),
        ids=ids,
        floats=floats,
        **of_problem(b, out, factors[0]),
    )
    plan = choose_groups(problem, target.arch, sm_count(target, b.device), r.config)
    x = XRows.in_16_bits(a, b) if floats and plan.streams else XRows.of(a, b, target)
    atoms = a.atoms if isinstance(a, GroupedRows) else None
    groups = RowsOfGroups(None if problem.ids else "offsets", b.batch, "status", atoms)
    weight = PackedWeight("b.packed", b.rows, b.packed.shape[-2], b.packed.stride(0))
    one, of_groups = one_of_rows(r, weight, x, rows), factors_of_groups(r, factors)
    if plan.streams:
        size = plan.scratch(b.rows)
        streamed = GroupedStreamArguments(groups, one, slots, scalar, of_groups, partial_sums(size), plan.workers)
        options = {"new": status_of(b.device), "extra": scratch_for(size, target, b.device)}
        return operation.planned(STREAM_GROUPS, plan.config, target, streamed, r, **options)
    arguments = GroupedWgmmaArguments(groups, one, slots, x.floats, scalar, of_groups, plan.workers)
    kernel = KERNEL if slots is None else ROUTED
    if slots is not None and x.first is not None:
        # the launch before this one makes the routing maps
        x = x._replace(first=replace(x.first, early=True))
    return rows_call(operation, kernel, r, target, plan, arguments, x)


def one_of_rows(r: Any, weight: PackedWeight | RowWeight, x: XRows, rows: int) -> PackedGroup:
    """The record of all rows of a request, as one group; each group has some of them."""
    out = OutputRows("out", r.out.stride(0), 0)
    return PackedGroup(weight, Activations(x.data, rows, x.stride, 0), x.scales, out, r.b.k)


def factors_of_groups(r: Any, factors: Sequence[Sequence[str]]) -> tuple[tuple[GroupFactor, ...], ...]:
    """The factors of each product, by their names; alpha may have one for each group."""

    def of_group(path: str) -> GroupFactor:
        return GroupFactor(path, int(path == "alpha" and r.alpha.numel() > 1))

    return tuple(tuple(map(of_group, some)) for some in factors)


def rows_call(
    operation: Operation,
    kernel: Kernel,
    r: Any,
    target: Target,
    plan: PackedPlan,
    arguments: GroupedWgmmaArguments,
    x: XRows,
) -> PlannedCall:
    """The planned call of a product of rows of groups that is not streamed."""
    device = r.b.device
    extra = scratch_for((0, 0), target, device, **x.buffers)
    config = replace(plan.config, first=x.first)
    return operation.planned(kernel, config, target, arguments, r, extra=extra, new=status_of(device))


_GROUPS = ByGeneration(
    sm90=Lazily("kernels.gemm.sm90.grouped", "GroupedWgmma"),
    sm100=Lazily("kernels.gemm.sm100.packed", "GroupedTensorPackedGemm"),
    sm120=Lazily("kernels.gemm.sm120.packed", "GroupedPackedGemm"),
)
_ROUTED = ByGeneration(
    sm90=Lazily("kernels.moe.routed", "RoutedWgmma"),
    sm100=Lazily("kernels.gemm.sm100.packed", "RoutedTensorPackedGemm"),
    sm120=Lazily("kernels.gemm.sm120.packed", "RoutedPackedGemm"),
)
KERNEL = Kernel("grouped_wgmma", GroupedWgmmaArguments, _GROUPS, can_implement_groups)
ROUTED = Kernel("moe_product", GroupedWgmmaArguments, _ROUTED, can_implement_groups)
_STREAM = Lazily("kernels.gemm.packed.grouped_stream", "GroupedStream")
STREAM_GROUPS = Kernel("stream_groups", GroupedStreamArguments, _STREAM, can_stream_groups)

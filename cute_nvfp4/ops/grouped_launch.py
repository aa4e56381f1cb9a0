"""How grouped GEMMs are planned and launched: the arguments of their host function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.gemm.arguments import (
    MAP_BYTES,
    Group,
    GroupedArguments,
    GroupFactor,
    GroupOffsets,
    GroupTable,
    Operand,
    Output,
)
from ..kernels.gemm.grouped_config import MAPS, GroupedConfig, can_implement_grouped
from ..operand import BlockScaledTensor
from ..planning.gemm_problem import Plan
from ..planning.grouped import GroupedProblem, plan_for_groups
from ..runtime.backend import sm_count
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..target import Target
from .checks import DTYPE_NAMES, parts, tensors
from .grouped_rows import GroupedRows
from .operands import operand_record

_TABLES = 64
"""Tables of groups that are kept on the device."""


def launch_list(
    pairs: Sequence[tuple[BlockScaledTensor, BlockScaledTensor]],
    outs: Sequence[torch.Tensor],
    scalar: float,
    alpha: torch.Tensor | None,
    target: Target,
    config: Plan | None,
) -> None:
    """Runs the groups that have rows."""
    device = outs[0].device
    factors = [] if alpha is None else [(alpha, int(alpha.shape[0] > 1))]
    for scales in ([a.global_scale for a, _ in pairs], [b.global_scale for _, b in pairs]):
        if any(x is not None for x in scales):
            one = torch.ones(1, dtype=torch.float32, device=device) if any(x is None for x in scales) else None
            factors.append((torch.cat([one if x is None else x.reshape(1) for x in scales]), 1))
    problem = GroupedProblem(
        sizes=tuple((a.rows, b.rows, a.k) for a, b in pairs),
        a_format=pairs[0][0].format.name,
        b_format=pairs[0][1].format.name,
        out=DTYPE_NAMES[outs[0].dtype],
        vector=all(_aligned(x) for x in outs),
        factors=len(factors),
    )
    plan = plan_for_groups(problem, target.arch, sm_count(target, device), config)
    groups = [_group(plan, a, b, out) for (a, b), out in zip(pairs, outs)]
    out = Output(outs[0].data_ptr(), 0, None, None, None)
    scratch: dict[str, torch.Tensor] = {}
    table = None
    if plan.config.maps == "parameters":
        # slots that no group has are another without rows
        padding = [groups[0]._replace(m=0, n=0)] * (plan.config.slots - len(groups))
        arguments = GroupedArguments(groups=(*groups, *padding), a=None, b=None, k=None, out=out, batch=1)
    else:
        table = _table(tuple(_table_row(group) for group in groups), device)
        words = MAP_BYTES // 8
        maps = torch.empty((len(groups) * len(MAPS) + 1) * words, dtype=torch.int64, device=device)
        # the host's allocator aligns less than a GPU's does
        maps = scratch["tensor maps"] = maps[-maps.data_ptr() // 8 % words :]
        filled = GroupTable(table.data_ptr(), len(groups), maps.data_ptr())
        a, b, k = groups[0].a, groups[0].b, groups[0].k
        arguments = GroupedArguments(groups=filled, a=a, b=b, k=k, out=out, batch=1)

    def touched() -> Tensors:
        read = parts({f"group {i}: {side}": x for i, pair in enumerate(pairs) for side, x in zip("ab", pair)})
        read["table of groups"] = table
        return tensors(read, {f"out[{i}]": x for i, x in enumerate(outs)} | scratch)

    _launch(plan, target, device, arguments, scalar, factors, touched)


def launch_contiguous(
    a: GroupedRows,
    b: BlockScaledTensor,
    out: torch.Tensor,
    status: torch.Tensor,
    scalar: float,
    alpha: torch.Tensor | None,
    target: Target,
    config: Plan | None,
) -> None:
    """Runs the contiguous form."""
    factors = [] if alpha is None else [(alpha, int(alpha.shape[0] > 1))]
    factors += [(x, 0) for x in (a.global_scale, b.global_scale) if x is not None]
    problem = GroupedProblem(
        sizes=((a.rows, b.rows, a.k),),
        a_format=a.format.name,
        b_format=b.format.name,
        out=DTYPE_NAMES[out.dtype],
        vector=_aligned(out),
        factors=len(factors),
        stack=b.batch,
    )
    plan = plan_for_groups(problem, target.arch, sm_count(target, a.device), config)
    group = _group(plan, a, b, out)
    arguments = GroupedArguments(
        groups=GroupOffsets(a.offsets.data_ptr(), a.groups, a.rows, a.atoms, status.data_ptr()),
        a=group.a,
        b=group.b,
        k=group.k,
        out=Output(group.out, group.stride, None, None, None),
        batch=b.batch,
    )

    def touched() -> Tensors:
        return tensors({**parts({"a": a, "b": b}), "a.offsets": a.offsets}, {"out": out, "status": status})

    _launch(plan, target, a.device, arguments, scalar, factors, touched)


def _aligned(out: torch.Tensor) -> bool:
    """Whether all rows start, and end, at multiples of 16 bytes."""
    stride = out.stride(0) if out.shape[0] > 1 else 0
    return (out.data_ptr() | stride * out.element_size() | out.shape[1] * out.element_size()) % 16 == 0


def _group(plan: Plan, a: Any, b: Any, out: torch.Tensor) -> Group:
    """A group as the kernel sees it."""
    first, second = (operand_record(x) for x in ((b, a) if plan.swap else (a, b)))
    stride = out.stride(0) if out.shape[0] > 1 else 0
    return Group(first, second, first.rows, second.rows, a.k, out.data_ptr(), stride)


def _table_row(group: Group) -> tuple[int, ...]:
    """A row of the table on the device (``grouped_scheduler.ROW_WORDS``)."""

    def side(x: Operand) -> tuple[int, int, int]:
        return x.data, x.row_stride, x.scale

    return (group.m, group.n, group.k, group.out, group.stride, *side(group.a), *side(group.b))


_tables: OrderedDict[tuple, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []


def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """``rows`` on the device, copied there without waiting; the same rows are copied once while they are remembered."""
    host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    if device.type != "cuda":
        return host
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        # a graph copies again, from the same memory, whenever it runs
        _captured.append((host, host.to(device, non_blocking=True)))
        return _captured[-1][1]
    key = (device, stream, rows)
    if key not in _tables:
        _tables[key] = host, host.to(device, non_blocking=True)
        if len(_tables) > _TABLES:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return _tables[key][1]


def _launch(
    plan: Plan,
    target: Target,
    device: torch.device,
    arguments: GroupedArguments,
    scalar: float,
    factors: list[tuple[torch.Tensor, int]],
    touched: Callable[[], Tensors],
) -> None:
    """factors: tensors of device scalars, and elements from a group's to the next."""
    pointers = tuple(GroupFactor(x.data_ptr(), stride) for x, stride in factors)
    arguments = arguments._replace(alpha=scalar, factors=pointers, workers=plan.workers)
    scalars = {f"factors[{i}]": x for i, (x, _) in enumerate(factors)}
    KERNEL.run(plan.config, target, device, arguments, lambda: touched() | tensors(scalars, {}))


def _host(config: GroupedConfig) -> Callable[..., Any]:
    from ..kernels.gemm.sm100.grouped import GroupedGemm

    return GroupedGemm(config)


KERNEL = Kernel("grouped_gemm", GroupedArguments, _host, can_implement_grouped)
compile_grouped_gemm = KERNEL.compile

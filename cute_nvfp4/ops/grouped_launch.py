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
    GroupTable,
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
from .calls import addresses
from .checks import DTYPE_NAMES, parts, tensors
from .operands import operand_record

_TABLES = 64
"""Tables of groups that are kept on the device."""


class ListCall:
    """The kernel for a list of groups, all with rows, planned."""

    def __init__(
        self,
        pairs: Sequence[tuple[BlockScaledTensor, BlockScaledTensor]],
        outs: Sequence[torch.Tensor],
        alpha: torch.Tensor | None,
        target: Target,
        config: Plan | None,
    ) -> None:
        self._device = device = outs[0].device
        strides = [] if alpha is None else [int(alpha.shape[0] > 1)]
        self._scales = arrangements(pairs)
        strides += [int(found != "one") for found in self._scales if found != "none"]
        problem = GroupedProblem(
            sizes=tuple((a.rows, b.rows, a.k) for a, b in pairs),
            a_format=pairs[0][0].format.name,
            b_format=pairs[0][1].format.name,
            out=DTYPE_NAMES[outs[0].dtype],
            vector=all(aligned(x) for x in outs),
            factors=len(strides),
        )
        plan = planned_groups(problem, target, device, config)
        self._groups = [group_record(plan, a, b, out) for (a, b), out in zip(pairs, outs)]
        self._swap, self._listed = plan.swap, plan.config.maps != "parameters"
        out = Output(0, 0, None, None, None)
        if self._listed:
            a, b, k = self._groups[0].a, self._groups[0].b, self._groups[0].k
            filled = GroupTable(0, len(pairs), 0)
            arguments = GroupedArguments(groups=filled, a=a, b=b, k=k, out=out, batch=1)
        else:
            # slots that no group has are another without rows
            self._padding = plan.config.slots - len(pairs)
            padding = [self._groups[0]._replace(m=0, n=0)] * self._padding
            arguments = GroupedArguments(groups=(*self._groups, *padding), a=None, b=None, k=None, out=out, batch=1)
        factors = tuple(GroupFactor(0, stride) for stride in strides)
        arguments = arguments._replace(alpha=1.0, factors=factors, workers=plan.workers)
        self._launch = KERNEL.launcher(plan.config, target, device, arguments, _touched_list)

    def __call__(
        self,
        pairs: Sequence[tuple[BlockScaledTensor, BlockScaledTensor]],
        outs: Sequence[torch.Tensor],
        scalar: float,
        alpha: torch.Tensor | None,
    ) -> None:
        factors = [] if alpha is None else [alpha]
        for side, arranged in enumerate(self._scales):
            if arranged == "apart":
                factors.append(gathered([pair[side].global_scale for pair in pairs], self._device))
            elif arranged != "none":
                # read where they are, from the first one's address on
                factors.append(pairs[0][side].global_scale)
        places = [
            (*addresses(b.data, b.scale, a.data, a.scale), out.data_ptr())
            if self._swap
            else (*addresses(a.data, a.scale, b.data, b.scale), out.data_ptr())
            for (a, b), out in zip(pairs, outs)
        ]
        table, maps = None, None
        if self._listed:
            table, maps = self._table(places)
            values = (table.data_ptr(), maps.data_ptr(), *places[0])
        else:
            values = (*(x for group in places for x in group), *places[0] * self._padding, places[0][4])
        self._launch((*values, scalar, *addresses(*factors)), (pairs, outs, table, maps, factors))

    def _table(self, places: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The table of the groups on the device, and room for their tensor maps."""
        rows = tuple(_table_row(group, at) for group, at in zip(self._groups, places))
        return table_on_device(rows, self._device), room_for_maps(len(rows) * len(MAPS), self._device)


def arrangements(pairs: Sequence[tuple[Any, Any]]) -> tuple[str, str]:
    """How the kernel finds the global scales of all a, and of all b: "none", "one" that all groups share, "row" (one
    after the other in memory, as elements of one tensor are), or "apart": they are gathered first. Groups without rows
    have none."""
    live = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    return arranged([a.global_scale for a, _ in live]), arranged([b.global_scale for _, b in live])


def arranged(scales: Sequence[torch.Tensor | None]) -> str:
    """One of ``arrangements``."""
    if not any(x is not None for x in scales):
        return "none"
    if any(x is None for x in scales):
        return "apart"
    places = addresses(*scales)
    if places.count(places[0]) == len(places):
        return "one"
    return "row" if places == tuple(range(places[0], places[0] + 4 * len(places), 4)) else "apart"


def gathered(
    scales: Sequence[torch.Tensor | None], device: torch.device, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The groups' global scales in one tensor; 1 for those that have none."""
    one = torch.ones(1, dtype=torch.float32, device=device) if any(x is None for x in scales) else None
    return torch.cat([one if x is None else x.reshape(1) for x in scales], out=out)


def _touched_list(pairs: Any, outs: Any, table: Any, maps: Any, factors: list[torch.Tensor]) -> Tensors:
    read = parts({f"group {i}: {side}": x for i, pair in enumerate(pairs) for side, x in zip("ab", pair)})
    read["table of groups"] = table
    return tensors(
        read | {f"factors[{i}]": x for i, x in enumerate(factors)},
        {f"out[{i}]": x for i, x in enumerate(outs)} | {"tensor maps": maps},
    )


def aligned(out: torch.Tensor) -> bool:
    """Whether all rows start, and end, at multiples of 16 bytes."""
    stride = out.stride(0) if out.shape[0] > 1 else 0
    return (out.data_ptr() | stride * out.element_size() | out.shape[1] * out.element_size()) % 16 == 0


def group_record(plan: Plan, a: Any, b: Any, out: torch.Tensor, names: tuple[str, str] = ("", "")) -> Group:
    """A group as the kernel sees it; without names of its operands it has no addresses."""
    pair = zip((a, b), names)
    first, second = (operand_record(*x) for x in (reversed([*pair]) if plan.swap else pair))
    stride = out.stride(0) if out.shape[0] > 1 else 0
    return Group(first, second, first.rows, second.rows, a.k, 0, stride)


def _table_row(group: Group, places: tuple[int, ...]) -> tuple[int, ...]:
    """A row of the table on the device (``GroupedConfig.words``).

    places: addresses of data and scales of A and of B, and of the output.
    """
    a, sfa, b, sfb, out = places
    return (group.m, group.n, group.k, out, group.stride, a, group.a.row_stride, sfa, b, group.b.row_stride, sfb)


_tables: OrderedDict[tuple, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []


def room_for_maps(count: int, device: torch.device) -> torch.Tensor:
    """Memory in which a kernel writes tensor maps."""
    words = MAP_BYTES // 8
    maps = torch.empty((count + 1) * words, dtype=torch.int64, device=device)
    # the host's allocator aligns less than a GPU's does
    return maps[-maps.data_ptr() // 8 % words :]


def table_on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
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


def planned_groups(problem: GroupedProblem, target: Target, device: torch.device, config: Plan | None) -> Plan:
    """The plan for groups, on ``device``."""
    return plan_for_groups(problem, target.arch, sm_count(target, device), config)


def _host(config: GroupedConfig) -> Callable[..., Any]:
    if config.arch.generation == "sm120":
        from ..kernels.gemm.sm120 import host as sm120

        return sm120.GroupedGemm(config)
    from ..kernels.gemm.sm100 import host as sm100

    return sm100.GroupedGemm(config)


KERNEL = Kernel("grouped_gemm", GroupedArguments, _host, can_implement_grouped)
compile_grouped_gemm = KERNEL.compile

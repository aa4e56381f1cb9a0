"""grouped_gemm with prepared weights: check, plan, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..errors import OperandError, OperandTypeError
from ..kernels.gemm.arguments import GroupFactor
from ..kernels.gemm.sm90.arguments import Activations, PackedWeight, Result
from ..kernels.gemm.sm90.grouped_arguments import GroupedWgmmaArguments, PackedGroup, PackedGroupTable
from ..operand import BlockScaledTensor, row_alignment
from ..planning.packed import PackedPlan
from ..planning.packed_groups import PackedGroups, choose_groups, tile_us
from ..prepared_weight import PreparedWeight
from ..reference import GATES
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.bounded import Bounded
from ..runtime.launch import Tensors
from ..runtime.simulating import world
from ..target import Target
from .calls import addresses, as_alpha, operand_key, output_key, tensor_key
from .checks import DTYPE_NAMES, refuse_config, span, split_alpha, tensors
from .grouped_launch import arranged, gathered, room_for_maps, table_on_device
from .groups import GroupsCall, alpha_of_group, check_spans, checked_outputs, each_group
from .packed_operands import X, check_products, check_x, decoded, row_stride, x_parts
from .packed_rows import KERNEL

Pair = tuple[X | None, PreparedWeight]


def is_packed(problems: Any) -> bool:
    """Whether the weights of problems are prepared ones: whether the first is."""
    first = problems[0] if isinstance(problems, (list, tuple)) and problems else None
    return isinstance(first, (list, tuple)) and len(first) == 2 and isinstance(first[1], PreparedWeight)


class Request(NamedTuple):
    """What ``grouped_gemm`` is asked for with prepared weights."""

    problems: Sequence[Pair]
    alpha: float | torch.Tensor | None
    out: Sequence[torch.Tensor] | None
    out_dtype: torch.dtype | None
    config: PackedPlan | None
    backend: Backend
    gate: str


def packed_list_call(request: Request) -> Callable[..., list[torch.Tensor]]:
    """The call for these groups: the one that was planned for others like them, or a new one."""
    problems, alpha, out, *rest = request
    each_group(_check_pair, problems)
    keys = [(operand_key(x) if isinstance(x, BlockScaledTensor) else tensor_key(x), b.key) for x, b in problems]
    outs = tuple(map(output_key, out)) if isinstance(out, (list, tuple)) else type(out)
    found = tuple(map(arranged, _scales([pair for pair in problems if _rows(pair[0])])))
    key = (*keys, found, outs, tensor_key(alpha), *rest, world(problems[0][1].key.on_cpu))
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(request)
    return call


_calls = Bounded()


def _check_pair(pair: Any) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise OperandTypeError.of("problem", got=type(pair).__name__, expected="a pair (a, b)")
    if not isinstance(pair[1], PreparedWeight):
        expected = "PreparedWeight, as in the first group"
        raise OperandTypeError.of("b", got=type(pair[1]).__name__, expected=expected)


def _rows(x: X | None) -> int:
    """Rows of an x, which may be None."""
    if x is None:
        return 0
    return x.rows if isinstance(x, BlockScaledTensor) else len(x)


def _scales(pairs: Sequence[Pair]) -> list[Sequence[torch.Tensor | None]]:
    """The global scales of all x, and then, for each product, those of all weights."""
    return [[getattr(x, "global_scale", None) for x, _ in pairs], *zip(*(b.global_scales for _, b in pairs))]


def _plan(request: Request) -> Callable[..., list[torch.Tensor]]:
    """The call for these groups and all like them, which it checks."""
    problems, alpha, out, out_dtype, config, backend, gate = request
    first = problems[0][1]

    def check(pair: Pair) -> None:
        x, b = pair
        if (b.packing, b.dtype, b.device) != (first.packing, first.dtype, first.device):
            got, expected = (f"{w.packing} for {w.dtype} on {w.device}" for w in (b, first))
            raise OperandError.of("prepared weight", got=got, expected=f"{expected}, as in the first group")
        check_products(b, gate)
        if x is None or (isinstance(x, torch.Tensor) and tuple(x.shape) == (0, b.k)):
            return
        check_x(x, b)

    each_group(check, problems)
    kinds = {type(x) for x, _ in problems if x is not None}
    if len(kinds) > 1:
        raise OperandTypeError.of("a of all groups", got="numbers and NVFP4", expected="the same")
    shapes = [(_rows(x), b.rows) for x, b in problems]
    outs = checked_outputs(shapes, first.device, out, out_dtype, first.dtype)
    _, alpha = split_alpha(alpha, first.device, len(problems))
    if out is not None:
        _check_apart(problems, outs, alpha)
    target = resolve(backend, first.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference, dtype=outs[0].dtype, gate=gate)
    call = GroupsCall(outs, [i for i, (x, _) in enumerate(problems) if _rows(x)], _tensors, _check_apart)
    call.plan(lambda pairs, outs, alpha: ListLaunch(pairs, outs, alpha, target, request), problems, outs, alpha)
    return call


class ListLaunch:
    """The kernel for a list of groups, all with rows, planned.

    only_addresses: whether a launch needs nothing but the addresses of numbers, weights, outputs, and a global scale.
    ordered: from those of all weights, then of all numbers, then of all outputs, to their order in the launch.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        outs: Sequence[torch.Tensor],
        alpha: torch.Tensor | None,
        target: Target,
        request: Request,
    ) -> None:
        self._device = device = outs[0].device
        self._backend: Backend = target.backend
        of_all = [] if alpha is None else [int(alpha.shape[0] > 1)]
        self._scales = of_x, *of_weights = [*map(arranged, _scales(pairs))]
        # of each product
        strides = [of_all + [int(found != "one") for found in (of_x, one) if found != "none"] for one in of_weights]
        problem = PackedGroups(
            sizes=tuple((_rows(x), b.rows, b.k) for x, b in pairs),
            dtype=DTYPE_NAMES[pairs[0][1].dtype],
            out=DTYPE_NAMES[outs[0].dtype],
            vector=all(row_alignment(out, 16) >= 16 for out in outs),
            factors=len(strides[0]),
            gate=request.gate,
            packing=pairs[0][1].packing,
        )
        plan = choose_groups(problem, target.arch, sm_count(target, device), request.config)
        # the dearest tiles first, so that all CTAs end together; factors of groups have their places
        self._order: Sequence[int] = range(len(pairs))
        if not any(map(any, strides)):
            cost = [tile_us(plan.config, m, k) for m, _, k in problem.sizes]
            self._order = sorted(self._order, key=lambda i: -cost[i])
        self._groups = [_group(*pairs[i], outs[i]) for i in self._order]
        self._listed = plan.config.maps == "workspace"
        # slots that no group has are another without rows
        first = self._groups[0]
        self._padding = 0 if self._listed else plan.config.slots - len(pairs)
        padding = [first._replace(weight=first.weight._replace(rows=0))] * self._padding
        arguments = GroupedWgmmaArguments(
            groups=PackedGroupTable(0, len(pairs), 0) if self._listed else (*self._groups, *padding),
            one=first if self._listed else None,
            alpha=1.0,
            factors=tuple(tuple(GroupFactor(0, stride) for stride in some) for some in strides),
            workers=plan.workers,
        )
        self.launch = KERNEL.launcher(plan.config, target, device, arguments, _touched)
        n, order = len(pairs), [*self._order, *[self._order[0]] * self._padding]
        self.ordered = itemgetter(*[place for i in order for place in (i, n + i, 2 * n + i)])
        numbers = all(isinstance(x, torch.Tensor) for x, _ in pairs)
        self.only_addresses = numbers and not self._listed and "apart" not in self._scales

    def __call__(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> None:
        # read where they are, from the first one's address on, unless they are apart
        of_x, *of_weights = [
            gathered(given, self._device) if found == "apart" else given[0]
            for found, given in zip(self._scales, _scales(pairs))
        ]
        factors = [factor for one in of_weights for factor in (alpha, of_x, one) if factor is not None]
        numbers = [decoded(x, b.dtype, self._backend) for x, b in pairs]
        table, maps = None, None
        if self._listed:
            places = [addresses(pairs[i][1].packed, numbers[i], outs[i]) for i in self._order]
            rows = tuple(_table_row(group, at) for group, at in zip(self._groups, places))
            table, maps = table_on_device(rows, self._device), room_for_maps(len(rows), self._device)
            values = (*addresses(table, maps), *places[0])
        else:
            values = self.ordered(addresses(*[b.packed for _, b in pairs], *numbers, *outs))
        self.launch((*values, scalar, *addresses(*factors)), (pairs, numbers, outs, table, maps, factors))


def _group(x: X, b: PreparedWeight, out: torch.Tensor) -> PackedGroup:
    """A group as the kernel sees it, without addresses."""
    rows = _rows(x)
    stride = row_stride(x.stride(0) if isinstance(x, torch.Tensor) else b.k, rows, b.k)
    weight = PackedWeight(0, b.rows, b.packed.shape[-2], 0)
    return PackedGroup(weight, Activations(0, rows, stride, 0), Result(0, out.stride(0), 0), b.k)


def _table_row(group: PackedGroup, places: tuple[int, ...]) -> tuple[int, ...]:
    """A row of the table on the device (``sm90.groups.Word``). places: addresses of weight, x and output."""
    weight, x, out = places
    return (group.x.rows, group.weight.rows, group.k, out, group.out.row_stride, weight, x, group.x.row_stride)


def _read(pairs: Sequence[Pair]) -> dict[str, torch.Tensor | None]:
    """Every tensor of the operands, by name."""
    found: dict[str, torch.Tensor | None] = {}
    for i, (x, b) in enumerate(pairs):
        parts = () if x is None else (*x_parts(x), getattr(x, "global_scale", None))
        found |= {f"group {i}: a[{j}]": part for j, part in enumerate(parts)}
        found[f"group {i}: b"] = b.packed
        found |= {f"group {i}: global scale {j} of b": scale for j, scale in enumerate(b.global_scales)}
    return found


def _touched(pairs: Any, numbers: Any, outs: Any, table: Any, maps: Any, factors: list[torch.Tensor]) -> Tensors:
    read = _read(pairs) | {f"group {i}: numbers of a": x for i, x in enumerate(numbers)}
    read |= {"table of groups": table} | {f"factors[{i}]": x for i, x in enumerate(factors)}
    return tensors(read, {f"out[{i}]": x for i, x in enumerate(outs)} | {"tensor maps": maps})


def _tensors(pairs: Sequence[Pair]) -> Iterable[torch.Tensor | None]:
    """Every tensor of the operands."""
    return _read(pairs).values()


def _check_apart(pairs: Sequence[Pair], outs: Sequence[torch.Tensor], alpha: torch.Tensor | None) -> None:
    """Raises if the outputs overlap each other or an input."""
    spans = [(*span(out), "out", i, True) for i, out in enumerate(outs)]
    spans += [] if alpha is None else [(*span(alpha), "alpha", 0, False)]
    for i, pair in enumerate(pairs):
        spans += [(*span(x), "an operand", i, False) for x in _read([pair]).values() if x is not None]
    check_spans(spans)


def _reference(
    pairs: Sequence[Pair], alpha: Any, out: Sequence[torch.Tensor] | None, *, dtype: torch.dtype, gate: str
) -> list[torch.Tensor]:
    scalar, alpha = as_alpha(alpha)
    shapes = [(_rows(x), b.rows) for x, b in pairs]
    outs = checked_outputs(shapes, pairs[0][1].device, out, dtype, dtype)
    if out is not None:
        _check_apart(pairs, outs, alpha)
    for i, (x, b) in enumerate(pairs):
        if _rows(x):
            wide = x.double() if isinstance(x, torch.Tensor) else x.dequantize(torch.float64)
            factor = alpha_of_group(scalar, alpha if alpha is None else alpha.reshape(-1), i)
            exact = wide @ b.dequantize(torch.float64).mT * factor
            outs[i].copy_(GATES[gate](exact[0]) * exact[1] if gate else exact)
    return outs

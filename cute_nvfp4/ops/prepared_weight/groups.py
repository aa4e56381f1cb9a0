"""grouped_gemm with prepared weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...planning.packed import PackedPlan
from ...prepared_weight import PreparedWeight
from ...reference import GATES
from ...runtime.backend import Backend
from ...runtime.simulating import world
from ...target import Target
from ..calls import any_key, output_key, tensor_key
from ..checks import span, split_alpha
from ..dispatch import by_operator
from ..grouped_launch import arranged
from ..groups import GroupsCall, alpha_of_group, check_spans, checked_outputs, each_group, operands_in, store_each
from ..operation import Operation
from .groups_launch import ListLaunch, Pair, everything_read, rows_of, scales_of
from .groups_prepared import preparation_of_list
from .operands import check_products, check_x


def is_packed(problems: Any) -> bool:
    """Whether the weights of problems are prepared ones: whether the first is."""
    first = problems[0] if isinstance(problems, (list, tuple)) and problems else None
    return isinstance(first, (list, tuple)) and len(first) == 2 and isinstance(first[1], PreparedWeight)


def all_groups(
    problems: Sequence[Pair],
    alpha: float | torch.Tensor | None,
    out: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    config: PackedPlan | None,
    backend: Backend,
    gate: str,
) -> list[torch.Tensor]:
    """``grouped_gemm`` of prepared weights; an x of no rows may be None or (0, K)."""
    return PREPARED_GROUPS(problems, alpha, out, out_dtype, config, backend, gate)


def _recorded(problems: Any, alpha: Any, out: Any, *options: Any) -> bool:
    given = operands_in(problems)
    floats = [x for x in given if isinstance(x, torch.Tensor)]
    ups = [x.up_global_scale for x in given if isinstance(x, PreparedWeight)]
    return by_operator([x for x in given if not isinstance(x, torch.Tensor)], floats, ups, alpha, out)


def _key(problems: Sequence[Pair], alpha: Any, out: Any, *options: Any) -> tuple:
    each_group(_check_pair, problems)
    keys = [(any_key(x), b.key) for x, b in problems]
    outs = tuple(map(output_key, out)) if isinstance(out, (list, tuple)) else type(out)
    found = tuple(map(arranged, scales_of([pair for pair in problems if rows_of(pair[0])])))
    return (*keys, found, outs, tensor_key(alpha), *options, world(problems[0][1].key.on_cpu))


def _check_pair(pair: Any) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise OperandTypeError.of("problem", got=type(pair).__name__, expected="a pair (a, b)")
    if not isinstance(pair[1], PreparedWeight):
        expected = "PreparedWeight, as in the first group"
        raise OperandTypeError.of("b", got=type(pair[1]).__name__, expected=expected)


def _check(r: Any) -> list[torch.Tensor]:
    first = r.problems[0][1]

    def check(pair: Pair) -> None:
        x, b = pair
        if (b.packing, b.dtype, b.device) != (first.packing, first.dtype, first.device):
            got, expected = (f"{w.packing} for {w.dtype} on {w.device}" for w in (b, first))
            raise OperandError.of("prepared weight", got=got, expected=f"{expected}, as in the first group")
        check_products(b, r.gate)
        if x is None or (isinstance(x, torch.Tensor) and tuple(x.shape) == (0, b.k)):
            return
        check_x(x, b)

    each_group(check, r.problems)
    kinds = {type(x) for x, _ in r.problems if x is not None}
    if len(kinds) > 1:
        raise OperandTypeError.of("a of all groups", got="numbers and NVFP4", expected="the same")
    shapes = [(rows_of(x), b.rows) for x, b in r.problems]
    outs = checked_outputs(shapes, first.device, r.out, r.out_dtype, first.dtype)
    split_alpha(r.alpha, first.device, len(r.problems))
    if r.out is not None:
        _check_overlap(r._replace(out=outs))
    return outs


def _check_overlap(r: Any) -> None:
    _check_apart(r.problems, r.out, r.alpha if isinstance(r.alpha, torch.Tensor) else None)


def _plan(r: Any, target: Target) -> Callable[..., list[torch.Tensor]]:
    alpha = r.alpha.reshape(-1) if isinstance(r.alpha, torch.Tensor) else None
    live = [i for i, (x, _) in enumerate(r.problems) if rows_of(x)]
    call = GroupsCall(r.out, live, _tensors, _check_apart)
    config, gate = r.config, r.gate
    call.plan(lambda pairs, outs, alpha: ListLaunch(pairs, outs, alpha, target, config, gate), r.problems, r.out, alpha)
    return call


def _tensors(pairs: Sequence[Pair]) -> Iterable[torch.Tensor | None]:
    """Every tensor of the operands."""
    return everything_read(pairs).values()


def _check_apart(pairs: Sequence[Pair], outs: Sequence[torch.Tensor], alpha: torch.Tensor | None) -> None:
    """Raises if the outputs overlap each other or an input."""
    spans = [(*span(out), "out", i, True) for i, out in enumerate(outs)]
    spans += [] if alpha is None else [(*span(alpha), "alpha", 0, False)]
    for i, pair in enumerate(pairs):
        spans += [(*span(x), "an operand", i, False) for x in everything_read([pair]).values() if x is not None]
    check_spans(spans)


def _reference(r: Any) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for i, (x, b) in enumerate(r.problems):
        if not rows_of(x):
            found.append(None)
            continue
        wide = x.double() if isinstance(x, torch.Tensor) else x.dequantize(torch.float64)
        exact = wide @ b.dequantize(torch.float64).mT * alpha_of_group(r.alpha, i)
        found.append(GATES[r.gate](exact[0]) * exact[1] if r.gate else exact)
    return found


PREPARED_GROUPS = Operation(
    all_groups,
    check=_check,
    reference=_reference,
    plan=_plan,
    store=store_each,
    overlaps=_check_overlap,
    operands=("problems",),
    recorded=_recorded,
    key=_key,
    prepared=preparation_of_list,
)

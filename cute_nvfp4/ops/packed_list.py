"""grouped_gemm with prepared weights: check, plan, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OperandError, OperandTypeError
from ..operand import BlockScaledTensor
from ..planning.packed import PackedPlan
from ..prepared_weight import PreparedWeight
from ..reference import GATES
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.simulating import world
from .calls import as_alpha, operand_key, output_key, tensor_key
from .checks import refuse_config, span, split_alpha
from .grouped_launch import arranged
from .groups import GroupsCall, alpha_of_group, check_spans, checked_outputs, each_group
from .packed_list_launch import ListLaunch, Pair, everything_read, rows_of, scales_of
from .packed_operands import check_products, check_x


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
    found = tuple(map(arranged, scales_of([pair for pair in problems if rows_of(pair[0])])))
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
    shapes = [(rows_of(x), b.rows) for x, b in problems]
    outs = checked_outputs(shapes, first.device, out, out_dtype, first.dtype)
    _, alpha = split_alpha(alpha, first.device, len(problems))
    if out is not None:
        _check_apart(problems, outs, alpha)
    target = resolve(backend, first.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference, dtype=outs[0].dtype, gate=gate)
    call = GroupsCall(outs, [i for i, (x, _) in enumerate(problems) if rows_of(x)], _tensors, _check_apart)
    call.plan(lambda pairs, outs, alpha: ListLaunch(pairs, outs, alpha, target, config, gate), problems, outs, alpha)
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


def _reference(
    pairs: Sequence[Pair], alpha: Any, out: Sequence[torch.Tensor] | None, *, dtype: torch.dtype, gate: str
) -> list[torch.Tensor]:
    scalar, alpha = as_alpha(alpha)
    shapes = [(rows_of(x), b.rows) for x, b in pairs]
    outs = checked_outputs(shapes, pairs[0][1].device, out, dtype, dtype)
    if out is not None:
        _check_apart(pairs, outs, alpha)
    for i, (x, b) in enumerate(pairs):
        if rows_of(x):
            wide = x.double() if isinstance(x, torch.Tensor) else x.dequantize(torch.float64)
            factor = alpha_of_group(scalar, alpha if alpha is None else alpha.reshape(-1), i)
            exact = wide @ b.dequantize(torch.float64).mT * factor
            outs[i].copy_(GATES[gate](exact[0]) * exact[1] if gate else exact)
    return outs

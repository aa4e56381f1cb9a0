"""grouped_gemm: a list of products in one launch, of block-scaled or of prepared weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..operand import BlockScaledTensor, check_pair
from ..planning.gemm_problem import Plan
from ..reference import gemm_reference
from ..runtime.backend import Backend
from ..runtime.simulating import world
from ..target import Target
from .calls import operand_key, output_key, tensor_key
from .checks import ALL_FORMATS, check_format, refuse_gate, span, split_alpha
from .dispatch import by_operator
from .grouped_launch import ListCall, arrangements
from .groups import GroupsCall, alpha_of_group, check_spans, checked_outputs, each_group, operands_in, store_each
from .operands import check_operands, check_signs
from .operation import PREPARED, Operation
from .planned import Preparation
from .prepared_weight.groups import PREPARED_GROUPS, is_packed
from .prepared_weight.repeated import prepared_groups

Problem = tuple["BlockScaledTensor | None", "BlockScaledTensor | None"]


def grouped_gemm(
    problems: Sequence[Problem],
    *,
    gate: str = "",
    alpha: float | torch.Tensor | None = None,
    out: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> list[torch.Tensor]:
    """Cᵢ = alphaᵢ · Aᵢ · Bᵢᵀ for a list of problems of any sizes, in one launch: a list of (Mᵢ, Nᵢ).

    Args:
        problems: pairs (a, b) of (M, K) and (N, K), each with sizes of its own; formats and scales as in ``gemm``, the
            same formats in all groups. None instead of an operand stands for one of no rows: its result has none
            either, (0, N) or (M, 0). At most 1024 groups have rows. K is at least 32: an operand without columns
            cannot be built, and no result is all zeros for want of K. Or each b is a ``PreparedWeight`` (N, K) on
            sm_90a, of one dtype, and each a is numbers (M, K) of that dtype, or each NVFP4.
        gate: with prepared weights of gate and up, each result is gate(A · gateᵀ) ∘ (A · upᵀ): as in ``gated_gemm``.
        alpha: a number, or a float32 tensor on the operands' device of one element, or of one for each group.
        out: where to put the results: contiguous along N, all of one dtype. Nothing may overlap.
        out_dtype: dtype of new results (float16 by default); with ``out`` None or theirs.
        config: a plan for all groups (``planning.grouped``); None has one chosen. stream_k is refused (groups of
            different K cannot be dealt in equal shares), and so is split_k beyond the k-tiles of the smallest K.
        backend: as in ``gemm``.

    Tensor maps of up to 16 groups are parameters of the kernel. Those of more are built on the device by a small kernel
    that runs before, from a table that is copied there; a table of the same addresses and sizes is copied once. Neither
    waits for the device. Global scales are read where they are if all groups share one, or if they are neighbours in
    memory (elements of one tensor); otherwise one more launch gathers them.

    Raises:
        OperandError, OperandTypeError: as ``gemm``; "group i: …" names the problem it is about.
    """
    if is_packed(problems):
        return prepared_groups(problems, alpha, out, out_dtype, config, backend, gate)
    refuse_gate(gate)
    return GROUPED(problems, alpha, out, out_dtype, config, backend)


def groups(
    problems: Sequence[Problem],
    alpha: float | torch.Tensor | None,
    out: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    config: Plan | None,
    backend: Backend,
) -> list[torch.Tensor]:
    """``grouped_gemm`` of block-scaled weights."""
    return GROUPED(problems, alpha, out, out_dtype, config, backend)


def _key(problems: Sequence[Problem], alpha: Any, out: Any, *options: Any) -> tuple | None:
    """All that a plan depends on; None of what is refused."""
    if not (len(problems) and all(map(_is_pair, problems))):
        return None
    first = next((x for x in problems[0] if isinstance(x, BlockScaledTensor)), None)
    outs = tuple(map(output_key, out)) if isinstance(out, (list, tuple)) else type(out)
    pairs = [(operand_key(a), operand_key(b)) for a, b in problems]
    where = world(first is None or first.key.on_cpu)
    return (*pairs, arrangements(problems), outs, tensor_key(alpha), *options, where)


def _is_pair(pair: Any) -> bool:
    """Whether a key can be made of it; what is none is for the checks to refuse."""
    return (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(x is None or isinstance(x, BlockScaledTensor) for x in pair)
    )


def _check(r: Any) -> list[torch.Tensor]:
    groups = _checked(r.problems)
    outs = _outputs(groups, r.out, r.out_dtype)
    split_alpha(r.alpha, outs[0].device, len(groups))
    return outs


def _plan(r: Any, target: Target) -> Callable[..., list[torch.Tensor]]:
    groups, outs = list(r.problems), r.out
    alpha = r.alpha.reshape(-1) if isinstance(r.alpha, torch.Tensor) else None
    each_group(lambda a, b: _check_scales(a, b, target.backend), *zip(*groups))
    live = [i for i, (a, b) in enumerate(groups) if a is not None and b is not None]
    call = GroupsCall(outs, live, _tensors, _check_apart)
    call.plan(lambda pairs, outs, alpha: ListCall(pairs, outs, alpha, target, r.config), groups, outs, alpha)
    if target.backend != "sim":
        return call

    def simulated(groups: Sequence[Problem], *given: Any) -> list[torch.Tensor]:
        each_group(_check_signs, *zip(*groups))
        return call(groups, *given)

    return simulated


def _tensors(groups: Sequence[Problem]) -> list[torch.Tensor | None]:
    """Every tensor of the operands."""
    operands = [x for pair in groups for x in pair if x is not None]
    return [y for x in operands for y in (x.data, x.scale, x.global_scale)]


def _reference(r: Any) -> list[torch.Tensor | None]:
    return [
        None
        if a is None or b is None
        else gemm_reference(_matrix(a), _matrix(b), alpha=alpha_of_group(r.alpha, i), out_dtype=out.dtype)
        for i, ((a, b), out) in enumerate(zip(r.problems, r.out))
    ]


def _checked(problems: Sequence[Problem]) -> list[Problem]:
    """The groups: each fits together, and all have the first's formats and device."""
    formats: list[Any] = [None, None]
    device = None

    def check(problem: Any) -> Problem:
        nonlocal device
        if not isinstance(problem, (tuple, list)) or len(problem) != 2:
            raise OperandTypeError.of("problem", got=type(problem).__name__, expected="a pair (a, b)")
        a, b = problem
        if a is not None and b is not None:
            check_pair(a, b)
        elif a is b:
            raise OperandError.of("operands", got="None and None", expected="at least one with rows")
        for side, x in enumerate(problem):
            if x is not None:
                _check_operand("ab"[side], x, formats[side])
                formats[side] = x.format
                device = device or x.device
                if x.device != device:
                    raise OperandError.of("device", got=x.device, expected=f"{device}, where the groups before are")
        return a, b

    groups = each_group(check, problems)
    if not groups:
        raise OperandError.of("problems", got="none", expected="at least one group")
    return groups


def _check_operand(name: str, x: Any, fmt: Any) -> None:
    if not isinstance(x, BlockScaledTensor):
        expected = "BlockScaledTensor, or None for no rows"
        raise OperandTypeError.of(name, got=type(x).__name__, expected=expected)
    if x.batch != 1:
        raise OperandError.of(f"batch of {name}", got=x.batch, expected="1: a group is one matrix")
    check_format(name, x, ALL_FORMATS if fmt is None else (fmt,))


def _outputs(
    groups: list[Problem], out: Sequence[torch.Tensor] | None, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Valid results: new ones, or the caller's, which overlap nothing."""
    shapes = [tuple(0 if x is None else x.rows for x in group) for group in groups]
    outs = checked_outputs(shapes, next(x.device for x in groups[0] if x is not None), out, dtype, torch.float16)
    if out is not None:
        _check_apart(groups, outs, None)
    return outs


def _check_apart(groups: Sequence[Problem], out: Sequence[torch.Tensor], alpha: torch.Tensor | None) -> None:
    """Raises if the outputs overlap each other or an input."""
    spans = [(*span(x), "out", i, True) for i, x in enumerate(out)]
    spans += [] if alpha is None else [(*span(alpha), "alpha", 0, False)]
    for i, group in enumerate(groups):
        for name, x in zip("ab", group):
            parts = {} if x is None else {"data": x.data, "scale": x.scale, "global scale": x.global_scale}
            spans += [(*span(y), f"{part} of {name}", i, False) for part, y in parts.items() if y is not None]
    check_spans(spans)


def _check_scales(a: BlockScaledTensor | None, b: BlockScaledTensor | None, backend: str) -> None:
    if a is not None and b is not None:
        check_operands({"a": a, "b": b}, backend)


def _check_signs(a: BlockScaledTensor | None, b: BlockScaledTensor | None) -> None:
    if a is not None and b is not None:
        check_signs("a", a)
        check_signs("b", b)


def _matrix(x: BlockScaledTensor) -> BlockScaledTensor:
    """Without a batch dimension."""
    return x if not x.is_batched else BlockScaledTensor(x.data[0], x.rowmajor_scale()[0], x.global_scale, x.format)


def _kinds(problems: Any) -> str:
    """What problems are, for an error."""
    if not isinstance(problems, (list, tuple)) or not problems:
        return f"an empty {type(problems).__name__}" if problems == [] else type(problems).__name__
    first = problems[0]
    return " and ".join(type(x).__name__ for x in first) if isinstance(first, (list, tuple)) else type(first).__name__


GROUPED = Operation(
    groups,
    check=_check,
    reference=_reference,
    plan=_plan,
    store=store_each,
    overlaps=lambda r: _check_apart(r.problems, r.out, r.alpha if isinstance(r.alpha, torch.Tensor) else None),
    operands=("problems",),
    recorded=lambda problems, alpha, out, *options: by_operator(operands_in(problems), alpha, out),
    key=_key,
)


def _prepared(problems: Sequence[Problem], **options: Any) -> Preparation:
    """``grouped_gemm`` of prepared weights, planned, for ``prepare``."""
    if not is_packed(problems):
        expected = "pairs of x and a PreparedWeight, for a call that decides nothing any more"
        raise OperandTypeError.of("problems", got=_kinds(problems), expected=expected)
    defaults = {"alpha": None, "out": None, "out_dtype": None, "config": None, "backend": "auto", "gate": ""}
    return PREPARED_GROUPS.preparation(problems, **defaults | options)


PREPARED[grouped_gemm] = _prepared

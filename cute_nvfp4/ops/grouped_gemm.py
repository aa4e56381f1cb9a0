"""grouped_gemm: validate, plan once, compile once, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..operand import BlockScaledTensor, check_pair
from ..planning.gemm_problem import Plan
from ..reference import gemm_reference
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.simulating import world
from .calls import as_alpha, operand_key, output_key, tensor_key
from .checks import ALL_FORMATS, check_format, refuse_config, refuse_gate, span, split_alpha
from .dispatch import by_operator, written_to
from .grouped_launch import ListCall, arrangements
from .groups import GroupsCall, alpha_of_group, check_spans, checked_outputs, each_group
from .library import grouped as operators
from .operands import check_operands, check_signs
from .packed_again import packed_list
from .packed_list import is_packed

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
        return packed_list(problems, alpha, out, out_dtype, config, backend, gate)
    refuse_gate(gate)
    if by_operator(operators.operands_in(problems), alpha, out):
        return operators.grouped_gemm(problems, alpha, out, out_dtype, config, backend)
    key = None
    if len(problems) and all(map(_is_pair, problems)):
        first = next((x for x in problems[0] if isinstance(x, BlockScaledTensor)), None)
        outs = tuple(map(output_key, out)) if isinstance(out, (list, tuple)) else type(out)
        pairs = [(operand_key(a), operand_key(b)) for a, b in problems]
        on_cpu = first is None or first.key.on_cpu
        key = (*pairs, arrangements(problems), outs, tensor_key(alpha), out_dtype, backend, config, world(on_cpu))
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(problems, alpha, out, out_dtype, backend, config)
    result = call(problems, alpha, out)
    if out is not None and torch.is_grad_enabled():
        written_to(out)
    return result


def _is_pair(pair: Any) -> bool:
    """Whether a key can be made of it; what is none is for the plan to refuse."""
    return (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(x is None or isinstance(x, BlockScaledTensor) for x in pair)
    )


_calls = Bounded()


def _plan(
    problems: Sequence[Problem], alpha: Any, out: Any, out_dtype: torch.dtype | None, backend: Backend, config: Any
) -> Callable[..., list[torch.Tensor]]:
    """The call for these groups and all like them, which it checks."""
    groups = _checked(problems)
    outs = _outputs(groups, out, out_dtype)
    device = outs[0].device
    _, alpha = split_alpha(alpha, device, len(groups))
    target = resolve(backend, device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference_call, dtype=outs[0].dtype)
    each_group(lambda a, b: _check_scales(a, b, target.backend), *zip(*groups))
    live = [i for i, (a, b) in enumerate(groups) if a is not None and b is not None]
    call = GroupsCall(outs, live, _tensors, _check_apart)
    call.plan(lambda pairs, outs, alpha: ListCall(pairs, outs, alpha, target, config), groups, outs, alpha)
    if target.backend != "sim":
        return call

    def simulated(groups: Sequence[Problem], alpha: Any, out: Any) -> list[torch.Tensor]:
        each_group(_check_signs, *zip(*groups))
        return call(groups, alpha, out)

    return simulated


def _tensors(groups: Sequence[Problem]) -> list[torch.Tensor | None]:
    """Every tensor of the operands."""
    operands = [x for pair in groups for x in pair if x is not None]
    return [y for x in operands for y in (x.data, x.scale, x.global_scale)]


def _reference_call(
    groups: Sequence[Problem], alpha: Any, out: Sequence[torch.Tensor] | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    scalar, alpha = as_alpha(alpha)
    outs = _outputs(list(groups), out, dtype)
    if out is not None:
        _check_apart(groups, outs, alpha)
    for i, (a, b) in enumerate(groups):
        if a is not None and b is not None:
            factor = alpha_of_group(scalar, alpha if alpha is None else alpha.reshape(-1), i)
            outs[i].copy_(gemm_reference(_matrix(a), _matrix(b), alpha=factor, out_dtype=outs[i].dtype))
    return outs


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

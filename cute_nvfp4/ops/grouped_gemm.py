"""grouped_gemm: computes a list of products in one launch, for block-scaled or prepared weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..operand import BlockScaledTensor, check_pair
from ..planning.gemm_problem import Plan
from ..prepared_weight import PreparedWeight
from ..reference import gemm_reference
from ..runtime.backend import Backend
from ..runtime.bounded import Bounded
from ..runtime.simulating import surroundings
from ..target import Target
from .arguments import ACTIVATIONS, LIST, OUTPUT, TENSOR
from .checks import (
    ALL_FORMATS,
    check_alpha,
    check_format,
    check_formats,
    exact_alpha,
    inputs,
    refuse_gate,
    span,
    split_alpha,
)
from .gemm_launch import check_operands, check_signs
from .grouped_launch import BlockScaledList
from .groups import (
    addresses,
    alpha_of_live,
    check_spans,
    checked_outputs,
    each_group,
    maker,
    rows_of,
    store_each,
    tensors_of,
)
from .list_fast_path import remember, repeated
from .list_launch import ListRequest, Pair, arranged
from .operation import Operation
from .planned import Preparation
from .prepared_weight.groups import PreparedList, check_group
from .prepared_weight.operands import exact_product, natural_dtype
from .prepared_weight.pack_then_multiply import PackThenMultiplyList
from .prepared_weight.plain import PlainList, can_read

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
    """Computes Cᵢ = alphaᵢ · Aᵢ · Bᵢᵀ for a list of problems of any sizes, in one launch: a list of (Mᵢ, Nᵢ).

    Args:
        problems: pairs (a, b) of (M, K) and (N, K), each pair with sizes of its own; formats and scales as in ``gemm``,
            the same formats in all groups. None instead of an operand stands for one without rows: the result is
            (0, N) or (M, 0). At most 1024 groups may have rows. K is at least 32, because an operand without columns
            cannot be built. Or each b is a ``PreparedWeight`` (N, K), all of one dtype; then every a (M, K) has that
            dtype, or every a is NVFP4; for float8_e4m3fn every a is a ``RowScaledTensor``.
        gate: for prepared weights of gate and up: each result is gate(A · gateᵀ) ∘ (A · upᵀ), as in ``gated_gemm``.
        alpha: a number, or a float32 tensor on the operands' device of one element, or of one for each group.
        out: the tensors to write and return: contiguous along N, all of one dtype. Nothing may overlap.
        out_dtype: the dtype of new results (float16 by default); with ``out`` it must be None or theirs.
        config: a plan for all groups (``planning.grouped``); None: the package chooses one. stream_k is refused,
            because groups of different K have no equal shares; so is split_k beyond the k-tiles of the smallest K.
        backend: as in ``gemm``.

    The kernel takes the tensor maps of up to 16 groups as parameters. For more groups, a small kernel first builds the
    maps on the device, from a table that the host copies there once for the same addresses and sizes. Neither waits for
    the device. Global scales are read in place if all groups share one, or if they are neighbours in memory (elements
    of one tensor); otherwise one more launch gathers them.

    Raises:
        OperandError, OperandTypeError: as ``gemm``; "group i: …" names the problem in question.
    """
    if alpha is config is None:
        results = repeated(problems, gate, out, out_dtype, backend)
        if results is not None:
            return results
    return GROUPED.call(problems, gate, alpha, out, out_dtype, config, backend)


def is_prepared(problems: Any) -> bool:
    """Whether problems have prepared weights; the first one decides."""
    first = problems[0] if isinstance(problems, (list, tuple)) and problems else None
    return isinstance(first, (list, tuple)) and len(first) == 2 and isinstance(first[1], PreparedWeight)


def _key(problems: Sequence[Pair], gate: str, alpha: Any, out: Any, *options: Any) -> tuple:
    pairs = [(ACTIVATIONS(a), ACTIVATIONS(b)) for a, b in problems]
    live = [pair for pair in problems if all(map(rows_of, pair))]
    scales = [
        [getattr(pair[side], name, None) for pair in live]
        for side, name in ((0, "global_scale"), (1, "global_scale"), (1, "up_global_scale"))
    ]
    outs = tuple(map(OUTPUT, out)) if isinstance(out, (list, tuple)) else type(out)
    first = next(x for x in reversed(problems[0]) if x is not None)
    return (*pairs, *map(arranged, scales), gate, TENSOR(alpha), outs, *options, surroundings(first.key.on_cpu))


def _check(r: Any) -> list[torch.Tensor]:
    if is_prepared(r.problems):
        first, default = r.problems[0][1], natural_dtype(None, r.problems[0][1])
        each_group(lambda pair: check_group(_pair(pair), first, r.gate), r.problems)
        kinds = {type(a) for a, _ in r.problems if a is not None}
        if len(kinds) > 1:
            got = " and ".join(sorted(x.__name__ for x in kinds))
            raise OperandTypeError.of("a of all groups", got=got, expected="the same")
    else:
        refuse_gate(r.gate)
        _check_block_scaled(r.problems)
        first, default = next(x for x in r.problems[0] if x is not None), torch.float16
    shapes = [(rows_of(a), rows_of(b)) for a, b in r.problems]
    outs = checked_outputs(shapes, first.device, r.out, r.out_dtype, default)
    check_alpha(r.alpha, first.device, len(r.problems))
    if r.out is not None:
        _check_apart(r.problems, outs, r.alpha)
    return outs


def _pair(problem: Any) -> Pair:
    """The problem, checked to be a pair."""
    if not isinstance(problem, (tuple, list)) or len(problem) != 2:
        raise OperandTypeError.of("problem", got=type(problem).__name__, expected="a pair (a, b)")
    return problem


def _check_block_scaled(problems: Sequence[Problem]) -> None:
    """Raises unless the operands of each group fit together, and all groups have the first's formats and device."""
    formats: list[Any] = [None, None]
    device = None

    def check(problem: Any) -> None:
        nonlocal device
        a, b = _pair(problem)
        if a is not None and b is not None:
            check_pair(a, b)
            check_formats("a", a, "b", b)
        elif a is b:
            raise OperandError.of("operands", got="None and None", expected="at least one with rows")
        for side, x in enumerate(problem):
            if x is not None:
                _check_operand("ab"[side], x, formats[side])
                formats[side] = x.format
                device = device or x.device
                if x.device != device:
                    raise OperandError.of("device", got=x.device, expected=f"{device}, where the groups before are")

    each_group(check, problems)
    if not problems:
        raise OperandError.of("problems", got="none", expected="at least one group")


def _check_operand(name: str, x: Any, fmt: Any) -> None:
    if not isinstance(x, BlockScaledTensor):
        expected = "BlockScaledTensor, or None for no rows"
        raise OperandTypeError.of(name, got=type(x).__name__, expected=expected)
    if x.batch != 1:
        raise OperandError.of(f"batch of {name}", got=x.batch, expected="1: a group is one matrix")
    check_format(name, x, ALL_FORMATS if fmt is None else (fmt,))


def _check_apart(groups: Sequence[Pair], outs: Sequence[torch.Tensor], alpha: Any) -> None:
    """Raises if the outputs overlap each other or an input."""
    spans = [(*span(out), "out", i, True) for i, out in enumerate(outs)]
    spans += [(*span(alpha), "alpha", 0, False)] if isinstance(alpha, torch.Tensor) else []
    for i, (a, b) in enumerate(groups):
        for name, x in inputs(a=a, b=b).items():
            owner, _, part = name.partition(".")
            name = f"{part.replace('_', ' ')} of {owner}" if part else owner
            spans += [] if x is None else [(*span(x), name, i, False)]
    check_spans(spans)


class GroupsCall:
    """A planned call: checks, then one launch for the groups that have rows.

    whole: whether all groups have rows. new: makes results. signed: whether each call checks the signs of scales, as
    the simulator does. launch: None if no group has rows.
    """

    def __init__(self, r: Any, target: Target) -> None:
        kind = PreparedList
        if not is_prepared(r.problems):
            kind = plain_or_packed if target.arch.generation == "sm90" else BlockScaledList
        self.signed = kind is BlockScaledList and target.backend == "sim"
        if kind is BlockScaledList:
            each_group(lambda pair: _check_scales(pair, target.backend), r.problems)
        self._live = [i for i, pair in enumerate(r.problems) if all(map(rows_of, pair))]
        self.whole, self._apart = len(self._live) == len(r.out), Bounded()
        self.new = maker([tuple(x.shape) for x in r.out], r.out[0].dtype, r.out[0].device)
        self.launch = None
        if self._live:
            groups = self._of_live(r.problems, r.out, split_alpha(r.alpha)[1])
            self.launch = kind(ListRequest(*groups, target, r.config, r.gate))

    def _of_live(self, groups: Sequence[Any], outs: Sequence[torch.Tensor], alpha: torch.Tensor | None) -> tuple:
        if not self.whole:
            groups, outs = [groups[i] for i in self._live], [outs[i] for i in self._live]
        return groups, outs, alpha_of_live(self._live, self.whole, alpha)

    def __call__(
        self,
        problems: Sequence[Pair],
        gate: str,
        alpha: float | torch.Tensor | None,
        out: Sequence[torch.Tensor] | None,
        out_dtype: torch.dtype | None,
        config: Plan | None,
        backend: Backend,
    ) -> list[torch.Tensor]:
        if self.signed:
            _check_signs(problems)
        scalar, factors = split_alpha(alpha)
        outs = self.new() if out is None else list(out)
        if out is not None:
            found = addresses(factors, *outs, *tensors_of(problems))
            # outputs at the same addresses as in an earlier call need no second check
            if found not in self._apart:
                _check_apart(problems, outs, alpha)
                self._apart[found] = True
        if self.launch is not None:
            groups, results, factors = self._of_live(problems, outs, factors)
            self.launch.multiply(groups, results, scalar, factors)
        if alpha is config is None and self.whole and not self.signed and self.launch.repeatable:
            remember(self.launch, self.new, outs, problems, gate, out, out_dtype, backend)
        return outs


def plain_or_packed(r: ListRequest) -> PlainList | PackThenMultiplyList:
    """The launches on sm_90a: of operands as they lie, or of weights that each call packs."""
    return (PlainList if all(can_read(*pair) for pair in r.pairs) else PackThenMultiplyList)(r)


def _check_scales(pair: Problem, backend: str) -> None:
    if None not in pair:
        check_operands(dict(zip("ab", pair)), backend)


def _check_signs(problems: Sequence[Problem]) -> None:
    each_group(lambda pair: None in pair or [check_signs(*x) for x in zip("ab", pair)], problems)


def _reference(r: Any) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for i, ((a, b), out) in enumerate(zip(r.problems, r.out)):
        alpha = exact_alpha(r.alpha, i)
        if not (rows_of(a) and rows_of(b)):
            found.append(None)
        elif isinstance(b, BlockScaledTensor):
            found.append(gemm_reference(_matrix(a), _matrix(b), alpha=alpha, out_dtype=out.dtype))
        else:
            found.append(exact_product(a, b, alpha, r.gate))
    return found


def _matrix(x: BlockScaledTensor) -> BlockScaledTensor:
    """The operand of a group as a matrix without a batch dimension."""
    return x if not x.is_batched else BlockScaledTensor(x.data[0], x.rowmajor_scale()[0], x.global_scale, x.format)


def _prepared(r: Any) -> Preparation:
    if not is_prepared(r.problems):
        expected = "pairs of x and a PreparedWeight, which a prepared call needs"
        raise OperandTypeError.of("problems", got=_kinds(r.problems), expected=expected)
    call = GROUPED.kernel_call(r)
    if not call.whole:
        empty = next(i for i, (x, _) in enumerate(r.problems) if not rows_of(x))
        hint = "Leave the group out: it has no result."
        raise OperandError.of(f"group {empty}: rows of a of a prepared call", got=0, expected="at least 1", hint=hint)
    outs = call.new() if r.out is None else list(r.out)
    return call.launch.preparation(r.problems, outs, *split_alpha(r.alpha))


def _kinds(problems: Any) -> str:
    """The types of problems, for an error."""
    if not isinstance(problems, (list, tuple)) or not problems:
        return f"an empty {type(problems).__name__}" if problems == [] else type(problems).__name__
    first = problems[0]
    return " and ".join(type(x).__name__ for x in first) if isinstance(first, (list, tuple)) else type(first).__name__


GROUPED = Operation(
    grouped_gemm,
    {"problems": LIST, "alpha": TENSOR, "out": LIST},
    check=_check,
    reference=_reference,
    plan=GroupsCall,
    store=store_each,
    overlaps=lambda r: _check_apart(r.problems, r.out, r.alpha),
    key=_key,
    prepared=_prepared,
    preparable=True,
)

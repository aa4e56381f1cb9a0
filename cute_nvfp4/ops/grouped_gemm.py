"""grouped_gemm: validate, plan once, compile once, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..operand import BlockScaledTensor, check_pair
from ..planning.gemm_problem import Plan
from ..reference import gemm_reference
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.simulating import world
from ..target import Target
from .calls import addresses, as_alpha, operand_key, output_key, tensor_key
from .checks import ALL_FORMATS, check_dtype, check_format, checked_output, refuse_config, span, split_alpha
from .dispatch import by_operator, written_to
from .grouped_launch import ListCall, arrangements
from .library import grouped as operators
from .operands import check_operands, check_signs

Problem = tuple["BlockScaledTensor | None", "BlockScaledTensor | None"]


def grouped_gemm(
    problems: Sequence[Problem],
    *,
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
            cannot be built, and no result is all zeros for want of K.
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
    _each(lambda a, b: _check_scales(a, b, target.backend), *zip(*groups))
    return _Call(groups, outs, alpha, target, config)


class _Call:
    """A planned call: the kernel of the groups that have rows, and what to check before it runs."""

    def __init__(
        self,
        groups: list[Problem],
        outs: list[torch.Tensor],
        alpha: torch.Tensor | None,
        target: Target,
        config: Plan | None,
    ) -> None:
        self._live = [i for i, (a, b) in enumerate(groups) if a is not None and b is not None]
        self._whole = len(self._live) == len(groups)
        alpha = self._alpha_of_live(alpha)
        self._simulated = target.backend == "sim"
        self._launch = None
        if self._live:
            pairs, results = [groups[i] for i in self._live], [outs[i] for i in self._live]
            self._launch = ListCall(pairs, results, alpha, target, config)
        self._new = functools.partial(_new_outputs, [tuple(x.shape) for x in outs], outs[0].dtype, outs[0].device)
        self._apart = Bounded()

    def __call__(self, groups: Sequence[Problem], alpha: Any, out: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        scalar, alpha = as_alpha(alpha)
        outs = self._new() if out is None else list(out)
        if out is not None:
            self._check_memory(groups, outs, alpha)
        if self._simulated:
            _each(lambda a, b: _check_signs(a, b), *zip(*groups))
        if self._launch is None:
            return outs
        if self._whole:
            self._launch(groups, outs, scalar, alpha)
        else:
            pairs, results = [groups[i] for i in self._live], [outs[i] for i in self._live]
            self._launch(pairs, results, scalar, self._alpha_of_live(alpha))
        return outs

    def _alpha_of_live(self, alpha: torch.Tensor | None) -> torch.Tensor | None:
        """The factors of the groups that have rows. Nothing is copied from the host."""
        if alpha is None or self._whole or alpha.numel() == 1 or not self._live:
            return alpha if alpha is None else alpha.reshape(-1)
        first, last = self._live[0], self._live[-1] + 1
        if len(self._live) == last - first:
            return alpha.reshape(-1)[first:last]
        each = alpha.reshape(-1).split(1)
        return torch.cat([each[i] for i in self._live])

    def _check_memory(self, groups: Sequence[Problem], outs: list[torch.Tensor], alpha: torch.Tensor | None) -> None:
        """Raises if the outputs overlap each other or an input. Addresses that were found to be apart stay so."""
        operands = [x for pair in groups for x in pair if x is not None]
        read = [y for x in operands for y in (x.data, x.scale, x.global_scale)]
        places = addresses(*outs, *read, alpha)
        if places not in self._apart:
            _check_apart(groups, outs, alpha)
            self._apart[places] = True


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


def _each(function: Callable[..., Any], *columns: Iterable[Any]) -> list:
    """``function`` of every group; errors say which group they are about."""
    results: list[Any] = []
    try:
        for group in zip(*columns):
            results.append(function(*group))
    except (OperandError, OperandTypeError) as error:
        raise type(error)(f"group {len(results)}: {error}") from None
    return results


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

    groups = _each(check, problems)
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
    device = next(x.device for x in groups[0] if x is not None)
    if out is None:
        dtype = torch.float16 if dtype is None else dtype
        check_dtype("out_dtype", dtype)
        return _new_outputs(shapes, dtype, device)
    if not isinstance(out, (list, tuple)) or len(out) != len(groups):
        got = f"{type(out).__name__}" + (f" of {len(out)}" if isinstance(out, (list, tuple)) else "")
        raise OperandError.of("out", got=got, expected=f"a list of {len(groups)} tensors")

    def check(given: Any, shape: tuple[int, int]) -> None:
        checked_output({}, device, shape, given, dtype or out[0].dtype)
        check_rows("out", given)

    _each(check, out, shapes)
    _check_apart(groups, out, None)
    return list(out)


def _new_outputs(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """New results; rows of one tensor where that leaves them aligned."""
    n = shapes[0][1]
    if any(shape[1] != n for shape in shapes) or n * dtype.itemsize % 16:
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    rows = [shape[0] for shape in shapes]
    return list(torch.empty((sum(rows), n), dtype=dtype, device=device).split(rows))


def _check_apart(groups: Sequence[Problem], out: Sequence[torch.Tensor], alpha: torch.Tensor | None) -> None:
    """Raises if the outputs overlap each other or an input."""
    spans = [(*span(x), "out", i, True) for i, x in enumerate(out)]
    spans += [] if alpha is None else [(*span(alpha), "alpha", 0, False)]
    for i, group in enumerate(groups):
        for name, x in zip("ab", group):
            parts = {} if x is None else {"data": x.data, "scale": x.scale, "global scale": x.global_scale}
            spans += [(*span(y), f"{part} of {name}", i, False) for part, y in parts.items() if y is not None]
    _check_spans(spans)


def _check_spans(spans: list[tuple[int, int, str, int, bool]]) -> None:
    """Refuses bytes that are written and belong to something else too. spans: (…, what, group, whether written)."""
    reach: dict[bool, tuple] = {True: (0, "", 0), False: (0, "", 0)}
    for start, end, name, group, written in sorted(spans):
        for other in (True, False) if written else (True,):
            last, what, its_group = reach[other]
            if start < min(last, end):
                got = f"bytes {start:#x} to {end:#x}, which overlap {what} of group {its_group}"
                raise OperandError.of(f"group {group}: memory of {name}", got=got, expected="memory of its own")
        if end > reach[written][0]:
            reach[written] = end, name, group


def _check_scales(a: BlockScaledTensor | None, b: BlockScaledTensor | None, backend: str) -> None:
    if a is not None and b is not None:
        check_operands({"a": a, "b": b}, backend)


def _check_signs(a: BlockScaledTensor | None, b: BlockScaledTensor | None) -> None:
    if a is not None and b is not None:
        check_signs("a", a)
        check_signs("b", b)


def check_rows(name: str, out: torch.Tensor) -> None:
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise OperandError.of(f"stride of {name} along N", got=out.stride(-1), expected="1")


def _matrix(x: BlockScaledTensor) -> BlockScaledTensor:
    """Without a batch dimension."""
    return x if not x.is_batched else BlockScaledTensor(x.data[0], x.rowmajor_scale()[0], x.global_scale, x.format)


def alpha_of_group(scalar: float, alpha: torch.Tensor | None, group: int) -> Any:
    return scalar if alpha is None else alpha[group if alpha.shape[0] > 1 else 0].double()

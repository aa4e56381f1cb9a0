"""grouped_gemm and grouped_gemm_contiguous: validate, plan once, compile once, launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..operand import BlockScaledTensor, check_pair
from ..planning.gemm_problem import Plan
from ..reference import gemm_reference
from ..runtime.backend import Backend, resolve
from .checks import ALL_FORMATS, check_dtype, check_format, checked_output, parts, refuse_config, span, split_alpha
from .grouped_launch import launch_contiguous, launch_list
from .grouped_rows import GroupedRows, clamped
from .library import grouped as operators
from .library.registration import by_operator
from .operands import check_operands

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
    waits for the device. Global scales, if there are any, are gathered by one more launch.

    Raises:
        OperandError, OperandTypeError: as ``gemm``; "group i: …" names the problem it is about.
    """
    if by_operator(operators.operands_in(problems), alpha, out):
        return operators.grouped_gemm(problems, alpha, out, out_dtype, config, backend)
    groups = _checked(problems)
    outs = _outputs(groups, out, out_dtype)
    device = outs[0].device
    scalar, alpha_tensor = split_alpha(alpha, device, len(groups))
    target = resolve(backend, device)
    if target.backend == "reference":
        refuse_config(config)
        for i, (a, b) in enumerate(groups):
            if a is not None and b is not None:
                factor = _factor(scalar, alpha_tensor, i)
                outs[i].copy_(gemm_reference(_matrix(a), _matrix(b), alpha=factor, out_dtype=outs[i].dtype))
        return outs
    live = [i for i, (a, b) in enumerate(groups) if a is not None and b is not None]
    _each(lambda a, b: _check_scales(a, b, target.backend), *zip(*groups))
    if live:
        pairs, results = [groups[i] for i in live], [outs[i] for i in live]
        if alpha_tensor is not None and alpha_tensor.shape[0] > 1 and len(live) < len(groups):
            alpha_tensor = alpha_tensor[live]
        launch_list(pairs, results, scalar, alpha_tensor, target, config)
    return outs


def grouped_gemm_contiguous(
    a: GroupedRows,
    b: BlockScaledTensor,
    *,
    alpha: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    status: torch.Tensor | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Rows of group e of A times the matrix e of a stack B: C[r] = alphaₑ · A[r] · B[e]ᵀ, (T, N), a mixture of experts.

    Args:
        a: rows (T, K) of E groups with their offsets; b: (E, N, K), of the same format. Groups may have no rows.
        alpha: a number, or a float32 tensor on the operands' device of one element, or of one for each group.
        out, out_dtype, config, backend: as in ``grouped_gemm``. Rows of no group are not written.
        status: (1,) int32 on the device, in which the kernel leaves 0; or i + 1 if offsets[i] is the first offset that
            is negative, less than the one before it, or more than T; or -1 if ``a.scale`` has fewer atoms than the
            groups have. Offsets are used as max(0, all up to it), at most T, so that nothing is read or written out of
            bounds whatever they are; scales that are not there are zeros.

    The host never reads the offsets and never waits. The plan is made for even shares of the rows.

    Raises:
        OperandError, OperandTypeError: as ``gemm``.
    """
    if by_operator((a, b), alpha, out):
        return operators.grouped_gemm_contiguous(a, b, alpha, out, out_dtype, status, config, backend)
    if not isinstance(a, GroupedRows) or not isinstance(b, BlockScaledTensor):
        got = f"{type(a).__name__} and {type(b).__name__}"
        raise OperandTypeError.of("a and b", got=got, expected="GroupedRows and BlockScaledTensor")
    same = {
        "K of a and b": (a.k, b.k),
        "groups of a and matrices of b": (a.groups, b.batch),
        "device of a and b": (a.device, b.device),
    }
    for what, (left, right) in same.items():
        if left != right:
            raise OperandError.of(what, got=f"{left} and {right}", expected="the same")
    for name, operand in (("a", a), ("b", b)):
        check_format(name, operand)
    scalar, alpha_tensor = split_alpha(alpha, a.device, a.groups)
    inputs = {**parts({"a": a, "b": b}), "a.offsets": a.offsets, "alpha": alpha_tensor}
    out = checked_output(inputs if out is not None else {}, a.device, (a.rows, b.rows), out, out_dtype)
    _check_rows("out", out)
    status = _checked_status(status, a.device)
    target = resolve(backend, a.device)
    if target.backend == "reference":
        refuse_config(config)
        return _reference(a, b, scalar, alpha_tensor, out, status)
    check_operands({"a": a, "b": b}, target.backend)
    launch_contiguous(a, b, out, status, scalar, alpha_tensor, target, config)
    return out


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
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    if not isinstance(out, (list, tuple)) or len(out) != len(groups):
        got = f"{type(out).__name__}" + (f" of {len(out)}" if isinstance(out, (list, tuple)) else "")
        raise OperandError.of("out", got=got, expected=f"a list of {len(groups)} tensors")

    def check(given: Any, shape: tuple[int, int]) -> None:
        checked_output({}, device, shape, given, dtype or out[0].dtype)
        _check_rows("out", given)

    _each(check, out, shapes)
    spans = [(*span(x), "out", i, True) for i, x in enumerate(out)]
    for i, group in enumerate(groups):
        operands = [(name, x) for name, x in zip("ab", group) if x is not None]
        spans += [(*span(x.data), f"data of {name}", i, False) for name, x in operands]
        spans += [(*span(x.scale), f"scale of {name}", i, False) for name, x in operands]
    _check_spans(spans)
    return list(out)


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


def _check_rows(name: str, out: torch.Tensor) -> None:
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise OperandError.of(f"stride of {name} along N", got=out.stride(-1), expected="1")


def _checked_status(status: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if status is None:
        return torch.empty(1, dtype=torch.int32, device=device)
    if not isinstance(status, torch.Tensor) or status.dtype is not torch.int32:
        got = status.dtype if isinstance(status, torch.Tensor) else type(status).__name__
        raise OperandTypeError.of("status", got=got, expected="a torch.int32 tensor")
    if status.numel() != 1 or status.device != device:
        got = f"shape {tuple(status.shape)} on {status.device}"
        raise OperandError.of("status", got=got, expected=f"one element on {device}")
    return status


def _matrix(x: BlockScaledTensor) -> BlockScaledTensor:
    """Without a batch dimension."""
    return x if not x.is_batched else BlockScaledTensor(x.data[0], x.rowmajor_scale()[0], x.global_scale, x.format)


def _factor(scalar: float, alpha: torch.Tensor | None, group: int) -> Any:
    return scalar if alpha is None else alpha[group if alpha.shape[0] > 1 else 0].double()


def _reference(
    a: GroupedRows,
    b: BlockScaledTensor,
    scalar: float,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
    status: torch.Tensor,
) -> torch.Tensor:
    """Group by group in float64. Reads the offsets, so it waits for the device."""
    given = a.offsets.tolist()
    wrong = [i for i, (x, y) in enumerate(zip([0, *given], given)) if y < x or y > a.rows]
    edges, scales = clamped(a.offsets, a.rows).tolist(), b.rowmajor_scale()
    atom = 0
    for e, (start, end) in enumerate(pairwise(edges)):
        if end > start:
            rows = a.matrix(start, end, atom)
            weights = BlockScaledTensor(b.data[e] if b.is_batched else b.data, scales[e], b.global_scale, b.format)
            out[start:end] = gemm_reference(rows, weights, alpha=_factor(scalar, alpha, e), out_dtype=out.dtype)
        atom += -(-(end - start) // 128)
    status.fill_(wrong[0] + 1 if wrong else -1 if atom > a.atoms else 0)
    return out

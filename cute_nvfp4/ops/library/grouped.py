"""The operators ``grouped_gemm`` and ``grouped_gemm_contiguous``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...operand import BlockScaledTensor, check_pair
from ...quantization.rules import resolve_format
from ..checks import split_alpha
from ..grouped_rows import GroupedRows
from .registration import call, define, either, new, operand, tensors_of

_OPS = torch.ops.cute_nvfp4
_LAST = 'str a_format="nvfp4", str b_format="nvfp4", ScalarType? out_dtype=None, str backend="auto"'


def operands_in(problems: Any) -> list[Any]:
    """The operands of problems that are pairs; whatever else there is, is for the call to refuse."""
    return [x for pair in problems if isinstance(pair, (list, tuple)) for x in pair]


def grouped_gemm(
    problems: Any, alpha: Any, out: Any, out_dtype: torch.dtype | None, config: Any, backend: str
) -> list[torch.Tensor]:
    """``ops.grouped_gemm.grouped_gemm`` by its operator."""
    problems = list(problems)
    sides = [[problem[i] for problem in problems] for i in (0, 1)]
    lists: list[list] = []
    for name, side in zip("ab", sides):
        pairs = [(None, None) if x is None else tensors_of(name, x) for x in side]
        lists += [[data for data, _ in pairs], [scale for _, scale in pairs]]
    lists += [[None if x is None else x.global_scale for x in side] for side in sides]
    first = [next((x for x in side if x is not None), None) for side in sides]
    device = next((x.device for x in first if x is not None), None)
    if device is None:
        raise OperandError.of("problems", got="none with rows", expected="at least one operand")
    scalar, alpha_tensor = split_alpha(alpha, device, len(problems))
    options = {"alpha": scalar, "out_dtype": out_dtype, "backend": backend}
    options |= {f"{name}_format": x.format.name for name, x in zip("ab", first) if x is not None}
    for name, side in zip("ab", sides):
        others = {x.format.name for x in side if x is not None} - {options.get(f"{name}_format")}
        if others:
            raise OperandError.of(f"format of {name}", got=others.pop(), expected=options[f"{name}_format"])
    written = None if out is None else {"out": list(out)}
    result = call(_OPS.grouped_gemm, [*lists, alpha_tensor], options, config, written)
    return list(result) if out is None else list(out)


def _problems(
    a, a_scale, b, b_scale, a_global_scale, b_global_scale, a_format, b_format
) -> Iterator[tuple[BlockScaledTensor | None, BlockScaledTensor | None]]:
    lists = (a, a_scale, a_global_scale, b, b_scale, b_global_scale)
    if len({len(x) for x in lists}) != 1:
        raise OperandError.of("lists of groups", got=f"lengths {[len(x) for x in lists]}", expected="equal ones")
    for x, x_scale, x_global, y, y_scale, y_global in zip(*lists):
        one = None if x is None else operand(x, x_scale, x_global, a_format)
        yield one, None if y is None else operand(y, y_scale, y_global, b_format)


def _grouped_gemm(
    a,
    a_scale,
    b,
    b_scale,
    a_global_scale,
    b_global_scale,
    alpha_tensor=None,
    *,
    alpha=1.0,
    a_format="nvfp4",
    b_format="nvfp4",
    out_dtype=None,
    out=None,
    backend="auto",
) -> list[torch.Tensor]:
    from ..grouped_gemm import grouped_gemm

    problems = list(_problems(a, a_scale, b, b_scale, a_global_scale, b_global_scale, a_format, b_format))
    if out is None:
        # results of an operator may not share memory, as those of the function do
        out = [new(next(x.data for x in pair if x is not None), _sizes(pair), out_dtype) for pair in problems]
    return grouped_gemm(problems, alpha=either(alpha, alpha_tensor), out=out, out_dtype=out_dtype, backend=backend)


def _sizes(pair: tuple[BlockScaledTensor | None, BlockScaledTensor | None]) -> list[int]:
    return [0 if x is None else x.rows for x in pair]


def _fake_grouped_gemm(
    a,
    a_scale,
    b,
    b_scale,
    a_global_scale,
    b_global_scale,
    alpha_tensor=None,
    *,
    alpha=1.0,
    a_format="nvfp4",
    b_format="nvfp4",
    out_dtype=None,
    backend="auto",
) -> list[torch.Tensor]:
    found = []
    for x, y in _problems(a, a_scale, b, b_scale, a_global_scale, b_global_scale, a_format, b_format):
        if x is not None and y is not None:
            check_pair(x, y)
        found.append(new((y if x is None else x).data, _sizes((x, y)), out_dtype))
    return found


define(
    "grouped_gemm",
    "Tensor?[] a, Tensor?[] a_scale, Tensor?[] b, Tensor?[] b_scale, Tensor?[] a_global_scale, "
    f"Tensor?[] b_global_scale, Tensor? alpha_tensor=None, *, float alpha=1.0, {_LAST}",
    "Tensor[]",
    {"out": "Tensor(a!)[]"},
    _grouped_gemm,
    _fake_grouped_gemm,
)


def grouped_gemm_contiguous(
    a: Any, b: Any, alpha: Any, out: Any, out_dtype: torch.dtype | None, status: Any, config: Any, backend: str
) -> torch.Tensor:
    """``ops.grouped_gemm.grouped_gemm_contiguous`` by its operator."""
    if not isinstance(a, GroupedRows):
        raise OperandTypeError.of("a", got=type(a).__name__, expected="GroupedRows")
    scalar, alpha_tensor = split_alpha(alpha, a.device, a.groups)
    tensors = [*tensors_of("a", a), a.offsets, *tensors_of("b", b), a.global_scale, b.global_scale, alpha_tensor]
    options = {"alpha": scalar, "a_format": a.format.name, "b_format": b.format.name}
    options |= {"out_dtype": out_dtype, "backend": backend}
    if out is None and status is None:
        return call(_OPS.grouped_gemm_contiguous, tensors, options, config, None)[0]
    out = new(a.data, (a.rows, b.rows), out_dtype) if out is None else out
    status = a.offsets.new_empty(1) if status is None else status
    call(_OPS.grouped_gemm_contiguous, tensors, options, config, {"out": out, "status": status})
    return out


def _grouped_gemm_contiguous(
    a,
    a_scale,
    offsets,
    b,
    b_scale,
    a_global_scale=None,
    b_global_scale=None,
    alpha_tensor=None,
    *,
    alpha=1.0,
    a_format="nvfp4",
    b_format="nvfp4",
    status=None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    from ..grouped_gemm_contiguous import grouped_gemm_contiguous

    y = operand(b, b_scale, b_global_scale, b_format)
    rows = GroupedRows(a, a_scale, offsets, a_global_scale, resolve_format(a_format))
    status = offsets.new_empty(1) if status is None else status
    return grouped_gemm_contiguous(rows, y, alpha=either(alpha, alpha_tensor), status=status, **options), status


def _fake_grouped_gemm_contiguous(
    a, a_scale, offsets, b, *args: Any, out_dtype: torch.dtype | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return new(a, (a.shape[0], b.shape[-2]), out_dtype), offsets.new_empty(1)


define(
    "grouped_gemm_contiguous",
    "Tensor a, Tensor a_scale, Tensor offsets, Tensor b, Tensor b_scale, Tensor? a_global_scale=None, "
    f"Tensor? b_global_scale=None, Tensor? alpha_tensor=None, *, float alpha=1.0, {_LAST}",
    "(Tensor, Tensor)",
    {"out": "Tensor(a!)", "status": "Tensor(b!)"},
    _grouped_gemm_contiguous,
    _fake_grouped_gemm_contiguous,
)

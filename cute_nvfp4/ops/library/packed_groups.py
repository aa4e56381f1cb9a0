"""The operators ``packed_grouped_gemm`` and ``packed_grouped_gemm_contiguous``: groups with prepared weights."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import OperandError
from ...formats import FORMATS
from ...operand import BlockScaledTensor
from ...prepared_weight import PreparedWeight
from ...quantization.rules import resolve_format
from ..checks import check_dtype, split_alpha
from ..dispatch import requires_grad
from ..grouped_rows import GroupedRows
from .registration import call, define, either, operand, tensors_of

_OPS = torch.ops.cute_nvfp4


def _parts(x: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Numbers, or data and scales, and a global scale; all None of nothing."""
    if x is None or isinstance(x, torch.Tensor):
        return x, None, None
    return (*tensors_of("a", x), x.global_scale)


def packed_rows(
    a: Any,
    b: PreparedWeight,
    offsets: torch.Tensor,
    alpha: Any,
    out: Any,
    out_dtype: Any,
    status: Any,
    config: Any,
    backend: str,
    gate: str,
) -> torch.Tensor:
    """``ops.packed_rows.packed_rows`` by its operator."""
    data, scale, factor = _parts(a)
    scalar, alpha_tensor = split_alpha(alpha, b.device, b.batch)
    tensors = (data, scale, offsets, b.packed, factor, b.global_scale, b.up_global_scale, alpha_tensor)
    options = {
        "rows": b.rows,
        "dtype": b.dtype,
        "packing": b.packing,
        "alpha": scalar,
        "gate": gate,
        "out_dtype": out_dtype,
    }
    options |= {"backend": backend} | ({} if scale is None else {"a_format": a.format.name})
    if out is None and status is None:
        return call(_OPS.packed_grouped_gemm_contiguous, tensors, options, config, None)[0]
    out = data.new_empty((len(data), b.rows), dtype=out_dtype or b.dtype) if out is None else out
    status = offsets.new_empty(1) if status is None else status
    call(_OPS.packed_grouped_gemm_contiguous, tensors, options, config, {"out": out, "status": status})
    return out


def _k(a: torch.Tensor, a_scale: torch.Tensor | None, a_format: str) -> int:
    """K, of numbers or of bytes of elements."""
    return a.shape[-1] * (1 if a_scale is None else FORMATS[a_format].elements_per_byte)


def _run_rows(
    a,
    a_scale,
    offsets,
    b,
    a_global_scale=None,
    b_global_scale=None,
    up_global_scale=None,
    alpha_tensor=None,
    *,
    rows: int,
    dtype: torch.dtype,
    alpha=1.0,
    gate="",
    packing="nvfp4",
    out_dtype=None,
    a_format="nvfp4",
    backend="auto",
    out=None,
    status=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from ..packed_rows import packed_rows

    k = _k(a, a_scale, a_format)
    weight = PreparedWeight(b, rows, k, dtype, b_global_scale, bool(gate), up_global_scale, packing)
    x: Any = a if a_scale is None else GroupedRows(a, a_scale, offsets, a_global_scale, resolve_format(a_format))
    status = offsets.new_empty(1) if status is None else status
    given = offsets if a_scale is None else None
    factor = either(alpha, alpha_tensor)
    return packed_rows(x, weight, given, factor, out, out_dtype, status, None, backend, gate), status


def _fake_rows(
    a, a_scale, offsets, b, *args: Any, rows: int, dtype: torch.dtype, out_dtype=None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if a.ndim != 2 or (a_scale is None and a.dtype is not dtype):
        raise OperandError.of("a", got=f"{a.dtype}, shape {tuple(a.shape)}", expected=f"{dtype} (T, K)")
    out_dtype = dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype)
    return a.new_empty((a.shape[0], rows), dtype=out_dtype), offsets.new_empty(1)


define(
    "packed_grouped_gemm_contiguous",
    "Tensor a, Tensor? a_scale, Tensor offsets, Tensor b, Tensor? a_global_scale=None, Tensor? b_global_scale=None, "
    "Tensor? up_global_scale=None, Tensor? alpha_tensor=None, *, int rows, ScalarType dtype, float alpha=1.0, "
    'str gate="", str packing="nvfp4", ScalarType? out_dtype=None, str a_format="nvfp4", str backend="auto"',
    "(Tensor, Tensor)",
    {"out": "Tensor(a!)", "status": "Tensor(b!)"},
    _run_rows,
    _fake_rows,
    ("a",),
)


def packed_list(
    problems: Any, alpha: Any, out: Any, out_dtype: Any, config: Any, backend: str, gate: str
) -> list[torch.Tensor]:
    """``ops.packed_again.packed_list`` by its operator."""
    weights = [b for _, b in problems]
    a, a_scale, a_global_scale = (list(x) for x in zip(*(_parts(x) for x, _ in problems)))
    if requires_grad(a):
        a = [b.packed.new_empty((0, b.k), dtype=b.dtype) if x is None else x for x, b in zip(a, weights)]
    scalar, alpha_tensor = split_alpha(alpha, weights[0].device, len(weights))
    scales = [b.global_scale for b in weights], [b.up_global_scale for b in weights]
    tensors = (a, a_scale, [b.packed for b in weights], a_global_scale, *scales, alpha_tensor)
    options = {"rows": [b.rows for b in weights], "k": [b.k for b in weights], "dtype": weights[0].dtype}
    options |= {"packing": weights[0].packing, "alpha": scalar, "gate": gate, "out_dtype": out_dtype}
    options |= {"backend": backend}
    formats = {x.format.name for x, _ in problems if isinstance(x, BlockScaledTensor)}
    if len(formats) > 1:
        raise OperandError.of("formats of a", got=" and ".join(sorted(formats)), expected="one in an operator")
    options |= {"a_format": formats.pop()} if formats else {}
    written = None if out is None else {"out": list(out)}
    result = call(_OPS.packed_grouped_gemm, tensors, options, config, written)
    return list(result) if out is None else list(out)


def _new(a, a_scale, rows: list[int], b, dtype: torch.dtype) -> list[torch.Tensor]:
    check_dtype("out_dtype", dtype)
    sizes = [0 if x is None else x.shape[0] for x in a]
    return [w.new_empty((m, n), dtype=dtype) for w, m, n in zip(b, sizes, rows)]


def _run_list(
    a,
    a_scale,
    b,
    a_global_scale,
    b_global_scale,
    up_global_scale,
    alpha_tensor=None,
    *,
    rows: list[int],
    k: list[int],
    dtype: torch.dtype,
    packing="nvfp4",
    alpha=1.0,
    gate="",
    out_dtype=None,
    a_format="nvfp4",
    backend="auto",
    out=None,
) -> list[torch.Tensor]:
    from ..packed_list import Request, packed_list_call

    lists = (a, a_scale, a_global_scale, b, b_global_scale, up_global_scale, rows, k)
    if len({len(x) for x in lists}) != 1:
        raise OperandError.of("lists of groups", got=f"lengths {[len(x) for x in lists]}", expected="equal ones")
    if torch.is_grad_enabled() and requires_grad(a):
        # torch takes a list with None for a constant
        raise OperandError.of("a", got="None", expected="tensors in all groups, where one requires a gradient")
    problems = []
    for x, scale, factor, packed, global_scale, up, n, depth in zip(*lists):
        one = x if scale is None else operand(x, scale, factor, a_format)
        problems.append((one, PreparedWeight(packed, n, depth, dtype, global_scale, bool(gate), up, packing)))
    # results of an operator may not share memory, as those of the function do
    out = _new(a, a_scale, rows, b, out_dtype or dtype) if out is None else out
    factor = either(alpha, alpha_tensor)
    return packed_list_call(Request(problems, factor, out, None, None, backend, gate))(problems, factor, out)


def _fake_list(a, a_scale, b, *args: Any, rows, k, dtype, out_dtype=None, **options: Any) -> list[torch.Tensor]:
    return _new(a, a_scale, rows, b, out_dtype or dtype)


define(
    "packed_grouped_gemm",
    "Tensor?[] a, Tensor?[] a_scale, Tensor[] b, Tensor?[] a_global_scale, Tensor?[] b_global_scale, "
    "Tensor?[] up_global_scale, Tensor? alpha_tensor=None, *, int[] rows, int[] k, ScalarType dtype, "
    'str packing="nvfp4", float alpha=1.0, str gate="", ScalarType? out_dtype=None, str a_format="nvfp4", '
    'str backend="auto"',
    "Tensor[]",
    {"out": "Tensor(a!)[]"},
    _run_list,
    _fake_list,
    ("a",),
)
ROWS_TENSORS, LIST_TENSORS = (
    tuple(x.name for x in operator.default._schema.arguments if not x.kwarg_only)
    for operator in (_OPS.packed_grouped_gemm_contiguous, _OPS.packed_grouped_gemm)
)
"""Arguments of the operators that are tensors, or lists of such, in order."""

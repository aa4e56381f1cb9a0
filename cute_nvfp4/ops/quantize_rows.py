"""``quantize`` of activations to FP8: E4M3 with a float32 scale for each row, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..kernels.quantize.fp8_config import MAX_K, VECTOR, Fp8RowsArguments, can_implement, short_rows_config
from ..lazy import Lazily
from ..row_scaled import FP8, RowScaledTensor, by_rows
from ..runtime.backend import Backend
from ..runtime.kernel import Kernel
from ..target import Target
from ..tensors import check_tensor
from .arguments import TENSOR, Argument
from .checks import DTYPE_NAMES, check_rows_aligned
from .operation import quantizing
from .planned import PlannedCall, allocator


def quantize_rows(x: torch.Tensor, out: RowScaledTensor | None = None, backend: Backend = "auto") -> RowScaledTensor:
    """Quantizes the rows of x (M, K), bfloat16 or float16, to E4M3: a row's largest magnitude becomes 448.

    out: where to write them; by default new tensors. Autograd does not follow x.

    Raises:
        OperandError, OperandTypeError: another shape or dtype; K is not a multiple of 16.
    """
    return QUANTIZE_ROWS.call(x, out, backend)


def check_no_options(args: Sequence[Any]) -> None:
    """Raises unless the arguments of ``quantize`` that FP8 rows do not have are left at their defaults.

    args: rule, global scale, generator, Hessian, out, and the options.
    """
    if tuple(args) != ("max", "auto", None, None, None, False, "nearest", None, False, None, False, "blocked"):
        expected = "none but backend"
        raise OperandError.of(f"arguments of quantize for {FP8}", got=repr(tuple(args)), expected=expected)


def check_rows(x: torch.Tensor) -> None:
    """Raises unless the kernel can read x."""
    check_tensor(f"x for {FP8}", x, dtypes=(torch.bfloat16, torch.float16))
    if x.ndim != 2 or x.shape[0] < 1 or not 0 < x.shape[1] <= MAX_K or x.shape[1] % VECTOR:
        expected = f"(M, K), K a multiple of {VECTOR}, at most {MAX_K}"
        raise OperandError.of(f"shape of x for {FP8}", got=tuple(x.shape), expected=expected)
    check_rows_aligned(f"x for {FP8}", x)


def check_out_rows(out: Any, x: torch.Tensor) -> None:
    """Raises unless the kernel can write the rows of x (M, K) to ``out``; None is fine."""
    if out is None:
        return
    if not isinstance(out, RowScaledTensor):
        raise OperandTypeError.of("out", got=type(out).__name__, expected="RowScaledTensor")
    check_tensor("data of out", out.data, shapes=[x.shape], device=x.device)
    if not out.data.is_contiguous():
        raise OperandError.of("strides of the data of out", got=out.data.stride(), expected="contiguous rows")


def _check(r: Any) -> RowScaledTensor:
    check_rows(r.x)
    check_out_rows(r.out, r.x)
    return new_rows(r.x) if r.out is None else r.out


def new_rows(x: torch.Tensor) -> RowScaledTensor:
    """New FP8 rows for x (M, K), not written yet."""
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return RowScaledTensor(data, x.new_empty(x.shape[0], dtype=torch.float32))


def rows_and_maker(x: torch.Tensor) -> tuple[RowScaledTensor, Callable[..., RowScaledTensor]]:
    """FP8 rows for x (M, K) to plan with, and a function that makes more of them in a planned call."""
    like = new_rows(x)
    data, scale = like.data, like.scale
    new_data, new_scale = allocator(torch.empty_like(data)), allocator(torch.empty_like(scale))
    return like, lambda *args: RowScaledTensor(new_data(), new_scale())


def stored(found: RowScaledTensor, out: RowScaledTensor | None) -> RowScaledTensor:
    """The rows ``found``, or ``out`` with them copied into it."""
    if out is None:
        return found
    out.data.copy_(found.data)
    out.scale.copy_(found.scale)
    return out


def _plan(r: Any, target: Target) -> PlannedCall:
    (rows, k), (_, new) = r.x.shape, rows_and_maker(r.x)
    arguments = Fp8RowsArguments("x", "out.data", "out.scale", rows, k, r.x.stride(0) * r.x.element_size())
    config = short_rows_config(DTYPE_NAMES[r.x.dtype], k, target.arch)
    return QUANTIZE_ROWS.planned(KERNEL, config, target, arguments, r, new_of=new)


KERNEL = Kernel("quantize_fp8_rows", Fp8RowsArguments, Lazily("kernels.quantize.fp8_rows", "Fp8Rows"), can_implement)
QUANTIZE_ROWS = quantizing(
    quantize_rows,
    {"x": TENSOR, "out": Argument("(None if {x} is None else {x}.key)")},
    check=_check,
    reference=lambda r: stored(by_rows(r.x.detach()), r.out),
    plan=_plan,
    count="increment_versions((out.data, out.scale))",
)

"""What ``rmsnorm_quantize`` and ``silu_mul_quantize`` share: checks, and how what they compute is quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import OperandError, OperandTypeError
from ..kernels.quantize.arguments import Strides
from ..kernels.quantize.fused import Matrix
from ..operand import BlockScaledTensor, row_alignment
from ..planning.quantize import QuantizeProblem
from ..tensors import check_dense
from .checks import DTYPE_NAMES, check_overlap
from .planned import allocator
from .quantize import QUANTIZE
from .quantize_request import (
    QuantizeRequest,
    check_out,
    check_out_gradient,
    check_out_memory,
    checked_request,
    kind_of_scale,
)

# kernels copy sixteen bytes at a time
_ALIGNMENT = 16


class Fused(NamedTuple):
    """What a fused operation gives: the operand, the new residual, what was quantized. The last two may be None."""

    quantized: BlockScaledTensor
    residual: torch.Tensor | None
    values: torch.Tensor | None


class FusedRequest(NamedTuple):
    """What a fused operation is asked for. matrices: all that its kernel reads or writes beside the operand, (M, K)
    each; quantized: what is done with the values; kind: of their global scale, as ``kind_of_scale`` says it."""

    matrices: tuple[torch.Tensor | None, ...]
    quantized: QuantizeRequest
    kind: str


def check_memory(
    read: Mapping[str, torch.Tensor], given: Any, out: BlockScaledTensor | None, residual_out: torch.Tensor | None
) -> None:
    """Raises if what is written overlaps itself or what is read; but the new residual may be x, or the old one."""
    if residual_out is not None:
        # a thread reads a block before it writes it: they may be the same memory, but not lie across it
        check_overlap({name: None if same(x, residual_out) else x for name, x in read.items()}, residual_out)
    if out is not None:
        first, *others = read
        check_out_gradient(out)
        check_out_memory(out, read[first], given)
        for part in (out.data, out.scale, out.global_scale):
            if part is not None:
                check_overlap({name: read[name] for name in others} | {"residual_out": residual_out}, part)


def checked_quantization(values: torch.Tensor, r: Any) -> tuple[QuantizeRequest, str]:
    """The quantization of values like ``values`` (M, K) by the request of an operation, and the kind of its global
    scale."""
    request = checked_request(values, r.format, r.rule, scale_layout=r.scale_layout)
    if request.rule.choice in ("optimal", "hessian"):
        got, expected = repr(request.rule.name), "a rule that does not search"
        raise OperandError.of("rule", got=got, expected=expected, hint="quantize has it.")
    if r.out is not None:
        check_out(r.out, request, r.global_scale)
    return request, kind_of_scale(request.format, r.global_scale, values.device)


def quantized_values(values: torch.Tensor, r: Any, backend: str) -> BlockScaledTensor:
    """``values`` quantized by ``quantize`` as the request of an operation says."""
    given = r._asdict() | {"x": values, "backend": backend, "rule": r.rule}
    return QUANTIZE.call(*(given.get(name, default) for name, default in QUANTIZE.defaults.items()))


def fused_problem(request: QuantizeRequest, kind: str, *read: torch.Tensor | None) -> QuantizeProblem:
    """What the choice of a kernel depends on. read: all matrices."""
    _, rows, k = request.source.matrices.shape
    return QuantizeProblem(
        request.format,
        request.rule,
        rows,
        k,
        dtype=DTYPE_NAMES[request.source.matrices.dtype],
        alignment=min(row_alignment(x, 32) for x in read if x is not None),
        scale_layout=request.scale_layout,
        global_scale=kind,
    )


class ComputedScale:
    """A planned call whose global scale is computed from all values: those are stored, and ``quantize`` takes them.

    check: raises where what is written overlaps what is read. values: the option that asks for the values.
    """

    def __init__(self, operation: Any, check: Callable[[Any], None], values: str) -> None:
        self._operation, self._check, self._plain = operation, check, {"global_scale": None, "out": None, values: True}

    def __call__(self, *given: Any) -> Fused:
        r = self._operation.request(*given)
        if r.out is not None:
            self._check(r)
        found = self._operation.run(*r._replace(**self._plain))
        return found._replace(quantized=quantized_values(found.values, r, r.backend))


class ReadableFirst:
    """A planned call that copies what a kernel cannot read, as ``copied`` does it with a request."""

    def __init__(self, operation: Any, check: Callable[[Any], None], copied: Callable[[Any], Any]) -> None:
        self._operation, self._check, self._copied = operation, check, copied

    def __call__(self, *given: Any) -> Fused:
        r = self._operation.request(*given)
        self._check(r)
        return self._operation.run(*self._copied(r))


def fused_results(stored: bool, like: torch.Tensor, residual: bool = False) -> dict[str, Any]:
    """How a planned call makes and returns what it computes on the way. stored: the values. like: both of them."""
    options: dict[str, Any] = {
        "wrap": Fused,
        "result": f"out, {'residual_out' if residual else None}, {'values' if stored else None}",
    }
    if residual:
        options["new"] = {"residual_out": allocator(torch.empty_like(like))}
    if stored:
        make = allocator(like)
        options["extra"] = "values", lambda given, kept: make(), like
    return options


def checked_matrix(name: str, x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A view of ``x`` as (M, K), without a gradient; ``like``: what it must match in shape, dtype and device."""
    check_dense(name, x)
    if x.dtype not in DTYPE_NAMES:
        raise OperandTypeError.of(f"dtype of {name}", got=x.dtype, expected=" or ".join(map(str, DTYPE_NAMES)))
    if x.ndim not in (1, 2) or x.numel() == 0:
        hint = "flatten(0, -2) makes one matrix of a batch." if x.ndim > 2 else ""
        got, expected = tuple(x.shape), "(K,) or (M, K), and no empty dimension"
        raise OperandError.of(f"shape of {name}", got=got, expected=expected, hint=hint)
    x = x.detach()
    x = x if x.ndim == 2 else x[None]
    if like is not None:
        if x.dtype is not like.dtype:
            raise OperandTypeError.of(f"dtype of {name}", got=x.dtype, expected=like.dtype)
        if x.shape != like.shape:
            raise OperandError.of(f"shape of {name}", got=tuple(x.shape), expected=tuple(like.shape))
        if x.device != like.device:
            raise OperandError.of(f"device of {name}", got=x.device, expected=like.device)
    return x


def same(a: Any, b: Any) -> bool:
    """Whether two matrices of as many elements are the same memory."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` if the kernels can read it, else a copy: K contiguous, rows that start at multiples of sixteen bytes."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and row_alignment(x, _ALIGNMENT) == _ALIGNMENT:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def matrix(x: torch.Tensor | None, name: str) -> Matrix | None:
    """The argument for a matrix (M, K) that a variant may lack. name: what is at its address."""
    return None if x is None else Matrix(name, Strides(x.stride(0) * x.element_size(), 0))

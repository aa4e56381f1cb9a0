"""What ``rmsnorm_quantize`` and ``silu_mul_quantize`` share: checks, and how what they compute is quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import OperandError
from ..kernels.quantize.arguments import Strides
from ..kernels.quantize.fused import Matrix
from ..operand import BlockScaledTensor, row_alignment
from ..planning.quantize import QuantizeProblem
from ..row_scaled import FP8, RowScaledTensor
from ..runtime.kernel import Kernel
from ..target import Target
from ..tensors import check_tensor
from .checks import DTYPE_NAMES, check_memory, check_overlap
from .dispatch import is_recorded
from .planned import PlannedCall, allocator
from .quantize import QUANTIZE
from .quantize_launch import Results, quantize_arguments, quantized_output, readable_by
from .quantize_request import (
    QuantizeRequest,
    check_out,
    check_out_gradient,
    check_out_memory,
    checked_request,
    kind_of_scale,
)
from .quantize_rows import quantize_rows


class Fused(NamedTuple):
    """What a fused operation gives: the operand, the new residual, what was quantized. The last two may be None."""

    quantized: BlockScaledTensor
    residual: torch.Tensor | None
    values: torch.Tensor | None


class FusedRequest(NamedTuple):
    """What a fused operation is asked for. matrices: all that its kernel reads or writes beside the operand, (M, K)
    each; quantized: what is done with the values, None for rows in FP8; kind: of their global scale, as
    ``kind_of_scale`` says it, or FP8."""

    matrices: tuple[torch.Tensor | None, ...]
    quantized: QuantizeRequest | None
    kind: str

    @property
    def recorded(self) -> bool:
        """Whether torch records what is done with the matrices."""
        return is_recorded(self.matrices[0])


def check_written(
    read: Mapping[str, torch.Tensor],
    given: Any,
    out: BlockScaledTensor | RowScaledTensor | None,
    residual_out: torch.Tensor | None,
) -> None:
    """Raises if what is written overlaps itself or what is read; but the new residual may be x, or the old one."""
    if residual_out is not None:
        # a thread reads a block before it writes it: they may be the same memory, but not lie across it
        check_overlap({name: None if same(x, residual_out) else x for name, x in read.items()}, residual_out)
    read = {**read, "residual_out": residual_out}
    if isinstance(out, RowScaledTensor):
        check_memory(read, out)
    elif out is not None:
        check_out_gradient(out)
        check_out_memory(out, read, given)


def checked_quantization(values: torch.Tensor, r: Any) -> tuple[QuantizeRequest, str]:
    """The quantization of values like ``values`` (M, K) by the request of an operation, and the kind of its global
    scale."""
    given = {"format": r.format, "rule": r.rule, "scale_layout": r.scale_layout}
    request = checked_request(QUANTIZE.request_of(x=values, **given))
    if request.rule.choice in ("optimal", "hessian"):
        got, expected = repr(request.rule.name), "a rule that does not search"
        raise OperandError.of("rule", got=got, expected=expected, hint="quantize has it.")
    if r.out is not None:
        check_out(r.out, request, r.global_scale)
    return request, kind_of_scale(request.format, r.global_scale, values.device)


def quantized_values(values: torch.Tensor, r: Any) -> BlockScaledTensor | RowScaledTensor:
    """``values`` quantized by ``quantize`` as the request of an operation says."""
    if r.format == FP8:
        return quantize_rows(values.reshape(-1, values.shape[-1]), r.out, r.backend)
    names = ("format", "rule", "global_scale", "scale_layout", "out", "backend")
    return QUANTIZE.call(*QUANTIZE.request_of(x=values, **{name: getattr(r, name) for name in names}))


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


def computed_scale(operation: Any, values: str) -> Callable[..., Fused]:
    """The planned call whose global scale is computed from all values: those are stored, and ``quantize`` takes them.
    values: the option that asks for them."""
    plain = {"global_scale": None, "out": None, values: True}

    def call(*given: Any) -> Fused:
        r = operation.request(*given)
        if r.out is not None:
            operation.overlapping(*given)
        found = operation.run(*r._replace(**plain))
        return found._replace(quantized=quantized_values(found.values, r))

    return call


def readable_first(operation: Any, copied: Callable[[Any], Any]) -> Callable[..., Fused]:
    """The planned call that copies what a kernel cannot read, as ``copied`` does it with a request."""

    def call(*given: Any) -> Fused:
        operation.overlapping(*given)
        return operation.run(*copied(operation.request(*given)))

    return call


def fused_call(
    operation: Any, kernel: Kernel, plan: Any, r: Any, target: Target, values: bool, **own: Any
) -> PlannedCall:
    """The planned call of one launch. values: whether they are a result, too. own: fields of the record; with a
    "residual_out" that is a result, too."""
    (x, *_), request, kind = r.described
    results = Results(request, r.global_scale)
    out = results.maker(operation.fields)(*r) if r.out is None else r.out
    arguments = kernel.arguments(
        quantize=quantize_arguments(request, x, operation.fields[0], out, kind, plan),
        # as they are allocated
        values=Matrix("values", Strides(x.shape[1] * x.element_size(), 0)) if values else None,
        **own,
    )
    options = quantized_output(operation, r, results)
    return planned_call(operation, kernel, plan.config, target, arguments, r, out, values, **options)


def planned_call(
    operation: Any,
    kernel: Kernel,
    config: Any,
    target: Target,
    arguments: Any,
    r: Any,
    out: BlockScaledTensor | RowScaledTensor,
    values: bool = False,
    **options: Any,
) -> PlannedCall:
    """The planned call that gives ``Fused``: a result like ``out``, a new residual, if the record has one, and
    ``values``, if wanted. options: of ``Operation.planned``."""
    x, residual = r.described.matrices[0], getattr(arguments, "residual_out", None) is not None
    like = torch.empty((*r[0].shape[:-1], x.shape[1]), dtype=x.dtype, device=x.device)
    options["result"] = f"out, {'residual_out' if residual else None}, {'values' if values else None}"
    if residual:
        options["new"] = {"residual_out": allocator(torch.empty_like(like))}
    if values:
        make = allocator(like)
        options["extra"] = "values", lambda given, kept: make(), like
    return operation.planned(kernel, config, target, arguments, r._replace(out=out), wrap=Fused, **options)


def checked_matrix(name: str, x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A view of ``x`` as (M, K), without a gradient; ``like``: what it must match in shape, dtype and device."""
    check_tensor(name, x, dtypes=DTYPE_NAMES)
    if x.ndim not in (1, 2) or x.numel() == 0:
        hint = "flatten(0, -2) makes one matrix of a batch." if x.ndim > 2 else ""
        got, expected = tuple(x.shape), "(K,) or (M, K), and no empty dimension"
        raise OperandError.of(f"shape of {name}", got=got, expected=expected, hint=hint)
    x = x.detach()
    x = x if x.ndim == 2 else x[None]
    if like is not None:
        check_tensor(name, x, dtypes=[like.dtype], shapes=[like.shape], device=like.device)
    return x


def same(a: Any, b: Any) -> bool:
    """Whether two matrices of as many elements are the same memory."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` if the kernels can read it, else a copy: they copy sixteen bytes at a time."""
    return readable_by(x, 16)


def matrix(x: torch.Tensor | None, name: str) -> Matrix | None:
    """The argument for a matrix (M, K) that a variant may lack. name: what is at its address."""
    return None if x is None else Matrix(name, Strides(x.stride(0) * x.element_size(), 0))

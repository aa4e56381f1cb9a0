"""What ``rmsnorm_quantize`` and ``silu_mul_quantize`` share: each quantizes what it computes, in one launch.

The results are block-scaled, or FP8 rows: E4M3 with a float32 scale for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import OperandError
from ..kernels.quantize.arguments import Strides
from ..kernels.quantize.fp8_config import (
    Fp8ComputedArguments,
    Fp8ComputedConfig,
    Fp8RowsArguments,
    OtherRows,
    can_implement,
    rows_config,
)
from ..kernels.quantize.fused import Matrix
from ..lazy import Lazily
from ..operand import BlockScaledTensor, row_alignment
from ..planning.quantize import QuantizeProblem
from ..row_scaled import FP8, RowScaledTensor
from ..runtime.backend import resolve, sm_count
from ..runtime.kernel import Kernel
from ..target import Target
from ..tensors import check_tensor
from .arguments import Argument
from .checks import DTYPE_NAMES, check_memory, check_overlap
from .dispatch import is_recorded
from .operation import Operation
from .planned import PlannedCall, allocator
from .quantize import QUANTIZE
from .quantize_launch import Results, byte_strides, quantize_arguments, quantized_output, readable_by
from .quantize_request import (
    COUNT_RESULT,
    QuantizeRequest,
    check_out,
    check_out_gradient,
    check_out_memory,
    checked_request,
    kind_of_scale,
)
from .quantize_rows import check_out_rows, check_rows, quantize_rows, rows_and_maker


class Fused(NamedTuple):
    """The result of a fused operation: the operand, the new residual or None, the quantized values or None."""

    quantized: BlockScaledTensor | RowScaledTensor
    residual: torch.Tensor | None
    values: torch.Tensor | None


class FusedRequest(NamedTuple):
    """What a request of a fused operation asks for.

    matrices: a record of everything that the kernel reads or writes besides the operand: matrices (M, K), a weight
    (K,), or None; the first has the shape of the values. quantized: the quantization of the values, None for FP8 rows.
    kind: the kind of the global scale, from ``kind_of_scale``, or FP8.
    """

    matrices: Any
    quantized: QuantizeRequest | None
    kind: str


class FusedOperation(Operation):
    """An operation that quantizes what it computes.

    kernel: computes block-scaled results. source: what is computed, as in ``Fp8ComputedConfig``. values: the option
    that asks for the values that are quantized. matrices: checks a request and returns its matrices (``FusedRequest``);
    the next three functions take the request and these. choose: plans the kernel for a ``QuantizeProblem``, an
    architecture and a number of multiprocessors. record: the arguments that only this operation's kernel has. compute:
    the values (M, K) and the new residual, in exact torch.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Argument],
        kernel: Kernel,
        *,
        source: str,
        values: str,
        matrices: Callable[[Any], Any],
        choose: Callable[..., Any],
        record: Callable[..., dict[str, Any]],
        compute: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        **options: Any,
    ) -> None:
        self._kernel, self._source, self.wanted, self._matrices = kernel, source, values, matrices
        self._choose, self._record, self._compute = choose, record, compute
        super().__init__(
            function,
            arguments,
            describe=self._described,
            check=self._checked_out,
            reference=self._computed_exactly,
            plan=self._planned_for,
            target=lambda r, out: resolve(r.backend, r[0].device),
            store=None,
            overlaps=self._check_memory,
            follows=False,
            **({"count": COUNT_RESULT} | options),
        )

    def shape_of(self, r: Any) -> tuple[int, ...]:
        """The shape of the values that a request quantizes."""
        return *r[0].shape[:-1], r.described.matrices[0].shape[1]

    def _described(self, r: Any) -> FusedRequest:
        matrices = self._matrices(r)
        if r.format != FP8:
            return FusedRequest(matrices, *checked_quantization(matrices[0], r))
        if (r.global_scale, r.rule, r.scale_layout, getattr(r, self.wanted)) != (None, "max", "blocked", False):
            got = f"global_scale={r.global_scale!r}, rule={r.rule!r}, scale_layout={r.scale_layout!r}"
            got += f", {self.wanted}={getattr(r, self.wanted)}"
            raise OperandError.of(f"options for {FP8}", got=got, expected="global_scale=None, and no other option")
        for x in matrices:
            if x is not None and x.ndim == 2:
                check_rows(x if r[0].ndim == 2 else x[0])
        check_out_rows(r.out, matrices[0])
        return FusedRequest(matrices, None, FP8)

    def _checked_out(self, r: Any) -> BlockScaledTensor | RowScaledTensor | None:
        if not is_recorded(r.described.matrices[0]):
            self._check_memory(r)
        return r.out

    def _check_memory(self, r: Any) -> None:
        """Raises if an output overlaps another one or an input; only the new residual may be x or the old residual."""
        new = getattr(r, "residual_out", None)
        read = {name: getattr(r, name) for name in r.described.matrices._fields if name != "residual_out"}
        if new is not None:
            # a thread reads a block before it writes it: the two may be the same memory, but not overlap in part
            check_overlap({name: None if same(x, new) else x for name, x in read.items()}, new)
        read["residual_out"] = new
        if isinstance(r.out, RowScaledTensor):
            check_memory(read, r.out)
        elif r.out is not None:
            check_out_gradient(r.out)
            check_out_memory(r.out, read, r.global_scale)

    def _planned_for(self, r: Any, target: Target) -> Callable[..., Fused]:
        matrices, request, kind = r.described
        if kind == "computed":
            return self._in_two_steps
        if any(x is not None and readable(x) is not x for x in matrices):
            return self._copied_first
        own = self._record(r, matrices)
        if kind == FP8:
            return self._planned_rows(r, target, own)
        x, values = matrices[0], getattr(r, self.wanted)
        plan = self._choose(r, fused_problem(request, kind, matrices), target.arch, sm_count(target, x.device))
        results = Results(request, r.global_scale)
        out = results.maker(self.fields)(*r) if r.out is None else r.out
        arguments = self._kernel.arguments(
            quantize=quantize_arguments(request, x, self.fields[0], out, kind, plan),
            values=dense_matrix(x, "values") if values else None,
            **own,
        )
        options = quantized_output(self, r, results)
        return self._planned_call(self._kernel, plan.config, target, arguments, r, out, values, **options)

    def _planned_rows(self, r: Any, target: Target, own: Mapping[str, Any]) -> PlannedCall:
        """The planned call that returns FP8 rows."""
        x = r.described.matrices[0]
        like, made = rows_and_maker(x)
        has = {name for name, field in own.items() if field is not None}
        variant = {"source": self._source, "residual": "residual" in has, "weighted": "weight" in has}
        config = Fp8ComputedConfig(**vars(rows_config(DTYPE_NAMES[x.dtype], x.shape[1], target.arch)), **variant)
        rows = Fp8RowsArguments(self.fields[0], "out.data", "out.scale", *x.shape, byte_strides(x).row)
        others = {name: OtherRows(x.pointer, x.strides.row) for name, x in own.items() if isinstance(x, Matrix)}
        arguments = Fp8ComputedArguments(**dict.fromkeys(Fp8ComputedArguments._fields) | own | others | {"rows": rows})
        out = like if r.out is None else r.out
        return self._planned_call(FP8_ROWS, config, target, arguments, r, out, False, new_of=made)

    def _planned_call(
        self,
        kernel: Kernel,
        config: Any,
        target: Target,
        arguments: Any,
        r: Any,
        out: BlockScaledTensor | RowScaledTensor,
        values: bool,
        **options: Any,
    ) -> PlannedCall:
        """The planned call of one launch. out: like the result. values: whether the caller wants the values, too."""
        x, residual = r.described.matrices[0], getattr(arguments, "residual_out", None) is not None
        like = torch.empty(self.shape_of(r), dtype=x.dtype, device=x.device)
        options["result"] = f"out, {'residual_out' if residual else None}, {'values' if values else None}"
        if residual:
            options["new"] = {"residual_out": allocator(torch.empty_like(like))}
        if values:
            make = allocator(like)
            options["extra"] = "values", lambda args, kept: make(), like
        return self.planned(kernel, config, target, arguments, r._replace(out=out), wrap=Fused, **options)

    def _in_two_steps(self, *args: Any) -> Fused:
        """The planned call for a global scale that all values decide: a launch, then ``quantize``."""
        r = self.request(*args)
        if r.out is not None:
            self.overlapping(*args)
        found = self.run(*r._replace(**{"global_scale": None, "out": None, self.wanted: True}))
        return found._replace(quantized=quantized_values(found.values, r))

    def _copied_first(self, *args: Any) -> Fused:
        """The planned call that first copies the matrices that a kernel cannot read."""
        self.overlapping(*args)
        r = self.request(*args)
        copies = {}
        for name, x in r.described.matrices._asdict().items():
            if x is not None and name != "residual_out":
                copies[name] = readable(x) if x.ndim == 1 else readable(x).reshape(*r[0].shape[:-1], -1)
        return self.run(*r._replace(**copies))

    def _computed_exactly(self, r: Any) -> Fused:
        """Computes the request in exact torch."""
        values, residual = self._compute(r, r.described.matrices)
        return Fused(quantized_values(values, r), residual, values.reshape(self.shape_of(r)).contiguous())


def checked_quantization(values: torch.Tensor, r: Any) -> tuple[QuantizeRequest, str]:
    """How the request of an operation quantizes values like ``values`` (M, K), and the kind of the global scale."""
    options = {"format": r.format, "rule": r.rule, "scale_layout": r.scale_layout}
    request = checked_request(QUANTIZE.request_of(x=values, **options))
    if request.rule.choice in ("optimal", "hessian"):
        got, expected = repr(request.rule.name), "a rule that does not search"
        raise OperandError.of("rule", got=got, expected=expected, hint="quantize has it.")
    if r.out is not None:
        check_out(r.out, request, r.global_scale)
    return request, kind_of_scale(request.format, r.global_scale, values.device)


def quantized_values(values: torch.Tensor, r: Any) -> BlockScaledTensor | RowScaledTensor:
    """``values``, quantized by ``quantize`` as the request of an operation asks."""
    if r.format == FP8:
        return quantize_rows(values, r.out, r.backend)
    names = ("format", "rule", "global_scale", "scale_layout", "out", "backend")
    return QUANTIZE.call(*QUANTIZE.request_of(x=values, **{name: getattr(r, name) for name in names}))


def fused_problem(request: QuantizeRequest, kind: str, read: Any) -> QuantizeProblem:
    """The problem that the choice of a kernel depends on. read: all matrices."""
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


def checked_matrix(name: str, x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A view of ``x`` as (M, K), without a gradient. like: the matrix whose shape, dtype and device it must have."""
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
    """Whether two matrices of equal shape are the same memory."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` if the kernels can read it, else a copy; they copy sixteen bytes at a time."""
    return readable_by(x, 16)


def matrix(x: torch.Tensor | None, name: str) -> Matrix | None:
    """The kernel's argument for a matrix (M, K), or None. name: the tensor at its address."""
    return None if x is None else Matrix(name, Strides(x.stride(0) * x.element_size(), 0))


def dense_matrix(like: torch.Tensor, name: str) -> Matrix:
    """The kernel's argument for a new matrix with the shape of ``like``."""
    return Matrix(name, Strides(like.shape[1] * like.element_size(), 0))


FP8_ROWS = Kernel(
    "quantize_fp8_computed", Fp8ComputedArguments, Lazily("kernels.quantize.fp8_computed", "Fp8Computed"), can_implement
)

"""What ``rmsnorm_quantize`` and ``silu_mul_quantize`` share: checks, the planned call, arguments of quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import Format
from ..kernels.quantize.arguments import Powers, QuantizeArguments, Seed, Strides
from ..kernels.quantize.fused import Matrix
from ..operand import BlockScaledTensor, row_alignment, span_bytes
from ..planning.fused import FusedPlan
from ..planning.quantize import QuantizeProblem
from ..quantization.rules import resolve_format
from ..runtime.apart import Apart
from ..runtime.kernel import Kernel
from ..runtime.launch import SimLauncher
from ..runtime.torch_private import is_exporting
from ..scale_layout import blocked_bytes, blocked_flat, blocked_view
from ..target import Target
from ..tensors import check_dense
from .calls import allocator
from .checks import DTYPE_NAMES, check_overlap
from .planned import PlannedLaunch
from .quantize import quantize
from .quantize_launch import Results, given_scale
from .quantize_request import (
    QuantizeRequest,
    check_out,
    check_out_gradient,
    check_out_memory,
    checked_global_scale,
    checked_request,
)

# kernels copy sixteen bytes at a time
_ALIGNMENT = 16


@dataclass(frozen=True)
class Quantization:
    """How values are quantized.

    request: that of values of the shape, dtype and device of ``request.source.matrices``. global_scale: "given",
    "none", or "auto": then it is computed from all values, which are stored, and quantized by ``quantize``.
    """

    request: QuantizeRequest
    global_scale: str

    @property
    def computes_scale(self) -> bool:
        """Whether the global scale is computed from all values."""
        return self.global_scale == "auto"

    @property
    def columns(self) -> int:
        """Blocks of a row."""
        return self.request.format.scale_columns(self.request.source.k)

    def problem(self, alignment: int) -> QuantizeProblem:
        """What the choice of a kernel depends on. alignment: of all matrices."""
        request = self.request
        _, rows, k = request.source.matrices.shape
        return QuantizeProblem(
            request.format,
            request.rule,
            rows,
            k,
            dtype=DTYPE_NAMES[request.source.matrices.dtype],
            alignment=alignment,
            scale_layout=request.scale_layout,
            global_scale="none" if self.computes_scale else self.global_scale,
        )

    def of_values(self, values: torch.Tensor, given: Any, out: BlockScaledTensor | None, backend: str) -> Any:
        """``values`` quantized by ``quantize``."""
        request = self.request
        options = {"scale_layout": request.scale_layout, "out": out, "backend": backend}
        given = None if self.global_scale == "none" else given
        return quantize(values, request.format, request.rule.name, global_scale=given, **options)


class Fused(NamedTuple):
    """What a fused operation gives: the operand, the new residual, what was quantized. The last two may be None."""

    quantized: BlockScaledTensor
    residual: torch.Tensor | None
    values: torch.Tensor | None


def call_fused(
    name: str,
    inputs: Mapping[str, torch.Tensor | None],
    shape: Sequence[int],
    kind: str,
    given: Any,
    options: Mapping[str, Any],
    out: BlockScaledTensor | None,
    residual_out: torch.Tensor | None = None,
) -> Fused:
    """The operator ``name`` of ``inputs``, x first. shape: of the values. kind: "given", "none" or "auto", the global
    scale. options: the operator's."""
    x, residual = next(iter(inputs.values())), inputs.get("residual")
    factor = checked_global_scale(given, x.device) if kind == "given" else None
    tensors = [None if t is None else t.detach() for t in (*inputs.values(), factor)]
    options = {**options, "compute_global_scale": kind == "auto"}
    operator, wants_values = getattr(torch.ops.cute_nvfp4, name), options["return_values"]
    if out is None and residual_out is None:
        data, scale, computed, *rest = operator.default(*tensors, **options)
        new, values = rest[0], rest[-1]
    else:
        data, scale, computed, new, values = new_results(x, shape, residual, **options)
        if out is not None:
            data, scale = out.data, blocked_flat(out.scale) if out.scale.ndim == 6 else out.scale
            computed = out.global_scale
        written = {"out": data, "out_scale": scale, "values_out": values if wants_values else None}
        # the given one may be that of out, which is read then
        stored = kind == "auto" or (out is not None and computed is not given)
        written["out_global_scale"] = computed if stored else None
        if residual is not None:
            written["residual_out"] = new = new if residual_out is None else residual_out
        operator.out(*tensors, **options, **written)
    found = Fused(out, None if residual is None else new, values if wants_values else None)
    if out is not None:
        return found
    format = resolve_format(options["format"])
    # a view in six dimensions would make a program of its own for up to 128 rows
    if options["scale_layout"] == "blocked" and not is_exporting():
        scale = blocked_view(scale, data.shape[0], format.scale_columns(shape[-1]))
    return found._replace(quantized=BlockScaledTensor(data, scale, computed if kind == "auto" else factor, format))


def new_results(
    x: torch.Tensor,
    shape: Sequence[int],
    residual: torch.Tensor | None,
    *,
    format: str = "nvfp4",
    scale_layout: str = "blocked",
    compute_global_scale: bool = False,
    return_values: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """New results: data, scales, global scale, residual, values. shape: of the values, (M, K) or (K,)."""
    kind, (rows, k) = resolve_format(format), (shape if len(shape) == 2 else (1, *shape))
    columns = kind.scale_columns(k)
    scales = (rows, columns) if scale_layout == "rowmajor" else blocked_bytes(rows, columns)
    return (
        x.new_empty((rows, kind.data_columns(k)), dtype=torch.uint8),
        x.new_empty(scales, dtype=torch.uint8),
        x.new_empty(() if compute_global_scale else 0, dtype=torch.float32),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(shape if return_values else 0),
    )


class FusedCall:
    """A kernel that quantizes what it computes, planned.

    It reads x and other tensors, and writes codes and scales, and where there are any a new residual and the values.
    """

    def __init__(
        self,
        quantization: Quantization,
        kernel: Kernel,
        config: Any,
        target: Target,
        arguments: Any,
        read: Mapping[str, torch.Tensor],
        new: Sequence[torch.Tensor | None],
        out: BlockScaledTensor | None,
        residual_out: torch.Tensor | None,
    ) -> None:
        """arguments: the kernel's record, filled by name. read: what is read, as the caller gives it, by name, x first.
        new: tensors like the new residual and the values, whose memory is given back. out, residual_out: the
        caller's."""
        self._quantization, self._names = quantization, tuple(read)
        self._copied = tuple(readable(x) is not x for x in read.values())
        self._given = quantization.global_scale == "given"
        self._results = Results(quantization.request, self._given)
        results = self._results.data(), self._results.scale(), self._results.factor()
        fields, device = (*read, "data", "scale", "given", "residual_out", "values"), results[0].device
        launch = PlannedLaunch(
            kernel, config, target, device, arguments, fields, (*map(readable, read.values()), *results, *new)
        )
        self._fill, self._launch = launch.values, launch.launch
        self._residual, self._values = (_nothing if x is None else allocator(x) for x in new)
        self._backend = "sim" if isinstance(self._launch, SimLauncher) else "cuda"
        # what is read and written at the same place counts once
        places = launch.places
        sizes = {places[name]: span_bytes(x) for name, x in read.items() if not same(x, residual_out)}
        parts = () if out is None else ("data", "scale")
        written = [(places[name], span_bytes(getattr(out, name))) for name in parts]
        if residual_out is not None:
            written.append((places["residual_out"], span_bytes(residual_out)))
        self._apart = Apart(sizes | ({places["given"]: 4} if self._given else {}), written)
        # codes of values whose global scale is not known yet are dropped, and ``quantize`` checks its own result
        self._closely = any(self._copied) or quantization.computes_scale

    def __call__(
        self, read: Sequence[torch.Tensor], given: Any, out: BlockScaledTensor | None, residual_out: torch.Tensor | None
    ) -> Fused:
        """All arguments are like those that were planned for."""
        quantization, results = self._quantization, self._results
        automatic = quantization.computes_scale
        sources = read
        if self._closely and any(self._copied):
            sources = [readable(x) if copied else x for x, copied in zip(read, self._copied)]
        factor = given_scale(given, read[0]) if self._given else None
        if out is None or automatic:
            data, scale = results.data(), results.scale()
        else:
            data, scale = out.data, out.scale
        residual, values = self._residual() if residual_out is None else residual_out, self._values()
        frame = (*sources, data, scale, factor, residual, values)
        at = self._fill(*frame)
        if out is not None or residual_out is not None:
            own = None if out is None else out.global_scale
            if self._closely or (own is not None and (own is not given or own.requires_grad)) or self._apart.near(at):
                check_memory(dict(zip(self._names, read)), given, out, residual_out)
            if factor is not None and own is not None and factor.data_ptr() != own.data_ptr():
                own.copy_(factor.reshape(own.shape))
        self._launch(at, frame)
        if automatic:
            result = quantization.of_values(values, given, out, self._backend)
        else:
            result = BlockScaledTensor.like(results.key, data, scale, factor) if out is None else out
        return Fused(result, residual, values)


def _nothing() -> None:
    return None


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


def checked_quantization(
    values: torch.Tensor,
    format: str | Format,
    rule: str,
    global_scale: float | torch.Tensor | str | None,
    scale_layout: str,
    out: BlockScaledTensor | None,
) -> Quantization:
    """The quantization of values like ``values`` (M, K)."""
    request = checked_request(values, format, rule, scale_layout=scale_layout)
    if request.rule.choice in ("optimal", "hessian"):
        got, expected = repr(request.rule.name), "a rule that does not search"
        raise OperandError.of("rule", got=got, expected=expected, hint="quantize has it.")
    if out is not None:
        check_out(out, request, global_scale)
    return Quantization(request, kind_of_scale(request.format, global_scale, values.device))


def kind_of_scale(format: Format, given: float | torch.Tensor | str | None, device: torch.device) -> str:
    """Which global scale the result has: "auto", "given" or "none"."""
    automatic = isinstance(given, str) and given == "auto"
    if not format.has_global_scale:
        if not (given is None or automatic):
            got = type(given).__name__
            raise OperandError.of(f"global scale of {format.name}", got=got, expected="None or 'auto'")
        return "none"
    if automatic or given is None:
        return "auto" if automatic else "none"
    checked_global_scale(given, device)
    return "given"


def recorded(
    name: str,
    inputs: dict[str, torch.Tensor | None],
    shape: Sequence[int],
    given: Any,
    options: dict[str, Any],
    out: BlockScaledTensor | None,
    residual_out: torch.Tensor | None = None,
) -> Fused:
    """The operation as one operator of a graph, which chooses when it runs. inputs: x first. shape: of the values."""
    format = resolve_format(options["format"])
    kind = kind_of_scale(format, given, next(iter(inputs.values())).device)
    return call_fused(name, inputs, shape, kind, given, options | {"format": format.name}, out, residual_out)


def matrix_key(x: Any) -> tuple | type | None:
    """All that a plan depends on of a matrix, or of what is none."""
    if isinstance(x, torch.Tensor):
        try:
            return x.dtype, x.shape, x.stride(), x.device, (x.data_ptr() or 1) & 31, x.is_neg()
        except RuntimeError:
            # without strides or an address, which the checks refuse
            return type(x), id(x)
    return None if x is None else type(x)


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


def alignment(*tensors: torch.Tensor | None) -> int:
    """What divides the address of every row of all of them; at most 32 bytes."""
    return min(row_alignment(x, 32) for x in tensors if x is not None)


def matrix(x: torch.Tensor | None, name: str) -> Matrix | None:
    """The argument for a matrix (M, K) that a variant may lack. name: what is at its address."""
    return None if x is None else Matrix(name, Strides(x.stride(0) * x.element_size(), 0))


def quantize_arguments(
    x: torch.Tensor, name: str, quantization: Quantization, out: BlockScaledTensor | None, plan: FusedPlan
) -> QuantizeArguments:
    """The arguments that all kernels of quantization have. x: (M, K), the call's ``name``."""
    request, columns = quantization.request, quantization.columns
    row_bytes = request.format.data_columns(x.shape[1])
    in_place = out is not None and not quantization.computes_scale
    return QuantizeArguments(
        x=name,
        data="data",
        scale="scale",
        global_in="given" if quantization.global_scale == "given" else 0,
        global_out=0,
        rows=x.shape[0],
        columns=columns,
        batch=1,
        x_strides=Strides(x.stride(0) * x.element_size(), 0),
        data_strides=Strides(out.data.stride(0) if in_place else row_bytes, 0),
        scale_strides=Strides(columns if request.scale_layout == "rowmajor" else 0, 0),
        seed=Seed(0, 0),
        signs=0,
        powers=Powers(1, 1 << 16),
        ctas=plan.ctas,
        walk=plan.walk,
        chunks=None,
    )

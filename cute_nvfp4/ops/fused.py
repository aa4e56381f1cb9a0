"""What ``rmsnorm_quantize`` and ``silu_mul_quantize`` share: checks, the result, the arguments of quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import Format
from ..kernels.quantize.arguments import Powers, QuantizeArguments, Seed, Strides
from ..kernels.quantize.fused import Matrix
from ..operand import BlockScaledTensor, row_alignment
from ..planning.fused import FusedPlan
from ..planning.quantize import QuantizeProblem
from ..scale_layout import blocked_bytes, blocked_view
from .checks import DTYPE_NAMES, check_overlap
from .quantize import quantize
from .quantize_request import QuantizeRequest, check_out, checked_global_scale, checked_request

# kernels copy sixteen bytes at a time
_ALIGNMENT = 16


@dataclass(frozen=True)
class Quantization:
    """How values are quantized, and where to: ``out``, or a new result if it is None.

    request: that of values of the shape, dtype and device of ``request.source.matrices``. global_scale: a float32
    tensor of no dimensions, None, or "auto".
    """

    request: QuantizeRequest
    global_scale: torch.Tensor | str | None
    out: BlockScaledTensor | None

    @property
    def computes_scale(self) -> bool:
        """Whether the global scale is computed from all values: they are stored then, and quantized by ``quantize``."""
        return isinstance(self.global_scale, str)

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
            global_scale="given" if isinstance(self.global_scale, torch.Tensor) else "none",
        )

    def result(self) -> BlockScaledTensor:
        """Where the kernel puts data and scales, with the global scale that it reads."""
        factor = None if self.computes_scale else self.global_scale
        # the codes of values whose global scale is not known yet are dropped
        if self.out is not None and not self.computes_scale:
            if factor is not None and factor.data_ptr() != self.out.global_scale.data_ptr():
                self.out.global_scale.copy_(factor.reshape(self.out.global_scale.shape))
            return self.out
        request = self.request
        x, format = request.source.matrices, request.format
        _, rows, k = x.shape
        data = torch.empty((rows, format.data_columns(k)), dtype=torch.uint8, device=x.device)
        if request.scale_layout == "rowmajor":
            scale = torch.empty((rows, self.columns), dtype=torch.uint8, device=x.device)
        else:
            flat = torch.empty(blocked_bytes(rows, self.columns), dtype=torch.uint8, device=x.device)
            scale = blocked_view(flat, rows, self.columns)
        return BlockScaledTensor(data, scale, factor, format)

    def of_values(self, values: torch.Tensor, backend: str) -> BlockScaledTensor:
        """``values`` quantized by ``quantize``."""
        request = self.request
        options = {"scale_layout": request.scale_layout, "out": self.out, "backend": backend}
        return quantize(values, request.format, request.rule.name, global_scale=self.global_scale, **options)


def checked_quantization(
    values: torch.Tensor,
    format: str | Format,
    rule: str,
    global_scale: float | torch.Tensor | str | None,
    scale_layout: str,
    out: BlockScaledTensor | None,
    others: Mapping[str, torch.Tensor | None],
) -> Quantization:
    """The quantization of values like ``values`` (M, K).

    others: what else the kernel reads, and writes: ``out`` may not overlap it.
    """
    request = checked_request(values, format, rule, scale_layout=scale_layout)
    if request.rule.choice in ("optimal", "hessian"):
        got, expected = repr(request.rule.name), "a rule that does not search"
        raise OperandError.of("rule", got=got, expected=expected, hint="quantize has it.")
    if out is not None:
        check_out(out, request, global_scale)
        for part in (out.data, out.scale, out.global_scale):
            if part is not None:
                check_overlap(others, part)
    automatic = isinstance(global_scale, str) and global_scale == "auto"
    if not request.format.has_global_scale:
        if not (global_scale is None or automatic):
            got = f"{type(global_scale).__name__}"
            raise OperandError.of(f"global scale of {request.format.name}", got=got, expected="None or 'auto'")
        global_scale = None
    elif global_scale is not None and not automatic:
        global_scale = checked_global_scale(global_scale, values.device)
    return Quantization(request, global_scale, out)


def checked_matrix(name: str, x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A view of ``x`` as (M, K), without a gradient; ``like``: what it must match in shape, dtype and device."""
    if not isinstance(x, torch.Tensor):
        raise OperandTypeError.of(name, got=type(x).__name__, expected="torch.Tensor")
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


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` if the kernels can read it, else a copy: K contiguous, rows that start at multiples of sixteen bytes."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and row_alignment(x, _ALIGNMENT) == _ALIGNMENT:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def alignment(*tensors: torch.Tensor | None) -> int:
    """What divides the address of every row of all of them; at most 32 bytes."""
    return min(row_alignment(x, 32) for x in tensors if x is not None)


def matrix(x: torch.Tensor | None) -> Matrix | None:
    """The argument for a matrix (M, K) that a variant may lack."""
    return None if x is None else Matrix(x.data_ptr(), Strides(x.stride(0) * x.element_size(), 0))


def quantize_arguments(
    x: torch.Tensor, result: BlockScaledTensor, quantization: Quantization, plan: FusedPlan
) -> QuantizeArguments:
    """The arguments that all kernels of quantization have."""
    factor, columns = result.global_scale, quantization.columns
    return QuantizeArguments(
        x=x.data_ptr(),
        data=result.data.data_ptr(),
        scale=result.scale.data_ptr(),
        global_in=0 if factor is None else factor.data_ptr(),
        global_out=0,
        rows=x.shape[0],
        columns=columns,
        batch=1,
        x_strides=Strides(x.stride(0) * x.element_size(), 0),
        data_strides=Strides(result.data.stride(0), 0),
        scale_strides=Strides(columns if result.scale_layout == "rowmajor" else 0, 0),
        seed=Seed(0, 0),
        signs=0,
        powers=Powers(1, 1 << 16),
        ctas=plan.ctas,
        walk=plan.walk,
        chunks=None,
    )

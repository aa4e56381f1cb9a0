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
from ..quantization.rules import Rule, resolve_format, resolve_rule
from ..scale_layout import blocked_bytes, blocked_view
from .checks import DTYPE_NAMES, check_overlap
from .quantize import quantize
from .quantize_request import checked_global_scale

# kernels copy sixteen bytes at a time
_ALIGNMENT = 16


@dataclass(frozen=True)
class Quantization:
    """How ``rows`` × ``k`` values are quantized, and where to: ``out``, or a new result if it is None.

    global_scale: a float32 tensor of no dimensions, None, or "auto".
    """

    format: Format
    rule: Rule
    rows: int
    k: int
    global_scale: torch.Tensor | str | None
    scale_layout: str
    out: BlockScaledTensor | None

    @property
    def computes_scale(self) -> bool:
        """Whether the global scale is computed from all values."""
        return isinstance(self.global_scale, str)

    def problem(self, dtype: torch.dtype, alignment: int) -> QuantizeProblem:
        """What the choice of a kernel depends on; a global scale that is computed is not the kernel's matter."""
        given = self.global_scale is not None and not self.computes_scale
        scale = "given" if given else "none"
        sizes = {"dtype": DTYPE_NAMES[dtype], "alignment": alignment}
        layout = self.scale_layout
        return QuantizeProblem(
            self.format, self.rule, self.rows, self.k, **sizes, scale_layout=layout, global_scale=scale
        )

    def result(self, device: torch.device) -> BlockScaledTensor:
        """Where the result goes."""
        factor = None if self.computes_scale else self.global_scale
        if self.out is not None:
            return BlockScaledTensor(self.out.data, self.out.scale, factor, self.format)
        columns = self.format.scale_columns(self.k)
        data = torch.empty((self.rows, self.format.data_columns(self.k)), dtype=torch.uint8, device=device)
        if self.scale_layout == "blocked":
            flat = torch.empty(blocked_bytes(self.rows, columns), dtype=torch.uint8, device=device)
            return BlockScaledTensor(data, blocked_view(flat, self.rows, columns), factor, self.format)
        scale = torch.empty((self.rows, columns), dtype=torch.uint8, device=device)
        return BlockScaledTensor(data, scale, factor, self.format)

    def of_values(self, values: torch.Tensor, backend: str) -> BlockScaledTensor:
        """``values`` quantized by ``quantize``."""
        options = {"global_scale": self.global_scale, "scale_layout": self.scale_layout, "backend": backend}
        found = quantize(values, self.format, self.rule.name, **options)
        if self.out is None:
            return found
        self.out.data.copy_(found.data)
        self.out.scale.copy_(found.scale)
        return BlockScaledTensor(self.out.data, self.out.scale, found.global_scale, self.format)


def checked_quantization(
    x: torch.Tensor,
    shape: tuple[int, int],
    format: str | Format,
    rule: str,
    global_scale: float | torch.Tensor | str | None,
    scale_layout: str,
    out: BlockScaledTensor | None,
) -> Quantization:
    """The quantization of values of ``shape`` and of the dtype and the device of ``x``."""
    format = resolve_format(format)
    resolved, (rows, k) = resolve_rule(rule, format), shape
    if scale_layout not in ("blocked", "rowmajor"):
        raise OperandError.of("scale_layout", got=repr(scale_layout), expected="'blocked' or 'rowmajor'")
    if resolved.choice in ("optimal", "hessian"):
        hint = "quantize has it: it takes the values that return_… gives."
        raise OperandError.of("rule", got=repr(resolved.name), expected="a rule that does not search", hint=hint)
    if k % format.block:
        raise OperandError.of(f"K of {format.name}", got=k, expected=f"a multiple of {format.block}")
    automatic = isinstance(global_scale, str) and global_scale == "auto"
    if not format.has_global_scale:
        if not (global_scale is None or automatic):
            raise OperandError.of(f"global scale of {format.name}", got="a number", expected="None or 'auto'")
        global_scale = None
    elif global_scale is not None and not automatic:
        global_scale = checked_global_scale(global_scale, x.device)
    found = Quantization(format, resolved, rows, k, global_scale, scale_layout, out)
    if out is not None:
        _check_out(out, found, x.device)
    return found


def _check_out(out: BlockScaledTensor, wanted: Quantization, device: torch.device) -> None:
    if not isinstance(out, BlockScaledTensor):
        raise OperandTypeError.of("out", got=type(out).__name__, expected="BlockScaledTensor")
    for what, got, expected in (
        ("format", out.format.name, wanted.format.name),
        ("rows and K", (out.rows, out.k), (wanted.rows, wanted.k)),
        ("dimensions of data", out.data.ndim, 2),
        ("scale layout", out.scale_layout, wanted.scale_layout),
        ("device", out.device, device),
    ):
        if got != expected:
            raise OperandError.of(f"{what} of out", got=got, expected=expected)
    # six-dimensional blocked scales are a view of memory in another order
    contiguous = out.data.is_contiguous() and (out.scale.ndim == 6 or out.scale.is_contiguous())
    if not contiguous or out.data.dtype is not torch.uint8 or out.scale.dtype is not torch.uint8:
        got = f"{out.data.dtype}, strides {out.data.stride()}; {out.scale.dtype}, strides {out.scale.stride()}"
        expected = "contiguous uint8, as a call without out returns it"
        raise OperandError.of("data and scale of out", got=got, expected=expected)


def check_written(
    read: Mapping[str, torch.Tensor | None],
    quantization: Quantization,
    written: Mapping[str, torch.Tensor | None] | None = None,
) -> None:
    """Refuses results that overlap what is read, or one another."""
    read = {**read, "global_scale": None if quantization.computes_scale else quantization.global_scale}
    out, results = quantization.out, dict(written or {})
    if out is not None:
        results |= {"out.data": out.data, "out.scale": out.scale if out.scale.ndim != 6 else _flat(out)}
    for name, tensor in results.items():
        if tensor is not None:
            others = {other: x for other, x in results.items() if other != name}
            check_overlap({**read, **others}, tensor)


def _flat(out: BlockScaledTensor) -> torch.Tensor:
    """Blocked scales as the bytes that they are."""
    return out.scale.as_strided((out.scale.numel(),), (1,))


def checked_matrix(name: str, x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A view of ``x`` as (M, K), without a gradient; ``like``: what it must match in shape, dtype and device."""
    if not isinstance(x, torch.Tensor):
        raise OperandTypeError.of(name, got=type(x).__name__, expected="torch.Tensor")
    if x.dtype not in DTYPE_NAMES:
        raise OperandTypeError.of(name, got=x.dtype, expected=" or ".join(map(str, DTYPE_NAMES)))
    if x.ndim not in (1, 2) or x.numel() == 0:
        hint = "x.flatten(0, -2) makes one matrix of a batch." if x.ndim > 2 else ""
        got, expected = f"shape {tuple(x.shape)}", "(K,) or (M, K), and no empty dimension"
        raise OperandError.of(name, got=got, expected=expected, hint=hint)
    x = x.detach().reshape(-1, x.shape[-1]) if x.ndim == 1 else x.detach()
    if like is not None:
        if x.dtype is not like.dtype:
            raise OperandTypeError.of(f"dtype of {name}", got=x.dtype, expected=like.dtype)
        for what, got, expected in (
            ("shape", tuple(x.shape), tuple(like.shape)),
            ("device", x.device, like.device),
        ):
            if got != expected:
                raise OperandError.of(f"{what} of {name}", got=got, expected=expected)
    return x


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` if the kernels can read it, else a copy: K contiguous, rows that start at multiples of sixteen bytes."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and alignment(x) == _ALIGNMENT:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def alignment(*tensors: torch.Tensor | None) -> int:
    """What divides the address of every row of all of them; at most sixteen bytes."""
    return min(row_alignment(x, _ALIGNMENT) for x in tensors if x is not None)


def matrix(x: torch.Tensor | None) -> Matrix | None:
    """The argument for a matrix (M, K) that a variant may lack."""
    return None if x is None else Matrix(x.data_ptr(), Strides(x.stride(0) * x.element_size(), 0))


def quantize_arguments(
    x: torch.Tensor, result: BlockScaledTensor, quantization: Quantization, plan: FusedPlan
) -> QuantizeArguments:
    """The arguments that all kernels of quantization have."""
    factor, columns = result.global_scale, quantization.format.scale_columns(quantization.k)
    blocked = quantization.scale_layout == "blocked"
    return QuantizeArguments(
        x=x.data_ptr(),
        data=result.data.data_ptr(),
        scale=result.scale.data_ptr(),
        global_in=0 if factor is None else factor.data_ptr(),
        global_out=0,
        rows=quantization.rows,
        columns=columns,
        batch=1,
        x_strides=Strides(x.stride(0) * x.element_size(), 0),
        data_strides=Strides(result.data.stride(0), 0),
        scale_strides=Strides(0 if blocked else columns, 0),
        seed=Seed(0, 0),
        signs=0,
        powers=Powers(1, 1 << 16),
        ctas=plan.ctas,
        walk=plan.walk,
    )

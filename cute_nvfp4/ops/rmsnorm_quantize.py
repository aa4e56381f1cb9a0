"""rmsnorm_quantize: adds the residual, norms, and quantizes for the product that follows, in one launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import OperandError, OperandTypeError
from ..formats import Format
from ..kernels.quantize.fused import RmsnormArguments, RmsnormConfig
from ..operand import BlockScaledTensor
from ..planning.fused import RmsnormProblem, choose_rmsnorm
from ..planning.quantize import QuantizeProblem
from ..quantization.rules import resolve_format, resolve_rule
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..target import Target, architecture
from .checks import DTYPE_NAMES, check_overlap, tensors
from .fused import (
    Quantization,
    alignment,
    checked_matrix,
    checked_quantization,
    matrix,
    quantize_arguments,
    readable,
)


class RmsnormQuantized(NamedTuple):
    """quantized: the normed rows. residual: x + residual; normed: what was quantized; None where not asked for."""

    quantized: BlockScaledTensor
    residual: torch.Tensor | None
    normed: torch.Tensor | None


def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    global_scale: float | torch.Tensor | str | None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    format: str | Format = "nvfp4",
    rule: str = "max",
    scale_layout: str = "blocked",
    return_normed: bool = False,
    out: BlockScaledTensor | None = None,
    residual_out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> BlockScaledTensor | RmsnormQuantized:
    """rmsnorm(x + residual) · weight, quantized, in one pass over x.

    Args:
        x: (M, K) or (K,), float32, float16 or bfloat16, any row stride. Its gradient is not followed.
        weight: (K,), of x's dtype or float32; None: none.
        global_scale: of the result. A number, or a float32 tensor of one element on x's device: used as it is
            (calibrate it: ``nn.calibration``); None: none. "auto" needs the maximum over all rows first: the kernel
            then stores the normed rows, and ``quantize`` takes them, in launches of its own.
        eps: added to the mean of squares; at least 0.
        residual: shaped as x, of x's dtype. s = x + residual, rounded once to that dtype, is normed, and is the new
            residual.
        format, rule, scale_layout: as in ``quantize``; a rule that does not search.
        return_normed: whether the rows that are quantized are wanted, too.
        out: as in ``quantize``. Where its global scale is the given one, nothing is copied.
        residual_out: where to put the new residual; ``residual`` or ``x`` itself will do.
        backend: as in ``quantize``.

    Returns: the result; or, with ``residual`` or ``return_normed``, ``RmsnormQuantized``.

    **What is rounded.** normed = s · (1 / sqrt(mean(s²) + eps)) · weight in float32, each product rounded, and then
    once to x's dtype, as ``torch.nn.functional.rms_norm`` does in one kernel. The data and the scales are bit for bit
    what ``quantize(normed, …)`` gives; the new residual is exact. Sums of squares have an order: it depends on K,
    format and dtype alone, so a row's result does not depend on the other rows, and repeats bit for bit.

    **How near normed is.** All squares are positive, and a sum passes at most 28 roundings (a thread's chain, four
    sums, a warp, the warps); the mean and eps add two; the root halves what is relative; ``rsqrt.approx`` is off by
    2**-22.9, each product by 2**-24: altogether less than 2**-19 of the value. Float16 and bfloat16 results are
    therefore within 1 ulp (0.51) of the value computed without rounding; float32 ones within 2**-19 of it. The
    reference computes in float64 and rounds once. A sum of squares beyond float32 (|s| near 1e19) is infinity, and the
    row zeros, on every backend; squares below 2**-126 vanish, which eps hides if it is 2**-100 or more. A NaN makes its
    row NaN; infinity its own block, and the others zeros.

    Raises:
        OperandError, OperandTypeError: an argument that does not fit; results that overlap.
        TargetError: an unknown backend, or one that cannot run tensors of this device.
    """
    rows = checked_matrix("x to norm", x)
    old = None if residual is None else checked_matrix("residual", residual, rows)
    _check_weight(weight, rows)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not (0 <= eps < math.inf):
        raise OperandError.of("eps", got=repr(eps), expected="a finite number that is not negative")
    new = _residual_out(rows, old, weight, residual_out)
    others = {"residual": old, "weight": weight, "residual_out": new}
    quantization = checked_quantization(rows, format, rule, global_scale, scale_layout, out, others)
    target = resolve(backend, x.device)
    if target.backend == "reference":
        summed = rows if old is None else new.copy_(rows + old)
        normed = rmsnorm_reference(summed, weight, eps)
        quantized = quantization.of_values(normed, "reference")
    else:
        quantized, normed = _launch(rows, old, new, weight, eps, quantization, return_normed, target)
    if residual is None and not return_normed:
        return quantized
    shaped = [None if t is None else t.reshape(x.shape) for t in (new, normed if return_normed else None)]
    return RmsnormQuantized(quantized, *shaped)


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight in float64, rounded once to the dtype of x, (M, K)."""
    wide = x.double()
    # the kernel's range, not float64's
    total = wide.square().sum(-1, keepdim=True).float().double()
    normed = wide * torch.rsqrt(total / x.shape[-1] + float(np.float32(eps)))
    return (normed if weight is None else normed * weight.double()).to(x.dtype)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    quantization: Quantization,
    wants_normed: bool,
    target: Target,
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """The result and, if it is wanted or needed, what was quantized."""
    device, k = x.device, x.shape[1]
    x, residual = readable(x), None if residual is None else readable(residual)
    weight = None if weight is None else readable(weight[None])[0]
    normed = torch.empty(x.shape, dtype=x.dtype, device=device) if wants_normed or quantization.computes_scale else None
    result = quantization.result()
    # the new residual and the weight have addresses of their own
    aligned = alignment(x, residual, residual_out, None if weight is None else weight[None])
    problem = RmsnormProblem(
        quantization.problem(aligned),
        values=normed is not None,
        residual=residual is not None,
        weight="" if weight is None else DTYPE_NAMES[weight.dtype],
    )
    plan = choose_rmsnorm(problem, target.arch, sm_count(target, device))
    arguments = RmsnormArguments(
        quantize=quantize_arguments(x, result, quantization, plan),
        weight=None if weight is None else weight.data_ptr(),
        residual=matrix(residual),
        residual_out=matrix(residual_out),
        values=matrix(normed),
        eps=eps,
        inverse_k=1.0 / k,
    )
    written = {"data": result.data, "scale": result.scale, "residual_out": residual_out, "normed": normed}
    # what is read and written at the same place is named once
    read = {"x": None if _same(x, residual_out) else x, "residual": None if _same(residual, residual_out) else residual}
    read |= {"weight": weight, "global_scale": result.global_scale}
    KERNEL.run(plan.config, target, device, arguments, lambda: tensors(read, written))
    return (quantization.of_values(normed, target.backend) if quantization.computes_scale else result), normed


def _check_weight(weight: torch.Tensor | None, x: torch.Tensor) -> None:
    if weight is None:
        return
    if not isinstance(weight, torch.Tensor):
        raise OperandTypeError.of("weight", got=type(weight).__name__, expected="torch.Tensor or None")
    if weight.dtype not in (x.dtype, torch.float32):
        raise OperandTypeError.of("dtype of weight", got=weight.dtype, expected=f"{x.dtype} or torch.float32")
    if tuple(weight.shape) != (x.shape[1],):
        raise OperandError.of("shape of weight", got=tuple(weight.shape), expected=f"({x.shape[1]},)")
    if weight.device != x.device:
        raise OperandError.of("device of weight", got=weight.device, expected=x.device)


def _residual_out(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor | None:
    """Where the new residual goes, (M, K)."""
    if out is None:
        return None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is None:
        raise OperandError.of("residual_out", got="one, without a residual", expected="None")
    out = checked_matrix("residual_out", out, x)
    if readable(out) is not out:
        got = f"address {out.data_ptr():#x}, strides {out.stride()}"
        raise OperandError.of("residual_out", got=got, expected="contiguous rows at multiples of 16 bytes")
    # a thread reads a block before it writes it: x and the residual may be the same memory, but not lie across it
    read = {"x": None if _same(x, out) else x, "residual": None if _same(residual, out) else residual}
    check_overlap({**read, "weight": weight}, out)
    return out


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two matrices of one shape are the same memory."""
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def compile_rmsnorm_quantize(
    arch: str,
    format: str | Format = "nvfp4",
    rule: str = "max",
    *,
    rows: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    values: bool = False,
    residual: bool = False,
    weight: torch.dtype | None = torch.bfloat16,
    **more: Any,
) -> tuple[CompiledKernel, RmsnormConfig]:
    """The kernel for contiguous matrices of this size on ``arch``, and its configuration.

    Needs no GPU and no tensors. ``more``: fields of ``QuantizeProblem``.
    """
    format, found = resolve_format(format), architecture(arch)
    quantized = QuantizeProblem(
        format, resolve_rule(rule, format), rows, k, dtype=DTYPE_NAMES[dtype], alignment=16, **more
    )
    problem = RmsnormProblem(quantized, values, residual, "" if weight is None else DTYPE_NAMES[weight])
    config = choose_rmsnorm(problem, found, found.sm_count).config
    return KERNEL.compile(config), config


def _host(config: RmsnormConfig) -> Callable[..., Any]:
    from ..kernels.quantize.rmsnorm import RmsnormQuantize

    return RmsnormQuantize(config)


KERNEL = Kernel("rmsnorm_quantize", RmsnormArguments, _host)

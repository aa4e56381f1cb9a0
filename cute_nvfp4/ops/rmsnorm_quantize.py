"""rmsnorm_quantize: adds the residual, norms, and quantizes for the product that follows, in one launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
from ..runtime.bounded import Bounded
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..runtime.simulating import world
from ..target import architecture
from ..tensors import check_dense
from .calls import operand_key, scalar_key
from .checks import DTYPE_NAMES
from .dispatch import is_recorded, written_to
from .fused import (
    Fused,
    FusedCall,
    Quantization,
    alignment,
    check_memory,
    checked_matrix,
    checked_quantization,
    matrix,
    matrix_key,
    quantize_arguments,
    readable,
    recorded,
    same,
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
    if isinstance(x, torch.Tensor) and is_recorded(x):
        checked_inputs(x, weight, residual, eps, residual_out)
        options = {"eps": eps, "return_values": return_normed}
        options |= {"format": format, "rule": rule, "scale_layout": scale_layout, "backend": backend}
        inputs = {"x": x, "weight": weight, "residual": residual}
        found = recorded("rmsnorm_quantize", inputs, x.shape, global_scale, options, out, residual_out)
    else:
        options = (eps, format, rule, scale_layout, return_normed, backend)
        call = planned(x, weight, residual, global_scale, out, residual_out, options)
        found = call([t for t in (x, weight, residual) if t is not None], global_scale, out, residual_out)
        if (out is not None or residual_out is not None) and torch.is_grad_enabled():
            written_to(out, residual_out)
    if residual is None and not return_normed:
        return found.quantized
    new = found.residual
    if new is not None and new.shape != x.shape:
        new = new.reshape(x.shape)
    return RmsnormQuantized(found.quantized, new, found.values if return_normed else None)


def planned(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    global_scale: float | torch.Tensor | str | None,
    out: BlockScaledTensor | None,
    residual_out: torch.Tensor | None,
    options: tuple,
) -> Callable[..., Fused]:
    """The call that was planned for others like these, or a new one. options: eps and those that follow it in the
    plan."""
    key = (
        *(matrix_key(x), matrix_key(weight), matrix_key(residual)),
        global_scale if type(global_scale) is str else scalar_key(global_scale),
        *(operand_key(out), matrix_key(residual_out), same(x, residual_out), same(residual, residual_out)),
        # True and 1 are equal keys
        *(options, type(options[0]), world(isinstance(x, torch.Tensor) and not x.is_cuda)),
    )
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(x, weight, residual, global_scale, out, residual_out, *options)
    return call


_calls = Bounded()


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    global_scale: float | torch.Tensor | str | None,
    out: BlockScaledTensor | None,
    residual_out: torch.Tensor | None,
    eps: float,
    format: str | Format,
    rule: str,
    scale_layout: str,
    return_normed: bool,
    backend: Backend,
) -> Callable[..., Fused]:
    """The call for these and all like them, which it checks."""
    rows, old, new = checked_inputs(x, weight, residual, eps, residual_out)
    if new is not None and readable(new) is not new:
        got = f"address {new.data_ptr():#x}, strides {new.stride()}"
        raise OperandError.of("residual_out", got=got, expected="contiguous rows at multiples of 16 bytes")
    given = {"x": x, "weight": weight, "residual": residual}
    read = {name: t for name, t in given.items() if t is not None}
    check_memory(read, global_scale, None, residual_out)
    quantization = checked_quantization(rows, format, rule, global_scale, scale_layout, out)
    check_memory(read, global_scale, out, residual_out)
    target = resolve(backend, x.device)
    if target.backend == "reference":
        return functools.partial(_reference_call, tuple(read), quantization=quantization, eps=eps)
    old = None if old is None else readable(old)
    rows, factor = readable(rows), None if weight is None else readable(weight)
    stores = return_normed or quantization.computes_scale
    problem = RmsnormProblem(
        # the new residual and the weight have addresses of their own
        quantization.problem(alignment(rows, old, new, factor)),
        values=stores,
        residual=old is not None,
        weight="" if weight is None else DTYPE_NAMES[weight.dtype],
    )
    plan = choose_rmsnorm(problem, target.arch, sm_count(target, x.device))
    like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dense = like.reshape(rows.shape)
    arguments = RmsnormArguments(
        quantize=quantize_arguments(rows, "x", quantization, out, plan),
        weight=None if weight is None else "weight",
        residual=matrix(old, "residual"),
        residual_out=None if old is None else matrix(dense if new is None else new, "residual_out"),
        values=matrix(dense, "values") if stores else None,
        eps=eps,
        inverse_k=1.0 / rows.shape[1],
    )
    made = (None if old is None else like, like if stores else None)
    return FusedCall(quantization, KERNEL, plan.config, target, arguments, read, made, out, residual_out)


def _reference_call(
    names: Sequence[str],
    read: Sequence[torch.Tensor],
    given: Any,
    out: BlockScaledTensor | None,
    residual_out: torch.Tensor | None,
    *,
    quantization: Quantization,
    eps: float,
) -> Fused:
    """By exact torch."""
    named = dict(zip(names, read))
    check_memory(named, given, out, residual_out)
    x, weight, residual = (None if t is None else t.detach() for t in map(named.get, ("x", "weight", "residual")))
    rows, new = x if x.ndim == 2 else x[None], residual_out
    if residual is not None:
        rows = rows + residual.reshape(rows.shape)
        new = torch.empty(x.shape, dtype=x.dtype, device=x.device) if new is None else new
        new.detach().copy_(rows.reshape(new.shape))
    normed = rmsnorm_reference(rows, weight, eps).reshape(x.shape).contiguous()
    return Fused(quantization.of_values(normed, given, out, "reference"), new, normed)


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight in float64, rounded once to the dtype of x, (M, K)."""
    wide = x.double()
    # the kernel's range, not float64's
    total = wide.square().sum(-1, keepdim=True).float().double()
    normed = wide * torch.rsqrt(total / x.shape[-1] + float(np.float32(eps)))
    return (normed if weight is None else normed * weight.double()).to(x.dtype)


def checked_inputs(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    residual_out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """x, the residual and the place of the new one as (M, K), of arguments that fit together."""
    rows = checked_matrix("x to norm", x)
    old = None if residual is None else checked_matrix("residual", residual, rows)
    _check_weight(weight, rows)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not (0 <= eps < math.inf):
        raise OperandError.of("eps", got=repr(eps), expected="a finite number that is not negative")
    if residual_out is not None and residual is None:
        raise OperandError.of("residual_out", got="one, without a residual", expected="None")
    return rows, old, None if residual_out is None else checked_matrix("residual_out", residual_out, rows)


def _check_weight(weight: torch.Tensor | None, x: torch.Tensor) -> None:
    if weight is None:
        return
    if not isinstance(weight, torch.Tensor):
        raise OperandTypeError.of("weight", got=type(weight).__name__, expected="torch.Tensor or None")
    check_dense("weight", weight)
    if weight.dtype not in (x.dtype, torch.float32):
        raise OperandTypeError.of("dtype of weight", got=weight.dtype, expected=f"{x.dtype} or torch.float32")
    if tuple(weight.shape) != (x.shape[1],):
        raise OperandError.of("shape of weight", got=tuple(weight.shape), expected=f"({x.shape[1]},)")
    if weight.device != x.device:
        raise OperandError.of("device of weight", got=weight.device, expected=x.device)


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

"""gemv: validate, choose a backend and a variant, compile once, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import NVFP4
from ..kernels.gemv.arguments import GemvArguments, Strides
from ..kernels.gemv.config import GemvConfig
from ..operand import BlockScaledTensor, row_alignment
from ..planning.gemv import GemvPlan, GemvProblem, choose, fitted
from ..reference import gemv_reference
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..target import Target, architecture
from .checks import DTYPE_NAMES, check_dtype, check_product, checked_output, number, parts, tensors
from .library import products as operators
from .library.registration import by_operator


def gemv(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    alpha: float | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    config: GemvPlan | None = None,
) -> torch.Tensor:
    """c = alpha · A · b for NVFP4 operands: (L, M), or (M,) if ``a`` has no batch dimension.

    Args:
        a: (L, M, K) or (M, K), scales blocked or row-major, with or without a global scale.
        b: (L, N, K) or (N, K) with N ≥ 1, of which row 0 is the vector (the padding of a 128-row b is not read).
        alpha: a number that multiplies the result; None is 1.
        out: where to put the result, of that shape and of dtype float16, bfloat16 or float32; any strides, but no
            element may be written twice and nothing may overlap the operands. Every element is written.
        out_dtype: dtype of a new result (float16 by default); with ``out`` it must be None or that of ``out``.
        backend: ``auto`` (the kernel for CUDA tensors, exact torch for CPU tensors), ``cuda``, ``sim``, ``reference``
            (:mod:`cute_nvfp4.runtime.backend`).
        config: a plan of ``planning.gemv``, whose tiling is kept; None has one chosen.

    Products and the sums of each block of 16 are exact; sums over blocks are in float32, in a fixed order, so the
    result repeats bit for bit. It is rounded once to the output's dtype. NaN scales make their row NaN.

    Runs on the current stream, without synchronising the device or allocating anything but the result.

    Raises:
        OperandError, OperandTypeError: operands that do not fit together, or cannot be computed with (by ``config``).
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    if by_operator((a, b), out):
        return operators.gemv(a, b, alpha, out, out_dtype, backend, config)
    check_product(a, {"b": b}, (NVFP4,))
    shape = (a.batch, a.rows) if a.is_batched else (a.rows,)
    inputs = {} if out is None else parts({"a": a, "b": b})
    out = checked_output(inputs, a.device, shape, out, out_dtype)
    scalar = number("alpha", alpha)
    target = resolve(backend, a.device)
    if target.backend == "reference":
        return out.copy_(gemv_reference(a, b, alpha=scalar, out_dtype=out.dtype))
    plan = _plan(_problem(a, b, out), target, sm_count(target, a.device), config)
    arguments = _arguments(a, b, out, scalar, plan.ctas)
    KERNEL.run(plan.config, target, a.device, arguments, lambda: _tensors(a, b, out))
    return out


def plan_for(
    a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, *, backend: Backend = "auto", sms: int | None = None
) -> GemvPlan:
    """The plan that ``gemv(a, b, out=out)`` chooses, on ``sms`` multiprocessors (None: those of the device)."""
    target = resolve(backend, a.device)
    return _plan(_problem(a, b, out), target, sms or sm_count(target, a.device), None)


@functools.lru_cache(maxsize=4096)
def _plan(problem: GemvProblem, target: Target, sm_count: int, plan: GemvPlan | None) -> GemvPlan:
    if plan is None:
        return choose(problem, target.arch, sm_count)
    if not isinstance(plan, GemvPlan):
        raise OperandTypeError.of("config", got=type(plan).__name__, expected="a GemvPlan of planning.gemv")
    return fitted(plan, problem, target.arch)


def _tensors(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor) -> Tensors:
    read = {"a": a.data, "sfa": a.scale, "b": b.data, "sfb": b.scale}
    return tensors(read | {"a_global": a.global_scale, "b_global": b.global_scale}, {"c": out})


def compile_gemv(
    arch: str, *, m: int, k: int, batch: int = 1, scales: str = "blocked", out_dtype: torch.dtype = torch.float16
) -> tuple[CompiledKernel, GemvConfig]:
    """The kernel that ``gemv`` would run for contiguous operands of these sizes on ``arch``, and its configuration.

    Needs no GPU and no tensors.
    """
    if min(m, k, batch) < 1 or k % NVFP4.block:
        raise OperandError.of("m, k, batch", got=(m, k, batch), expected="positive, and k a multiple of 16")
    if scales not in ("blocked", "rowmajor"):
        raise OperandError.of("scales", got=repr(scales), expected="'blocked' or 'rowmajor'")
    check_dtype("out_dtype", out_dtype)
    target = architecture(arch)
    alignment = min((k // 2) & -(k // 2), 32)
    problem = GemvProblem(m, k, batch, alignment, scales, scales, (k // 16) % 4 == 0, out=DTYPE_NAMES[out_dtype])
    config = choose(problem, target, target.sm_count).config
    return KERNEL.compile(config), config


def _problem(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor) -> GemvProblem:
    return GemvProblem(
        a.rows,
        a.k,
        a.batch,
        min(a.data_alignment, 32),
        a.scale_layout,
        b.scale_layout,
        # whether four row-major scales can be read at once
        a.scale_layout == "blocked" or row_alignment(a.scale, 4) == 4,
        a.global_scale is not None,
        b.global_scale is not None,
        DTYPE_NAMES[out.dtype],
    )


def _strides(tensor: torch.Tensor) -> Strides:
    """Strides of (L, MN, …) or (MN, …)."""
    return Strides(tensor.stride(1), tensor.stride(0)) if tensor.ndim == 3 else Strides(tensor.stride(0), 0)


def _scale_strides(operand: BlockScaledTensor) -> Strides:
    """Strides of the scales in bytes; blocked scales have no rows of their own."""
    if operand.scale_layout == "rowmajor":
        return _strides(operand.scale)
    return Strides(0, operand.scale.numel() // operand.batch)


def _arguments(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, alpha: float, ctas: int) -> GemvArguments:
    return GemvArguments(
        a=a.data.data_ptr(),
        sfa=a.scale.data_ptr(),
        b=b.data.data_ptr(),
        sfb=b.scale.data_ptr(),
        c=out.data_ptr(),
        a_global=0 if a.global_scale is None else a.global_scale.data_ptr(),
        b_global=0 if b.global_scale is None else b.global_scale.data_ptr(),
        alpha=alpha,
        m=a.rows,
        k=a.k,
        batch=a.batch,
        a_strides=_strides(a.data),
        sfa_strides=_scale_strides(a),
        b_batch=_strides(b.data).batch,
        sfb_batch=_scale_strides(b).batch,
        c_strides=Strides(out.stride(1), out.stride(0)) if out.ndim == 2 else Strides(out.stride(0), 0),
        ctas=ctas,
    )


def _host(config: GemvConfig) -> Callable[..., Any]:
    from ..kernels.gemv.kernel import Gemv

    return Gemv(config)


KERNEL = Kernel("gemv", GemvArguments, _host)

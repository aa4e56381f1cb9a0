"""gemv: a matrix times a vector, both NVFP4."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import NVFP4
from ..kernels.gemv.arguments import GemvArguments, Strides
from ..kernels.gemv.config import GemvConfig
from ..lazy import Lazily
from ..operand import BlockScaledTensor, OperandKey
from ..planning.gemv import GemvPlan, GemvProblem, choose, fitted
from ..reference import gemv_reference
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..target import Target, architecture
from .arguments import NUMBER, OPERAND
from .checks import DTYPE_NAMES, check_dtype, check_product, check_types, checked_output, exact_alpha, number, reads
from .operation import Operation
from .planned import PlannedCall


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
    """Computes c = alpha · A · b for NVFP4 operands: (L, M), or (M,) if ``a`` has no batch dimension.

    Args:
        a: (L, M, K) or (M, K), scales blocked or row-major, with or without a global scale.
        b: (L, N, K) or (N, K) with N ≥ 1; row 0 is the vector (the kernel does not read the padding of a 128-row b).
        alpha: a number that multiplies the result, any float32 one; None is 1.
        out: the tensor to write and return, of that shape and of dtype float16, bfloat16 or float32; any strides, but
            no two elements may share memory, and it may not overlap the operands. Every element is written.
        out_dtype: dtype of a new result (float16 by default); with ``out`` it must be None or that of ``out``.
        backend: ``auto`` (the kernel for CUDA tensors, exact torch for CPU tensors), ``cuda``, ``sim``, ``reference``
            (:mod:`cute_nvfp4.runtime.backend`).
        config: a plan of ``planning.gemv``, whose tiling is kept; None: the package chooses. Refused for exact torch.

    Products and the sums of each block of 16 are exact; sums over blocks are in float32, in a fixed order, so the
    result repeats bit for bit. It is rounded once to the output's dtype. NaN scales make their row NaN.

    Runs on the current stream, without synchronising the device or allocating anything but the result.

    Raises:
        OperandError, OperandTypeError: operands do not fit together, or cannot be computed with (by ``config``).
        TargetError: the backend is unknown, or cannot run tensors of this device.
    """
    return GEMV.call(a, b, 1.0 if alpha is None else alpha, out, out_dtype, backend, config)


def _check(r: Any) -> torch.Tensor:
    check_types(r.a, r.b)
    check_product(r.a, {"b": r.b}, (NVFP4,))
    number("alpha", r.alpha)
    shape = (r.a.batch, r.a.rows) if r.a.is_batched else (r.a.rows,)
    return checked_output(reads(r), r.a.device, shape, r.out, r.out_dtype)


def _plan(r: Any, target: Target) -> PlannedCall:
    a, b, out = r.a.key, r.b.key, r.out
    plan = _chosen(_problem(a, b, out.dtype), target, sm_count(target, a.device), r.config)
    arguments = GemvArguments(
        a="a.data",
        sfa="a.scale",
        b="b.data",
        sfb="b.scale",
        c="out",
        a_global="a.global_scale" if a.has_global_scale else 0,
        b_global="b.global_scale" if b.has_global_scale else 0,
        alpha=1.0 if r.alpha is None else "alpha",
        m=a.rows,
        k=a.k,
        batch=a.batch,
        ctas=plan.ctas,
        a_strides=Strides(*a.strides),
        sfa_strides=Strides(*a.scale_strides),
        b_batch=b.strides[1],
        sfb_batch=b.scale_strides[1],
        c_strides=Strides(out.stride(1), out.stride(0)) if out.ndim == 2 else Strides(out.stride(0), 0),
    )
    return GEMV.planned(KERNEL, plan.config, target, arguments, r)


def plan_for(
    a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, *, backend: Backend = "auto", sms: int | None = None
) -> GemvPlan:
    """The plan that ``gemv(a, b, out=out)`` chooses, on ``sms`` multiprocessors (None: those of the device)."""
    target = resolve(backend, a.device)
    return _chosen(_problem(a.key, b.key, out.dtype), target, sms or sm_count(target, a.device), None)


def _chosen(problem: GemvProblem, target: Target, sms: int, plan: GemvPlan | None) -> GemvPlan:
    if plan is None:
        return choose(problem, target.arch, sms)
    if not isinstance(plan, GemvPlan):
        raise OperandTypeError.of("config", got=type(plan).__name__, expected="a GemvPlan of planning.gemv")
    return fitted(plan, problem, target.arch)


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


def _problem(a: OperandKey, b: OperandKey, dtype: torch.dtype) -> GemvProblem:
    return GemvProblem(
        a.rows,
        a.k,
        a.batch,
        min(a.alignment, 32),
        a.scale_layout,
        b.scale_layout,
        # whether four row-major scales can be read at once
        a.scale_layout == "blocked" or a.scale_alignment >= 4,
        a.has_global_scale,
        b.has_global_scale,
        DTYPE_NAMES[dtype],
    )


KERNEL = Kernel("gemv", GemvArguments, Lazily("kernels.gemv.kernel", "Gemv"))
GEMV = Operation(
    gemv,
    {"a": OPERAND, "b": OPERAND, "alpha": NUMBER},
    check=_check,
    reference=lambda r: gemv_reference(r.a, r.b, alpha=exact_alpha(r.alpha), out_dtype=r.out.dtype),
    plan=_plan,
    preparable=True,
)

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
from ..operand import BlockScaledTensor, OperandKey, span_bytes
from ..planning.gemv import GemvPlan, GemvProblem, choose, fitted
from ..reference import gemv_reference
from ..runtime.apart import Apart
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.bounded import Bounded
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..runtime.simulating import world
from ..target import Target, architecture
from .calls import Preparation, allocator, output_key, preparable
from .checks import (
    DTYPE_NAMES,
    check_dtype,
    check_overlap,
    check_product,
    check_types,
    checked_output,
    number,
    parts,
    refuse_config,
    tensors,
)
from .dispatch import by_operator, written_to
from .library import products as operators


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
        config: a plan of ``planning.gemv``, whose tiling is kept; None has one chosen. Refused where exact torch runs.

    Products and the sums of each block of 16 are exact; sums over blocks are in float32, in a fixed order, so the
    result repeats bit for bit. It is rounded once to the output's dtype. NaN scales make their row NaN.

    Runs on the current stream, without synchronising the device or allocating anything but the result.

    Raises:
        OperandError, OperandTypeError: operands that do not fit together, or cannot be computed with (by ``config``).
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    if by_operator((a, b), out):
        return operators.gemv(a, b, alpha, out, out_dtype, backend, config)
    result = planned(a, b, out, out_dtype, backend, config)(a, b, out, 1.0 if alpha is None else number("alpha", alpha))
    if out is not None and torch.is_grad_enabled():
        written_to(out)
    return result


def planned(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    backend: Backend,
    config: GemvPlan | None,
) -> Callable[..., torch.Tensor]:
    """The call for these operands: the one that was planned for others like them, or a new one."""
    check_types(a, b)
    key = (a.key, b.key, output_key(out), out_dtype, backend, config, world(a.key.on_cpu))
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(a, b, out, out_dtype, backend, config)
    return call


def prepared(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    alpha: float | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    config: GemvPlan | None = None,
) -> Preparation:
    """``gemv`` planned, for ``prepare``."""
    call = preparable(planned(a, b, out, out_dtype, backend, config), _Call)
    scalar = number("alpha", alpha)
    out = call.new() if out is None else out
    slots = {"a": [("data", 0), ("scale", 1)], "b": [("data", 2), ("scale", 3)], "out": [(None, 4)]}
    for name, x, place in (("a", a, 5), ("b", b, 6)):
        if x.global_scale is not None:
            slots[name].append(("global_scale", place))
    return Preparation(
        call.launch,
        call.values(a, b, out, scalar),
        {"a": a, "b": b, "out": out},
        slots,
        Apart(call.sizes, ((4, span_bytes(out)),)),
        lambda x: (x["a"], x["b"], x["out"]),
    )


class _Call:
    """A planned call: the kernel, and what to check before it runs."""

    def __init__(self, a: OperandKey, b: OperandKey, out: torch.Tensor, target: Target, config: GemvPlan | None):
        plan = _chosen(_problem(a, b, out.dtype), target, sm_count(target, a.device), config)
        self.launch = KERNEL.launcher(plan.config, target, a.device, _arguments(a, b, out, plan.ctas), _tensors)
        self.new = allocator(torch.empty(out.shape, dtype=out.dtype, device=out.device))
        self.sizes = {0: a.data_bytes, 1: a.scale_bytes, 2: b.data_bytes, 3: b.scale_bytes, 5: 4, 6: 4}
        self._bytes = a.data_bytes, a.scale_bytes, b.data_bytes, b.scale_bytes, span_bytes(out)

    def __call__(
        self, a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor | None, alpha: float
    ) -> torch.Tensor:
        new = out is None
        if new:
            out = self.new()
        values = self.values(a, b, out, alpha)
        if not new and self._overlaps(*values):
            check_overlap(parts({"a": a, "b": b}), out)
        self.launch(values, (a, b, out))
        return out

    def values(self, a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, alpha: float) -> tuple:
        """What varies, in the order of ``GemvArguments``."""
        return (
            a.data.data_ptr(),
            a.scale.data_ptr(),
            b.data.data_ptr(),
            b.scale.data_ptr(),
            out.data_ptr(),
            0 if a.global_scale is None else a.global_scale.data_ptr(),
            0 if b.global_scale is None else b.global_scale.data_ptr(),
            alpha,
        )

    def _overlaps(self, a: int, sfa: int, b: int, sfb: int, c: int, a_global: int, b_global: int, alpha: float) -> bool:
        """Whether the output may overlap an operand."""
        a_bytes, sfa_bytes, b_bytes, sfb_bytes, c_bytes = self._bytes
        end = c + c_bytes
        return (
            (a < end and c < a + a_bytes)
            or (sfa < end and c < sfa + sfa_bytes)
            or (b < end and c < b + b_bytes)
            or (sfb < end and c < sfb + sfb_bytes)
            or c - 4 < a_global < end
            or c - 4 < b_global < end
        )


def _reference_call(
    a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor | None, alpha: float, *, dtype: torch.dtype
) -> torch.Tensor:
    if out is not None:
        check_overlap(parts({"a": a, "b": b}), out)
    exact = gemv_reference(a, b, alpha=alpha, out_dtype=dtype)
    return exact if out is None else out.copy_(exact)


_calls = Bounded()


def _plan(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    backend: Backend,
    config: GemvPlan | None,
) -> Callable[..., torch.Tensor]:
    """The call for these operands and all like them, which it checks."""
    check_product(a, {"b": b}, (NVFP4,))
    shape = (a.batch, a.rows) if a.is_batched else (a.rows,)
    out = checked_output(parts({"a": a, "b": b}), a.device, shape, out, out_dtype)
    target = resolve(backend, a.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference_call, dtype=out.dtype)
    return _Call(a.key, b.key, out, target, config)


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


def _tensors(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor) -> Tensors:
    read = {"a": a.data, "sfa": a.scale, "b": b.data, "sfb": b.scale}
    return tensors(read | {"a_global": a.global_scale, "b_global": b.global_scale}, {"c": out})


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


def _arguments(a: OperandKey, b: OperandKey, out: torch.Tensor, ctas: int) -> GemvArguments:
    return GemvArguments(
        # what varies from call to call
        *(0,) * 7,
        alpha=1.0,
        m=a.rows,
        k=a.k,
        batch=a.batch,
        a_strides=Strides(*a.strides),
        sfa_strides=Strides(*a.scale_strides),
        b_batch=b.strides[1],
        sfb_batch=b.scale_strides[1],
        c_strides=Strides(out.stride(1), out.stride(0)) if out.ndim == 2 else Strides(out.stride(0), 0),
        ctas=ctas,
    )


def _host(config: GemvConfig) -> Callable[..., Any]:
    from ..kernels.gemv.kernel import Gemv

    return Gemv(config)


KERNEL = Kernel("gemv", GemvArguments, _host)

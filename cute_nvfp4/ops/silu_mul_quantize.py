"""silu_mul_quantize: silu(gate) · up, quantized for the product that follows, in one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OperandError
from ..formats import Format
from ..kernels.quantize.fused import SiluMulArguments, SiluMulConfig
from ..operand import BlockScaledTensor
from ..planning.fused import FusedProblem, choose_silu_mul
from ..planning.quantize import QuantizeProblem
from ..quantization.rules import resolve_format, resolve_rule
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.bounded import Bounded
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..runtime.simulating import world
from ..target import architecture
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
)


class SiluMulQuantized(NamedTuple):
    """quantized: the activation's codes and scales. activation: what was quantized."""

    quantized: BlockScaledTensor
    activation: torch.Tensor


def silu_mul_quantize(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    global_scale: float | torch.Tensor | str | None,
    format: str | Format = "nvfp4",
    rule: str = "max",
    scale_layout: str = "blocked",
    return_activation: bool = False,
    out: BlockScaledTensor | None = None,
    backend: Backend = "auto",
) -> BlockScaledTensor | SiluMulQuantized:
    """silu(gate) · up, quantized, in one pass.

    Args:
        gate: (M, N) or (N,), float32, float16 or bfloat16, any row stride; without ``up`` (M, 2N) or (2N,), whose first
            half is the gate: what a projection with both weights one above the other gives. No gradient is followed.
        up: shaped as the gate, of its dtype.
        global_scale, format, rule, scale_layout, out, backend: as in ``rmsnorm_quantize``; "auto" is two steps here,
            too.
        return_activation: whether what is quantized is wanted, too.

    Returns: the result; with ``return_activation`` ``SiluMulQuantized``.

    **What is rounded.** activation = silu(gate) · up in float32, and then once to the inputs' dtype: torch's
    ``silu(gate) * up`` rounds silu, too. The data and the scales are bit for bit what ``quantize(activation, …)``
    gives.

    **How near the activation is.** silu is x / (1 + exp(−x)) by ``ex2.approx`` and ``rcp.approx``: its relative error
    is at most 4·10⁻⁶ for gates down to −80, and 6·10⁻⁷ above −8 (``kernels/gemm/gates.py``); the product adds 2**-24.
    Float16 and bfloat16 results are therefore within 1 ulp (0.51) of the value computed without rounding, float32 ones
    within 5·10⁻⁶ of it. Below −80 silu is smaller than 2·10⁻³³, and may be 0. The reference computes in float64 and
    rounds once. NaN stays NaN, and silu(−inf) is one, as in torch.

    Raises:
        OperandError, OperandTypeError: an argument that does not fit; results that overlap.
        TargetError: an unknown backend, or one that cannot run tensors of this device.
    """
    if isinstance(gate, torch.Tensor) and is_recorded(gate):
        first, _ = halves(gate, up)
        options = {"format": format, "rule": rule, "scale_layout": scale_layout, "backend": backend}
        options["return_values"] = return_activation
        shape = (*gate.shape[:-1], first.shape[1])
        found = recorded("silu_mul_quantize", {"gate": gate, "up": up}, shape, global_scale, options, out)
    else:
        call = planned(gate, up, global_scale, out, (format, rule, scale_layout, return_activation, backend))
        found = call((gate,) if up is None else (gate, up), global_scale, out, None)
        if out is not None and torch.is_grad_enabled():
            written_to(out)
    return SiluMulQuantized(found.quantized, found.values) if return_activation else found.quantized


def planned(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    global_scale: float | torch.Tensor | str | None,
    out: BlockScaledTensor | None,
    options: tuple,
) -> Callable[..., Fused]:
    """The call that was planned for others like these, or a new one. options: format and those that follow it in the
    plan."""
    key = (
        *(matrix_key(gate), matrix_key(up)),
        global_scale if type(global_scale) is str else scalar_key(global_scale),
        *(operand_key(out), options, world(isinstance(gate, torch.Tensor) and not gate.is_cuda)),
    )
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(gate, up, global_scale, out, *options)
    return call


_calls = Bounded()


def _plan(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    global_scale: float | torch.Tensor | str | None,
    out: BlockScaledTensor | None,
    format: str | Format,
    rule: str,
    scale_layout: str,
    return_activation: bool,
    backend: Backend,
) -> Callable[..., Fused]:
    """The call for these and all like them, which it checks."""
    first, second = halves(gate, up)
    quantization = checked_quantization(first, format, rule, global_scale, scale_layout, out)
    read = {"gate": gate} if up is None else {"gate": gate, "up": up}
    check_memory(read, global_scale, out, None)
    target = resolve(backend, gate.device)
    if target.backend == "reference":
        return functools.partial(_reference_call, quantization=quantization)
    half = 0
    if up is None:
        half = first.shape[1] * gate.element_size()
        if readable(first) is not first or readable(second) is not second:
            options = (format, rule, scale_layout, return_activation, backend)
            return functools.partial(_of_halves, _plan(first, second, global_scale, out, *options))
    first, second = readable(first), readable(second)
    stores = return_activation or quantization.computes_scale
    problem = FusedProblem(quantization.problem(alignment(first, second)), values=stores)
    plan = choose_silu_mul(problem, target.arch, sm_count(target, gate.device))
    shape = (*gate.shape[:-1], first.shape[1])
    like = torch.empty(shape, dtype=gate.dtype, device=gate.device)
    arguments = SiluMulArguments(
        quantize=quantize_arguments(first, "gate", quantization, out, plan),
        up=matrix(second, "up" if up is not None else f"gate + {half}"),
        values=matrix(like.reshape(first.shape), "values") if stores else None,
    )
    made = (None, like if stores else None)
    return FusedCall(quantization, KERNEL, plan.config, target, arguments, read, made, out, None)


def _of_halves(call: FusedCall, read: Sequence[torch.Tensor], *rest: Any) -> Fused:
    """``call``, which takes gate and up, of one tensor: its halves cannot be read where they are."""
    return call(halves(read[0], None), *rest)


def _reference_call(
    read: Sequence[torch.Tensor],
    given: Any,
    out: BlockScaledTensor | None,
    residual_out: None,
    *,
    quantization: Quantization,
) -> Fused:
    """By exact torch."""
    check_memory(dict(zip(("gate", "up"), read)), given, out, None)
    gate, up = halves(*read)
    activation = silu_mul_reference(gate, up)
    shape = (*read[0].shape[:-1], gate.shape[1])
    return Fused(
        quantization.of_values(activation, given, out, "reference"), None, activation.reshape(shape).contiguous()
    )


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up in float64, rounded once to the dtype of the gate."""
    wide = gate.double()
    return (wide / (1.0 + torch.exp(-wide)) * up.double()).to(gate.dtype)


def halves(gate: torch.Tensor, up: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, (M, N) each."""
    gates = checked_matrix("gate", gate)
    if up is not None:
        return gates, checked_matrix("up", up, gates)
    n = gates.shape[1]
    if n % 2:
        raise OperandError.of("columns of gate and up in one tensor", got=n, expected="an even number")
    return gates[:, : n // 2], gates[:, n // 2 :]


def compile_silu_mul_quantize(
    arch: str,
    format: str | Format = "nvfp4",
    rule: str = "max",
    *,
    rows: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    values: bool = False,
    **more: Any,
) -> tuple[CompiledKernel, SiluMulConfig]:
    """The kernel for contiguous matrices (rows, k) on ``arch``, and its configuration.

    Needs no GPU and no tensors. ``more``: fields of ``QuantizeProblem``.
    """
    format, found = resolve_format(format), architecture(arch)
    quantized = QuantizeProblem(
        format, resolve_rule(rule, format), rows, k, dtype=DTYPE_NAMES[dtype], alignment=16, **more
    )
    config = choose_silu_mul(FusedProblem(quantized, values), found, found.sm_count).config
    return KERNEL.compile(config), config


def _host(config: SiluMulConfig) -> Callable[..., Any]:
    from ..kernels.quantize.silu_mul import SiluMulQuantize

    return SiluMulQuantize(config)


KERNEL = Kernel("silu_mul_quantize", SiluMulArguments, _host)

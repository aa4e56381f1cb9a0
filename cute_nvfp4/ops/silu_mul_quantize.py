"""silu_mul_quantize: silu(gate) · up, quantized for the product that follows, in one launch."""

from __future__ import annotations

from collections.abc import Callable
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
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..target import Target, architecture
from .checks import DTYPE_NAMES, tensors
from .fused import (
    Quantization,
    alignment,
    checked_matrix,
    checked_quantization,
    matrix,
    quantize_arguments,
    readable,
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
    gates, ups = _halves(gate, up)
    quantization = checked_quantization(gates, format, rule, global_scale, scale_layout, out, {"up": ups})
    target = resolve(backend, gate.device)
    if target.backend == "reference":
        activation = silu_mul_reference(gates, ups)
        quantized = quantization.of_values(activation, "reference")
    else:
        quantized, activation = _launch(gates, ups, quantization, return_activation, target)
    if not return_activation:
        return quantized
    return SiluMulQuantized(quantized, activation if gate.ndim == 2 else activation[0])


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up in float64, rounded once to the dtype of the gate."""
    wide = gate.double()
    return (wide / (1.0 + torch.exp(-wide)) * up.double()).to(gate.dtype)


def _halves(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, (M, N) each."""
    gates = checked_matrix("gate", gate)
    if up is not None:
        return gates, checked_matrix("up", up, gates)
    n = gates.shape[1]
    if n % 2:
        raise OperandError.of("columns of gate and up in one tensor", got=n, expected="an even number")
    return gates[:, : n // 2], gates[:, n // 2 :]


def _launch(
    gate: torch.Tensor, up: torch.Tensor, quantization: Quantization, wants_activation: bool, target: Target
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """The result and, if it is wanted or needed, what was quantized."""
    device = gate.device
    gate, up = readable(gate), readable(up)
    activation = None
    if wants_activation or quantization.computes_scale:
        activation = torch.empty(gate.shape, dtype=gate.dtype, device=device)
    result = quantization.result()
    problem = FusedProblem(quantization.problem(alignment(gate, up)), values=activation is not None)
    plan = choose_silu_mul(problem, target.arch, sm_count(target, device))
    arguments = SiluMulArguments(
        quantize=quantize_arguments(gate, result, quantization, plan), up=matrix(up), values=matrix(activation)
    )
    read = {"gate": gate, "up": up, "global_scale": result.global_scale}
    written = {"data": result.data, "scale": result.scale, "activation": activation}
    KERNEL.run(plan.config, target, device, arguments, lambda: tensors(read, written))
    return (quantization.of_values(activation, target.backend) if quantization.computes_scale else result), activation


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

"""silu_mul_quantize: silu(gate) · up, quantized for the product that follows, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import OperandError
from ..formats import Format
from ..kernels.quantize.fused import SiluMulArguments
from ..lazy import Lazily
from ..operand import BlockScaledTensor
from ..planning.fused import FusedProblem, choose_silu_mul
from ..reference import silu_mul_reference
from ..row_scaled import FP8, RowScaledTensor
from ..runtime.backend import Backend, sm_count
from ..runtime.kernel import Kernel
from ..target import Target
from .fp8_computed import fp8_call, rows_in_fp8
from .fused import (
    Fused,
    FusedRequest,
    check_written,
    checked_matrix,
    checked_quantization,
    computed_scale,
    fused_call,
    fused_problem,
    matrix,
    quantized_values,
    readable,
    readable_first,
)
from .operation import quantizing
from .quantize_request import COUNT_RESULT, MATRIX, RESULT, SCALE


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
    out: BlockScaledTensor | RowScaledTensor | None = None,
    backend: Backend = "auto",
) -> BlockScaledTensor | SiluMulQuantized | RowScaledTensor:
    """Computes silu(gate) · up and quantizes it, in one pass.

    Args:
        gate: (M, N) or (N,), float32, float16 or bfloat16, any row stride; without ``up`` (M, 2N) or (2N,), whose first
            half is the gate: what a projection with both weights one above the other gives. No gradient is followed.
        up: shaped as the gate, of its dtype.
        global_scale, format, rule, scale_layout, out, backend: as in ``rmsnorm_quantize``; "auto" is two steps here,
            too. "fp8_e4m3" gives a ``RowScaledTensor``, bit for bit that of ``quantize(activation, "fp8_e4m3")``.
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
    options = global_scale, format, rule, scale_layout, return_activation
    found = SILU_MUL.call(gate, up, *options, out, backend)
    return SiluMulQuantized(found.quantized, found.values) if return_activation else found.quantized


def _describe(r: Any) -> FusedRequest:
    matrices = halves(r.gate, r.up)
    if r.format == FP8:
        return rows_in_fp8(r, matrices, r.return_activation)
    return FusedRequest(matrices, *checked_quantization(matrices[0], r))


def _check(r: Any) -> BlockScaledTensor | None:
    if not r.described.recorded:
        _check_memory(r)
    return r.out


def _check_memory(r: Any) -> None:
    """Raises if what is written overlaps itself or what is read."""
    check_written({"gate": r.gate, "up": r.up}, r.global_scale, r.out, None)


def _plan(r: Any, target: Target) -> Callable[..., Fused]:
    (gate, up), request, kind = r.described
    if kind == "computed":
        return computed_scale(SILU_MUL, "return_activation")
    half = gate.shape[1] * gate.element_size()
    second = matrix(up, "up" if r.up is not None else f"gate + {half}")
    if kind == FP8:
        return fp8_call(SILU_MUL, "silu_mul", r, target, up=second)
    if any(readable(x) is not x for x in (gate, up)):
        return readable_first(SILU_MUL, _copied)
    problem = FusedProblem(fused_problem(request, kind, gate, up), values=r.return_activation)
    plan = choose_silu_mul(problem, target.arch, sm_count(target, r.gate.device))
    return fused_call(SILU_MUL, KERNEL, plan, r, target, r.return_activation, up=second)


def _copied(r: Any) -> Any:
    """A request whose inputs the kernel can read."""
    gate, up = (readable(x).reshape(_shape(r, x)) for x in r.described.matrices)
    return r._replace(gate=gate, up=up)


def _shape(r: Any, half: torch.Tensor) -> tuple[int, ...]:
    """The shape of the activation."""
    return (*r.gate.shape[:-1], half.shape[1])


def _reference(r: Any) -> Fused:
    """Computes the request in exact torch."""
    gate, up = halves(r.gate, r.up)
    activation = silu_mul_reference(gate, up)
    values = activation.reshape(_shape(r, gate)).contiguous()
    return Fused(quantized_values(activation, r), None, values)


def halves(gate: torch.Tensor, up: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, (M, N) each."""
    gates = checked_matrix("gate", gate)
    if up is not None:
        return gates, checked_matrix("up", up, gates)
    n = gates.shape[1]
    if n % 2:
        raise OperandError.of("columns of gate and up in one tensor", got=n, expected="an even number")
    return gates[:, : n // 2], gates[:, n // 2 :]


KERNEL = Kernel("silu_mul_quantize", SiluMulArguments, Lazily("kernels.quantize.silu_mul", "SiluMulQuantize"))
SILU_MUL = quantizing(
    silu_mul_quantize,
    {"gate": MATRIX, "up": MATRIX.or_none(), "global_scale": SCALE, "out": RESULT},
    describe=_describe,
    check=_check,
    reference=_reference,
    plan=_plan,
    overlaps=_check_memory,
    count=COUNT_RESULT,
)

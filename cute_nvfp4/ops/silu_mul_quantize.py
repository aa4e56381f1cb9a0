"""silu_mul_quantize: silu(gate) · up, quantized for the product that follows, in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import OperandError
from ..formats import Format
from ..kernels.quantize.fused import SiluMulArguments
from ..lazy import Lazily
from ..operand import BlockScaledTensor
from ..planning.fused import FusedProblem, choose_silu_mul
from ..reference import silu_mul_reference
from ..row_scaled import RowScaledTensor
from ..runtime.backend import Backend
from ..runtime.kernel import Kernel
from .fused import FusedOperation, checked_matrix, matrix
from .quantize_request import MATRIX, RESULT, SCALE


class SiluMulQuantized(NamedTuple):
    """quantized: data and scales of the activation. activation: its values before quantization."""

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
        gate: (M, N) or (N,), float32, float16 or bfloat16, any row stride. Without ``up`` it is (M, 2N) or (2N,) and
            its first half is the gate, as a projection with both stacked weights gives it. Autograd does not follow it.
        up: shaped as the gate, of its dtype.
        global_scale, format, rule, scale_layout, out, backend: as in ``rmsnorm_quantize``; "auto" takes two steps here,
            too. "fp8_e4m3" gives a ``RowScaledTensor``, bit for bit that of ``quantize(activation, "fp8_e4m3")``.
        return_activation: whether to return the values before quantization, too.

    Returns: the result; with ``return_activation``, ``SiluMulQuantized``.

    **What is rounded.** activation = silu(gate) · up in float32, then rounded once to the inputs' dtype; torch's
    ``silu(gate) * up`` also rounds silu. The data and the scales are bit for bit what ``quantize(activation, …)``
    gives.

    **How near the activation is.** silu is x / (1 + exp(−x)) by ``ex2.approx`` and ``rcp.approx``: its relative error
    is at most 4·10⁻⁶ for gates down to −80, and 6·10⁻⁷ above −8 (``kernels/gemm/gates.py``); the product adds 2**-24.
    Float16 and bfloat16 results are therefore within 1 ulp (0.51) of the value computed without rounding, float32 ones
    within 5·10⁻⁶ of it. Below −80 silu is smaller than 2·10⁻³³, and may be 0. The reference computes in float64 and
    rounds once. NaN stays NaN, and silu(−inf) is NaN, as in torch.

    Raises:
        OperandError, OperandTypeError: an argument does not fit; results overlap.
        TargetError: the backend is unknown, or cannot run tensors of this device.
    """
    options = global_scale, format, rule, scale_layout, return_activation
    found = SILU_MUL.call(gate, up, *options, out, backend)
    return SiluMulQuantized(found.quantized, found.values) if return_activation else found.quantized


class Halves(NamedTuple):
    """Gate and up, (M, N) each."""

    gate: torch.Tensor
    up: torch.Tensor


def _record(r: Any, both: Halves) -> dict[str, Any]:
    half = both.gate.shape[1] * both.gate.element_size()
    return {"up": matrix(both.up, "up" if r.up is not None else f"gate + {half}")}


def halves(gate: torch.Tensor, up: torch.Tensor | None = None) -> Halves:
    """Gate and up as matrices; without ``up``, ``gate`` holds both."""
    gates = checked_matrix("gate", gate)
    if up is not None:
        return Halves(gates, checked_matrix("up", up, gates))
    n = gates.shape[1]
    if n % 2:
        raise OperandError.of("columns of gate and up in one tensor", got=n, expected="an even number")
    return Halves(gates[:, : n // 2], gates[:, n // 2 :])


KERNEL = Kernel("silu_mul_quantize", SiluMulArguments, Lazily("kernels.quantize.silu_mul", "SiluMulQuantize"))
SILU_MUL = FusedOperation(
    silu_mul_quantize,
    {"gate": MATRIX, "up": MATRIX.or_none(), "global_scale": SCALE, "out": RESULT},
    KERNEL,
    source="silu_mul",
    values="return_activation",
    matrices=lambda r: halves(r.gate, r.up),
    choose=lambda r, problem, *gpu: choose_silu_mul(FusedProblem(problem, r.return_activation), *gpu),
    record=_record,
    compute=lambda r, both: (silu_mul_reference(*both), None),
)

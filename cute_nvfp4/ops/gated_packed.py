"""gated_gemm with a prepared weight: what it shares with ``gemm`` is in :mod:`.packed_gemm`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import NVFP4, as_bytes
from ..operand import BlockScaledTensor
from ..planning.packed import PackedPlan
from ..prepared_weight import PreparedWeight
from ..runtime.backend import Backend
from .calls import Preparation, as_alpha
from .checks import check_gate, check_overlap
from .packed_gemm import packed_gemm
from .packed_gemm import prepared as prepared_packed
from .packed_operands import Request, X, everything_read


def gated_packed(
    a: X,
    weight: PreparedWeight,
    b2: Any,
    gate: str,
    alpha: float | torch.Tensor | None,
    interleaved: bool,
    out: Any,
    out_dtype: torch.dtype | None,
    out_global_scale: Any,
    config: PackedPlan | None,
    backend: Backend,
) -> torch.Tensor | BlockScaledTensor:
    """``gated_gemm`` of a weight that is both, (M, N); quantized by a launch of its own."""
    check_gate(gate)
    if b2 is not None or interleaved:
        got = "b2" if b2 is not None else "interleaved=True"
        expected = "a prepared weight alone, which has both"
        raise OperandError.of("weights", got=got, expected=expected, hint="prepare_weight(gate, up) makes one.")
    if out_global_scale is not None or isinstance(out, BlockScaledTensor):
        return _quantized(a, weight, gate, alpha, out, out_dtype, out_global_scale, config, backend)
    return packed_gemm(a, weight, alpha, None, out, out_dtype, config, backend, gate)


def _quantized(
    a: X,
    weight: PreparedWeight,
    gate: str,
    alpha: float | torch.Tensor | None,
    out: Any,
    out_dtype: torch.dtype | None,
    global_scale: Any,
    config: PackedPlan | None,
    backend: Backend,
) -> BlockScaledTensor:
    """The float32 result, quantized: what a kernel that did both would write."""
    from .quantize import quantize

    if out_dtype is not None:
        raise OperandTypeError.of("out_dtype", got=out_dtype, expected="None for a quantized result")
    if weight.rows % NVFP4.block:
        raise OperandError.of("N of a quantized result", got=weight.rows, expected=f"a multiple of {NVFP4.block}")
    if out is not None:
        if not isinstance(out, BlockScaledTensor):
            got = type(out).__name__
            raise OperandTypeError.of("out", got=got, expected="BlockScaledTensor, for a quantized result")
        if global_scale is not None or out.global_scale is None:
            got = " and ".join("none" if x is None else "one" for x in (global_scale, out.global_scale))
            raise OperandError.of("out_global_scale, and that of out", got=got, expected="none, and one")
        read = everything_read(a, weight, as_alpha(alpha)[1], None)
        for part in (out.data, out.scale):
            check_overlap(read, as_bytes(part))
        global_scale = out.global_scale
    product = packed_gemm(a, weight, alpha, None, None, torch.float32, config, backend, gate)
    return quantize(product, NVFP4, "max", global_scale=global_scale, out=out, backend=backend)


def prepared(
    a: X,
    b1: PreparedWeight,
    b2: None = None,
    *,
    gate: str = "silu",
    alpha: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: PackedPlan | None = None,
    backend: Backend = "auto",
) -> Preparation:
    """``gated_gemm`` of a prepared weight, planned, for ``prepare``."""
    if b2 is not None or not isinstance(b1, PreparedWeight):
        expected = "a PreparedWeight of both, for a call that decides nothing any more"
        raise OperandTypeError.of("b1 and b2", got=f"{type(b1).__name__} and {type(b2).__name__}", expected=expected)
    check_gate(gate)
    return prepared_packed(Request(a, b1, alpha, None, out, out_dtype, config, backend, gate))

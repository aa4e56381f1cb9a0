"""gated_gemm with a prepared weight: what it shares with ``gemm`` is in :mod:`.packed_gemm`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..planning.packed import PackedPlan
from ..prepared_weight import PreparedWeight
from ..runtime.backend import Backend
from .calls import Preparation
from .checks import check_gate
from .packed_gemm import packed_gemm
from .packed_gemm import prepared as prepared_packed
from .packed_operands import Request, X


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
) -> torch.Tensor:
    """``gated_gemm`` of a weight that is both, (M, N)."""
    check_gate(gate)
    if b2 is not None or interleaved:
        got = "b2" if b2 is not None else "interleaved=True"
        expected = "a prepared weight alone, which has both"
        raise OperandError.of("weights", got=got, expected=expected, hint="prepare_weight(gate, up) makes one.")
    if out_global_scale is not None:
        raise OperandError.of(
            "out_global_scale with a prepared weight", got="one", expected="None", hint="quantize the result."
        )
    return packed_gemm(a, weight, alpha, None, out, out_dtype, config, backend, gate)


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

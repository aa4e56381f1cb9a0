"""moe as an operator of ``torch.library``; experts become the tensors of their weights, factors and biases."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch

from ...operand import BlockScaledTensor
from ...prepared_weight import PreparedWeight
from ...quantization.rules import resolve_format
from ...scale_layout import blocked_flat
from ..operator import Operator
from .experts import ActivationFunction, Experts

ARGUMENTS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor? gate_up_scale, "
    "Tensor? gate_up_global_scale, Tensor? up_global_scale, Tensor down, Tensor? down_scale, "
    "Tensor? down_global_scale, Tensor? gate_up_factor=None, Tensor? down_factor=None, Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None, Tensor? shared=None, *, int inner, ScalarType? dtype=None, bool gated=False, "
    "str weight_format, "
    'str activation="silu", float activation_alpha=1.702, float activation_limit=7.0, int offset=0, '
    'bool deterministic=True, str backend="auto"'
)
OF_EXPERTS = ("gate_up_factor", "down_factor", "gate_up_bias", "down_bias", "inner", "dtype", "gated")
"""Arguments that are attributes of ``Experts``."""


def _parts(weight: Any, prepared: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The bytes of a stack, its scales or row factors, and its global scale."""
    if prepared:
        return weight.packed, weight.row_factor, weight.global_scale
    return weight.data, blocked_flat(weight.scale), weight.global_scale


class ExpertsOperator(Operator):
    """The operator of ``moe``."""

    def adapted(self, request: Any) -> Any:
        """The request with the parts of its experts as arguments of the operator.

        weight_format: the format of block-scaled weights, or the packing of prepared ones.
        """
        e, first, prepared = request.experts, request.experts.gate_up, request.experts.dtype is not None
        values = request._asdict() | {"up_global_scale": getattr(first, "up_global_scale", None)}
        for name, weight in (("gate_up", first), ("down", e.down)):
            data, scale, factor = _parts(weight, prepared)
            values |= {name: data, f"{name}_scale": scale, f"{name}_global_scale": factor}
        values |= {name: getattr(e, name) for name in OF_EXPERTS}
        values |= {"weight_format": first.packing if prepared else first.format.name, "activation": e.activation.name}
        values |= {f"activation_{name}": getattr(e.activation, name) for name in ("alpha", "limit")}
        return namedtuple("Flat", tuple(values))(*values.values())

    def restore(self, values: dict[str, Any]) -> None:
        """Rebuilds the experts from their parts."""
        hidden, inner = values["x"].shape[-1], values["inner"]
        function = ActivationFunction(*(values[x] for x in ("activation", "activation_alpha", "activation_limit")))
        rows = inner * (1 if values["gated"] else function.halves)
        optional = (values[f"{name}_{part}"] for part in ("factor", "bias") for name in ("gate_up", "down"))
        values["experts"] = Experts(
            _weight("gate_up", values, rows, hidden, values["gated"]),
            _weight("down", values, hidden, inner, False),
            *optional,
            function,
        )


def _weight(name: str, values: dict[str, Any], rows: int, k: int, gated: bool) -> PreparedWeight | BlockScaledTensor:
    """One of the two stacks, rebuilt from its parts."""
    data, factor, kind = values[name], values[f"{name}_global_scale"], values["weight_format"]
    dtype: torch.dtype | None = values["dtype"]
    if dtype is None:
        return BlockScaledTensor(data, values[f"{name}_scale"], factor, resolve_format(kind))
    up = values["up_global_scale"] if gated else None
    return PreparedWeight(data, rows, k, dtype, factor, gated, up, kind, row_factor=values[f"{name}_scale"])

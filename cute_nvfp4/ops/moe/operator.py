"""moe as an operator of ``torch.library``: experts are the tensors of their weights, factors and biases."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...operand import BlockScaledTensor
from ...prepared_weight import PreparedWeight
from ...quantization.rules import resolve_format
from ...scale_layout import blocked_flat
from ..operator import Operator
from .activation import ActivationFunction
from .experts import Experts

ARGUMENTS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor? gate_up_scale, "
    "Tensor? gate_up_global_scale, Tensor? up_global_scale, Tensor down, Tensor? down_scale, "
    "Tensor? down_global_scale, Tensor? gate_up_factor=None, Tensor? down_factor=None, Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None, Tensor? shared=None, *, int inner, ScalarType? dtype=None, bool gated=False, "
    "str weight_format, "
    'str activation="silu", float activation_alpha=1.702, float activation_limit=7.0, int offset=0, '
    'bool deterministic=True, str backend="auto"'
)


class Flat(NamedTuple):
    """A request, with the parts of its experts as arguments of the operator. weight_format: of block-scaled weights, or
    the packing of prepared ones."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor | None
    gate_up_global_scale: torch.Tensor | None
    up_global_scale: torch.Tensor | None
    down: torch.Tensor
    down_scale: torch.Tensor | None
    down_global_scale: torch.Tensor | None
    gate_up_factor: torch.Tensor | None
    down_factor: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    shared: torch.Tensor | None
    inner: int
    dtype: torch.dtype | None
    gated: bool
    weight_format: str
    activation: str
    activation_alpha: float
    activation_limit: float
    offset: int
    deterministic: bool
    out: torch.Tensor | None
    backend: str

    @classmethod
    def of(cls, r: Any) -> Flat:
        """The arguments of a request of ``moe``."""
        e, first, prepared = r.experts, r.experts.gate_up, r.experts.dtype is not None
        return cls(
            r.x,
            r.topk_ids,
            r.topk_weights,
            *_parts(first, prepared),
            getattr(first, "up_global_scale", None),
            *_parts(e.down, prepared),
            e.gate_up_factor,
            e.down_factor,
            e.gate_up_bias,
            e.down_bias,
            r.shared,
            inner=e.inner,
            dtype=e.dtype,
            gated=e.gated,
            weight_format=first.packing if prepared else first.format.name,
            activation=e.activation.name,
            activation_alpha=e.activation.alpha,
            activation_limit=e.activation.limit,
            offset=r.offset,
            deterministic=r.deterministic,
            out=r.out,
            backend=r.backend,
        )


def _parts(weight: Any, prepared: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The bytes of a stack, its scales or factors of its rows, and its global scale."""
    if prepared:
        return weight.packed, weight.row_factor, weight.global_scale
    return weight.data, blocked_flat(weight.scale), weight.global_scale


class ExpertsOperator(Operator):
    """The operator of ``moe``."""

    def adapted(self, request: Any) -> Any:
        return Flat.of(request)

    def given(self, values: dict[str, Any]) -> None:
        """Puts the experts together again."""
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
    """One of the two stacks."""
    data, factor, kind = values[name], values[f"{name}_global_scale"], values["weight_format"]
    dtype: torch.dtype | None = values["dtype"]
    if dtype is None:
        return BlockScaledTensor(data, values[f"{name}_scale"], factor, resolve_format(kind))
    up = values["up_global_scale"] if gated else None
    return PreparedWeight(data, rows, k, dtype, factor, gated, up, kind, row_factor=values[f"{name}_scale"])

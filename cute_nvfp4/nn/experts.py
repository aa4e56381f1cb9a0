"""Experts of a mixture with NVFP4 weights, in the place of a module that has all of them in two tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.linear import NVFP4Linear

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class NVFP4Experts(torch.nn.Module):
    """Σ over a token's experts of weight · down(activation(gate(x), up(x))), called as transformers calls experts.

    Each expert is a child ``<number>`` with layers ``gate_proj``, ``up_proj`` and ``down_proj``, which are the names of
    published checkpoints. Experts run one after the other, those that a token chose: the host waits for the device to
    know them, so that no graph is captured.

    join: makes of [gate, up] (rows, 2 · I) what down takes, (rows, I).
    """

    def __init__(
        self, experts: Sequence[Mapping[str, torch.nn.Module]], join: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.num_experts, self.join = len(experts), join
        for i, layers in enumerate(experts):
            self.add_module(str(i), torch.nn.ModuleDict({name: layers[name] for name in PROJECTIONS}))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H) of rows (T, H), their experts (T, k) and weights (T, k). Numbers beyond the experts are no expert."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if not 0 <= expert < self.num_experts:
                continue
            rows, places = torch.where(top_k_index == expert)
            x, layers = hidden_states[rows], self.get_submodule(str(expert))
            y = layers["down_proj"](self.join(torch.cat((layers["gate_proj"](x), layers["up_proj"](x)), dim=-1)))
            out.index_add_(0, rows, (y * top_k_weights[rows, places, None]).to(out.dtype))
        return out


def fused_experts(module: torch.nn.Module) -> bool:
    """Whether a module has all experts' matrices in parameters ``gate_up_proj`` and ``down_proj`` of three
    dimensions."""
    parts = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    return all(part is not None and part.ndim == 3 for part in parts)


def why_not(module: torch.nn.Module) -> str:
    """The reason why fused experts cannot be ``NVFP4Experts``; "" if they can. Flags are those of transformers."""
    flags = {"is_transposed": False, "is_concatenated": True, "has_gate": True, "has_bias": False}
    flags["has_post_expert_norm"] = False
    wrong = [name for name, value in flags.items() if getattr(module, name, value) is not value]
    if not wrong and not (hasattr(module, "_apply_gate") or hasattr(module, "act_fn")):
        wrong = ["act_fn"]
    return f"experts of another form: {', '.join(wrong)}" if wrong else ""


def join_of(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation of fused experts, which keep none of their weights."""
    for name in ("gate_up_proj", "down_proj"):
        module._parameters.pop(name, None)
    if hasattr(module, "_apply_gate"):
        return module._apply_gate
    activation = module.act_fn

    def join(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return activation(gate) * up

    return join


def quantized_experts(
    module: torch.nn.Module, make: Callable[[torch.Tensor, torch.Tensor | None], NVFP4Linear]
) -> NVFP4Experts:
    """``NVFP4Experts`` of fused ones, whose weights are given up. make: of a matrix and another one that shares its
    global scale, or None."""
    reason = why_not(module)
    if reason:
        raise OperandError.of("experts", got=reason, expected="[gate; up] (E, 2 I, H), down (E, H, I), no bias")
    experts = []
    for gate_up, down in zip(module.gate_up_proj.detach(), module.down_proj.detach()):
        gate, up = gate_up.chunk(2, dim=0)
        experts.append({"gate_proj": make(gate, up), "up_proj": make(up, gate), "down_proj": make(down, None)})
    return NVFP4Experts(experts, join_of(module))

"""Runs experts of transformers' modules by ``moe``: quantizes their weights once, and keeps them beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.expert_modules import activation_of, first_stack, stacks_of
from cute_nvfp4.ops.moe.experts import DTYPES, Experts, prepare_experts
from cute_nvfp4.ops.moe.layer import moe
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.runtime.backend import resolve

_KEPT = "_cute_nvfp4_experts"


class Kept(NamedTuple):
    """The experts of a module, and the addresses and versions of the weights that they were made from."""

    experts: Experts
    made_of: tuple[Any, ...]


def routed_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """(T, H) from rows (T, H), their experts' ids (T, k) and weights (T, k), by ``moe`` with the module's weights in
    NVFP4.

    The first call quantizes the weights; so does a call after they changed. transformers calls it for
    ``experts_implementation``.
    """
    weights = [module._parameters[name] for name in stacks_of(module)]
    target = resolve("auto", hidden_states.device)
    quantized = target.backend != "reference" and target.arch.generation == "sm100"
    made_of = (quantized, hidden_states.dtype, *map(_state, weights))
    kept: Kept | None = getattr(module, _KEPT, None)
    if kept is None or kept.made_of != made_of:
        kept = Kept(experts_of(module, None if quantized else hidden_states.dtype), made_of)
        # it is neither a submodule nor a buffer, so it is not saved
        object.__setattr__(module, _KEPT, kept)
    return moe(hidden_states, top_k_index, top_k_weights, kept.experts)


def experts_of(module: torch.nn.Module, dtype: torch.dtype | None, format: str = "nvfp4") -> Experts:
    """The experts of a transformers module, each matrix quantized by itself. dtype: as for ``prepare_experts``.

    Raises:
        OperandError: the experts have another form, or an activation that ``moe`` lacks.
    """
    if dtype is not None and dtype not in DTYPES:
        expected = "torch.bfloat16 or torch.float16"
        raise OperandError.of("dtype of hidden states", got=dtype, expected=expected, hint="Load the model in one.")
    if getattr(module, "has_post_expert_norm", False):
        raise OperandError.of("experts", got="a norm after each expert", expected="none")
    first, transposed = first_stack(module), getattr(module, "is_transposed", False)
    if first is None:
        got = f"parameters {', '.join(stacks_of(module))}"
        raise OperandError.of("experts", got=got, expected="gate_up_proj and down_proj")
    interleaved = first == "gate_up_proj" and not getattr(module, "is_concatenated", True)
    function = activation_of(module)
    stacks = []
    for name in (first, "down_proj"):
        weights = getattr(module, name).detach()
        stacks.append([quantize((w.T if transposed else w).contiguous(), format) for w in weights])
    return prepare_experts(
        *stacks,
        activation=function.name,
        alpha=function.alpha,
        limit=function.limit,
        gate_up_bias=getattr(module, f"{first}_bias", None),
        down_bias=getattr(module, "down_proj_bias", None),
        interleaved=interleaved,
        dtype=dtype,
    )


def _state(x: torch.Tensor) -> tuple[int, int]:
    """The address and the autograd version counter of a weight; the counter is 0 in inference mode."""
    return x.data_ptr(), 0 if x.is_inference() else x._version

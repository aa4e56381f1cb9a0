"""Modules of transformers that keep all experts' matrices in two tensors: finds them, their form, their activation."""

from __future__ import annotations

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.kernels.moe.config import ACTIVATIONS
from cute_nvfp4.ops.moe.experts import ActivationFunction

GATED = ("gate_proj", "up_proj", "down_proj")
"""The names of an expert's matrices in published checkpoints; an expert without a gate has the last two."""


def stacks_of(module: torch.nn.Module) -> list[str]:
    """The names of a module's parameters with three dimensions."""
    return [name for name, x in module._parameters.items() if x is not None and x.ndim == 3]


def first_stack(module: torch.nn.Module) -> str | None:
    """The name of the parameter of the first product, beside ``down_proj``; None if the module has no such experts."""
    names = stacks_of(module)
    found = next((name for name in ("gate_up_proj", "up_proj") if name in names), None)
    return found if "down_proj" in names else None


def why_not(module: torch.nn.Module) -> str:
    """The reason why fused experts cannot be ``PackedExperts`` of matrices; "" if they can."""
    flags = {"is_transposed": False, "is_concatenated": True, "has_bias": False, "has_post_expert_norm": False}
    wrong = [name for name, value in flags.items() if getattr(module, name, value) is not value]
    if wrong:
        return f"experts of another form: {', '.join(wrong)}"
    k = [getattr(module, name).shape[2] for name in (first_stack(module), "down_proj")]
    if any(x % NVFP4.block for x in k):
        return f"K of experts is {k[0]} and {k[1]}, no multiples of {NVFP4.block}"
    try:
        activation_of(module)
    except OperandError:
        return f"an activation that is none of {', '.join(ACTIVATIONS)}"
    return ""


def activation_of(module: torch.nn.Module) -> ActivationFunction:
    """The activation that a module applies, found from its result for a sample.

    Raises:
        OperandError: ``moe`` has no such activation.
    """
    gated = first_stack(module) == "gate_up_proj"
    interleaved = gated and not getattr(module, "is_concatenated", True)
    sample = torch.linspace(-12.0, 12.0, 4 * 32, dtype=torch.float32, device="cpu").view(4, 32).roll(7, 1)
    if gated and not hasattr(module, "_apply_gate"):
        gate, up = sample.chunk(2, dim=-1)
        apply = getattr(module, "act_fn", None)
        got = None if apply is None else apply(gate) * up
    else:
        apply = module._apply_gate if gated else module.act_fn
        got = apply(sample)
    both = torch.cat((sample[:, 0::2], sample[:, 1::2]), 1) if interleaved else sample
    constants = {name: getattr(module, name) for name in ("alpha", "limit") if hasattr(module, name)}
    for name in ACTIVATIONS if got is not None else ():
        function = ActivationFunction(name, **(constants if name == "clamped_swiglu" else {}))
        if (function.halves == 2) == gated and torch.allclose(got, function(both), rtol=1e-4, atol=1e-5):
            return function
    raise OperandError.of("activation of experts", got=repr(apply), expected=f"one of {', '.join(ACTIVATIONS)}")

"""``rotate_model``: rotates a model's activations, which spreads outliers before anything is rounded.

Ashkboos, Mohtashami, Croci, Li, Cameron, Jaggi, Alistarh, Hoefler and Hensman, "QuaRot" (2024). An RMSNorm without
weights commutes with a rotation R of the hidden states. So R is multiplied into the matrices that write and that read
the hidden states, and the norms' weights into the latter. Values of attention, and the matrix that reads them, are
rotated within each head. The model computes the same, and nothing is added to it: any checkpoint can have its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any, NamedTuple

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.quantization.hadamard import Hadamard

_LARGEST = 256
_NORMS = "input_layernorm", "post_attention_layernorm"
_READERS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)
_WRITERS = "self_attn.o_proj", "mlp.down_proj"
_OF_HEADS = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
"""Norms of queries and keys, which these rotations do not affect."""


class Parts(NamedTuple):
    """The modules of a decoder, as Llama names them."""

    embedding: torch.nn.Module
    blocks: torch.nn.ModuleList
    norm: torch.nn.Module
    head: torch.nn.Linear


def rotate_model(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Rotates the weights of a decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3) in place; returns it.

    seed: the seed of the signs. It rotates blocks of the largest power of two up to 256 that divides the hidden size,
    or the size of a head. The head gets weights of its own if it shared those of the embedding. Products are in float64
    and rounded to the weights' dtype once.

    Raises:
        OperandError: the model has another structure; the message names the difference. Nothing is changed then.
    """
    parts = _parts(model)
    hidden = parts.embedding.weight.shape[1]
    rotation = Hadamard.from_seed(seed, _size(hidden))
    heads = Hadamard.from_seed(seed + 1, _size(_head_dim(model.config, parts.blocks[0])))
    with torch.no_grad():
        if parts.head.weight is parts.embedding.weight:
            parts.head.weight = torch.nn.Parameter(parts.head.weight.detach().clone(), requires_grad=False)
            model.config.tie_word_embeddings = False
            getattr(model, "all_tied_weights_keys", {}).pop("lm_head.weight", None)
        _rotate(parts.embedding.weight, rotation)
        _read(parts.norm, [parts.head], rotation)
        for block in parts.blocks:
            for norm, readers in _READERS:
                _read(block.get_submodule(norm), [block.get_submodule(name) for name in readers], rotation)
            for name in _WRITERS:
                _write(block.get_submodule(name), rotation)
            _write(block.self_attn.v_proj, heads)
            _rotate(block.self_attn.o_proj.weight, heads)
    return model


def _size(columns: int) -> int:
    return gcd(columns, _LARGEST)


def _head_dim(config: Any, block: torch.nn.Module) -> int:
    return block.self_attn.o_proj.in_features // config.num_attention_heads


def _parts(model: torch.nn.Module) -> Parts:
    """The modules of ``model``.

    Raises:
        OperandError: parameters are missing or unknown, or a norm is not a plain RMSNorm.
    """
    try:
        inner = model.model
        parts = Parts(inner.embed_tokens, inner.layers, inner.norm, model.lm_head)
    except AttributeError as error:
        raise OperandError.of("model to rotate", got=str(error), expected="a decoder as Llama's") from error
    known = {f"{name}.weight" for name in _NORMS} | set(_OF_HEADS)
    known |= {
        f"{x}.{part}" for x in (*(y for _, names in _READERS for y in names), *_WRITERS) for part in ("weight", "bias")
    }
    needed = {name for name in known if name.endswith("weight")} - set(_OF_HEADS)
    for i, block in enumerate(parts.blocks):
        names = {name for name, _ in block.named_parameters()}
        if odd := sorted((names - known) | (needed - names)):
            raise OperandError.of(f"block {i} to rotate", got=", ".join(odd), expected="the parameters of Llama's")
    for norm in _norms(parts):
        _check_norm(norm)
    return parts


def _norms(parts: Parts) -> Iterator[torch.nn.Module]:
    yield parts.norm
    for block in parts.blocks:
        yield from (block.get_submodule(name) for name in _NORMS)


def _check_norm(norm: torch.nn.Module) -> None:
    """Raises unless it multiplies x / √mean(x²) by its weight: others add one to the weight, or subtract the mean."""
    weight = norm.weight.detach().double()
    x = torch.linspace(-3, 4, len(weight), dtype=torch.float32, device=weight.device)
    found = norm(x.to(norm.weight.dtype)[None])[0].double()
    want = x.double() * x.double().square().mean().rsqrt() * weight
    if not (found - want).norm() <= 0.02 * want.norm():
        raise OperandError.of("norm of a model to rotate", got=type(norm).__name__, expected="an RMSNorm with a weight")


def _read(norm: torch.nn.Module, layers: list[torch.nn.Module], rotation: Hadamard) -> None:
    """Multiplies the norm's weight and the rotation into the layers that read it."""
    for layer in layers:
        layer.weight.copy_(layer.weight.double() * norm.weight.double())
        _rotate(layer.weight, rotation)
    norm.weight.fill_(1.0)


def _rotate(weight: torch.Tensor, rotation: Hadamard) -> None:
    """Rotates rows (…, K) in place: each becomes row · R."""
    matrix = rotation.matrix(torch.float64, weight.device)
    weight.copy_((weight.double().unflatten(-1, (-1, rotation.size)) @ matrix).flatten(-2))


def _write(layer: torch.nn.Linear, rotation: Hadamard) -> None:
    """Rotates what the layer returns."""
    weight = layer.weight.T.contiguous()
    _rotate(weight, rotation)
    layer.weight.copy_(weight.T)
    if layer.bias is not None:
        _rotate(layer.bias, rotation)

"""A decoder of the Llama family in plain torch, with matrices in bf16 or in NVFP4: what ``generate.py`` times.

Weights are drawn, so that there is speed and no language. They are drawn in NVFP4, with a power of two for a global
scale: bf16 holds them exactly, and all contestants have the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from cute_nvfp4 import BlockScaledTensor, NVFP4Linear, gated_gemm, prepare_weight, quantize

GLOBAL_SCALE = 2.0**-12
INPUT_SCALE = 8 / 2688
"""Of activations, where they are quantized: magnitudes up to 8 fit."""
EPSILON = 1e-5


class Shape(NamedTuple):
    """A model's sizes."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    theta: float = 500000.0

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def linear_weights(self) -> int:
        """Elements of the matrices of all layers, without the head."""
        attention = self.hidden * (self.qkv + self.heads * self.head_dim)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)
TINY = Shape("tiny", 2, 64, 128, 4, 2, 16, 96)


def empty_cache(shape: Shape, batch: int, length: int, device: torch.device | str) -> torch.Tensor:
    """Keys and then values of all layers: (layers, batch, 2 · kv heads, length, head dim). They lie together, so that a
    step writes both at once."""
    size = shape.layers, batch, 2 * shape.kv_heads, length, shape.head_dim
    return torch.zeros(size, dtype=torch.bfloat16, device=device)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual, and its RMSNorm."""
    residual = residual + x
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return residual, wide.to(x.dtype) * weight


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, values: int) -> torch.Tensor:
    """Rotary positions of heads (B, S, heads, D), the last ``values`` of which stay as they are; cosine and sine are
    (S, 1, D / 2), in float32."""
    turned = torch.arange(x.shape[2], device=x.device)[:, None] < x.shape[2] - values
    cosine, sine = torch.where(turned, cosine, 1.0), torch.where(turned, sine, 0.0)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class Between(NamedTuple):
    """The operations between products, as torch has them or compiled: the same ones for every contestant."""

    add_norm: Callable = add_norm
    rotate: Callable = rotate
    silu_mul: Callable = silu_mul

    def compiled(self) -> Between:
        return Between(*(torch.compile(x, fullgraph=True, dynamic=False) for x in self))


class Plain(torch.nn.Module):
    """x · Wᵀ in bf16."""

    def __init__(self, weight: BlockScaledTensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.dequantize(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class GatedPlain(torch.nn.Module):
    """silu(x · Gᵀ) · (x · Uᵀ) in bf16: one product, and one operation behind it."""

    def __init__(self, gate: BlockScaledTensor, up: BlockScaledTensor, between: Between) -> None:
        super().__init__()
        self.register_buffer("weight", torch.cat([x.dequantize(torch.bfloat16) for x in (gate, up)]))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between.silu_mul(F.linear(x, self.weight))


class GatedPrepared(torch.nn.Module):
    """The same of prepared NVFP4 weights: ``gated_gemm``, one launch."""

    def __init__(self, gate: BlockScaledTensor, up: BlockScaledTensor) -> None:
        super().__init__()
        self.weight = prepare_weight(gate, up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated_gemm(x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], -1)


class GatedQuantized(torch.nn.Module):
    """The same, x quantized to NVFP4: a product of all columns, and one operation behind it."""

    def __init__(self, gate: BlockScaledTensor, up: BlockScaledTensor, between: Between) -> None:
        super().__init__()
        data = torch.cat([x.data for x in (gate, up)])
        scale = torch.cat([x.rowmajor_scale()[0] for x in (gate, up)])
        self.product = nvfp4(BlockScaledTensor(data, scale, gate.global_scale), "max")
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between.silu_mul(self.product(x))


def nvfp4(weight: BlockScaledTensor, input_rule: str | None) -> NVFP4Linear:
    scale = None if input_rule is None else torch.tensor(INPUT_SCALE, device=weight.device)
    return NVFP4Linear(weight, input_rule=input_rule, input_global_scale=scale).prepare()


class Contestant(NamedTuple):
    """How a matrix becomes a module, gate and up become one, and the head does."""

    linear: Callable[[BlockScaledTensor], torch.nn.Module]
    gated: Callable[[BlockScaledTensor, BlockScaledTensor], torch.nn.Module]
    head: Callable[[BlockScaledTensor], torch.nn.Module]


def contestants(between: Between) -> dict[str, Contestant]:
    def w4a16(weight: BlockScaledTensor) -> NVFP4Linear:
        return nvfp4(weight, None)

    def w4a4(weight: BlockScaledTensor) -> NVFP4Linear:
        return nvfp4(weight, "max")

    return {
        "bf16": Contestant(Plain, lambda g, u: GatedPlain(g, u, between), Plain),
        "w4a16": Contestant(w4a16, GatedPrepared, Plain),
        "w4a16, head too": Contestant(w4a16, GatedPrepared, w4a16),
        "w4a4": Contestant(w4a4, lambda g, u: GatedQuantized(g, u, between), Plain),
    }


class Layer(torch.nn.Module):
    """Attention and MLP, each behind a sum and its norm."""

    def __init__(self, shape: Shape, qkv, output, gated, down, norms: torch.Tensor, between: Between) -> None:
        super().__init__()
        self.shape, self.between = shape, between
        self.qkv, self.output, self.gated, self.down = qkv, output, gated, down
        self.register_buffer("norms", norms)

    def products(self, hidden: torch.Tensor, heads: torch.Tensor, wide: torch.Tensor) -> None:
        """The four products alone, of rows that are there."""
        for module, x in ((self.qkv, hidden), (self.output, heads), (self.gated, hidden), (self.down, wide)):
            module(x)

    def forward(self, x, residual, turn, cache, position) -> tuple[torch.Tensor, torch.Tensor]:
        shape, (batch, length, _) = self.shape, x.shape
        residual, x = self.between.add_norm(x, residual, self.norms[0])
        heads = self.qkv(x).view(batch, length, -1, shape.head_dim)
        y = attention(self.between.rotate(heads, *turn, shape.kv_heads), cache, position)
        residual, x = self.between.add_norm(self.output(y), residual, self.norms[1])
        return self.down(self.gated(x)), residual


def attention(heads: torch.Tensor, cache: torch.Tensor, position: torch.Tensor | None) -> torch.Tensor:
    """Of queries, keys and values (B, S, heads + 2 · kv heads, D), the latter kept in the cache (B, 2 · kv heads,
    length, D): causal from its beginning without a ``position``; of one row, at the position (1,), with all of the
    cache."""
    (batch, length, _, size), both = heads.shape, cache.shape[1]
    q, kv = heads[:, :, :-both], heads[:, :, -both:].transpose(1, 2)
    if position is None:
        cache[:, :, :length] = kv
        y = F.scaled_dot_product_attention(q.transpose(1, 2), *kv.chunk(2, dim=1), is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(batch, length, -1)
    cache.index_copy_(2, position, kv)
    # the heads of a group are rows of one product: they read its keys once
    y = F.scaled_dot_product_attention(q.reshape(batch, both // 2, -1, size), *cache.chunk(2, dim=1))
    return y.reshape(batch, 1, -1)


class Decoder(torch.nn.Module):
    """Tokens (B, S) to logits (B, vocabulary) of the last ones."""

    def __init__(self, shape: Shape, embedding: torch.Tensor, layers, norm, head, between: Between) -> None:
        super().__init__()
        self.shape, self.between = shape, between
        self.layers, self.head = torch.nn.ModuleList(layers), head
        self.register_buffer("embedding", embedding)
        self.register_buffer("norm", norm)
        exponents = torch.arange(0, shape.head_dim, 2, device=embedding.device) / shape.head_dim
        self.register_buffer("frequencies", shape.theta**-exponents)

    def forward(self, tokens: torch.Tensor, cache: torch.Tensor, position: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device) if position is None else position
        angles = places[:, None, None] * self.frequencies
        turn = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embedding)
        residual = torch.zeros_like(x)
        for layer, kept in zip(self.layers, cache):
            x, residual = layer(x, residual, turn, kept, position)
        _, x = self.between.add_norm(x[:, -1].contiguous(), residual[:, -1].contiguous(), self.norm)
        return self.head(x)


def drawn(n: int, k: int, generator: torch.Generator) -> BlockScaledTensor:
    """A weight (N, K) of normal values in NVFP4."""
    x = torch.randn(n, k, dtype=torch.bfloat16, device=generator.device, generator=generator)
    return quantize(x * k**-0.5, global_scale=GLOBAL_SCALE)


def models(
    shape: Shape, names: list[str], device: torch.device | str, between: Between, seed: int = 0
) -> dict[str, Decoder]:
    """The same model for each contestant, a matrix at a time."""
    made = {name: contestants(between)[name] for name in names}
    generator = torch.Generator(device).manual_seed(seed)
    embedding = torch.randn(shape.vocabulary, shape.hidden, device=device, generator=generator).bfloat16()
    layers: dict[str, list[Layer]] = {name: [] for name in names}
    for _ in range(shape.layers):
        norms = 1 + 0.1 * torch.randn(2, shape.hidden, device=device, generator=generator)
        sizes = (shape.qkv, shape.hidden), (shape.hidden, shape.heads * shape.head_dim)
        sizes += ((shape.intermediate, shape.hidden),) * 2 + ((shape.hidden, shape.intermediate),)
        qkv, output, gate, up, down = (drawn(*size, generator) for size in sizes)
        for name, (linear, gated, _) in made.items():
            modules = linear(qkv), linear(output), gated(gate, up), linear(down)
            layers[name].append(Layer(shape, *modules, norms.bfloat16(), between))
    head = drawn(shape.vocabulary, shape.hidden, generator)
    norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
    return {
        name: Decoder(shape, embedding, layers[name], norm, made[name].head(head), between).eval() for name in names
    }

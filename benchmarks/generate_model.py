"""The decoder in plain torch that ``generate.py`` times: a Llama or a Qwen3 mixture of experts, in bf16 or NVFP4.

Its weights are drawn at random: it has a model's speed, but knows no language. They are drawn in NVFP4, with a power of
two as global scale, so that bf16 holds them exactly and all contestants have the same model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from between_torch import EPSILON, Between, attention
from generate_contestants import Contestant, Dense, Routed, Stack, Stacks, contestants
from slots import Slots
from torch.nn import functional as F

from cute_nvfp4 import BlockScaledTensor, RowScaledTensor, quantize, rmsnorm_quantize

GLOBAL_SCALE = 2.0**-12


class Shape(NamedTuple):
    """A model's sizes.

    experts: the experts of each layer, of which a token takes ``top``; 0: one MLP. ``intermediate`` is then one
        expert's.
    head_norms: whether queries and keys are normalized, as in Qwen3.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    theta: float = 500000.0
    experts: int = 0
    top: int = 0
    head_norms: bool = False

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def linear_weights(self) -> int:
        """Elements of the matrices of all layers, without the head."""
        attention = self.hidden * (self.qkv + self.heads * self.head_dim)
        return self.layers * (attention + 3 * self.hidden * self.intermediate * max(self.experts, 1))


LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN3_30B_A3B = Shape("Qwen3-30B-A3B", 48, 2048, 768, 32, 4, 128, 151936, 1e6, experts=128, top=8, head_norms=True)
SMOLLM2 = Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152, 1e5)
SHAPES = {shape.name: shape for shape in (LLAMA_8B, QWEN3_30B_A3B, SMOLLM2)}
TINY = Shape("tiny", 2, 64, 128, 4, 2, 16, 96)
TINY_MIXTURE = TINY._replace(name="tiny mixture", experts=4, top=2, head_norms=True)


def empty_cache(shape: Shape, batch: int, length: int, device: torch.device | str) -> torch.Tensor:
    """Keys and then values of all layers (layers, batch, 2 · kv heads, length, head dim), together, so that one
    operation of a step writes both."""
    size = shape.layers, batch, 2 * shape.kv_heads, length, shape.head_dim
    return torch.zeros(size, dtype=torch.bfloat16, device=device)


def add_norm_fp8(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, RowScaledTensor]:
    """The new residual (B, S, H), and its RMSNorm as rows (B · S, H) in FP8: one launch."""
    rows, before = (t.reshape(-1, x.shape[-1]) for t in (x, residual))
    found = rmsnorm_quantize(rows, weight, global_scale=None, eps=EPSILON, residual=before, format="fp8_e4m3")
    return found.residual.view(x.shape), found.quantized


class Norms(NamedTuple):
    """Weights of a layer's norms: before attention and before the MLP, (H,) each, and of its heads, or None."""

    attention: torch.Tensor
    feed: torch.Tensor
    heads: torch.Tensor | None


class Layer(torch.nn.Module):
    """Attention, and an MLP or experts, each after a sum and its norm. fp8: whether norms give rows in FP8; the norm
    before experts never does, because their router reads bf16."""

    def __init__(self, shape: Shape, qkv, output, feed, norms: Norms, between: Between, fp8: bool) -> None:
        super().__init__()
        self.shape, self.between, self.norms = shape, between, norms
        self.before_qkv = add_norm_fp8 if fp8 else between.add_norm
        self.before_feed = add_norm_fp8 if fp8 and not shape.experts else between.add_norm
        self.qkv, self.output, self.feed = qkv, output, feed

    def products(self, hidden: torch.Tensor, heads: torch.Tensor) -> None:
        """Computes the products alone, on given rows."""
        for module, x in ((self.qkv, hidden), (self.output, heads), (self.feed, hidden)):
            module(x)

    def forward(self, x, residual, turn, cache, position) -> tuple[torch.Tensor | Slots, torch.Tensor]:
        shape, (batch, length, _) = self.shape, residual.shape
        residual, x = self.before_qkv(x, residual, self.norms.attention)
        heads = self.qkv(x).view(batch, length, -1, shape.head_dim)
        if self.between.attention is not None:
            y = self.between.attention(heads, turn, self.norms.heads, cache, position)
        else:
            y = attention(self.between.rotate(heads, *turn, shape.kv_heads, self.norms.heads), cache, position)
        y = self.output(y)
        if self.between.norm_route is None or not shape.experts or batch * length > 1:
            residual, x = self.before_feed(y, residual, self.norms.feed)
            return self.feed(x).view(residual.shape), residual
        feed, rows = self.feed, (1, shape.hidden)
        if feed.routes:
            residual, x, *chosen = self.between.norm_route(y, residual, self.norms.feed, feed.router, feed.top)
        else:
            residual, x = self.before_feed(y, residual, self.norms.feed)
            chosen = self.between.route(x.view(rows), feed.router, feed.top)
        return feed.slots(x.view(rows), *chosen), residual


class Decoder(torch.nn.Module):
    """Maps tokens (B, S) to the logits (B, vocabulary) after the last token."""

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
        turn = self.between.turn_of(places, self.frequencies)
        x = F.embedding(tokens, self.embedding)
        residual = torch.zeros_like(x)
        for layer, kept in zip(self.layers, cache):
            x, residual = layer(x, residual, turn, kept, position)
        last = x if isinstance(x, Slots) else x[:, -1].contiguous()
        _, x = self.between.add_norm(last, residual[:, -1].contiguous(), self.norm)
        return self.head(x)


def drawn(n: int, k: int, generator: torch.Generator) -> BlockScaledTensor:
    """Draws a weight (N, K) of normal values in NVFP4."""
    x = torch.randn(n, k, dtype=torch.bfloat16, device=generator.device, generator=generator)
    return quantize(x * k**-0.5, global_scale=GLOBAL_SCALE)


def drawn_norms(shape: Shape, generator: torch.Generator) -> Norms:
    """Draws the weights of a layer's norms, about 1. Values have no norm: their weights are unused."""

    def about_one(*size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(*size, device=generator.device, generator=generator)).bfloat16()

    heads = about_one(shape.heads + 2 * shape.kv_heads, shape.head_dim) if shape.head_norms else None
    return Norms(*about_one(2, shape.hidden), heads)


def drawn_feeds(shape: Shape, generator: torch.Generator, made: dict[str, Contestant], between: Between) -> dict:
    """Draws an MLP or experts, and returns each contestant's module."""
    hidden, inner, e = shape.hidden, shape.intermediate, shape.experts
    if not e:
        gate, up, down = (drawn(n, k, generator) for n, k in ((inner, hidden), (inner, hidden), (hidden, inner)))
        return {name: Dense(one.gated(gate, up), one.linear(down), one.rows) for name, one in made.items()}
    router = drawn(e, hidden, generator).dequantize(torch.bfloat16)
    stacks = Stacks(*(Stack(drawn(e * n, k, generator), e) for n, k in ((2 * inner, hidden), (hidden, inner))))
    # contestants that multiply experts in the same way share them
    experts = {dtype: stacks.made(dtype) for dtype in {one.experts for one in made.values()}}
    return {name: Routed(router, experts[x.experts], shape.top, between, x.routes) for name, x in made.items()}


def models(
    shape: Shape, names: list[str], device: torch.device | str, between: Between, seed: int = 0
) -> dict[str, Decoder]:
    """Draws one model, a matrix at a time, and returns each contestant's form of it."""
    made = {name: contestants(between)[name] for name in names}
    generator = torch.Generator(device).manual_seed(seed)
    embedding = torch.randn(shape.vocabulary, shape.hidden, device=device, generator=generator).bfloat16()
    layers: dict[str, list[Layer]] = {name: [] for name in names}
    for _ in range(shape.layers):
        norms = drawn_norms(shape, generator)
        qkv = drawn(shape.qkv, shape.hidden, generator)
        output = drawn(shape.hidden, shape.heads * shape.head_dim, generator)
        for name, feed in drawn_feeds(shape, generator, made, between).items():
            linear, fp8 = made[name].linear, made[name].fp8
            layers[name].append(Layer(shape, linear(qkv), linear(output), feed, norms, between, fp8))
    head = drawn(shape.vocabulary, shape.hidden, generator)
    norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
    return {
        name: Decoder(shape, embedding, layers[name], norm, made[name].head(head), between).eval() for name in names
    }

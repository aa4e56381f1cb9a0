"""A decoder in plain torch, a Llama or a Qwen3 mixture of experts, with matrices in bf16 or in NVFP4: what
``generate.py`` times.

Weights are drawn, so that there is speed and no language. They are drawn in NVFP4, with a power of two for a global
scale: bf16 holds them exactly, and all contestants have the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from moe import routed_by_torch, rows_by_torch
from slots import Slots
from torch.nn import functional as F

from cute_nvfp4 import (
    BlockScaledTensor,
    NVFP4Linear,
    RowScaledTensor,
    gated_gemm,
    gemm,
    moe,
    prepare_experts,
    prepare_weight,
    quantize,
    rmsnorm_quantize,
    route,
)
from cute_nvfp4.ops.moe.experts import Experts
from cute_nvfp4.ops.moe.layer import slot_rows

GLOBAL_SCALE = 2.0**-12
INPUT_SCALE = 8 / 2688
"""Of activations, where they are quantized: magnitudes up to 8 fit."""
EPSILON = 1e-5
FEW_ROWS = 1
"""Rows up to which a router's product is compiled as sums."""
PART = 2048
"""Rows of a part of an MLP."""


class Shape(NamedTuple):
    """A model's sizes. experts: of each layer, of which a token takes ``top``, or 0 for one MLP; ``intermediate`` is
    that of one expert. head_norms: whether queries and keys are normalized, as Qwen3 does."""

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
    """Keys and then values of all layers: (layers, batch, 2 · kv heads, length, head dim). They lie together, so that a
    step writes both at once."""
    size = shape.layers, batch, 2 * shape.kv_heads, length, shape.head_dim
    return torch.zeros(size, dtype=torch.bfloat16, device=device)


def add_norm(
    x: torch.Tensor | Slots, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual, and its RMSNorm. x: what is added, or rows of one token's experts, which add up to it."""
    residual = residual + (x.summed(residual) if isinstance(x, Slots) else x)
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return residual, wide.to(residual.dtype) * weight


def add_norm_fp8(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, RowScaledTensor]:
    """The new residual (B, S, H), and its RMSNorm as rows (B · S, H) in FP8: one launch."""
    rows, before = (t.reshape(-1, x.shape[-1]) for t in (x, residual))
    found = rmsnorm_quantize(rows, weight, global_scale=None, eps=EPSILON, residual=before, format="fp8_e4m3")
    return found.residual.view(x.shape), found.quantized


def rotate(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, values: int, norms: torch.Tensor | None
) -> torch.Tensor:
    """Rotary positions of heads (B, S, heads, D), the last ``values`` of which stay as they are; cosine and sine are
    (S, 1, D / 2), in float32. norms: None, or (heads, D), the weights of an RMSNorm of each head before it turns."""
    turned, wide = torch.arange(x.shape[2], device=x.device)[:, None] < x.shape[2] - values, x.float()
    if norms is not None:
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        wide = torch.where(turned, normed.to(x.dtype) * norms, x).float()
    cosine, sine = torch.where(turned, cosine, 1.0), torch.where(turned, sine, 0.0)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def scores(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """What a router (E, H) gives for rows (T, H): (T, E). Few rows are sums, which torch compiles to a kernel that is
    faster than its product: 3 µs a layer of Qwen3-30B-A3B on an H200."""
    if len(x) > FEW_ROWS:
        return F.linear(x, router)
    return (x.float()[:, None] * router.float()).sum(-1).to(x.dtype)


def route_by_torch(x: torch.Tensor, router: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts (T, top) of each row of x (T, H), and their weights, which add up to 1: router (E, H)."""
    chances, ids = scores(x, router).float().softmax(-1).topk(top)
    return ids, chances / chances.sum(-1, keepdim=True)


def turn_of(places: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine (S, 1, D / 2) of places (S,)."""
    angles = places[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def token(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token (B, 1)."""
    return logits.argmax(-1, keepdim=True)


def slots_by_torch(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``routed_by_torch`` before the sum: rows in the order of their experts, and their weights."""
    order, rows = rows_by_torch(x, ids, gate_up, down)
    return rows, weights.flatten()[order].float()


class Between(NamedTuple):
    """The operations between products, as torch has them or compiled: the same ones for every contestant. ``experts``
    and ``slots`` have products of their own: all experts in bf16, in torch's operations. attention: what takes the
    place of ``rotate`` and torch's attention, or None. norm_route: of one token, what takes the place of ``add_norm``,
    ``scores`` and ``route``, or None; its experts' rows are then added up by ``add_norm``."""

    add_norm: Callable = add_norm
    rotate: Callable = rotate
    silu_mul: Callable = silu_mul
    scores: Callable = scores
    route: Callable = route_by_torch
    experts: Callable = routed_by_torch
    slots: Callable = slots_by_torch
    turn_of: Callable = turn_of
    token: Callable = token
    attention: Callable | None = None
    norm_route: Callable | None = None

    def compiled(self) -> Between:
        made = {n: torch.compile(x, fullgraph=True, dynamic=False) for n, x in self._asdict().items() if x is not None}
        return self._replace(**made)


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
    """The same of prepared NVFP4 weights: ``gated_gemm``, one launch. dtype: of the products."""

    def __init__(self, gate: BlockScaledTensor, up: BlockScaledTensor, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = prepare_weight(gate, up, dtype=dtype)

    def forward(self, x: torch.Tensor | RowScaledTensor) -> torch.Tensor:
        if isinstance(x, RowScaledTensor):
            return gated_gemm(x, self.weight, out_dtype=torch.bfloat16)
        return gated_gemm(x.reshape(-1, x.shape[-1]), self.weight, out_dtype=x.dtype).reshape(*x.shape[:-1], -1)


class PreparedRows(torch.nn.Module):
    """x · Wᵀ of a weight that is prepared for FP8, for x in bf16, or rows (M, K) in FP8, which give (M, N)."""

    def __init__(self, weight: BlockScaledTensor) -> None:
        super().__init__()
        self.weight = prepare_weight(weight, dtype=torch.float8_e4m3fn)

    def forward(self, x: torch.Tensor | RowScaledTensor) -> torch.Tensor:
        if isinstance(x, RowScaledTensor):
            return gemm(x, self.weight, out_dtype=torch.bfloat16)
        return gemm(x.reshape(-1, x.shape[-1]), self.weight, out_dtype=x.dtype).view(*x.shape[:-1], -1)


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


class Dense(torch.nn.Module):
    """The MLP of a Llama: the gated product, and down. rows: how many at a time, for rows in FP8; None for all."""

    def __init__(self, gated: torch.nn.Module, down: torch.nn.Module, rows: int | None) -> None:
        super().__init__()
        self.gated, self.down, self.rows = gated, down, rows

    def forward(self, x: torch.Tensor | RowScaledTensor) -> torch.Tensor:
        if self.rows is None or not isinstance(x, RowScaledTensor) or x.rows <= self.rows:
            return self.down(self.gated(x))
        out = torch.empty(x.rows, self.down.weight.rows, dtype=torch.bfloat16, device=x.data.device)
        for data, scale, part in zip(*(t.split(self.rows) for t in (x.data, x.scale, out))):
            gemm(self.gated(RowScaledTensor(data, scale)), self.down.weight, out=part)
        return out


class Routed(torch.nn.Module):
    """A mixture of experts: ``Pair`` in bf16, or what ``prepare_experts`` made; the router (E, H) is in bf16."""

    def __init__(self, router: torch.Tensor, experts: Experts | Pair, top: int, between: Between, routes: bool) -> None:
        super().__init__()
        self.register_buffer("router", router)
        self.top, self.between, self.experts = top, between, None
        self.routes = routes
        if isinstance(experts, Pair):
            for name, stack in experts._asdict().items():
                self.register_buffer(name, stack)
        else:
            self.experts = experts

    def slots(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Slots:
        """The rows of the experts of one token (1, H), which nothing has added up."""
        if self.experts is None:
            return Slots(*self.between.slots(x, ids, weights, self.gate_up.mT, self.down.mT))
        return Slots(slot_rows(x, ids, weights, self.experts), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.routes:
            ids, weights = route(self.between.scores(rows, self.router), self.top)
        else:
            ids, weights = self.between.route(rows, self.router, self.top)
        if self.experts is None:
            # (E, K, N), as torch takes them: views of rows along K
            y = self.between.experts(rows, ids, weights, self.gate_up.mT, self.down.mT)
        else:
            y = moe(rows, ids, weights, self.experts)
        return y.view(x.shape)


class Stack(NamedTuple):
    """A matrix (N, K) of each of E experts: rows of all, one after the other."""

    weight: BlockScaledTensor
    experts: int

    def matrices(self) -> list[BlockScaledTensor]:
        """One of each expert, with its global scale, as a checkpoint has them."""
        parts = (x.chunk(self.experts) for x in (self.weight.data, self.weight.rowmajor_scale()[0]))
        return [BlockScaledTensor(data, scale, self.weight.global_scale) for data, scale in zip(*parts)]

    def decoded(self) -> torch.Tensor:
        """(E, N, K) in bf16."""
        return self.weight.dequantize(torch.bfloat16).unflatten(0, (self.experts, -1))


class Pair(NamedTuple):
    """Both matrices of all experts in bf16: gate and up (E, 2 I, H), and down (E, H, I)."""

    gate_up: torch.Tensor
    down: torch.Tensor


class Stacks(NamedTuple):
    """The same in NVFP4."""

    gate_up: Stack
    down: Stack

    def made(self, dtype: torch.dtype | None) -> Experts | Pair:
        """As a contestant has them: for products in ``dtype``, or in bf16 for torch."""
        if dtype is None:
            return Pair(*(stack.decoded() for stack in self))
        return prepare_experts(*(stack.matrices() for stack in self), dtype=dtype)


def nvfp4(weight: BlockScaledTensor, input_rule: str | None) -> NVFP4Linear:
    scale = None if input_rule != "max" else torch.tensor(INPUT_SCALE, device=weight.device)
    return NVFP4Linear(weight, input_rule=input_rule, input_global_scale=scale).prepare()


class Contestant(NamedTuple):
    """How a matrix becomes a module, gate and up become one, and the head does; what experts are multiplied in, None
    for torch's bf16; whether products of normed rows take them in FP8; whether ``route`` chooses experts, or torch's
    operations do; how many rows of a prompt an MLP takes at a time, whose activations then stay in L2."""

    linear: Callable[[BlockScaledTensor], torch.nn.Module]
    gated: Callable[[BlockScaledTensor, BlockScaledTensor], torch.nn.Module]
    head: Callable[[BlockScaledTensor], torch.nn.Module]
    experts: torch.dtype | None
    fp8: bool = False
    routes: bool = True
    rows: int | None = None


def contestants(between: Between) -> dict[str, Contestant]:
    def w4a16(weight: BlockScaledTensor) -> NVFP4Linear:
        return nvfp4(weight, None)

    def w4a4(weight: BlockScaledTensor) -> NVFP4Linear:
        return nvfp4(weight, "max")

    fp8, bf16 = torch.float8_e4m3fn, Contestant(Plain, lambda g, u: GatedPlain(g, u, between), Plain, None)
    w4a8 = Contestant(PreparedRows, lambda g, u: GatedPrepared(g, u, fp8), Plain, fp8, True)
    return {
        "bf16": bf16._replace(routes=False),
        "bf16, our router": bf16,
        "w4a16": Contestant(w4a16, GatedPrepared, Plain, torch.bfloat16),
        "w4a16, torch's router": Contestant(w4a16, GatedPrepared, Plain, torch.bfloat16, routes=False),
        "w4a16, head too": Contestant(w4a16, GatedPrepared, w4a16, torch.bfloat16),
        "w4a8": w4a8,
        "w4a8, MLP in parts": w4a8._replace(rows=PART),
        "w4a4": Contestant(w4a4, lambda g, u: GatedQuantized(g, u, between), Plain, torch.bfloat16),
    }


class Norms(NamedTuple):
    """Weights of a layer's norms: before attention and before what follows it, (H,) each, and of its heads or None."""

    attention: torch.Tensor
    feed: torch.Tensor
    heads: torch.Tensor | None


class Layer(torch.nn.Module):
    """Attention, and an MLP or experts, each behind a sum and its norm. fp8: whether norms give rows in FP8, but for
    experts, whose router reads them in bf16."""

    def __init__(self, shape: Shape, qkv, output, feed, norms: Norms, between: Between, fp8: bool) -> None:
        super().__init__()
        self.shape, self.between, self.norms = shape, between, norms
        self.before_qkv = add_norm_fp8 if fp8 else between.add_norm
        self.before_feed = add_norm_fp8 if fp8 and not shape.experts else between.add_norm
        self.qkv, self.output, self.feed = qkv, output, feed

    def products(self, hidden: torch.Tensor, heads: torch.Tensor) -> None:
        """The products alone, of rows that are there."""
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
        turn = self.between.turn_of(places, self.frequencies)
        x = F.embedding(tokens, self.embedding)
        residual = torch.zeros_like(x)
        for layer, kept in zip(self.layers, cache):
            x, residual = layer(x, residual, turn, kept, position)
        last = x if isinstance(x, Slots) else x[:, -1].contiguous()
        _, x = self.between.add_norm(last, residual[:, -1].contiguous(), self.norm)
        return self.head(x)


def drawn(n: int, k: int, generator: torch.Generator) -> BlockScaledTensor:
    """A weight (N, K) of normal values in NVFP4."""
    x = torch.randn(n, k, dtype=torch.bfloat16, device=generator.device, generator=generator)
    return quantize(x * k**-0.5, global_scale=GLOBAL_SCALE)


def drawn_norms(shape: Shape, generator: torch.Generator) -> Norms:
    """Weights about 1; of values they are not read."""

    def about_one(*size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(*size, device=generator.device, generator=generator)).bfloat16()

    heads = about_one(shape.heads + 2 * shape.kv_heads, shape.head_dim) if shape.head_norms else None
    return Norms(*about_one(2, shape.hidden), heads)


def drawn_feeds(shape: Shape, generator: torch.Generator, made: dict[str, Contestant], between: Between) -> dict:
    """What follows attention in a layer, for each contestant."""
    hidden, inner, e = shape.hidden, shape.intermediate, shape.experts
    if not e:
        gate, up, down = (drawn(n, k, generator) for n, k in ((inner, hidden), (inner, hidden), (hidden, inner)))
        return {name: Dense(one.gated(gate, up), one.linear(down), one.rows) for name, one in made.items()}
    router = drawn(e, hidden, generator).dequantize(torch.bfloat16)
    stacks = Stacks(*(Stack(drawn(e * n, k, generator), e) for n, k in ((2 * inner, hidden), (hidden, inner))))
    # contestants that multiply them in the same way share them
    experts = {dtype: stacks.made(dtype) for dtype in {one.experts for one in made.values()}}
    return {name: Routed(router, experts[x.experts], shape.top, between, x.routes) for name, x in made.items()}


def models(
    shape: Shape, names: list[str], device: torch.device | str, between: Between, seed: int = 0
) -> dict[str, Decoder]:
    """The same model for each contestant, a matrix at a time."""
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

"""The operations of ``generate_model.py`` between products, in torch's operations or compiled by torch. All contestants
use the same ones. ``between_triton.py`` has Triton kernels that replace some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from moe import routed_by_torch, rows_by_torch
from slots import Slots
from torch.nn import functional as F

EPSILON = 1e-5
FEW_ROWS = 1
"""Up to this many rows, a router's product is compiled as sums."""


def add_norm(
    x: torch.Tensor | Slots, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual, and its RMSNorm. x: the term to add, or the rows of one token's experts, whose sum is the
    term."""
    residual = residual + (x.summed(residual) if isinstance(x, Slots) else x)
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return residual, wide.to(residual.dtype) * weight


def rotate(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, values: int, norms: torch.Tensor | None
) -> torch.Tensor:
    """Applies rotary positions to heads (B, S, heads, D), except to the last ``values`` heads. cosine, sine: (S, 1, D /
    2), float32. norms: None, or the weights (heads, D) of an RMSNorm that each head passes first."""
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
    """A router's logits (T, E) for rows (T, H); router: (E, H). Few rows are computed as sums, which torch compiles to
    a kernel that is faster than its product: 3 µs a layer of Qwen3-30B-A3B on an H200."""
    if len(x) > FEW_ROWS:
        return F.linear(x, router)
    return (x.float()[:, None] * router.float()).sum(-1).to(x.dtype)


def route_by_torch(x: torch.Tensor, router: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts (T, top) of each row of x (T, H), and their weights, which add up to 1. router: (E, H)."""
    chances, ids = scores(x, router).float().softmax(-1).topk(top)
    return ids, chances / chances.sum(-1, keepdim=True)


def turn_of(places: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine (S, 1, D / 2) of positions (S,)."""
    angles = places[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def token(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token (B, 1) of logits."""
    return logits.argmax(-1, keepdim=True)


def slots_by_torch(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of ``routed_by_torch`` before the sum: the rows in the order of their experts, and their weights."""
    order, rows = rows_by_torch(x, ids, gate_up, down)
    return rows, weights.flatten()[order].float()


class Between(NamedTuple):
    """The operations between products, in torch's operations or compiled: the same ones for every contestant.

    experts, slots: all experts in bf16, with their products, in torch's operations.
    attention: replaces ``rotate`` and torch's attention; or None.
    norm_route: replaces ``add_norm``, ``scores`` and ``route`` for one token, whose experts' rows ``add_norm`` then
        adds up; or None.
    """

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


def attention(heads: torch.Tensor, cache: torch.Tensor, position: torch.Tensor | None) -> torch.Tensor:
    """Attention of queries, keys and values (B, S, heads + 2 · kv heads, D); keys and values go into the cache (B, 2 ·
    kv heads, length, D). Without a ``position`` it is causal from the cache's beginning; one row at the position (1,)
    attends to the whole cache."""
    (batch, length, _, size), both = heads.shape, cache.shape[1]
    q, kv = heads[:, :, :-both], heads[:, :, -both:].transpose(1, 2)
    if position is None:
        cache[:, :, :length] = kv
        y = F.scaled_dot_product_attention(q.transpose(1, 2), *kv.chunk(2, dim=1), is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(batch, length, -1)
    cache.index_copy_(2, position, kv)
    # the heads of a group are rows of one product, which reads the group's keys once
    y = F.scaled_dot_product_attention(q.reshape(batch, both // 2, -1, size), *cache.chunk(2, dim=1))
    return y.reshape(batch, 1, -1)

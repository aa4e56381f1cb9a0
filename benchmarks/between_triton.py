"""Operations of ``generate_model.py`` between products in Triton, the same ones for every contestant.

A step of decoding takes one launch a layer for its attention: queries and keys are normed and turned, the new key and
value kept, and all keys attended to, their CTAs' results added by the last one of a group of heads. A prompt takes one
launch for the same up to the kept keys, and then torch's attention. torch's own operations for this take four to eight
launches, and most of their time is a launch's. ``add_norm`` reads each row once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

ROWS = 16
"""Rows of an MMA: the heads of a group, and padding."""
BLOCK = 64
"""Keys of a step of the loop."""
CTAS = 128
"""About so many CTAs share the keys of all sequences and groups."""
TOKENS, HEADS = 16, 8
"""Tokens and heads of a CTA of ``turn_kernel``."""


@triton.jit
def rounded(x, weight):
    """x in bf16 times a weight in bf16."""
    return (x.to(tl.bfloat16).to(tl.float32) * weight.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def turned(first, second, weight, at, cosine, sine, norm: tl.constexpr, size: tl.constexpr, eps: tl.constexpr):
    """Both halves (rows, size / 2) of bf16 heads after their RMSNorm, if there is one, and their rotation. at: places
    of the first half's weights."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    if norm:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / size + eps)[:, None]
        a = rounded(a * scale, tl.load(weight + at)).to(tl.float32)
        b = rounded(b * scale, tl.load(weight + at + size // 2)).to(tl.float32)
    return (a * cosine - b * sine).to(tl.bfloat16), (b * cosine + a * sine).to(tl.bfloat16)


@triton.jit
def attend_kernel(
    heads, cosine, sine, weight, cache, position, out, partial, stats, counter, scale, length,
    kv: tl.constexpr, group: tl.constexpr, lines: tl.constexpr, rows: tl.constexpr, size: tl.constexpr,
    block: tl.constexpr, splits: tl.constexpr, norm: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """Attention of one token of a sequence: a group of heads, and its share of the keys.

    heads (B, (group + 2) · kv, size): queries, keys, values; cosine and sine (size / 2,); weight as the heads of a
    sequence; cache (B, 2 · kv, length, size); position (1,); out (B, group · kv, size). partial (B · kv, splits, group,
    size), stats (2, B · kv, splits, group), counter (B · kv,) zeros before and after. lines: group, up to a power of
    two.
    """
    half: tl.constexpr = size // 2
    pair, split = tl.program_id(0), tl.program_id(1)
    sequence, mine = pair // kv, pair % kv
    every = heads + sequence * (group + 2) * kv * size
    low, row, whole = tl.arange(0, half), tl.arange(0, rows), tl.arange(0, size)
    cos, sin = tl.load(cosine + low)[None, :], tl.load(sine + low)[None, :]
    # rows of padding repeat the last head, and are not stored
    of_q = (mine * group + tl.minimum(row, group - 1))[:, None] * size + low[None, :]
    q1, q2 = turned(tl.load(every + of_q), tl.load(every + of_q + half), weight, of_q, cos, sin, norm, size, eps)
    one = tl.zeros((1, 1), tl.int32)
    of_k = (group * kv + mine + one) * size + low[None, :]
    new1, new2 = turned(tl.load(every + of_k), tl.load(every + of_k + half), weight, of_k, cos, sin, norm, size, eps)
    value = tl.load(every + ((group + 1) * kv + mine) * size + whole)[None, :]
    keys = cache + (sequence * 2 * kv + mine).to(tl.int64) * length * size
    values = keys + kv * length * size
    place = tl.load(position).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, splits), block) * block
    begin = split * share
    end = tl.minimum(begin + share, length)
    if (place >= begin) & (place < end):
        tl.store(keys + place * size + low[None, :], new1)
        tl.store(keys + place * size + half + low[None, :], new2)
        tl.store(values + place * size + whole[None, :], value)
    most = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    found = tl.zeros((rows, size), tl.float32)
    for start in range(begin, end, block):
        j = start + tl.arange(0, block)
        here, new = (j < end)[:, None], (j == place)[:, None]
        there = keys + j[:, None] * size + low[None, :]
        k1 = tl.where(new, new1, tl.load(there, here, other=0.0))
        k2 = tl.where(new, new2, tl.load(there + half, here, other=0.0))
        v = tl.where(new, value, tl.load(values + j[:, None] * size + whole[None, :], here, other=0.0))
        scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
        scores = tl.where((j < end)[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        kept, chances = tl.exp(most - larger), tl.exp(scores - larger[:, None])
        total = total * kept + tl.sum(chances, 1)
        found = found * kept[:, None] + tl.dot(chances.to(tl.bfloat16), v)
        most = larger
    target = out + (sequence * kv + mine) * group * size
    if splits == 1:
        tl.store(target + row[:, None] * size + whole[None, :], found / total[:, None], (row < group)[:, None])
    else:
        pairs = tl.num_programs(0)
        own = (pair * splits + split) * group + row
        tl.store(partial + own[:, None] * size + whole[None, :], found, (row < group)[:, None])
        tl.store(stats + own, most, row < group)
        tl.store(stats + pairs * splits * group + own, total, row < group)
        tl.debug_barrier()
        if tl.atomic_add(counter + pair, 1, sem="acq_rel") == splits - 1:
            line = tl.arange(0, lines)
            all_of = (pair * splits + tl.arange(0, splits)[:, None]) * group + tl.minimum(line, group - 1)[None, :]
            each = tl.load(stats + all_of, cache_modifier=".cg")
            sums = tl.load(stats + pairs * splits * group + all_of, cache_modifier=".cg")
            # a split past the last key has no weight
            factor = tl.where(sums > 0, tl.exp(each - tl.max(each, 0)[None, :]), 0.0)
            factor = factor / tl.sum(factor * sums, 0)[None, :]
            parts = tl.load(partial + all_of[:, :, None] * size + whole[None, None, :], cache_modifier=".cg")
            y = tl.sum(parts * factor[:, :, None], 0)
            tl.store(target + line[:, None] * size + whole[None, :], y, (line < group)[:, None])
            tl.store(counter + pair, 0)


@triton.jit
def turn_kernel(
    heads, cosine, sine, weight, cache, out, tokens, length,
    kv: tl.constexpr, queries: tl.constexpr, size: tl.constexpr, block: tl.constexpr, each: tl.constexpr,
    norm: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """Some heads of some tokens of a prompt: queries (B, tokens, queries, size) are normed and turned, keys kept in the
    cache (B, 2 · kv, length, size), too, values only kept. cosine and sine (tokens, size / 2)."""
    half: tl.constexpr = size // 2
    sequence, every = tl.program_id(2), queries + 2 * kv
    token, low = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, half)
    here = (token < tokens)[:, None]
    angle = token[:, None] * half + low[None, :]
    cos, sin = tl.load(cosine + angle, here, other=0.0), tl.load(sine + angle, here, other=0.0)
    for head in range(tl.program_id(1) * each, tl.minimum(tl.program_id(1) * each + each, every)):
        at = ((sequence * tokens + token) * every + head).to(tl.int64)[:, None] * size + low[None, :]
        first, second = tl.load(heads + at, here, other=0.0), tl.load(heads + at + half, here, other=0.0)
        if head < queries + kv:
            of_head = tl.zeros((1, 1), tl.int32) + head * size + low[None, :]
            first, second = turned(first, second, weight, of_head, cos, sin, norm, size, eps)
        if head < queries:
            of_q = ((sequence * tokens + token).to(tl.int64) * queries + head)[:, None] * size + low[None, :]
            tl.store(out + of_q, first, here)
            tl.store(out + of_q + half, second, here)
        else:
            kept = ((sequence * 2 * kv + head - queries).to(tl.int64) * length + token)[:, None] * size + low[None, :]
            tl.store(cache + kept, first, here)
            tl.store(cache + kept + half, second, here)


@triton.jit
def add_norm_kernel(x, residual, weight, total, out, columns, block: tl.constexpr, eps: tl.constexpr):
    """One row of the new residual, ``total``, and its RMSNorm."""
    row, column = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, block)
    here = column < columns
    added = tl.load(x + row + column, here, other=0.0).to(tl.float32)
    added += tl.load(residual + row + column, here, other=0.0).to(tl.float32)
    added = added.to(tl.bfloat16)
    tl.store(total + row + column, added, here)
    wide = added.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    tl.store(out + row + column, rounded(normed, tl.load(weight + column, here, other=0.0)), here)


class Scratch(NamedTuple):
    """What CTAs of a launch leave for the last one: sums, their largest scores and weights, and how many are done."""

    partial: torch.Tensor
    stats: torch.Tensor
    counter: torch.Tensor


@functools.cache
def scratch(pairs: int, splits: int, group: int, size: int, device: torch.device) -> Scratch:
    """Memory that all launches of these sizes share, one after the other."""
    return Scratch(
        torch.empty(pairs, splits, group, size, device=device),
        torch.empty(2, pairs, splits, group, device=device),
        torch.zeros(pairs, dtype=torch.int32, device=device),
    )


def splits_of(pairs: int, length: int) -> int:
    """How many CTAs share the keys of a group of heads: a power of two."""
    most = max(1, min(CTAS // pairs, length // BLOCK, 16))
    return 1 << most.bit_length() - 1


def attention(
    heads: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    norms: torch.Tensor | None,
    cache: torch.Tensor,
    position: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Attention (B, S, heads · D) of queries, keys and values (B, S, heads + 2 · kv heads, D) in bf16, as a product
    gives them, the latter kept in the cache (B, 2 · kv heads, length, D).

    turn: cosine and sine (S, 1, D / 2), float32. norms: None, or weights (heads + 2 · kv heads, D). A prompt, without a
    ``position``, is causal from the cache's beginning; one token at the position (1,) attends to all of the cache.
    """
    (batch, tokens, _, size), (both, length) = heads.shape, cache.shape[1:3]
    kv, queries = both // 2, heads.shape[2] - both
    heads, weight = heads.contiguous(), heads if norms is None else norms
    options = {"kv": kv, "size": size, "norm": norms is not None, "eps": eps}
    if position is None:
        q = heads.new_empty(batch, tokens, queries, size)
        grid = triton.cdiv(tokens, TOKENS), triton.cdiv(queries + both, HEADS), batch
        options |= {"queries": queries, "block": TOKENS, "each": HEADS}
        turn_kernel[grid](heads, *turn, weight, cache, q, tokens, length, **options)
        keys, values = cache[:, :, :tokens].chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(batch, tokens, -1)
    out = heads.new_empty(batch, 1, queries * size)
    group, pairs = queries // kv, batch * kv
    splits = splits_of(pairs, length)
    kept = scratch(pairs, splits, group, size, heads.device)
    options |= {"group": group, "lines": triton.next_power_of_2(group), "rows": ROWS, "block": BLOCK, "splits": splits}
    given = heads, *turn, weight, cache, position, out, *kept, size**-0.5, length
    attend_kernel[pairs, splits](*given, **options, num_warps=8 if splits > 1 else 4)
    return out


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual (…, H), and its RMSNorm."""
    x, residual = x.contiguous(), residual.contiguous()
    total, out, columns = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(columns)
    grid = (x.numel() // columns,)
    add_norm_kernel[grid](x, residual, weight, total, out, columns, block, eps, num_warps=max(4, block // 512))
    return total, out

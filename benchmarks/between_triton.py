"""Triton kernels for operations of ``between_torch.py``.

A decoding step takes one launch a layer for attention: it normalizes and rotates queries and keys, stores the new key
and value, and attends to all keys; the last CTA of a group of heads adds up the results of the group's CTAs. A prompt
takes one launch that ends with the stored keys, and then torch's attention. torch's own operations take four to eight
launches for this, and most of their time is launch overhead. ``add_norm`` reads each row once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from slots import Slots
from torch.nn import functional as F

ROWS = 16
"""Rows of an MMA: the heads of a group, and padding."""
BLOCK = 32
"""Keys of a step of the loop."""
CTAS, SPLITS, WARPS = 128, 16, 4
"""About how many CTAs share the keys of all sequences and groups; the most CTAs of one group; warps of a CTA."""
ROUTING_CTAS = 32
"""CTAs that share a router's experts."""
TOKENS, HEADS = 16, 8
"""Tokens and heads of a CTA of ``turn_kernel``."""


@triton.jit
def rounded(x, weight):
    """x rounded to bf16, times a weight in bf16."""
    return (x.to(tl.bfloat16).to(tl.float32) * weight.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def turned(first, second, weight, at, cosine, sine, norm: tl.constexpr, size: tl.constexpr, eps: tl.constexpr):
    """Both halves (rows, size / 2) of bf16 heads after their RMSNorm, if ``norm``, and their rotation. at: offsets of
    the first half's weights."""
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
    """Attention of one token of a sequence: one group of heads, and this CTA's share of the keys.

    heads (B, (group + 2) · kv, size): queries, keys, values; cosine and sine (size / 2,); weight as the heads of one
    sequence; cache (B, 2 · kv, length, size); position (1,); out (B, group · kv, size). Scratch: partial (B · kv,
    splits, group, size), stats (2, B · kv, splits, group), and counter (B · kv,), which is zero before and after the
    launch. lines: ``group``, rounded up to a power of two.
    """
    half: tl.constexpr = size // 2
    pair, split = tl.program_id(0), tl.program_id(1)
    sequence, mine = pair // kv, pair % kv
    every = heads + sequence * (group + 2) * kv * size
    low, row, whole = tl.arange(0, half), tl.arange(0, rows), tl.arange(0, size)
    keys = cache + (sequence * 2 * kv + mine).to(tl.int64) * length * size
    values = keys + kv * length * size
    share = tl.cdiv(tl.cdiv(length, splits), block) * block
    begin = split * share
    end = tl.minimum(begin + share, length)
    # the loads of the first block start before anything waits
    j = begin + tl.arange(0, block)
    here, there = (j < end)[:, None], keys + j[:, None] * size + low[None, :]
    old1, old2 = tl.load(there, here, other=0.0), tl.load(there + half, here, other=0.0)
    old = tl.load(values + j[:, None] * size + whole[None, :], here, other=0.0)
    place = tl.load(position).to(tl.int32)
    cos, sin = tl.load(cosine + low)[None, :], tl.load(sine + low)[None, :]
    # padding rows repeat the last head, and are not stored
    of_q = (mine * group + tl.minimum(row, group - 1))[:, None] * size + low[None, :]
    q1, q2 = turned(tl.load(every + of_q), tl.load(every + of_q + half), weight, of_q, cos, sin, norm, size, eps)
    one = tl.zeros((1, 1), tl.int32)
    of_k = (group * kv + mine + one) * size + low[None, :]
    new1, new2 = turned(tl.load(every + of_k), tl.load(every + of_k + half), weight, of_k, cos, sin, norm, size, eps)
    value = tl.load(every + ((group + 1) * kv + mine) * size + whole)[None, :]
    if (place >= begin) & (place < end):
        tl.store(keys + place * size + low[None, :], new1)
        tl.store(keys + place * size + half + low[None, :], new2)
        tl.store(values + place * size + whole[None, :], value)
    most = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    found = tl.zeros((rows, size), tl.float32)
    for start in range(begin, end, block):
        j = start + tl.arange(0, block)
        new, following = (j == place)[:, None], j + block
        k1, k2, v = tl.where(new, new1, old1), tl.where(new, new2, old2), tl.where(new, value, old)
        here, there = (following < end)[:, None], keys + following[:, None] * size + low[None, :]
        old1, old2 = tl.load(there, here, other=0.0), tl.load(there + half, here, other=0.0)
        old = tl.load(values + following[:, None] * size + whole[None, :], here, other=0.0)
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
            parts = tl.load(partial + all_of[:, :, None] * size + whole[None, None, :], cache_modifier=".cg")
            each = tl.load(stats + all_of, cache_modifier=".cg")
            sums = tl.load(stats + pairs * splits * group + all_of, cache_modifier=".cg")
            # a split past the last key has no weight
            factor = tl.where(sums > 0, tl.exp(each - tl.max(each, 0)[None, :]), 0.0)
            factor = factor / tl.sum(factor * sums, 0)[None, :]
            y = tl.sum(parts * factor[:, :, None], 0)
            tl.store(target + line[:, None] * size + whole[None, :], y, (line < group)[:, None])
            tl.store(counter + pair, 0)


@triton.jit
def turn_kernel(
    heads, cosine, sine, weight, cache, out, tokens, length,
    kv: tl.constexpr, queries: tl.constexpr, size: tl.constexpr, block: tl.constexpr, each: tl.constexpr,
    norm: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """Prepares some heads of some tokens of a prompt. Queries (B, tokens, queries, size) and keys are normalized and
    rotated; keys and values go into the cache (B, 2 · kv, length, size). cosine and sine: (tokens, size / 2)."""
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
    """Computes one row of the new residual, ``total``, and its RMSNorm."""
    row, column = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, block)
    here = column < columns
    added = tl.load(x + row + column, here, other=0.0).to(tl.float32)
    added += tl.load(residual + row + column, here, other=0.0).to(tl.float32)
    added = added.to(tl.bfloat16)
    tl.store(total + row + column, added, here)
    wide = added.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    tl.store(out + row + column, rounded(normed, tl.load(weight + column, here, other=0.0)), here)


@triton.jit
def slots_add_norm_kernel(
    rows, weights, residual, weight, total, out, columns,
    top: tl.constexpr, lines: tl.constexpr, block: tl.constexpr, weighted: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """``add_norm_kernel`` for one row whose term is the sum of ``top`` rows. weighted: whether to multiply them by
    their weights. lines: ``top``, rounded up to a power of two."""
    column, line = tl.arange(0, block), tl.arange(0, lines)
    here, there = column < columns, line < top
    each = tl.load(rows + line[:, None] * columns + column[None, :], there[:, None] & here[None, :], other=0.0)
    before = tl.load(residual + column, here, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, here, other=0.0)
    each = each.to(tl.float32)
    if weighted:
        each = each * tl.load(weights + line, there, other=0.0)[:, None]
    added = (tl.sum(each, 0).to(tl.bfloat16).to(tl.float32) + before).to(tl.bfloat16)
    tl.store(total + column, added, here)
    wide = added.to(tl.float32)
    tl.store(out + column, rounded(wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps), scale), here)


@triton.jit
def norm_route_kernel(
    x, residual, weight, router, total, out, logits, counter, ids, weights, columns,
    experts: tl.constexpr, each: tl.constexpr, top: tl.constexpr, lines: tl.constexpr, block: tl.constexpr,
    eps: tl.constexpr,
):  # fmt: skip
    """``add_norm_kernel`` for one row, then a router: each CTA computes the logits of ``each`` experts, and the last
    CTA chooses the ``top`` largest and takes the softmax of their logits.

    router (experts, columns); logits (experts,) float32, and counter (1,), 0 before and after, are scratch memory; ids
    (top,) int32, weights (top,) float32. Logits are rounded to bf16; of equal logits the lower expert comes first.
    """
    column = tl.arange(0, block)
    here, mine = column < columns, tl.program_id(0) * each + tl.arange(0, each)
    matrix = tl.load(router + mine[:, None] * columns + column[None, :], here[None, :], other=0.0)
    added = tl.load(x + column, here, other=0.0).to(tl.float32)
    added += tl.load(residual + column, here, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, here, other=0.0)
    added = added.to(tl.bfloat16)
    wide = added.to(tl.float32)
    normed = rounded(wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps), scale)
    if tl.program_id(0) == 0:
        tl.store(total + column, added, here)
        tl.store(out + column, normed, here)
    found = tl.sum(matrix.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    tl.store(logits + mine, found.to(tl.bfloat16).to(tl.float32))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        expert, line = tl.arange(0, experts), tl.arange(0, lines)
        bits = tl.load(logits + expert, cache_modifier=".cg").to(tl.int32, bitcast=True)
        # integers in the order of the logits, whose low 16 bits are free: the lower expert has the larger ones
        keys = (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) & -65536) | (65535 - expert)
        chosen, values = tl.zeros((lines,), tl.int32), tl.full((lines,), float("-inf"), tl.float32)
        for i in tl.static_range(top):
            best = tl.max(keys, 0)
            keys = tl.where(keys == best, -0x7FFFFFFF, keys)
            high = best & -65536
            bits_of = tl.where(high < 0, (high | 65535) ^ 0x7FFFFFFF, high)
            chosen = tl.where(line == i, 65535 - (best & 65535), chosen)
            values = tl.where(line == i, bits_of.to(tl.float32, bitcast=True), values)
        powers = tl.exp(values - tl.max(values, 0))
        tl.store(ids + line, chosen, line < top)
        tl.store(weights + line, powers / tl.sum(powers, 0), line < top)
        tl.store(counter, 0)


class Scratch(NamedTuple):
    """What the CTAs of a launch leave for the last CTA: sums, maxima and sums of the softmax, and how many CTAs are
    done."""

    partial: torch.Tensor
    stats: torch.Tensor
    counter: torch.Tensor


@functools.cache
def scratch(pairs: int, splits: int, group: int, size: int, device: torch.device) -> Scratch:
    """Scratch memory that all launches of these sizes share, one after the other."""
    return Scratch(
        torch.empty(pairs, splits, group, size, device=device),
        torch.empty(2, pairs, splits, group, device=device),
        torch.zeros(pairs, dtype=torch.int32, device=device),
    )


def splits_of(pairs: int, length: int) -> int:
    """How many CTAs share the keys of a group of heads: a power of two."""
    most = max(1, min(CTAS // pairs, length // BLOCK, SPLITS))
    return 1 << most.bit_length() - 1


def attention(
    heads: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    norms: torch.Tensor | None,
    cache: torch.Tensor,
    position: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Attention (B, S, heads · D) of a product's queries, keys and values (B, S, heads + 2 · kv heads, D) in bf16. Keys
    and values go into the cache (B, 2 · kv heads, length, D).

    turn: cosine and sine (S, 1, D / 2), float32. norms: None, or weights (heads + 2 · kv heads, D). A prompt, without a
    ``position``, is causal from the cache's beginning; one token at the position (1,) attends to the whole cache.
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
    attend_kernel[pairs, splits](*given, **options, num_warps=WARPS if splits > 1 else 4)
    return out


def add_norm(
    x: torch.Tensor | Slots, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual (…, H), and its RMSNorm. x: the term to add, or the rows of one token's experts, whose sum is
    the term."""
    residual, columns = residual.contiguous(), residual.shape[-1]
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(columns)
    if isinstance(x, Slots):
        weights, top = x.rows if x.weights is None else x.weights, len(x.rows)
        given = x.rows, weights, residual, weight, total, out, columns
        sizes = {"top": top, "lines": triton.next_power_of_2(top), "block": block, "weighted": x.weights is not None}
        slots_add_norm_kernel[(1,)](*given, **sizes, eps=eps, num_warps=8)
        return total, out
    grid = (residual.numel() // columns,)
    x = x.contiguous()
    add_norm_kernel[grid](x, residual, weight, total, out, columns, block, eps, num_warps=max(4, block // 512))
    return total, out


def norm_route(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, router: torch.Tensor, top: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For one token: the new residual (…, H), its RMSNorm, the experts (1, top) that the router chooses, and their
    weights (1, top), which add up to 1. router: (E, H), E a power of two."""
    x, residual, (experts, columns) = x.contiguous(), residual.contiguous(), router.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    ids = torch.empty(1, top, dtype=torch.int32, device=x.device)
    weights = torch.empty(1, top, device=x.device)
    ctas = min(ROUTING_CTAS, experts)
    logits, counter = routing_scratch(experts, x.device)
    sizes = {"experts": experts, "each": experts // ctas, "top": top, "lines": triton.next_power_of_2(top)}
    given = x, residual, weight, router, total, out, logits, counter, ids, weights, columns
    norm_route_kernel[(ctas,)](*given, **sizes, block=triton.next_power_of_2(columns), eps=eps, num_warps=8)
    return total, out, ids, weights


@functools.cache
def routing_scratch(experts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits and the counter of finished CTAs that launches share, one after the other."""
    return torch.empty(experts, device=device), torch.zeros(1, dtype=torch.int32, device=device)

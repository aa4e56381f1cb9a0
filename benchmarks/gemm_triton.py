"""The Triton baseline of ``gemm.py``: a W4A16 NVFP4 GEMM that decodes in the kernel, and silu(gate) · up.

What a few dozen lines of Triton give. Weights are the left operand of the MMA, decoded to bf16 in registers, exactly:
an element times its scale has at most 6 significant bits. They are repacked once, so that a group of 128 along K is two
contiguous halves: byte j has element j in its low nibble and element 64 + j in its high one, and the activations of a
half are contiguous, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

GROUP = 128
"""Elements along K that are repacked together; a step of the kernel's loop."""


class Config(NamedTuple):
    """Tile sizes (columns of weights are rows of the MMA), shares of K, warps of a CTA and stages of the pipeline."""

    block_n: int
    block_m: int
    split_k: int
    warps: int
    stages: int


class Weight(NamedTuple):
    """Repacked weights: data (N, K/2) and E4M3 scales (N, K/16)."""

    data: torch.Tensor
    scale: torch.Tensor


def repack(data: torch.Tensor, scale: torch.Tensor) -> Weight:
    """Weights for ``gemm``. data: (N, K/2) bytes, even elements in low nibbles; scale: (N, K/16) row-major bytes."""
    n, k = data.shape[0], 2 * data.shape[1]
    if k % GROUP:
        raise ValueError(f"K of the Triton baseline: got {k}, expected a multiple of {GROUP}.")
    nibbles = torch.stack((data & 15, data >> 4), -1).view(n, k // GROUP, 2, GROUP // 2)
    halves = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    return Weight(halves.reshape(n, k // 2), scale.contiguous().view(torch.float8_e4m3fn))


@triton.jit
def decode(code):
    """E2M1 codes (low four bits of int16) as bf16: exponent and mantissa moved into bf16's, whose bias is 126 more."""
    bits = ((code & 8) << 12) | ((code & 7) << 6)
    return bits.to(tl.bfloat16, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def scaled(code, scale, rows: tl.constexpr, columns: tl.constexpr):
    """(rows, columns) of codes as bf16, each block of 16 times its scale of (rows, columns / 16)."""
    blocks = tl.reshape(decode(code), (rows, columns // 16, 16))
    return tl.reshape(blocks * scale.to(tl.bfloat16)[:, :, None], (rows, columns))


@triton.jit
def gemm_kernel(
    x, data, scale, out, m, n, k, data_stride, scale_stride, groups_a_split,
    block_m: tl.constexpr, block_n: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """A tile of out (split, M, N) = x (M, K) · Wᵀ over one share of K; W is (N, K), strides in bytes."""
    tiles_m, tiles_n = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    # eight tiles along M take turns, so that what CTAs of one wave read stays in L2
    tile_m, tile_n = tl.swizzle2d(tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m, tiles_m, tiles_n, 8)
    split = tl.program_id(1)
    row_n = tile_n * block_n + tl.arange(0, block_n)
    row_m = tile_m * block_m + tl.arange(0, block_m)
    column = tl.arange(0, half)
    first = split * groups_a_split
    data += row_n[:, None].to(tl.int64) * data_stride + first * half + column[None, :]
    scale += row_n[:, None].to(tl.int64) * scale_stride + first * (half // 8) + tl.arange(0, half // 16)[None, :]
    x += row_m[None, :].to(tl.int64) * k + first * half * 2 + column[:, None]
    in_m, in_n = row_m[None, :] < m, row_n[:, None] < n
    accumulator = tl.zeros((block_n, block_m), dtype=tl.float32)
    for _ in range(first, min(first + groups_a_split, k // (2 * half))):
        code = tl.load(data, mask=in_n, other=0).to(tl.int16)
        low_scale = tl.load(scale, mask=in_n, other=0.0)
        high_scale = tl.load(scale + half // 16, mask=in_n, other=0.0)
        low = scaled(code, low_scale, block_n, half)
        high = scaled(code >> 4, high_scale, block_n, half)
        accumulator = tl.dot(low, tl.load(x, mask=in_m, other=0.0), accumulator)
        accumulator = tl.dot(high, tl.load(x + half, mask=in_m, other=0.0), accumulator)
        data += half
        scale += half // 8
        x += 2 * half
    out += split.to(tl.int64) * m * n + row_m[None, :].to(tl.int64) * n + row_n[:, None]
    tl.store(out, accumulator.to(out.dtype.element_ty), mask=in_m & in_n)


@triton.jit
def sum_kernel(partial, out, size, splits, block: tl.constexpr):
    """out = the sum of ``splits`` float32 arrays."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(partial + split * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@triton.jit
def silu_mul_kernel(both, out, n, block: tl.constexpr):
    """A row's part of out (M, N) = silu(both[:, :N]) · both[:, N:]."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1).to(tl.int64)
    gate = tl.load(both + row * 2 * n + column, mask=column < n, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * n + n + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=column < n)


def configs(m: int, n: int, k: int) -> list[Config]:
    """The configurations that are tried: a few tile sizes, and shares of K that give an SM up to four CTAs."""
    widest = max(16, min(256, triton.next_power_of_2(m)))
    found = []
    for block_m in {widest, max(16, widest // 2)}:
        deep = 6 if block_m <= 32 else 4 if block_m <= 64 else 3
        # the last one: two CTAs of an SM decode and multiply in turns
        for block_n, warps, stages in ((64, 4, deep), (128, 8, deep), *(((64, 4, 2),) if block_m >= 128 else ())):
            tiles = triton.cdiv(n, block_n) * triton.cdiv(m, block_m)
            most = max(1, min(528 // tiles, k // GROUP // 4))
            found += [Config(block_n, block_m, split, warps, stages) for split in (1, 2, 4) if split <= most]
    return found


def gemm(x: torch.Tensor, weight: Weight, config: Config) -> torch.Tensor:
    """x (M, K) · Wᵀ in x's dtype, (M, N)."""
    (m, k), n = x.shape, weight.data.shape[0]
    split = config.split_k
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    partial = out if split == 1 else torch.empty(split, m, n, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n), split
    gemm_kernel[grid](
        x, *weight, partial, m, n, k, weight.data.stride(0), weight.scale.stride(0), triton.cdiv(k // GROUP, split),
        config.block_m, config.block_n, GROUP // 2, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if split > 1:
        sum_kernel[(triton.cdiv(m * n, 1024),)](partial, out, m * n, split, 1024)
    return out


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """silu(both[:, :N]) · both[:, N:] of (M, 2N), in its dtype."""
    m, n = both.shape[0], both.shape[1] // 2
    out = torch.empty(m, n, dtype=both.dtype, device=both.device)
    silu_mul_kernel[(triton.cdiv(n, 1024), m)](both, out, n, 1024)
    return out

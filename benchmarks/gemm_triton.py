"""The Triton baseline of ``gemm.py``: a W4A16 NVFP4 GEMM that decodes in the kernel, and silu(gate) · up.

It shows what a few dozen lines of Triton reach. Weights are the left operand of the MMA, decoded to bf16 in registers
without an error: an element times its scale has at most 6 significant bits. They are repacked once, so that a group of
128 along K is two contiguous halves: byte j has element j in its low nibble and element 64 + j in its high one, and the
activations of a half are contiguous, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

GROUP = 128
"""Elements along K that are repacked together, and that one step of the kernel's loop takes."""


class Config(NamedTuple):
    """Tile sizes (columns of weights are rows of the MMA), splits of K, warps of a CTA and stages of the pipeline."""

    block_n: int
    block_m: int
    split_k: int
    warps: int
    stages: int


class Weight(NamedTuple):
    """Repacked weights: data (N, K/2), and words of four E4M3 scales (N, K/64)."""

    data: torch.Tensor
    scale: torch.Tensor


def repack(data: torch.Tensor, scale: torch.Tensor) -> Weight:
    """Repacks weights for ``gemm``. data: (N, K/2) bytes, even elements in low nibbles; scale: (N, K/16) row-major
    bytes."""
    n, k = data.shape[0], 2 * data.shape[1]
    if k % GROUP:
        raise ValueError(f"K of the Triton baseline: got {k}, expected a multiple of {GROUP}.")
    nibbles = torch.stack((data & 15, data >> 4), -1).view(n, k // GROUP, 2, GROUP // 2)
    halves = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    return Weight(halves.reshape(n, k // 2), scale.contiguous().view(torch.int32))


@triton.jit
def decode(packed):
    """Decodes the low and high E2M1 codes of bytes to bf16 times 2**-126, by moving exponent and mantissa to bf16's
    places."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shl.b32 s, a, 12;  and.b32 s, s, 0x80008000;  shl.b32 $0, a, 6;  lop3.b32 $0, $0, 0x01C001C0, s, 0xEA;
        shl.b32 s, b, 12;  and.b32 s, s, 0x80008000;  shl.b32 $1, b, 6;  lop3.b32 $1, $1, 0x01C001C0, s, 0xEA;
        shl.b32 s, a, 8;   and.b32 s, s, 0x80008000;  shl.b32 $2, a, 2;  lop3.b32 $2, $2, 0x01C001C0, s, 0xEA;
        shl.b32 s, b, 8;   and.b32 s, s, 0x80008000;  shl.b32 $3, b, 2;  lop3.b32 $3, $3, 0x01C001C0, s, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,r", [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def scaled(values, scale, rows: tl.constexpr, columns: tl.constexpr):
    """(rows, columns) of decoded values, each block of 16 times its E4M3 scale, times 2**-7. scale: words of four
    scales."""
    codes = (scale[:, None] >> (8 * tl.arange(0, 4))[None, :]).to(tl.uint8)
    # multiply by 2**119: 2**126 would make a scale of 448 overflow
    factor = codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16) * 6.646139978924579e35
    return tl.reshape(tl.reshape(values, (rows, columns // 16, 16)) * factor[:, :, None], (rows, columns))


@triton.jit
def gemm_kernel(
    x, data, scale, out, m, n, k, data_stride, scale_stride, groups_a_split,
    block_m: tl.constexpr, block_n: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Computes a tile of out (split, M, N) = x (M, K) · Wᵀ over one split of K; W is (N, K)."""
    tiles_m, tiles_n = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    # the raster takes eight tiles along M in turn, so that L2 holds what the CTAs of one wave read
    tile_m, tile_n = tl.swizzle2d(tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m, tiles_m, tiles_n, 8)
    split = tl.program_id(1)
    row_n = tile_n * block_n + tl.arange(0, block_n)
    row_m = tile_m * block_m + tl.arange(0, block_m)
    column = tl.arange(0, half)
    first = split * groups_a_split
    last = min(first + groups_a_split, k // (2 * half))
    data += row_n[:, None].to(tl.int64) * data_stride + first * half + column[None, :]
    scale += row_n.to(tl.int64) * scale_stride + first * 2
    x += row_m[None, :].to(tl.int64) * k + first * half * 2 + column[:, None]
    in_m, in_n = row_m[None, :] < m, row_n[:, None] < n
    accumulator = tl.zeros((block_n, block_m), dtype=tl.float32)
    for _ in range(first, last):
        low_scale = tl.load(scale, mask=row_n < n, other=0)
        high_scale = tl.load(scale + 1, mask=row_n < n, other=0)
        low, high = decode(tl.load(data, mask=in_n, other=0))
        low = scaled(low, low_scale, block_n, half)
        high = scaled(high, high_scale, block_n, half)
        accumulator = tl.dot(low, tl.load(x, mask=in_m, other=0.0), accumulator)
        accumulator = tl.dot(high, tl.load(x + half, mask=in_m, other=0.0), accumulator)
        data += half
        scale += 2
        x += 2 * half
    out += split.to(tl.int64) * m * n + row_m[None, :].to(tl.int64) * n + row_n[:, None]
    tl.store(out, (accumulator * 128).to(out.dtype.element_ty), mask=in_m & in_n)


@triton.jit
def sum_kernel(partial, out, size, splits, block: tl.constexpr):
    """Computes out, the sum of ``splits`` float32 arrays."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(partial + split * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@triton.jit
def silu_mul_kernel(both, out, n, block: tl.constexpr):
    """Computes a section of a row of out (M, N) = silu(both[:, :N]) · both[:, N:]."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1).to(tl.int64)
    gate = tl.load(both + row * 2 * n + column, mask=column < n, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * n + n + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=column < n)


def configs(m: int, n: int, k: int) -> list[Config]:
    """The configurations to try: a few tile sizes, and splits of K that give an SM up to four CTAs."""
    widest = max(16, min(256, triton.next_power_of_2(m)))
    found = []
    for block_m in {widest, 128} if widest == 256 else {widest}:
        deep = {16: 6, 32: 6, 64: 4, 128: 3, 256: 2}[block_m]
        # with the last configuration, two CTAs of an SM decode and multiply in turn
        for block_n, warps, stages in ((64, 4, deep), (128, 8, deep), (64, 4, 2))[: 3 if block_m == 128 else 2]:
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
    """silu(both[:, :N]) · both[:, N:] for ``both`` (M, 2N), in its dtype."""
    m, n = both.shape[0], both.shape[1] // 2
    out = torch.empty(m, n, dtype=both.dtype, device=both.device)
    silu_mul_kernel[(triton.cdiv(n, 1024), m)](both, out, n, 1024)
    return out

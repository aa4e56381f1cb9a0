"""The layout of 4-bit weights that are decoded to E4M3, for FP8 tensor cores with operand A in registers.

Tiles and their sizes are those of ``weight_layout``. A decoded element is the E2M1 code times its block's scale, times
a power of two for the row that brings the row's largest product under 448, rounded to E4M3 (nearest, ties to even).
The eight magnitudes of a block are eight bytes of two registers, {0, s/2, s, r} and {2s, 2r, 4s, 4r} with r = 1.5 s
rounded. If s/2 is no subnormal, a factor of two adds eight to the byte, and r is s + 4, or s + 5 if 1.5 s is rounded
up. So a scale byte is s, and its bit 7 says whether r is s + 5. Both registers are the byte times a constant plus a
constant (``TABLES``), in which bit 7 carries into the byte of r. Bit 7 of each byte of a table is undefined: the sign
takes its place.

* codes: words (SLAB, LANE, BLOCK). A word is what lane 4·g + c holds of A for a block of 16 columns (PTX ISA, "wgmma,
  register fragments for m64k32"), columns 4c to 4c + 3 of row g, and of row g + 8. The magnitudes of row g are bits 0
  to 2 of the four low nibbles, those of row g + 8 of the high ones: selectors of PRMT. The signs of row g are bits 7,
  15, 23 and 31, those of row g + 8 bits 3, 11, 19 and 27.
* scales: bytes in the order of ``weight_layout``.

s is at most 72, whose 6 s is 432, and at least 2**-5. Blocks of NVFP4 with smaller scales, 2**-11 of the row's largest,
are rounded to E2M1 times 2**-5. That moves an element by less than 2**-12 of the row's largest. Blocks of MXFP4 must
not move: ``Rows.least`` says how small a row's scales are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_nvfp4.formats import decode_e2m1, encode_e2m1
from cute_nvfp4.weight_layout import (
    SLABS,
    STEP_K,
    STEPS,
    TILE_K,
    TILE_ROWS,
    Packing,
    joined,
    padded,
    scale_matrix,
    tiles,
)

MMA_K = 2 * STEP_K
"""Columns of one MMA: two blocks."""
LEAST, MOST = 2.0**-5, 72.0
"""The range of a block's scale times the row's power of two."""
TABLES = (0x01010100, 0x047FF800), (0x01010101, 0x14900C88)
"""(factor, addend): a scale byte times factor plus addend is the lower, and the upper, four magnitudes."""
MAGNITUDES = 0x77777777
"""The bits of the selectors in a word of codes."""
SIGNS = 0x80808080
OF_FP8 = {
    name: {
        torch.bfloat16: Packing(torch.bfloat16, 4, steps, 0x81C081C0, (), 4, 0x7000, factor=2.0**22, of_fp8=True),
        torch.float16: Packing(torch.float16, 4, steps, 0x8E008E00, (), 7, 0x4000, factor=2.0**6, of_fp8=True),
    }
    for name, steps in (("nvfp4", 1), ("mxfp4_near", 2))
}
"""How weights in this layout are decoded to 16 bits: exactly, without the rounding to E4M3."""
HALF_WORD, SIGN_SHIFT = 16, 4
"""Bits from row g's part of a word to that of row g + 8: selectors lie to the right, signs to the left."""


class Rows(NamedTuple):
    """Weights (L, N, K) as codes, one a byte, and float64 scales (L, N, K / 16), each row times a power of two.

    factor: (L, N), float32: multiplies the decoded row; NaN if a scale of the row is NaN. least: the smallest scale of
    a block that is not zero, times the row's power of two; codes change if it is below ``LEAST``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    factor: torch.Tensor
    least: torch.Tensor


def by_row(codes: torch.Tensor, scales: torch.Tensor) -> Rows:
    """Finds the rows' powers of two. codes: (L, N, K), E2M1. scales: (L, N, K / 16) of either sign, zero or NaN."""
    blocks = codes.unflatten(-1, (-1, STEP_K))
    used = (blocks & 7).ne(0).any(-1)
    magnitude = scales.to(torch.float64).abs()
    nan = magnitude.isnan() | magnitude.isinf()
    magnitude = torch.where(used & ~nan, magnitude, 0.0)
    # the largest power of two that leaves the row's largest scale at most 72 = 9/16 · 2**7
    mantissa, exponent = torch.frexp(magnitude.amax(-1))
    shift = torch.where(mantissa > 0, torch.where(mantissa <= MOST / 128, 7, 6) - exponent, 0)
    scaled = torch.ldexp(magnitude, shift.unsqueeze(-1))
    factor = torch.where(nan.any(-1), float("nan"), torch.ldexp(torch.ones_like(mantissa), -shift))
    codes = blocks ^ (scales.signbit().to(torch.uint8) << 3).unsqueeze(-1)
    codes = torch.where((scaled == 0).unsqueeze(-1), 0, codes)
    small = (scaled < LEAST).unsqueeze(-1)
    moved = encode_e2m1((decode_e2m1(codes, torch.float64) * (scaled / LEAST).unsqueeze(-1)).to(torch.float32))
    codes = torch.where(small, moved, codes).flatten(-2)
    least = torch.where(scaled > 0, scaled, MOST).amin()
    return Rows(codes, scaled.clamp(min=LEAST), factor.to(torch.float32), least)


def pack_rows(rows: Rows, packing: Packing) -> torch.Tensor:
    """Packs rows into tiles (L, row tiles, K tiles, bytes)."""
    batch, count, k = rows.codes.shape
    row_tiles, k_tiles = tiles(count, k)
    # sixteen elements of a block of 32 may have no scale, because they are zeros
    scales = rows.scales.unflatten(-1, (-1, packing.block_steps)).amax(-1)
    bytes_of = scales.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    mantissa = bytes_of & 7
    # 1.5 times 9, 10, 11, 12 and 13 eighths rounds up or carries: 13.5, 15, 16.5, 18 and 19.5 become 14 … 20
    bytes_of = bytes_of | ((mantissa >= 1) & (mantissa <= 5)).to(torch.uint8) << 7
    scales = padded(bytes_of, row_tiles * TILE_ROWS, k_tiles * STEPS // packing.block_steps)
    codes = padded(rows.codes, row_tiles * TILE_ROWS, k_tiles * TILE_K).to(torch.int64)
    # (L, row tile, slab, row half, g; K tile, block, c, i)
    codes = codes.view(batch, row_tiles, SLABS, 2, 8, k_tiles, STEPS, 4, 4)
    # (L, row tile, K tile, slab, g, c, block; row half, i)
    codes = codes.permute(0, 1, 5, 2, 4, 7, 6, 3, 8)
    selectors = torch.arange(8, device=codes.device).view(2, 4) * 4
    signs = torch.arange(4, device=codes.device) * 8 + torch.tensor([[7], [3]], device=codes.device)
    words = ((codes & 7) << selectors | (codes >> 3) << signs).sum((-1, -2))
    return joined(words, scales, packing)


def tables(scale: Any) -> tuple[Any, Any]:
    """The two registers, of four magnitudes each, of a scale byte (an integer, or a tensor of int64)."""
    lower, upper = ((scale * factor + addend) & 0xFFFFFFFF for factor, addend in TABLES)
    return lower, upper


class Unpacked(NamedTuple):
    """Unpacked tiles: matrices (L, padded rows, padded K) of magnitudes and signs, and (…, K / 16) scale bytes."""

    magnitudes: torch.Tensor
    negative: torch.Tensor
    scales: torch.Tensor


def _unpacked(packed: torch.Tensor, packing: Packing) -> Unpacked:
    batch, row_tiles, k_tiles, _ = packed.shape
    words = packed[..., : packing.code_bytes].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    words = words.view(batch, row_tiles, k_tiles, SLABS, 8, 4, STEPS, 1, 1)
    selectors = torch.arange(8, device=packed.device).view(2, 4) * 4
    signs = torch.arange(4, device=packed.device) * 8 + torch.tensor([[7], [3]], device=packed.device)
    # (L, row tile, K tile, slab, g, c, block, row half, i)
    found = words >> selectors & 7, words >> signs & 1
    shape = batch, row_tiles * TILE_ROWS, k_tiles * TILE_K
    matrices = (x.permute(0, 1, 3, 7, 4, 2, 6, 5, 8).reshape(shape) for x in found)
    return Unpacked(*matrices, scale_matrix(packed, packing).to(torch.int64))


def unpack_rows(packed: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The values (L, padded rows, padded K) of tiles in float64, as tensor cores multiply them: without row factors."""
    magnitudes, negative, scales = _unpacked(packed, packing)
    lower, upper = tables(scales.repeat_interleave(STEP_K * packing.block_steps, dim=-1))
    chosen = torch.where(magnitudes < 4, lower, upper) >> (magnitudes % 4 * 8) & 0x7F | negative << 7
    return chosen.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)


def unpack_blocks(packed: torch.Tensor, packing: Packing, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes (L, rows, padded K), one a byte, and float64 scales (L, rows, blocks of padded K), from tiles.

    factor: (L, rows), those of the rows. The scale of a block of zeros is 0. If ``by_row`` moved codes or signs, the
    result differs from what it was given.
    """
    magnitudes, negative, scales = (x[:, : factor.shape[1]] for x in _unpacked(packed, packing))
    codes = (magnitudes | negative << 3).to(torch.uint8)
    used = magnitudes.unflatten(-1, (-1, STEP_K * packing.block_steps)).ne(0).any(-1)
    values = (scales & 0x7F).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float64) * factor.unsqueeze(-1)
    return codes, torch.where(used, values, 0.0)

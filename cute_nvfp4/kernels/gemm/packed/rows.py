"""Weights in rows: NVFP4 or MXFP4 codes and blocked scales, from global memory to the registers of operand A.

Two warps copy a stage, 128 elements along K, by ``cp.async``: 64 bytes of codes of each row, and one or two scale
atoms. A lane of WGMMA's fragments has two rows, g and g + 8 of a slab. Lane c of the four lanes of these rows reads
codes 32c … 32c + 31 of both, sixteen bytes each, so that no two lanes read the same banks, and one scale for sixteen
codes (NVFP4) or for all (MXFP4).

So columns of the MMA are not those of the weight. ``column_of`` gives their order, and x must have the same order in
memory: the kernel that decodes x writes it so (``DequantizeConfig.order``). Every sum has the same terms.

NVFP4: a code in fp16 is 2**-14 times its value. The bits of a scale, shifted left by seven, are 2**-8 times the scale;
a multiplication with 2**15, which is exact, comes first. So the decoded weight is 2**-7 times the weight, as for packed
weights. NaN among scales stays NaN, and a scale keeps its sign. MXFP4: a code in bf16 is 2**-126 times its value; a
multiplication with 2**126, which is exact, comes first. The bits of a scale, shifted left by seven, are the scale in
bf16, except 2**-127 and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32

from ....ptx import mbarrier
from ....ptx.arithmetic import select_bits
from ....ptx.async_copy import copy_async
from ....ptx.half import max_u16x2, mul_bf16x2, mul_f16x2, multiply_by_half
from ....ptx.memory import load_shared
from ....ptx.move import prmt
from ....scale_layout import ATOM_BYTES, ATOM_ROWS
from ....weight_layout import HALF_SLAB, SLAB_ROWS, SLABS, STEPS, TILE_K, TILE_ROWS, Packing
from ...arith import div, mod
from ..barriers import Ring
from ..sm90.arguments import RowWeight
from ..sm90.config import GATHER_THREADS, STAGE_TILES, WgmmaConfig
from ..stage_loader import ThreadCopies
from .decode import DTYPE_NAMES, ROW_LANES, PackedLane
from .loaders import CopiesOf, StageOrder

CHUNK = 16
"""Bytes of one copy, or one read, of a lane."""
ROW_BYTES = STAGE_TILES * TILE_K // 2
"""Bytes of a row's codes in a stage."""
CODE_BYTES = TILE_ROWS * ROW_BYTES
SCALE_BYTES = STAGE_TILES * ATOM_BYTES
"""Bytes of a stage's scales for NVFP4; MXFP4 has half as many."""
SCALE_ROWS = ATOM_BYTES // CHUNK
"""The distance between rows of a scale atom whose scales share sixteen bytes: r, r + 32, r + 64 and r + 96."""
WORD = 4
SIGNS = 0x80008000


class Halves(NamedTuple):
    """Where a 16-bit float has the three bits of a code's magnitude: places below its sign, and the mask of a pair."""

    places: int
    magnitudes: int


HALVES = {torch.float16: Halves(3, 0x0E000E00), torch.bfloat16: Halves(6, 0x01C001C0)}


def stage_atoms(packing: Packing) -> int:
    """Scale atoms along K of a stage."""
    return STAGE_TILES // packing.block_steps


def column_of(position: int) -> int:
    """The column of a weight, of 128, at a position along K of operand A, and of x in shared memory."""
    tile, step, rest = position // TILE_K, position % TILE_K // 16, position % 16
    high, lane, odd = rest // 8, rest % 8 // 2, rest % 2
    return 32 * lane + 16 * tile + 8 * (step // 2) + 4 * odd + 2 * (step % 2) + high


def load_rows(memory: Int32, slab: Int32, lane: Int32, gated: bool, packing: Packing) -> tuple[PackedLane, ...]:
    """A lane's words of the two tiles of a stage whose 128 rows are at ``memory``.

    codes: two words of row g, two of row g + 8. scales: one word, with the scale of each row in the high byte of a
    half. gated: the slab has rows of two weights, whose scales are apart.
    """
    g, quad = div(lane, ROW_LANES), mod(lane, ROW_LANES)
    codes = memory + (slab * SLAB_ROWS + g) * ROW_BYTES + quad * CHUNK
    chunks = load_shared(codes, CHUNK), load_shared(codes + HALF_SLAB * ROW_BYTES, CHUNK)
    # (ROW % 32, ROW // 32) words of four scales, which serve two lanes, or four
    atoms = stage_atoms(packing)
    if gated:
        row, pitch, apart = slab * HALF_SLAB + g, CHUNK // 2, atoms * ATOM_BYTES // 2
    else:
        row, pitch, apart = slab * SLAB_ROWS + g, CHUNK, HALF_SLAB * CHUNK
    place = mod(row, SCALE_ROWS) * pitch + div(row, SCALE_ROWS) * WORD
    scales = memory + CODE_BYTES + place
    if atoms == 2:
        scales = memory + CODE_BYTES + div(quad, 2) * (pitch * SCALE_ROWS) + place
    words = load_shared(scales, WORD)[0], load_shared(scales + apart, WORD)[0]
    return lane_tiles(chunks, words, quad, packing)


def lane_tiles(
    chunks: tuple[Sequence[Uint32], Sequence[Uint32]], words: tuple[Uint32, Uint32], quad: Int32, packing: Packing
) -> tuple[PackedLane, ...]:
    """A lane's words of the two tiles of a stage.

    chunks: its 32 codes of rows g and g + 8. words: the four scales of each row, of which the lane uses two, or one.
    quad: the lane's index among the four lanes of a row.
    """
    low, high = chunks
    if packing.block_steps == 1:
        first, apart = Uint32(mod(quad, 2)) * Uint32(0x2020) + Uint32(0x4000), 0x1010
    else:
        first, apart = Uint32(quad) * Uint32(0x1010) + Uint32(0x4000), 0
    found = []
    for tile in range(STAGE_TILES):
        scale = prmt(*words, first + Uint32(apart * tile))
        found.append(PackedLane((*low[2 * tile :][:2], *high[2 * tile :][:2]), (scale,)))
    return tuple(found)


def scales_of(word: Uint32, packing: Packing) -> Uint32:
    """The scales in the high bytes of both halves: 2**7 times the scales in fp16, or those of MXFP4 in bf16."""
    if packing.dtype is torch.bfloat16:
        scales = max_u16x2((word >> 1) & Uint32(0x7F807F80), Uint32(0x00400040))
        # only 0xFF, NaN, reaches bit 15 by the addition
        return scales | ((scales + Uint32(0x00800080)) >> 9) & Uint32(0x00400040)
    magnitudes = (word >> 1) & Uint32(0x3F803F80)
    # only 0x7F, NaN, reaches bit 14 by the addition
    special = ((magnitudes + Uint32(0x00800080)) >> 14) & Uint32(0x00010001)
    scales = mul_f16x2(word & Uint32(SIGNS) | magnitudes, Uint32(0x78007800))
    return scales | special * Uint32(0x7E00)


def pairs_of(word: Uint32, packing: Packing) -> list[Uint32]:
    """Codes i and i + 4 of eight, as the halves of register i: their values in bf16, 2**-14 times these in fp16."""
    half, found = HALVES[packing.dtype], []
    for shift in (12, 8, 4, 0):
        signs, places = word << shift if shift else word, shift - half.places
        magnitudes = word << places if places > 0 else word >> -places
        pair = select_bits(magnitudes, signs, SIGNS) & Uint32(SIGNS | half.magnitudes)
        found.append(mul_bf16x2(pair, Uint32(0x10001 * (packing.boost + 127 << 7))) if packing.boost else pair)
    return found


def decoded_rows(packed: PackedLane, packing: Packing) -> Iterator[tuple[int, int, Uint32]]:
    """A lane's decoded part of one tile: the register of operand A, the step, and the value of each 32-bit word."""
    scales, dtype = scales_of(packed.scales[0], packing), DTYPE_NAMES[packing.dtype]
    for row in range(2):
        for i, word in enumerate(packed.codes[2 * row :][:2]):
            pairs = [multiply_by_half(pair, scales, row, dtype) for pair in pairs_of(word, packing)]
            for j, pair in enumerate(pairs):
                step, high = 2 * i + j // 2, j % 2
                yield 2 * high + row, step, pair


def decode_rows(tCrA: cute.Tensor, packed: PackedLane, packing: Packing) -> None:
    """Decodes a lane's part of one tile into ``tCrA`` (REGISTER, STEP), 32-bit words."""
    for register, step, pair in decoded_rows(packed, packing):
        tCrA[register, step] = pair


class Rows(NamedTuple):
    """The rows of a work tile's weights in global memory, as a copying thread finds them. codes, scales: addresses for
    each weight. last: the last row of each. atoms: scale atoms of a row tile."""

    codes: tuple[Int64, ...]
    scales: tuple[Int64, ...]
    stride: Int64
    atoms: Int32
    last: Int32


def rows_of_weight(config: WgmmaConfig, weight: RowWeight, batch: Int32) -> Rows:
    """Where the rows of matrix ``batch`` of the weight, or of both weights of a gated product, are."""
    both = (weight, weight.up)[: config.products]
    codes, scales = (tuple(getattr(x, name).toint() for x in both) for name in ("data", "scale"))
    if config.batched:
        codes = tuple(x + Int64(batch) * weight.batch.codes for x in codes)
        scales = tuple(x + Int64(batch) * weight.batch.scales for x in scales)
    return Rows(codes, scales, weight.row_stride, weight.atoms, weight.rows - 1)


def copy_rows(config: WgmmaConfig, rows: Rows, first_tile: Int32, target: Int32, thread: Int32, step: Int32) -> None:
    """Copies a thread's part of a stage, the rows of row tiles from ``first_tile`` on, to ``target``."""
    each, products, atoms = TILE_ROWS // config.products, config.products, stage_atoms(config.weights)
    # threads that copy one weight's part of a chunk of an atom
    sharing = STAGE_TILES // atoms
    chunk, row = mod(thread, ROW_LANES), div(thread, ROW_LANES)
    for i in range(config.tile_m // TILE_ROWS):
        tile, place = first_tile + i, target + i * config.tile_bytes
        codes, first = rows.codes[0], tile * each + row
        if products == 2:
            # rows g of a slab belong to the first weight, rows g + 8 to the second
            codes = cutlass.select_(row < HALF_SLAB, rows.codes[0], rows.codes[1])
            first = tile * each + mod(row, HALF_SLAB)
        codes += Int64(step) * ROW_BYTES + chunk * CHUNK
        for slab in range(SLABS):
            # beyond the last row any bytes will do: the epilogue does not store it
            at = cutlass.min(first + slab * (SLAB_ROWS // products), rows.last)
            shared = place + (slab * SLAB_ROWS + row) * ROW_BYTES + chunk * CHUNK
            copy_async(shared, codes + Int64(at) * rows.stride, CHUNK)
        atom = cutlass.min(tile * each, rows.last) // ATOM_ROWS * rows.atoms + step * atoms
        # of two weights, only the halves of their atoms that have these rows
        size, half = CHUNK // products // sharing, mod(tile, 2) * (CHUNK // 2) if products == 2 else 0
        for product, scales in enumerate(rows.scales):
            source = scales + Int64(atom) * ATOM_BYTES + div(thread, sharing) * CHUNK + half
            source = source + mod(thread, sharing) * size if sharing > 1 else source
            shared = place + CODE_BYTES + product * (atoms * ATOM_BYTES // 2) + thread * size
            copy_async(shared, source, size)


def row_copies(order: StageOrder, rows_of: Callable[[Any], Rows], first: Int32, thread: Int32) -> CopiesOf:
    """A thread's copies of the rows of a work tile. rows_of: finds the rows of a tile. first: the shared address of the
    first stage's weights."""
    cfg = order.config

    def copies(tile: Any, cursor: Int32) -> ThreadCopies:
        rows = rows_of(tile)

        def start(ring: Ring, stage: Int32, step: Int32) -> None:
            target = first + stage * cfg.weight_bytes
            copy_rows(cfg, rows, tile.m * (cfg.tile_m // TILE_ROWS), target, thread, order.along_k(step, tile))
            mbarrier.arrive_after_copies(ring.full(stage))

        return ThreadCopies(order.steps(tile), start)

    return copies


assert STEPS * 16 == TILE_K and GATHER_THREADS == SLAB_ROWS * ROW_LANES == SCALE_BYTES // CHUNK

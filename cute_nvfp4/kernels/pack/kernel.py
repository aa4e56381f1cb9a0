"""Block-scaled weights to the tiles of ``weight_layout``, in one pass.

A warp packs 16 rows of a tile: lane 4·g + c takes the codes of rows g and g + 8 that it will hold as operand A, which
are two bytes of each 8 (a step's 16 columns) of either row, and turns them into one word for each step.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32

from ...ptx.convert import e4m3x4_to_f16x2
from ...ptx.half import mul_f16x2
from ...ptx.memory import load_global_byte_if, load_global_if, store_global
from ...ptx.move import prmt
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, cute_atom
from ...weight_layout import (
    CODE_BYTES,
    DTYPES,
    LANE_BYTES,
    ROW_SCALE_BYTES,
    SLAB_ROWS,
    SLABS,
    STEP_K,
    STEPS,
    TILE_BYTES,
    TILE_K,
    TILE_ROWS,
    encoding,
)
from ..arith import ceil_div, div, mod
from ..quantize.config import WARP
from ..quantize.kernel import atom_row
from .config import WARPS, PackArguments, PackConfig

STEP_BYTES = STEP_K // 2
_TWO_TO_7 = 0x58005800
"""In both halves of an f16x2."""
_EACH = 0x01010101
_MAGNITUDE, _SIGN = 0x7F * _EACH, 0x80 * _EACH


class Pack:
    """The host function and the kernel of one :class:`PackConfig`."""

    def __init__(self, config: PackConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: PackArguments, stream: CUstream):
        """A warp for 16 rows of a tile."""
        tasks = ceil_div(arguments.rows, TILE_ROWS) * SLABS * arguments.k_tiles
        self.kernel(arguments._replace(batch=None)).launch(
            grid=(ceil_div(tasks, WARPS), arguments.batch, 1), block=(WARP * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: PackArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        task = cta * WARPS + div(thread, WARP)
        # warps walk along K first
        slab, k_tile = task // arguments.k_tiles, task % arguments.k_tiles
        if slab < ceil_div(arguments.rows, TILE_ROWS) * SLABS:
            self.pack(arguments, Int64(batch), slab, k_tile, mod(thread, WARP))

    @cute.jit
    def pack(self, arguments: PackArguments, batch: Int64, slab: Int32, k_tile: Int32, lane: Int32):
        """What ``lane`` has of a slab of a tile. Slabs are counted from the first row on."""
        g, c = div(lane, 4), mod(lane, 4)
        rows = [slab * SLAB_ROWS + g + 8 * half for half in range(2)]
        codes = [self.codes(arguments, batch, row, k_tile) for row in rows]
        scales = [self.scales(arguments, batch, row, k_tile) for row in rows]
        # bytes that are 0 where a block has no value, and 0x8* where its scale is negative
        present = [((word & Uint32(_MAGNITUDE)) + Uint32(_MAGNITUDE)) & Uint32(_SIGN) for word in scales]
        words = [self.word(codes, present, scales, step, c) for step in range(STEPS)]
        tile = Int64(div(slab, SLABS)) * arguments.k_tiles + k_tile
        target = arguments.packed.toint() + batch * arguments.packed_batch_stride + tile * TILE_BYTES
        of_slab = mod(slab, SLABS)
        store_global(target + of_slab * (WARP * LANE_BYTES) + lane * LANE_BYTES, words)
        first, second = self.scale_pairs(scales[0]), self.scale_pairs(scales[1])
        pairs = [prmt(a, b, Uint32(0x6420)) for a, b in zip(first, second)]
        if c == 0:
            row = CODE_BYTES + of_slab * (SLAB_ROWS // 2 * ROW_SCALE_BYTES) + g * ROW_SCALE_BYTES
            store_global(target + row, pairs)

    def codes(self, arguments: PackArguments, batch: Int64, row: Int32, k_tile: Int32) -> list[list[Uint32]]:
        """The two words of each step of a row; zeros beyond the matrix."""
        strides = arguments.data_strides
        first = (
            arguments.data.toint() + batch * strides.batch + Int64(row) * strides.row + Int64(k_tile) * (TILE_K // 2)
        )
        found = []
        for step in range(STEPS):
            exists = (row < arguments.rows) & (k_tile * TILE_K + step * STEP_K < arguments.k)
            predicate = cutlass.select_(exists, Int32(1), Int32(0))
            found.append(load_global_if(predicate, first + step * STEP_BYTES, STEP_BYTES))
        return found

    def scales(self, arguments: PackArguments, batch: Int64, row: Int32, k_tile: Int32) -> Uint32:
        """The codes of a row's scales, a byte for each step; zeros beyond the matrix."""
        cfg, strides = self.config, arguments.scale_strides
        first = arguments.scale.toint() + batch * strides.batch
        blocks = cutlass.min(cutlass.max(div(arguments.k, STEP_K) - k_tile * STEPS, Int32(0)), Int32(STEPS))
        blocks = cutlass.select_(row < arguments.rows, blocks, Int32(0))
        if cfg.layout == "rowmajor":
            at = first + Int64(row) * strides.row + Int64(k_tile) * STEPS
            word = Uint32(0)
            for i in range(STEPS):
                exists = cutlass.select_(blocks > i, Int32(1), Int32(0))
                word = word | load_global_byte_if(exists, at + i) << Uint32(8 * i)
            return word
        number = Int64(div(row, ATOM_ROWS)) * ceil_div(div(arguments.k, STEP_K), ATOM_COLS) + k_tile
        place = cute.crd2idx((atom_row(mod(row, ATOM_ROWS)), 0), cute_atom())
        exists = cutlass.select_(blocks > 0, Int32(1), Int32(0))
        word = load_global_if(exists, first + number * ATOM_BYTES + place, ATOM_COLS)[0]
        # columns beyond K are padding, which may hold anything
        some = (Uint32(1) << (Uint32(blocks) * Uint32(8))) - Uint32(1)
        return word & cutlass.select_(blocks >= STEPS, Uint32(0xFFFFFFFF), some)

    def word(
        self, codes: list[list[list[Uint32]]], present: list[Uint32], scales: list[Uint32], step: int, c: Int32
    ) -> Uint32:
        """A lane's word of one step."""
        # bytes c and 4 + c of the eight: columns 2c, 2c + 1 and 8 + 2c, 9 + 2c
        selector = Uint32(c) * Uint32(0x11) + Uint32(0x40)
        low, high = (prmt(words[step][0], words[step][1], selector) for words in codes)
        # rows g + 8, g, g + 8, g
        natural = prmt(high, low, Uint32(0x5140))
        # what has bit 3 of a selector set replicates the sign of a byte
        of_rows = Uint32((0x8 + step) * 0x0101 | (0xC + step) * 0x1010)
        negative = prmt(scales[1], scales[0], of_rows) & Uint32(0x88 * _EACH)
        natural = (natural ^ negative) & prmt(present[1], present[0], of_rows)
        # elements 2, 6, 0, 4, 3, 7, 1, 5, one a nibble (``weight_layout.ENCODED_ORDER``)
        nibbles = natural & Uint32(0xF0F00F0F)
        nibbles = nibbles | ((natural << Uint32(12)) & Uint32(0x0F0F0000))
        nibbles = nibbles | ((natural >> Uint32(12)) & Uint32(0x0000F0F0))
        word = Uint32(0)
        for shift, mask in encoding(DTYPES[self.config.dtype]):
            part = nibbles << Uint32(shift) if shift >= 0 else nibbles >> Uint32(-shift)
            word = word ^ (part & Uint32(mask))
        return word

    def scale_pairs(self, word: Uint32) -> list[Uint32]:
        """Bytes of the scales of two steps each, in bytes 0 and 2: 2**7 times the scale as fp16 without its sign."""
        pairs = e4m3x4_to_f16x2(word & Uint32(_MAGNITUDE))
        return [mul_f16x2(pair, Uint32(_TWO_TO_7)) >> Uint32(7) for pair in pairs]

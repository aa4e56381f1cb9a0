"""Packs block-scaled weights into the tiles of ``weight_layout``, in one pass.

A warp packs 16 rows of a tile. Lane 4·g + c reads the codes that it will hold as MMA operand A: in rows g and g + 8,
the columns 2c, 2c + 1, 8 + 2c and 9 + 2c of each step's 16. It turns them into one word for each step (two words where
an element has eight bits).
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
from ...weight_layout import LOAD_BYTES, SLAB_ROWS, SLABS, STEP_K, STEPS, TILE_K, TILE_ROWS, encoding
from ..arith import ceil_div, div, mod
from ..quantize.config import WARP
from ..quantize.kernel import atom_row, bytes_at
from .config import WARPS, PackArguments, PackConfig

_TWO_TO_7 = 0x58005800
"""2⁷ in both halves of an f16x2."""
_EACH = 0x01010101
_MAGNITUDE, _SIGN = 0x7F * _EACH, 0x80 * _EACH


class Pack:
    """The host function and the kernel of one :class:`PackConfig`."""

    def __init__(self, config: PackConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: PackArguments, stream: CUstream):
        """Launches one warp for every 16 rows of a tile."""
        tasks = ceil_div(arguments.rows, TILE_ROWS) * SLABS * arguments.k_tiles
        self.kernel(arguments._replace(batch=None)).launch(
            grid=(ceil_div(tasks, WARPS), arguments.batch, 1), block=(WARP * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: PackArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        task = cta * WARPS + div(thread, WARP)
        # consecutive warps go along K first
        slab, k_tile = task // arguments.k_tiles, task % arguments.k_tiles
        if slab < ceil_div(arguments.rows, TILE_ROWS) * SLABS:
            self.pack(arguments, Int64(batch), slab, k_tile, mod(thread, WARP))

    @cute.jit
    def pack(self, arguments: PackArguments, batch: Int64, slab: Int32, k_tile: Int32, lane: Int32):
        """Packs the part of a slab of one tile that ``lane`` holds. slab: counted from the matrix's first row."""
        g, c = div(lane, 4), mod(lane, 4)
        packing = self.config.packing
        rows = [slab * SLAB_ROWS + g + 8 * half for half in range(2)]
        codes = [self.codes(arguments, batch, row, k_tile) for row in rows]
        scales = [self.scales(arguments, batch, row, k_tile) for row in rows]
        if cutlass.const_expr(packing.block_steps == 1):
            # a byte is 0 where a block's scale is zero, and has its top bit set where it is not
            present = [((word & Uint32(_MAGNITUDE)) + Uint32(_MAGNITUDE)) & Uint32(_SIGN) for word in scales]
            words = [self.signed(self.natural(codes, step, c)[0], present, scales, step) for step in range(STEPS)]
        else:
            steps = [self.natural(codes, step, c) for step in range(STEPS)]
            words, scales = self.without_nan(steps, scales)
        words = [self.encoded(word) for word in words]
        tile = Int64(div(slab, SLABS)) * arguments.k_tiles + k_tile
        target = arguments.packed.toint() + batch * arguments.packed_batch_stride + tile * packing.tile_bytes
        of_slab = mod(slab, SLABS)
        codes_at = target + of_slab * packing.slab_code_bytes + lane * LOAD_BYTES
        for i in cutlass.range_constexpr(packing.step_words):
            store_global(codes_at + i * (WARP * LOAD_BYTES), words[4 * i : 4 * i + 4])
        pairs = self.scale_pairs(scales)
        if c == 0:
            row = packing.code_bytes + of_slab * packing.slab_scale_bytes + g * packing.row_scale_bytes
            store_global(target + row, pairs)

    def codes(self, arguments: PackArguments, batch: Int64, row: Int32, k_tile: Int32) -> list[list[Uint32]]:
        """The words of a row's codes for each step of the k-tile; zeros beyond the matrix."""
        strides, bits = arguments.data_strides, self.config.packing.element_bits
        layout = cute.make_layout((arguments.rows, div(arguments.k, 8 // bits)), stride=(strides.row, 1))
        mW = bytes_at(arguments.data.toint() + batch * strides.batch, layout)  # (ROWS, BYTES)
        gW = cute.local_tile(mW, (1, TILE_K * bits // 8), (None, Int64(k_tile)))  # (1, TILE_BYTES, ROWS)
        gW = cute.local_tile(gW[None, None, row], (1, STEP_K * bits // 8), (0, None))  # (1, STEP_BYTES, STEPS)
        found = []
        for step in range(STEPS):
            exists = (row < arguments.rows) & (k_tile * TILE_K + step * STEP_K < arguments.k)
            predicate = cutlass.select_(exists, Int32(1), Int32(0))
            found.append(load_global_if(predicate, gW[None, None, step].iterator.toint(), STEP_K * bits // 8))
        return found

    def scales(self, arguments: PackArguments, batch: Int64, row: Int32, k_tile: Int32) -> Uint32:
        """The codes of a row's scale factors in the k-tile, one byte for each block; zeros beyond the matrix."""
        cfg, strides = self.config, arguments.scale_strides
        block, each = cfg.format.block, TILE_K // cfg.format.block
        first = arguments.scale.toint() + batch * strides.batch
        blocks = cutlass.min(cutlass.max(div(arguments.k, block) - k_tile * each, Int32(0)), Int32(each))
        blocks = cutlass.select_(row < arguments.rows, blocks, Int32(0))
        if cfg.layout == "rowmajor":
            at = first + Int64(row) * strides.row + Int64(k_tile) * each
            word = Uint32(0)
            for i in range(each):
                exists = cutlass.select_(blocks > i, Int32(1), Int32(0))
                word = word | load_global_byte_if(exists, at + i) << Uint32(8 * i)
            return word
        across = ceil_div(div(arguments.k, block), ATOM_COLS)
        # counting atoms here saves some ten instructions over the strides of ``cute_layout``
        number = Int64(div(row, ATOM_ROWS)) * across + (k_tile if each == ATOM_COLS else div(k_tile * each, ATOM_COLS))
        place = cute.crd2idx((atom_row(mod(row, ATOM_ROWS)), 0), cute_atom())
        exists = cutlass.select_(blocks > 0, Int32(1), Int32(0))
        word = load_global_if(exists, first + number * ATOM_BYTES + place, ATOM_COLS)[0]
        if each < ATOM_COLS:
            word = word >> Uint32(8 * mod(k_tile * each, ATOM_COLS))
        # columns beyond K are padding, which may hold anything
        some = (Uint32(1) << (Uint32(blocks) * Uint32(8))) - Uint32(1)
        return word & cutlass.select_(blocks >= ATOM_COLS, Uint32(0xFFFFFFFF), some)

    def natural(self, codes: list[list[list[Uint32]]], step: int, c: Int32) -> list[Uint32]:
        """A lane's codes of one step. Four-bit codes fill one word, whose bytes are (row g + 8 or g, column half);
        eight-bit codes fill a word for each half of the columns, whose halves are rows g and g + 8."""
        if self.config.packing.element_bits == 4:
            # bytes c and 4 + c of a row's eight
            selector = Uint32(c) * Uint32(0x11) + Uint32(0x40)
            low, high = (prmt(words[step][0], words[step][1], selector) for words in codes)
            # rows g + 8, g, g + 8, g
            return [prmt(high, low, Uint32(0x5140))]
        selector = Uint32(c) * Uint32(0x22) + Uint32(0x10)
        halves = []
        for half in range(2):
            low, high = (prmt(words[step][2 * half], words[step][2 * half + 1], selector) for words in codes)
            halves.append(prmt(low, high, Uint32(0x5410)))
        return halves

    def signed(self, natural: Uint32, present: list[Uint32], scales: list[Uint32], step: int) -> Uint32:
        """NVFP4's codes of one step, with the signs of their scales; zeros where the scale is zero."""
        # bit 3 of a selector makes prmt replicate the sign of the byte that it selects
        of_rows = Uint32((0x8 + step) * 0x0101 | (0xC + step) * 0x1010)
        negative = prmt(scales[1], scales[0], of_rows) & Uint32(0x88 * _EACH)
        return (natural ^ negative) & prmt(present[1], present[0], of_rows)

    def without_nan(self, steps: list[list[Uint32]], scales: list[Uint32]) -> tuple[list[Uint32], list[Uint32]]:
        """The codes, and a word of scales for each row, with zeros and 0xFF for each block that contains a NaN."""
        packing = self.config.packing
        blocks = [steps[i : i + packing.block_steps] for i in range(0, STEPS, packing.block_steps)]
        # bits 7 and 6 of each row's bytes, one for each of the two blocks: some element is infinite or NaN
        flags = Uint32(0)
        if packing.special:
            for i, block in enumerate(blocks):
                found = Uint32(0)
                for word in (word for step in block for word in step):
                    found = found | ((word & Uint32(_MAGNITUDE)) + Uint32((0x80 - packing.special) * _EACH))
                flags = flags | (found & Uint32(_SIGN)) >> Uint32(i)
            for distance in (1, 2):
                flags = flags | cute.arch.shuffle_sync_bfly(flags, offset=distance)
        # bytes of rows g and g + 8
        of_rows = (0xFF00FF00, 0x00FF00FF) if packing.element_bits == 4 else (0x0000FFFF, 0xFFFF0000)
        words, found = [], [Uint32(0), Uint32(0)]
        for i, block in enumerate(blocks):
            kept = Uint32(0)
            for row, mask in enumerate(of_rows):
                byte = (scales[row] >> Uint32(8 * i)) & Uint32(0xFF)
                special = flags & Uint32((0x8080 >> i) << 16 * row)
                good = (byte != Uint32(0xFF)) & (special == Uint32(0))
                kept = kept | cutlass.select_(good, Uint32(mask), Uint32(0))
                found[row] = found[row] | cutlass.select_(good, byte, Uint32(0xFF)) << Uint32(8 * i)
            words += [word & kept for step in block for word in step]
        return words, found

    def encoded(self, word: Uint32) -> Uint32:
        """A lane's word of codes in the order in which it is stored."""
        if self.config.packing.element_bits == 4:
            # elements 2, 6, 0, 4, 3, 7, 1, 5, one in each nibble (``weight_layout.ENCODED_ORDER``)
            nibbles = word & Uint32(0xF0F00F0F)
            nibbles = nibbles | ((word << Uint32(12)) & Uint32(0x0F0F0000))
            word = nibbles | ((word >> Uint32(12)) & Uint32(0x0000F0F0))
        found = Uint32(0)
        for shift, mask in encoding(self.config.packing):
            part = word << Uint32(shift) if shift >= 0 else word >> Uint32(-shift)
            found = found ^ (part & Uint32(mask))
        return found

    def scale_pairs(self, scales: list[Uint32]) -> list[Uint32]:
        """Words of the scale bytes of rows g and g + 8; each word has two blocks of both rows."""
        if self.config.packing.block_steps == 2:
            return [prmt(scales[0], scales[1], Uint32(0x5410))]
        first, second = (self.exponents(word) for word in scales)
        return [prmt(a, b, Uint32(0x6420)) for a, b in zip(first, second)]

    def exponents(self, word: Uint32) -> list[Uint32]:
        """The scales of two steps in each word, in its bytes 0 and 2: 2⁷ · scale as fp16, without its sign bit."""
        pairs = e4m3x4_to_f16x2(word & Uint32(_MAGNITUDE))
        return [mul_f16x2(pair, Uint32(_TWO_TO_7)) >> Uint32(7) for pair in pairs]

"""The rungs of the GEMV ladder: c = A · b in NVFP4, from one thread a row to a tile of sixteen rows a warp.

Each class is one kernel; its docstring says what changes against the rung before it, and why. They are made to be
read: tensors are contiguous, M is a multiple of 128, K a multiple of 1024 and compiled in, and c is fp32, so that a
result can be checked sharply. The final kernel (``cute_nvfp4.gemv``) has none of these limits. Figures and story are in
``01_gemv.ipynb``; ``ladder_tools.py`` compiles, runs and counts.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint16, Uint32
from cutlass.memory import SmemAllocator

from cute_nvfp4.ptx.async_copy import commit_group, copy_async, wait_group
from cute_nvfp4.ptx.convert import bits_to_f32, e2m1x8_to_f16x2, e4m3x2_to_f16x2, e4m3x4_to_f16x2, f16x2_to_f32
from cute_nvfp4.ptx.half import fma_e2m1x16
from cute_nvfp4.ptx.memory import load_global, load_shared, store_shared
from cute_nvfp4.ptx.warp import sum_lanes
from cute_nvfp4.scale_layout import ATOM_BYTES, ATOM_ROWS, cute_layout
from cute_nvfp4.target import Architecture

BLOCK = 16  # elements under one scale


def decode_nibble(code: Any) -> Float32:
    """An E2M1 code in fp32: its bits s.ee.m where fp32 has sign, exponent and mantissa, times 2^(127 - 1)."""
    bits = ((code & Uint32(8)) << Uint32(28)) | ((code & Uint32(7)) << Uint32(22))
    return bits_to_f32(Int32(bits)) * Float32(2.0**126)


def decode_scale(byte: Any) -> Float32:
    """An E4M3 scale in fp32."""
    return f16x2_to_f32(e4m3x2_to_f16x2(Uint16(byte)))[0]


def dot_nibbles(a: Any, b: Any, count: int) -> Float32:
    """The sum of ``count`` products of E2M1 elements packed in two words, one nibble after the other."""
    total = Float32(0.0)
    for shift in map(Uint32, range(0, 4 * count, 4)):
        total = total + decode_nibble(a >> shift) * decode_nibble(b >> shift)
    return total


def dot_block(words: list, b_pairs: list, arch: Architecture) -> Float32:
    """The sum of a block of 16 products, exact in f16: eight of ``words``' elements in each half of one register."""
    low, high = f16x2_to_f32(fma_e2m1x16(Uint32(0), words, b_pairs, arch))
    return low + high


class Rung:
    """What all rungs share: the host function, and where a matrix of the batch begins."""

    letter, title = "", ""
    scales = "rowmajor"
    threads, rows_per_block = 128, 128

    def __init__(self, arch: Architecture, k: int) -> None:
        self.arch, self.k = arch, k

    @cute.jit
    def __call__(self, a, sfa, b, sfb, c, m: Int32, batch: Int32, stream: CUstream):
        """c (L, M) = A (L, M, K) · b (L, 1, K); all pointers."""
        grid = (m // self.rows_per_block, batch, 1)
        self.kernel(a, sfa, b, sfb, c, m).launch(grid=grid, block=(self.threads, 1, 1), stream=stream)

    def begin(self, a: Any, sfa: Any, b: Any, sfb: Any, c: Any, m: Any, batch: Any) -> tuple:
        """Addresses of this matrix: A, its scales, b, its scales; and c as a tensor."""
        blocks = self.k // BLOCK
        scale_rows = 1 if self.scales == "rowmajor" else ATOM_ROWS  # of b: blocked scales are padded to an atom
        l64 = Int64(batch)
        out = cute.make_tensor(c + l64 * m, cute.make_layout(m))  # (M)
        return (
            a.toint() + l64 * m * (self.k // 2),
            sfa.toint() + l64 * m * blocks,
            b.toint() + l64 * (self.k // 2),
            sfb.toint() + l64 * (scale_rows * blocks),
            out,
        )


def bytes_at(address: Any, layout: Any, dtype: Any = cutlass.Uint8) -> Any:
    """Global memory at ``address`` as a tensor."""
    align = dtype.width // 8
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align), layout)


class OneThreadARow(Rung):
    """(a) One thread a row. What the formula says, byte by byte; the rung that the others are compared with.

    Each thread reads its row of A, and b, one byte (two elements) at a time and decodes the nibbles in fp32. The
    threads of a warp are a whole row apart: a load of 32 bytes touches 32 sectors of 32 bytes.
    """

    letter, title = "a", "one thread a row"
    threads = rows_per_block = 32

    @cute.kernel
    def kernel(self, a, sfa, b, sfb, c, m: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        a_at, sfa_at, b_at, sfb_at, out = self.begin(a, sfa, b, sfb, c, m, batch)
        row_bytes, row_scales = self.k // 2, self.k // BLOCK
        data = bytes_at(a_at, cute.make_layout((m, row_bytes), stride=(row_bytes, 1)))  # (M, K/2)
        scale = bytes_at(sfa_at, cute.make_layout((m, row_scales), stride=(row_scales, 1)))  # (M, K/16)
        vector, vector_scale = (
            bytes_at(b_at, cute.make_layout(row_bytes)),
            bytes_at(sfb_at, cute.make_layout(row_scales)),
        )
        row = block * self.rows_per_block + thread
        total = Float32(0.0)
        for j in cutlass.range(0, row_scales, unroll=1):
            products = Float32(0.0)
            for i in cutlass.range_constexpr(BLOCK // 2):
                products += dot_nibbles(Uint32(data[row, 8 * j + i]), Uint32(vector[8 * j + i]), 2)
            total += products * (decode_scale(scale[row, j]) * decode_scale(vector_scale[j]))
        out[row] = total


class OneWarpARow(Rung):
    """(b) One warp a row. Neighbouring lanes read neighbouring words: 128 bytes a load, four whole sectors.

    The lanes' partial sums meet at the end in five shuffles. The arithmetic is as before: now it is what limits.
    """

    letter, title = "b", "one warp a row"
    threads, rows_per_block = 256, 8

    @cute.kernel
    def kernel(self, a, sfa, b, sfb, c, m: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        a_at, sfa_at, b_at, sfb_at, out = self.begin(a, sfa, b, sfb, c, m, batch)
        lane, row = thread & 31, block * self.rows_per_block + (thread >> 5)
        scale = bytes_at(sfa_at + Int64(row) * (self.k // BLOCK), cute.make_layout(self.k // BLOCK))
        vector_scale = bytes_at(sfb_at, cute.make_layout(self.k // BLOCK))
        row_at = a_at + Int64(row) * (self.k // 2)
        total = Float32(0.0)
        # eight elements a word, two words a scale
        for word in cutlass.range(lane, self.k // 8, 32, unroll=1):
            x = load_global(row_at + Int64(4 * word), 4)[0]
            y = load_global(b_at + Int64(4 * word), 4)[0]
            factor = decode_scale(scale[word >> 1]) * decode_scale(vector_scale[word >> 1])
            total += dot_nibbles(x, y, 8) * factor
        total = sum_lanes(total, 32)
        if lane == 0:
            out[row] = total


class WideAndPacked(Rung):
    """(c) 128-bit loads and packed arithmetic. A quarter of the loads, two elements an instruction.

    E2M1 is decoded in pairs to f16x2 and multiplied there. A block's products are summed unscaled: eight terms in each
    half, multiples of 0.25 of magnitude at most 288, which f16 holds exactly. Scales multiply the sum in fp32, once
    for 16 elements. A passes by L1: nobody reads it again.
    """

    letter, title = "c", "128-bit loads, f16x2"
    threads, rows_per_block = 256, 8

    @cute.kernel
    def kernel(self, a, sfa, b, sfb, c, m: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        a_at, sfa_at, b_at, sfb_at, out = self.begin(a, sfa, b, sfb, c, m, batch)
        lane, row = thread & 31, block * self.rows_per_block + (thread >> 5)
        pairs = cute.make_layout(self.k // (2 * BLOCK))  # two scales at a time
        scale = bytes_at(sfa_at + Int64(row) * (self.k // BLOCK), pairs, Uint16)
        vector_scale = bytes_at(sfb_at, pairs, Uint16)
        row_at = a_at + Int64(row) * (self.k // 2)
        total = Float32(0.0)
        for piece in cutlass.range(lane, self.k // 32, 32, unroll=1):
            x = load_global(row_at + Int64(16 * piece), 16, l1="no_allocate", l2="evict_first")
            y = load_global(b_at + Int64(16 * piece), 16, l1="evict_last")
            x_scales = f16x2_to_f32(e4m3x2_to_f16x2(scale[piece]))
            y_scales = f16x2_to_f32(e4m3x2_to_f16x2(vector_scale[piece]))
            for i in cutlass.range_constexpr(2):
                y_pairs = e2m1x8_to_f16x2(y[2 * i], self.arch) + e2m1x8_to_f16x2(y[2 * i + 1], self.arch)
                total += dot_block(x[2 * i : 2 * i + 2], y_pairs, self.arch) * (x_scales[i] * y_scales[i])
        total = sum_lanes(total, 32)
        if lane == 0:
            out[row] = total


class SharedVector(Rung):
    """(d) b decoded once a block of threads; scales as the atom has them.

    The 32 rows of a block share b: each of its elements is decoded once, to f16 in shared memory, in the order in which
    lanes will read it (consecutive lanes, consecutive 16 bytes: no bank conflicts). A warp takes rows r, r+32, r+64 and
    r+96: the sixteen bytes that the blocked layout keeps together for them are one load. Each lane has four rows' loads
    under way, and what it reads of b serves all four.
    """

    letter, title = "d", "b shared, blocked scales"
    scales = "blocked"
    threads, rows_per_block = 256, 32
    # word of b (eight elements) -> cell of sixteen bytes in shared memory, as a CuTe layout:
    # a lane's words (4), lanes (32), steps; lanes are neighbours in memory
    word_shape, word_stride = (4, 32, 1 << 16), (32, 1, 128)

    @cute.jit
    def stage_vector(self, thread: Int32, b_at: Int64, sfb_at: Int64, values: Int32, factors: Int32):
        """Decodes b into shared memory: f16 at ``values``, its scales in fp32 at ``factors``; then a barrier."""
        cells = cute.make_layout(self.word_shape, stride=self.word_stride)
        for word in cutlass.range(thread, self.k // 8, self.threads, unroll=1):
            codes = load_global(b_at + Int64(4 * word), 4, l1="evict_last")[0]
            store_shared(values + 16 * cute.crd2idx(word, cells), e2m1x8_to_f16x2(codes, self.arch))
        layout = cute_layout(ATOM_ROWS, self.k // BLOCK)
        scale = bytes_at(sfb_at, layout)
        to = cute.make_ptr(Float32, factors, cute.AddressSpace.smem, assumed_align=4)
        target = cute.make_tensor(to, cute.make_layout(self.k // BLOCK))
        for j in cutlass.range(thread, self.k // BLOCK, self.threads, unroll=1):
            target[j] = decode_scale(scale[0, j, 0])
        cute.arch.sync_threads()

    def shared_vector(self, smem: Any) -> tuple:
        """Room for b: (address of its values in f16, address of its scales in fp32)."""
        values = smem.allocate_array(cutlass.Uint8, 2 * self.k, byte_alignment=128)
        factors = smem.allocate_array(cutlass.Uint8, self.k // BLOCK * 4, byte_alignment=16)
        return values.toint(), factors.toint()

    @cute.kernel
    def kernel(self, a, sfa, b, sfb, c, m: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        a_at, sfa_at, b_at, sfb_at, out = self.begin(a, sfa, b, sfb, c, m, batch)
        values, factors = self.shared_vector(SmemAllocator())
        self.stage_vector(thread, b_at, sfb_at, values, factors)

        # a block of threads has a quarter of an atom's 128 rows: eight r, each with r + 32, r + 64, r + 96
        lane, first = thread & 31, (block >> 2) * ATOM_ROWS + (block & 3) * 8 + (thread >> 5)
        row_at = a_at + Int64(first) * (self.k // 2)
        scale_at = sfa_at + Int64(cute.crd2idx((first, 0, 0), cute_layout(m, self.k // BLOCK)))
        sums = cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        for piece in cutlass.range(lane, self.k // 32, 32, unroll=1):
            rows: list = []
            for r in cutlass.range_constexpr(4):
                at = row_at + Int64(r * 32 * (self.k // 2)) + Int64(16 * piece)
                rows.append(load_global(at, 16, l1="no_allocate", l2="evict_first"))
            # two lanes share the four columns of an atom; each takes its two
            words = load_global(scale_at + Int64((piece >> 1) * ATOM_BYTES), 16)
            shift = Uint32(16 * (piece & 1))
            b_words: list = []
            for i in cutlass.range_constexpr(4):
                b_words += load_shared(values + (piece >> 5) * 2048 + i * 512 + lane * 16, 16)
            b_scales = load_shared(factors + 8 * piece, 8)
            for r in cutlass.range_constexpr(4):
                scales = f16x2_to_f32(e4m3x2_to_f16x2(Uint16((words[r] >> shift) & Uint32(0xFFFF))))
                for i in cutlass.range_constexpr(2):
                    dot = dot_block(rows[r][2 * i : 2 * i + 2], b_words[8 * i : 8 * i + 8], self.arch)
                    sums[r] = sums[r] + dot * (scales[i] * bits_to_f32(Int32(b_scales[i])))
        for r in cutlass.range_constexpr(4):
            total = sum_lanes(sums[r], 32)
            if lane == 0:
                out[first + 32 * r] = total


class TileOfQuads(SharedVector):
    """(e) A tile of sixteen rows a warp, a quad of lanes for two of them, 32 bytes a lane and row.

    Rows r … r+3, and the same plus 32, 64 and 96: their scales are 64 contiguous bytes of an atom, whole sectors, of
    which a lane reads the eight bytes of its two rows. Two steps of a butterfly sum a row instead of five, for eight
    rows at once. Four warps share a tile along K. sm_100a loads the 32 bytes at once. On sm_90a they take two loads,
    each of which touches every sector by half: the next rung cures that.
    """

    letter, title = "e", "tile of quads"
    tiles, warps_k = 2, 4
    threads, rows_per_block = 32 * 2 * 4, 2 * 16
    word_shape, word_stride = (8, 4, 1 << 16), (4, 1, 32)  # a lane's words (8), lanes of the quad (4), slices of 256
    ring_bytes = 0

    @cute.kernel
    def kernel(self, a, sfa, b, sfb, c, m: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        a_at, sfa_at, b_at, sfb_at, out = self.begin(a, sfa, b, sfb, c, m, batch)
        smem = SmemAllocator()
        values, factors = self.shared_vector(smem)
        sums_layout = cute.make_layout((16, self.warps_k, self.tiles))
        sums = smem.allocate_tensor(Float32, sums_layout, byte_alignment=16)  # (ROW, WARP_K, TILE)
        ring = smem.allocate_array(cutlass.Uint8, max(self.ring_bytes * self.threads // 32, 16), byte_alignment=128)
        self.stage_vector(thread, b_at, sfb_at, values, factors)

        lane, warp = thread & 31, thread >> 5
        warp_k, tile = warp & (self.warps_k - 1), warp // self.warps_k
        first = self.first_row(block * self.tiles + tile)
        at = (a_at, sfa_at, m, first, values, factors, ring.toint() + warp * self.ring_bytes)
        sum0, sum1 = self.walk(at, lane, warp_k)
        sum0, sum1 = sum_lanes(sum0, 4), sum_lanes(sum1, 4)
        if lane & 3 == 0:
            sums[lane >> 2, warp_k, tile] = sum0
            sums[(lane >> 2) + 8, warp_k, tile] = sum1
        cute.arch.sync_threads()
        if thread < 16 * self.tiles:
            row, tile = thread & 15, thread >> 4
            total = sums[row, 0, tile]
            for w in cutlass.range_constexpr(1, self.warps_k):
                total = total + sums[row, w, tile]
            out[self.first_row(block * self.tiles + tile) + self.row_in_tile(row & 7, row >> 3)] = total

    def first_row(self, tile: Any) -> Any:
        """First row of a tile: eight tiles an atom, four rows apart."""
        return (tile >> 3) * ATOM_ROWS + (tile & 7) * 4

    def row_in_tile(self, quad: Any, i: Any) -> Any:
        """Row ``i`` (0, 1) of quad ``quad`` (0-7), from the tile's first: ((4, 2), 2) : ((1, 64), 32)."""
        return (quad & 3) + (quad >> 2) * 64 + i * 32

    @cute.jit
    def walk(self, at, lane: Int32, warp_k: Int32):
        """The lane's sums of its two rows over this warp's slices of K, 256 elements each."""
        a_at, sfa_at, m, first, values, factors, _ = at
        row = first + self.row_in_tile(lane >> 2, 0)
        row_at = a_at + Int64(row) * (self.k // 2) + Int64((lane & 3) * 32)
        scale_at = sfa_at + Int64(cute.crd2idx((row, (lane & 3) * 4, 0), cute_layout(m, self.k // BLOCK)))
        sum0, sum1 = Float32(0.0), Float32(0.0)
        width = self.arch.vector_bytes
        for s in cutlass.range(warp_k, self.k // 256, self.warps_k, unroll=1):
            rows: list = [[], []]
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(32 // width):
                    from_ = row_at + Int64(r * 32 * (self.k // 2) + i * width) + Int64(s * 128)
                    rows[r] += load_global(from_, width, l1="no_allocate", l2="evict_first")
            scales = load_global(scale_at + Int64(s * 4 * ATOM_BYTES), 8, l1="no_allocate")
            sum0, sum1 = self.accumulate(sum0, sum1, rows, scales, values, factors, s, lane)
        return sum0, sum1

    def accumulate(self, sum0, sum1, rows, scales, values, factors, s, lane) -> tuple:
        """Adds four blocks of each of the two rows."""
        x_scales = [[x for pair in e4m3x4_to_f16x2(word) for x in f16x2_to_f32(pair)] for word in scales]
        b_scales = load_shared(factors + 64 * s + 16 * (lane & 3), 16)
        for j in range(4):
            b: list = []
            for i in range(2):
                b += load_shared(values + 512 * s + (2 * j + i) * 64 + 16 * (lane & 3), 16)
            y_scale = bits_to_f32(Int32(b_scales[j]))
            sum0 = sum0 + dot_block(rows[0][2 * j : 2 * j + 2], b, self.arch) * (x_scales[0][j] * y_scale)
            sum1 = sum1 + dot_block(rows[1][2 * j : 2 * j + 2], b, self.arch) * (x_scales[1][j] * y_scale)
        return sum0, sum1


class RingOfCopies(TileOfQuads):
    """(e′) sm_90a: the same tile, copied in the order of memory into a ring in shared memory (``cp.async``).

    Eight consecutive lanes copy the 128 bytes of a row: every sector is asked for once, whole. Three stages of 2304
    bytes a warp are under way without holding a register. A lane then reads the 32 bytes that it needs; pieces of odd
    rows are swapped in pairs (p ^ 1), so that the lanes of an access meet in no bank.
    """

    letter, title = "e'", "copies in memory's order"
    stages = 4
    stage_bytes = 16 * 128 + 32 * 8  # the slice of a tile, and eight bytes of scales a lane
    ring_bytes = stages * stage_bytes

    @cute.jit
    def walk(self, at, lane: Int32, warp_k: Int32):
        a_at, sfa_at, m, first, values, factors, ring = at
        quad, piece = lane >> 2, lane & 7
        row = first + self.row_in_tile(quad, 0)
        scale_at = sfa_at + Int64(cute.crd2idx((row, (lane & 3) * 4, 0), cute_layout(m, self.k // BLOCK)))
        copy_at = a_at + Int64(first) * (self.k // 2) + Int64(16 * piece)
        slices = self.k // 256
        for i in cutlass.range_constexpr(self.stages - 1):
            self.copy_slice(copy_at, scale_at, ring + i * self.stage_bytes, lane, warp_k + i * self.warps_k)
        sum0, sum1, stage, free = Float32(0.0), Float32(0.0), Int32(0), Int32(self.stages - 1)
        for s in cutlass.range(warp_k, slices, self.warps_k, unroll=1):
            wait_group(self.stages - 2)
            cute.arch.sync_warp()  # the stage is complete for all lanes, and the free one has been read by all
            ahead = s + (self.stages - 1) * self.warps_k
            self.copy_slice(copy_at, scale_at, ring + free * self.stage_bytes, lane, ahead)
            base = ring + stage * self.stage_bytes
            rows: list = [[], []]
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    cell = ((lane & 3) * 2 + i) ^ (quad & 1)
                    rows[r] += load_shared(base + (quad + 8 * r) * 128 + cell * 16, 16)
            scales = load_shared(base + 16 * 128 + lane * 8, 8)
            sum0, sum1 = self.accumulate(sum0, sum1, rows, scales, values, factors, s, lane)
            free, stage = stage, cutlass.select_(stage == self.stages - 1, Int32(0), stage + 1)
        return sum0, sum1

    @cute.jit
    def copy_slice(self, copy_at: Int64, scale_at: Int64, base: Int32, lane: Int32, s: Int32):
        """Starts the copies of slice ``s`` if there is one, and closes their group in any case."""
        if s < self.k // 256:
            for i in cutlass.range_constexpr(4):
                row = (lane >> 3) + 4 * i
                from_ = copy_at + Int64(self.row_in_tile(row & 7, row >> 3)) * (self.k // 2) + Int64(s * 128)
                copy_async(base + row * 128 + ((lane & 7) ^ (row & 1)) * 16, from_, 16, evict_first=True)
            copy_async(base + 16 * 128 + lane * 8, scale_at + Int64(s * 4 * ATOM_BYTES), 8)
        commit_group()


RUNGS = (OneThreadARow, OneWarpARow, WideAndPacked, SharedVector, TileOfQuads, RingOfCopies)

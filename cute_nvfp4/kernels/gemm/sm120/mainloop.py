"""The mainloop of a work tile: fragments of a stage by ``ldmatrix``, scale factors by plain loads, and the MMAs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ....ptx import mbarrier
from ....ptx.memory import load_shared
from ....ptx.mma import ScaleWord, load_matrices, load_unpacked, mma_block_scaled
from ....scale_layout import ATOM_BYTES, ATOM_COLS
from ..barriers import PipelineState, Ring
from ..config import GemmConfig
from ..shared_plan import StagePlan
from ..tile_scheduler import WorkTile
from .warp_tile import WarpTile


def make_accumulators(config: GemmConfig, tile: WarpTile) -> cute.Tensor:
    """A lane's fp32 accumulators: (RESULT, PAIR, HALF, MMA_M, PRODUCT). An instruction's results are two columns of row
    g and two of row g + 8."""
    layout = cute.make_layout((4, tile.pairs, tile.halves, tile.m_tiles, config.products))
    return cute.make_rmem_tensor(layout, Float32)


def clear(acc: cute.Tensor) -> None:
    """Zeroes the accumulators one by one. From a vector of zeros LLVM makes register pairs that it carries through the
    loop, and ptxas moves them to the quads of an MMA and back."""
    for i in range(cute.size(acc)):
        acc[i] = Float32(0.0)


class LaneOffsets(NamedTuple):
    """Bytes from a stage to what this lane reads: constants of a work tile, kept in registers. Data is swizzled and has
    an offset for each k-block (and each two instructions along N), which ptxas would recompute in each stage."""

    tAsA: cute.Tensor  # (MMA_K, A)
    tBsB: cute.Tensor  # (PAIR / 2, MMA_K, B)
    tAsSFA: cute.Tensor  # (A)
    tBsSFB: cute.Tensor  # (B)


class ScaleFragments(NamedTuple):
    """A lane's words of scale factors for the k-blocks of one atom."""

    tCrSFA: cute.Tensor  # (A)
    tCrSFB: cute.Tensor  # (HALF, B)


class Fragments(NamedTuple):
    """A lane's words of the operands for one k-block."""

    tCrA: cute.Tensor  # (WORD, MMA_M, A)
    tCrB: cute.Tensor  # (WORD, PAIR, HALF, B)


@dataclass(frozen=True)
class Multiplier:
    """What a lane of an MMA warp keeps over the k-tiles of a work tile. base: shared address of the stages."""

    config: GemmConfig
    tile: WarpTile
    ring: Ring
    base: Int32
    offsets: LaneOffsets

    def scale_fragments(self, stage: Int32, atom: int) -> ScaleFragments:
        """Loads the scale factors of one atom along K."""
        (count_a, count_b), tile = self.config.counts, self.tile
        tCrSFA = cute.make_rmem_tensor(cute.make_layout(count_a), Uint32)  # (A)
        tCrSFB = cute.make_rmem_tensor(cute.make_layout((tile.halves, count_b)), Uint32)  # (HALF, B)
        at = atom * ATOM_BYTES
        for i in range(count_a):
            tCrSFA[i] = load_shared(stage + self.offsets.tAsSFA[i] + at, 4)[0]
        for i in range(count_b):
            for half in range(tile.halves):
                tCrSFB[half, i] = load_shared(stage + self.offsets.tBsSFB[i] + (at + half * tile.sfb_step), 4)[0]
        return ScaleFragments(tCrSFA, tCrSFB)

    def fragments(self, stage: Int32, k: int) -> Fragments:
        """Loads the operands of k-block ``k``. Every stage starts where the swizzle repeats, so that adding a stage's
        address does not change the swizzled bits of an offset."""
        (count_a, count_b), tile = self.config.counts, self.tile
        load_a, load_b = (load_unpacked if unpacked else load_matrices for unpacked in self.config.unpacked)
        tCrA = cute.make_rmem_tensor(cute.make_layout((4, tile.m_tiles, count_a)), Uint32)  # (WORD, MMA_M, A)
        # (WORD, PAIR, HALF, B)
        tCrB = cute.make_rmem_tensor(cute.make_layout((2, tile.pairs, tile.halves, count_b)), Uint32)
        for i in range(count_a):
            for m in range(tile.m_tiles):
                for w, word in enumerate(load_a(stage + self.offsets.tAsA[k, i] + m * tile.a_step)):
                    tCrA[w, m, i] = word
        for i in range(count_b):
            for two in range(tile.pairs // 2):
                for half in range(tile.halves):
                    words = load_b(stage + self.offsets.tBsB[two, k, i] + half * tile.b_step)
                    for w, word in enumerate(words):
                        tCrB[w % 2, 2 * two + w // 2, half, i] = word
        return Fragments(tCrA, tCrB)

    def multiply_block(self, k: int, operands: Fragments, scales: ScaleFragments, acc: cute.Tensor) -> None:
        """Issues the MMAs of k-block ``k`` for every product."""
        config, (tCrA, tCrB) = self.config, operands
        byte = k * config.kind.scales % ATOM_COLS
        formats = config.a_format, config.b_format
        for p in range(config.products):
            a, b = (min(p, count - 1) for count in config.counts)
            for half in range(self.tile.halves):
                for pair in range(self.tile.pairs):
                    for m in range(self.tile.m_tiles):
                        left, right = [tCrA[w, m, a] for w in range(4)], [tCrB[w, pair, half, b] for w in range(2)]
                        sfa = ScaleWord(scales.tCrSFA[a], byte, m)
                        sfb = ScaleWord(scales.tCrSFB[half, b], byte, pair)
                        sums = [acc[i, pair, half, m, p] for i in range(4)]
                        for i, x in enumerate(mma_block_scaled(config.kind, formats, left, right, sums, sfa, sfb)):
                            acc[i, pair, half, m, p] = x

    @cute.jit
    def release(self, stage: Int32):
        """Signals that this warp has read a stage."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            mbarrier.arrive(self.ring.empty(stage))

    def multiply_stage(self, index: Int32, acc: cute.Tensor) -> None:
        """Multiplies a stage, and releases it once all of its operands are in registers."""
        stage = self.base + index * StagePlan(self.config).bytes
        for k in range(self.config.blocks_k):
            atom, byte = divmod(k * self.config.kind.scales, ATOM_COLS)
            if byte == 0:
                scales = self.scale_fragments(stage, atom)
            self.multiply_block(k, self.fragments(stage, k), scales, acc)
        self.release(index)


def lane_offsets(config: GemmConfig, tile: WarpTile, tile_n: Int32) -> LaneOffsets:
    """A lane's offsets in tile ``tile_n`` along N."""
    at, blocks, twos = StagePlan(config).offsets, config.blocks_k, tile.pairs // 2
    count_a, count_b = config.counts
    tAsA = cute.make_rmem_tensor(cute.make_layout((blocks, count_a)), Int32)  # (MMA_K, A)
    tBsB = cute.make_rmem_tensor(cute.make_layout((twos, blocks, count_b)), Int32)  # (PAIR / 2, MMA_K, B)
    tAsSFA = cute.make_rmem_tensor(cute.make_layout(count_a), Int32)  # (A)
    tBsSFB = cute.make_rmem_tensor(cute.make_layout(count_b), Int32)  # (B)
    for i, first in enumerate(at.a):
        for k in range(blocks):
            tAsA[k, i] = first + (tile.a_offset ^ tile.k_bits(k))
    for i, first in enumerate(at.b):
        for k in range(blocks):
            for two in range(twos):
                tBsB[two, k, i] = first + (tile.b_offset ^ (tile.k_bits(k) ^ tile.pair_bits(two)))
    for i, first in enumerate(at.sfa):
        tAsSFA[i] = first + tile.sfa_offset
    for i, first in enumerate(at.sfb):
        tBsSFB[i] = first + tile.sfb_offset(tile_n)
    return LaneOffsets(tAsA, tBsB, tAsSFA, tBsSFB)


@cute.jit
def multiply(
    config: cutlass.Constexpr[GemmConfig],
    tile: WarpTile,
    ring: Ring,
    base: Int32,
    work: WorkTile,
    acc: cute.Tensor,
    at: PipelineState,
) -> PipelineState:
    """Accumulates the k-tiles of a work tile in ``acc``, and returns the pipeline state after them."""
    clear(acc)
    multiplier = Multiplier(config, tile, ring, base, lane_offsets(config, tile, work.n))
    for _ in cutlass.range(work.k_count, unroll=1):
        mbarrier.wait(ring.full(at.stage), at.phase)
        multiplier.multiply_stage(at.stage, acc)
        at = ring.advance(at)
    return at

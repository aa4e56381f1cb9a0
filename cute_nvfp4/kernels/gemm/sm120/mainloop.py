"""The k-tiles of a work tile: fragments of a stage by ``ldmatrix``, scales by plain loads, and the MMAs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ....ptx import mbarrier
from ....ptx.memory import load_shared
from ....ptx.mma import ScaleWord, load_matrices, mma_block_scaled
from ....scale_layout import ATOM_BYTES, ATOM_COLS
from ..barriers import PipelineState, Ring
from ..config import GemmConfig
from ..shared_plan import StagePlan
from ..tile_scheduler import WorkTile
from .warp_tile import WarpTile


def make_accumulators(config: GemmConfig, tile: WarpTile) -> cute.Tensor:
    """fp32 results of a lane: (RESULT, PAIR, HALF, MMA_M, PRODUCT). Results of an instruction are two columns of row
    g, and of row g + 8."""
    layout = cute.make_layout((4, tile.pairs, tile.halves, tile.m_tiles, config.products))
    return cute.make_rmem_tensor(layout, Float32)


def clear(acc: cute.Tensor) -> None:
    """Zeros, one by one: of a vector of zeros LLVM makes pairs that it carries through the loop, and ptxas moves them
    to the fours of an MMA and back."""
    for i in range(cute.size(acc)):
        acc[i] = Float32(0.0)


class LaneOffsets(NamedTuple):
    """Bytes from a stage to what this lane reads of each A, each B, and the scales of each. Data is swizzled, and has
    an offset for each k-block (and two instructions along N): ptxas would compute them again in each stage."""

    a: list[list[Int32]]  # [operand][k-block]
    b: list[list[list[Int32]]]  # [operand][k-block][two instructions]
    sfa: list[Int32]
    sfb: list[Int32]


@dataclass(frozen=True)
class Multiplier:
    """What a lane of a multiplying warp keeps over the k-tiles of a work tile. base: shared address of the stages."""

    config: GemmConfig
    tile: WarpTile
    ring: Ring
    base: Int32
    offsets: LaneOffsets

    def scale_words(self, stage: Int32, atom: int) -> tuple[list[Uint32], list[list[Uint32]]]:
        """The words of scales of each A, and of the halves of each B."""
        at = atom * ATOM_BYTES
        sfa = [load_shared(stage + x + at, 4)[0] for x in self.offsets.sfa]
        steps = [at + x * self.tile.sfb_step for x in range(self.tile.halves)]
        return sfa, [[load_shared(stage + x + step, 4)[0] for step in steps] for x in self.offsets.sfb]

    def fragments(self, stage: Int32, k: int) -> tuple[list, list]:
        """The fragments for k-block ``k``: of each A [m_tile], four words; of each B [half][pair], two words. Stages
        start where the swizzle repeats, so that what it changes in an offset leaves them alone."""
        tile, a, b = self.tile, [], []
        for offset in self.offsets.a:
            a.append([load_matrices(stage + offset[k] + i * tile.a_step) for i in range(tile.m_tiles)])
        for offset in self.offsets.b:
            halves = [[] for _ in range(tile.halves)]
            for first in offset[k]:
                for half in range(tile.halves):
                    words = load_matrices(stage + first + half * tile.b_step)
                    halves[half] += [words[:2], words[2:]]
            b.append(halves)
        return a, b

    def multiply_block(self, k: int, a: list, b: list, sfa: list, sfb: list, acc: cute.Tensor) -> None:
        """The MMAs of k-block ``k`` of every product."""
        config = self.config
        byte = k * config.kind.scales % ATOM_COLS
        formats = config.a_format, config.b_format
        for p in range(config.products):
            ia, ib = (min(p, count - 1) for count in config.counts)
            for half in range(self.tile.halves):
                for pair in range(self.tile.pairs):
                    for m in range(self.tile.m_tiles):
                        before = [acc[i, pair, half, m, p] for i in range(4)]
                        scales = ScaleWord(sfa[ia], byte, m), ScaleWord(sfb[ib][half], byte, pair)
                        found = mma_block_scaled(config.kind, formats, a[ia][m], b[ib][half][pair], before, *scales)
                        for i in range(4):
                            acc[i, pair, half, m, p] = found[i]

    @cute.jit
    def release(self, stage: Int32):
        """Says that this warp has read a stage."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            mbarrier.arrive(self.ring.empty(stage))

    def multiply_stage(self, index: Int32, acc: cute.Tensor) -> None:
        """All of a stage; it is released once it is in registers."""
        stage = self.base + index * StagePlan(self.config).bytes
        for k in range(self.config.blocks_k):
            atom, byte = divmod(k * self.config.kind.scales, ATOM_COLS)
            if byte == 0:
                sfa, sfb = self.scale_words(stage, atom)
            a, b = self.fragments(stage, k)
            self.multiply_block(k, a, b, sfa, sfb, acc)
        self.release(index)


def lane_offsets(config: GemmConfig, tile: WarpTile, tile_n: Int32) -> LaneOffsets:
    """``tile_n``: which tile along N."""
    at = StagePlan(config).offsets
    blocks, twos = range(config.blocks_k), range(tile.pairs // 2)
    a = [[x + (tile.a_offset ^ tile.k_bits(k)) for k in blocks] for x in at.a]
    b = [[[x + (tile.b_offset ^ (tile.k_bits(k) ^ tile.pair_bits(i))) for i in twos] for k in blocks] for x in at.b]
    sfa, sfb = (
        [x + offset for x in places] for places, offset in zip(at[2:], (tile.sfa_offset, tile.sfb_offset(tile_n)))
    )
    return LaneOffsets(a, b, sfa, sfb)


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
    """Sums the k-tiles of a work tile in ``acc``; returns the state after them."""
    clear(acc)
    multiplier = Multiplier(config, tile, ring, base, lane_offsets(config, tile, work.n))
    for _ in cutlass.range(work.k_count, unroll=1):
        mbarrier.wait(ring.full(at.stage), at.phase)
        multiplier.multiply_stage(at.stage, acc)
        at = ring.advance(at)
    return at

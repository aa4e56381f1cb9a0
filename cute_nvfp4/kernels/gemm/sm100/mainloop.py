"""The MMA warp: for each stage it copies scale factors to tensor memory, issues MMAs, and commits to free the stage.

tcgen05.cp, tcgen05.mma and tcgen05.commit of one thread execute in the order in which it issues them. The warp
therefore waits neither between a copy of scales and the MMA that reads them, nor before the next stage's copy
overwrites them.

``cute.gemm`` with scales as fields of the tiled MMA, and ``cute.copy`` with ``tcgen05.Cp4x32x128bOp``, take 128
instructions for a 128×128×256 stage, where this loop takes 41: each of them elects a thread and packs each descriptor
from two halves. Here CuTe provides the tensors (``mma_tensors``), and ``ptx`` the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint64

from ....ptx import mbarrier, tcgen05
from ....scale_layout import ATOM_ROWS
from ..barriers import Barriers
from ..config import GemmConfig
from ..problem import Scheduler
from ..shared_plan import SWIZZLE_BYTES, StagePlan
from ..tile_scheduler import CtaPlace
from .memory_plan import TensorPlan
from .mma_tensors import COLUMN_BYTES, MmaTensors, atom_in_tensor_memory, mma_tensors
from .operands import make_mma, shared_operands

SCALE_STRIDE = 128
"""Bytes from eight rows of a scale atom in shared memory to the next eight."""
_SCALE_ID_BIT = 30


class CommitMasks(NamedTuple):
    """Masks of CTAs, one bit each: those whose stages this MMA reads, and those of the MMA itself."""

    readers: Int16
    mma: Int16


def commit_masks(config: GemmConfig, place: CtaPlace) -> CommitMasks:
    """The masks for this CTA's MMA, which reads stages of its row and its column of the cluster."""
    cm, cn = config.cluster
    ours = (1 << config.ctas) - 1
    row = sum(ours << (cm * y) for y in range(cn))
    first = place.part * (cm * cn)
    column = Int32((1 << cm) - 1) << (first + place.y * cm)
    pair_x = place.x - place.v
    readers = (Int32(row) << (first + pair_x)) | column
    return CommitMasks(Int16(readers), Int16(Int32(ours) << (first + place.y * cm + pair_x)))


@dataclass(frozen=True)
class StageDescriptors:
    """Matrix descriptors of one stage: of its first A, at which the stage starts, and of its first scale atom."""

    data: Uint64
    scales: Uint64


@dataclass(frozen=True)
class DescriptorBase:
    """What the descriptors of all stages share: bits 63:32 for swizzled data and for scale atoms, bits 31:0 of the
    first stage, and the distance from a stage's start to its first scale atom in steps of 16 bytes."""

    upper_data: Int32
    upper_scales: Int32
    lower: Int32
    to_scales: int

    def stage(self, offset: Int32) -> StageDescriptors:
        """The descriptors of the stage that starts ``offset`` times 16 bytes after the first."""
        start = self.lower + offset
        return StageDescriptors(
            tcgen05.descriptor(start, self.upper_data), tcgen05.descriptor(start + self.to_scales, self.upper_scales)
        )


def descriptor_base(config: GemmConfig, base: cute.Pointer, tensor_base: Int32) -> DescriptorBase:
    """The common part of all descriptors. base: the first stage; tensor_base: any address in tensor memory."""
    # An address in tensor memory is never negative, but the compiler does not know. With upper halves that it knows to
    # be constant, it would split every 64-bit sum in the loop in two.
    hidden = tensor_base >> 31
    return DescriptorBase(
        tcgen05.descriptor_upper(tcgen05.SWIZZLE_128B, SWIZZLE_BYTES) | hidden,
        tcgen05.descriptor_upper(tcgen05.SWIZZLE_NONE, SCALE_STRIDE) | hidden,
        tcgen05.descriptor_lower(base.toint()),
        StagePlan(config).offsets.sfa[0] // tcgen05.DESCRIPTOR_UNIT,
    )


class ScaleColumns(NamedTuple):
    """Addresses of the first column of the scales of every A and every B."""

    sfa: list[Int32]
    sfb: list[Int32]


def copy_scales(config: GemmConfig, tensors: MmaTensors, stage: StageDescriptors, columns: ScaleColumns) -> None:
    """Copies every scale atom of a stage to tensor memory."""
    for sources, targets, tCtSF in (
        (tensors.tCsSFA, columns.sfa, tensors.tCtSFA_copy),
        (tensors.tCsSFB, columns.sfb, tensors.tCtSFB_copy),
    ):
        for tCsSF, first in zip(sources, targets):
            for k in range(cute.size(tCsSF, mode=[1])):
                for mn in range(cute.size(tCsSF, mode=[2])):
                    column = first + tCtSF[0, mn, k] // COLUMN_BYTES
                    tcgen05.copy_scales(column, stage.scales, tCsSF[0, k, mn, 0], group=config.ctas)


def _scale_address(first: Int32, column: int, byte: int) -> Int32:
    """The address of scales at byte ``byte`` of a column; the byte goes into bits 31:30, as a signed number."""
    return first + (column + ((byte - COLUMN_BYTES if byte >= COLUMN_BYTES // 2 else byte) << _SCALE_ID_BIT))


def issue_k_block(
    config: GemmConfig,
    tensors: MmaTensors,
    stage: StageDescriptors,
    k: int,
    columns: ScaleColumns,
    accumulators: list[Int32],
    sfb_shift: Int32,
    accumulate: Int32,
) -> None:
    """Issues each product's MMA for k-block ``k`` of a stage: D (+)= (A · SFA) · (B · SFB)."""
    kind, types = config.kind, dict(config.kind.element_types)
    for p in range(config.products):
        a, b = (min(p, count - 1) for count in config.counts)
        # an MMA takes the column of its scales, and the byte in the column at which its first block's scale lies
        column_a, byte_a = divmod(tensors.tCtSFA[0, 0, k], COLUMN_BYTES)
        column_b, byte_b = divmod(tensors.tCtSFB[0, 0, k], COLUMN_BYTES)
        tcgen05.mma_block_scaled(
            accumulators[p],
            stage.data,
            tensors.tCrA[a][0, 0, k, 0],
            tensors.tCrB[b][0, 0, k, 0],
            tcgen05.instruction_descriptor(
                types[config.a_format],
                types[config.b_format],
                kind.scale_type,
                config.tile_m,
                config.tile_n,
                byte_a,
                byte_b,
            ),
            _scale_address(columns.sfa[a], column_a, byte_a),
            _scale_address(columns.sfb[b] + sfb_shift, column_b, byte_b),
            accumulate,
            kind=kind.name,
            vector=kind.vector,
            group=config.ctas,
        )


def first_column_of_sfb(config: GemmConfig, tile_n: Int32) -> Int32:
    """Columns from a tile's first atom to the scales of its first row, as a tile may start within an atom."""
    if config.tile_n % ATOM_ROWS == 0:
        return Int32(0)
    columns = cute.recast_layout(8 * COLUMN_BYTES, 8, atom_in_tensor_memory())
    row = tile_n * config.tile_n % ATOM_ROWS  # a multiple of 32
    return Int32(cute.crd2idx(((0, row // 32), 0), columns))


@cute.jit
def multiply(
    config: cutlass.Constexpr[GemmConfig],
    base: cute.Pointer,
    barriers: Barriers,
    tensor_base: Int32,
    scheduler: Scheduler,
):
    """Runs the loop of the MMA warp; in a pair, that of the even CTA issues the MMAs for both."""
    mma, plan = make_mma(config), TensorPlan(config)
    tensors = mma_tensors(config, mma, shared_operands(config, mma, base))
    descriptors = descriptor_base(config, base, tensor_base)
    columns = ScaleColumns(
        [tensor_base + plan.sfa_column(i) for i in range(config.counts[0])],
        [tensor_base + plan.sfb_column(i) for i in range(config.counts[1])],
    )
    masks = commit_masks(config, scheduler.place)
    multicast = config.cluster[0] * config.cluster[1] > 1
    first_empty = barriers.operands.empty()
    to_full = barriers.operands.full() - first_empty
    at, acc = barriers.operands.start(), barriers.accumulators.start()
    cursor, end = scheduler.range()
    while cursor < end:
        tile = scheduler.tile(cursor, end)
        sfb_shift = first_column_of_sfb(config, tile.n)
        mbarrier.wait(barriers.accumulators.empty(acc.stage), acc.phase ^ 1, cluster=config.pair)
        tcgen05.fence_after()
        accumulators = [tensor_base + tensors.tCtAcc[0, 0, 0, p, acc.stage] for p in range(config.products)]
        accumulate = Int32(0)
        # unrolling by two would save two of forty instructions, but then a gated pair's code would not stay in an SM's
        # instruction cache from one launch to the next (docs/explanation/timing.md)
        for _ in cutlass.range(tile.k_count, unroll=1):
            empty = first_empty + at.stage * 8
            mbarrier.wait(empty + to_full, at.phase)
            with cute.arch.elect_one():
                stage = descriptors.stage(tensors.tCrA[0][0, 0, 0, at.stage])
                copy_scales(config, tensors, stage, columns)
                for k in cutlass.range_constexpr(config.blocks_k):
                    first = accumulate if k == 0 else 1
                    issue_k_block(config, tensors, stage, k, columns, accumulators, sfb_shift, first)
                tcgen05.commit(empty, group=config.ctas, mask=masks.readers if multicast else None)
            accumulate = Int32(1)
            at = barriers.operands.advance(at)
        with cute.arch.elect_one():
            full = barriers.accumulators.full(acc.stage)
            tcgen05.commit(full, group=config.ctas, mask=masks.mma if config.pair else None)
        acc = barriers.accumulators.advance(acc)
        cursor = scheduler.after(cursor, tile)
    if cutlass.const_expr(config.pair):
        # arrivals of the other CTA may still be on their way to this CTA's barriers, and must come before it exits
        for _ in cutlass.range(barriers.accumulators.edge.stages, unroll=1):
            mbarrier.wait(barriers.accumulators.empty(acc.stage), acc.phase ^ 1, cluster=True)
            acc = barriers.accumulators.advance(acc)

"""The warp that multiplies: scales of a stage to tensor memory, its MMAs, and a commit that frees the stage.

tcgen05.cp, tcgen05.mma and tcgen05.commit of one thread run in the order in which it issues them, so nothing is waited
for between a copy of scales and the MMA that reads them, nor before the next stage's copy overwrites them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint64

from ....ptx import mbarrier, tcgen05
from ....scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS
from ..barriers import Barriers, advance
from ..config import MMA_BYTES, GemmConfig
from ..tile_scheduler import Work, next_unit, tile_of, units
from .memory_plan import ATOM_COLUMNS, SWIZZLE_BYTES, SharedPlan, StagePlan, TensorPlan

# rows of a scale atom in shared memory: eight rows of sixteen bytes
SCALE_STRIDE = 128
_SCALE_ID_BIT = 30
UNROLL = 4
"""Steps of K in one pass of the loop: what counts and branches is then a fourth."""


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def commit_masks(config: GemmConfig, work: Work) -> tuple[Any, Any]:
    """CTAs whose stages this MMA read (its row and its column of the cluster), and the CTAs of the MMA itself."""
    cm, cn = config.cluster
    ours = (1 << config.ctas) - 1
    row = sum(ours << (cm * y) for y in range(cn))
    first = work.part * (cm * cn)
    column = Int32((1 << cm) - 1) << (first + work.y * cm)
    pair_x = work.x - work.v
    readers = (Int32(row) << (first + pair_x)) | column
    return Int16(readers), Int16(Int32(ours) << (first + work.y * cm + pair_x))


def stage_mma(
    config: GemmConfig,
    data: Uint64,
    scales: Uint64,
    columns: tuple,
    accumulators: list,
    sfb_shift: Any,
    accumulate: Any,
) -> None:
    """Scales and MMAs of one stage.

    data, scales: matrix descriptors of the stage's first A and SFA; all operands lie at constant distances from them.
    columns: where in tensor memory the scales of every A and of every B go.
    """
    stage, kind, group = StagePlan(config), config.kind, config.ctas
    columns_a, columns_b = columns
    count_a, count_b = config.counts
    for m in range(count_a):
        for i in range(stage.atoms_k):
            offset = stage.offset(f"SFA{m}") - stage.offset("SFA0") + ATOM_BYTES * i
            tcgen05.copy_scales(columns_a[m] + ATOM_COLUMNS * i, scales, offset, group=group)
    for n in range(count_b):
        for i in range(stage.atoms_k):
            for j in range(stage.atoms_n):
                column = columns_b[n] + ATOM_COLUMNS * (i * stage.atoms_n + j)
                offset = stage.offset(f"SFB{n}") - stage.offset("SFA0") + ATOM_BYTES * (i + stage.atoms_k * j)
                tcgen05.copy_scales(column, scales, offset, group=group)
    types = dict(kind.element_types)
    for block in range(config.blocks_k):
        # which atom along K, and which of its columns the instruction starts at
        atom, scale_id = divmod(block * kind.scales, ATOM_COLS)
        idesc = tcgen05.instruction_descriptor(
            types[config.a_format],
            types[config.b_format],
            kind.scale_type,
            config.tile_m,
            config.tile_n,
            scale_id,
            scale_id,
        )
        tag = _signed(scale_id << _SCALE_ID_BIT)
        for p in range(config.products):
            m, n = min(p, count_a - 1), min(p, count_b - 1)
            tcgen05.mma_block_scaled(
                accumulators[p],
                data,
                stage.offset(f"A{m}") + MMA_BYTES * block,
                stage.offset(f"B{n}") + MMA_BYTES * block,
                idesc,
                columns_a[m] + (ATOM_COLUMNS * atom + tag),
                columns_b[n] + sfb_shift + (ATOM_COLUMNS * stage.atoms_n * atom + tag),
                accumulate if block == 0 else 1,
                kind=kind.name,
                vector=kind.vector,
                group=group,
            )


@cute.jit
def multiply(
    config: cutlass.Constexpr[GemmConfig], base: cute.Pointer, barriers: Barriers, tensor_base: Int32, work: Work
):
    """The loop of the MMA warp; in a pair, that of the even CTA, for both."""
    shared, tensor = SharedPlan(config), TensorPlan(config)
    # the sign of an address of tensor memory is zero, but no compiler can know: were the upper halves of descriptors
    # known constants, every 64-bit sum in the loop would be split in two
    hidden = tensor_base >> 31
    upper_data = tcgen05.descriptor_upper(tcgen05.SWIZZLE_128B, SWIZZLE_BYTES) | hidden
    upper_scales = tcgen05.descriptor_upper(tcgen05.SWIZZLE_NONE, SCALE_STRIDE) | hidden
    lower = tcgen05.descriptor_lower(base.toint())
    columns = (
        [tensor_base + tensor.sfa_column(i) for i in range(config.counts[0])],
        [tensor_base + tensor.sfb_column(i) for i in range(config.counts[1])],
    )
    mask_stage, mask_acc = commit_masks(config, work)
    multicast = config.cluster[0] * config.cluster[1] > 1
    unit_bytes = shared.stage.bytes // tcgen05.DESCRIPTOR_UNIT
    first_empty = barriers.address(config, "operands", "empty")
    to_full = barriers.address(config, "operands", "full") - first_empty
    scale_units = shared.stage.offset("SFA0") // tcgen05.DESCRIPTOR_UNIT
    index, phase = Int32(0), Int32(0)
    acc, acc_phase = Int32(0), Int32(0)
    unit, end = units(config, work)
    while unit < end:
        _, tile_n, _, _, count = tile_of(config, work, unit, end)
        # a tile that starts in the middle of an atom finds its first scales two columns on
        sfb_shift = (tile_n * config.tile_n % ATOM_ROWS) // 32 if config.tile_n % ATOM_ROWS else Int32(0)
        mbarrier.wait(barriers.address(config, "accumulators", "empty", acc), acc_phase ^ 1, cluster=config.pair)
        tcgen05.fence_after()
        accumulators = [tensor_base + acc * tensor.acc + p * config.tile_n for p in range(config.products)]
        accumulate = Int32(0)
        for _ in cutlass.range(count, unroll=UNROLL):
            empty = first_empty + index * 8
            mbarrier.wait(empty + to_full, phase)
            start = lower + index * unit_bytes
            with cute.arch.elect_one():
                data = tcgen05.descriptor(start, upper_data)
                scales = tcgen05.descriptor(start + scale_units, upper_scales)
                stage_mma(config, data, scales, columns, accumulators, sfb_shift, accumulate)
                tcgen05.commit(empty, group=config.ctas, mask=mask_stage if multicast else None)
            accumulate = Int32(1)
            index, phase = advance(shared.stages, index, phase)
        with cute.arch.elect_one():
            tcgen05.commit(
                barriers.address(config, "accumulators", "full", acc),
                group=config.ctas,
                mask=mask_acc if config.pair else None,
            )
        acc, acc_phase = advance(tensor.acc_stages, acc, acc_phase)
        unit = next_unit(config, work, unit, count)

"""The loading warp: a stage of every operand's tile into each buffer that comes free, by TMA.

In a cluster each CTA loads its part of a tile for all that need it: A's goes to the CTAs along N, B's to those along M.
A CTA of a pair has its own rows of A and its own half of B's columns; B's scales go to both.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from ...ptx import mbarrier
from ...scale_layout import ATOM_ROWS
from .barriers import Barriers, advance
from .config import GemmConfig
from .graph import edge_of
from .operands import SCALE_WORD, data_layouts, element_types, make_mma, scale_layouts
from .plan import SharedPlan, StagePlan
from .scheduler import Work, next_unit, tile_of, units


def shared_tensors(config: GemmConfig, mma: cute.TiledMma, base: cute.Pointer) -> tuple:
    """(A, [B…], SFA, [SFB…]) in shared memory, from the first stage's address.

    Data: (MMA, MMA_M or MMA_N, MMA_K, STAGE); scales: (WORD, ATOM_K, ATOM_MN, STAGE).
    """
    stage = StagePlan(config)
    layout_a, layout_b = data_layouts(config, mma)
    layout_sfa, layout_sfb = scale_layouts(config)
    type_a, type_b = element_types(config)

    def data(name: str, dtype: type, layout: Any) -> cute.Tensor:
        pointer = cute.recast_ptr((base + stage.offset(name)).align(1024), swizzle_=layout.inner, dtype=dtype)
        return cute.make_tensor(pointer, layout.outer)

    def scale(name: str, layout: Any) -> cute.Tensor:
        return cute.make_tensor(cute.recast_ptr((base + stage.offset(name)).align(128), dtype=SCALE_WORD), layout)

    several = range(config.products)
    return (
        data("A", type_a, layout_a),
        [data(f"B{i}", type_b, layout_b) for i in several],
        scale("SFA", layout_sfa),
        [scale(f"SFB{i}", layout_sfb) for i in several],
    )


def multicast_masks(config: GemmConfig, work: Work) -> tuple:
    """CTAs of the cluster that get this CTA's part of (A and SFA, B, SFB): bit r is rank x + cm·(y + cn·part)."""
    cm, cn = config.cluster
    row = sum(1 << (cm * y) for y in range(cn))
    column = sum(1 << x for x in range(0, cm, config.ctas))
    everyone = (1 << cm) - 1
    first = work.part * (cm * cn)
    along_n, along_m = first + work.x, first + work.y * cm
    return (
        Int16(Int32(row) << along_n),
        Int16(Int32(column) << (along_m + work.v)),
        Int16(Int32(everyone) << along_m),
    )


def _data_copy(load: tuple, part: Any, shared: cute.Tensor, tile: tuple, place: Any, places: int) -> tuple:
    """(atom, source ((atom, rest), REST_MN, REST_K, L), target ((atom, rest), STAGE)) of A or of a B."""
    atom, tensor = load
    tiles = part(cute.local_tile(tensor, tile, (None, None, None)))  # (MMA, MMA_MN, MMA_K, REST_MN, REST_K, L)
    target, source = cpasync.tma_partition(
        atom, place, cute.make_layout(places), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )
    return atom, source, target


def _scale_source(load: tuple, shared: cute.Tensor, place: Any, places: int, atom_mn: Any, batch: Any) -> tuple:
    """The same of the scales of one tile, which may start at any atom along MN: source ((atom, rest), REST_K)."""
    atom, tensor = load
    box = shared.shape[:3]
    tiles = cute.local_tile(cute.domain_offset((0, 0, atom_mn, 0), tensor), box, (0, None, 0, batch))
    target, source = cpasync.tma_partition(
        atom, place, cute.make_layout(places), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )
    return atom, source, target


def _copies_of_tile(
    config: GemmConfig,
    loads_a: tuple,
    loads_b: tuple,
    data: tuple,
    scales: tuple,
    work: Work,
    masks: tuple,
    tile: tuple,
) -> list:
    """(atom, source ((atom, rest), REST_K), target ((atom, rest), STAGE), multicast mask) of each copy of a stage."""
    cm, cn = config.cluster
    tile_m, tile_n, batch = tile
    copy_a, copies_b = data
    sfa, sfbs = scales
    mask_a, mask_b, mask_sfb = (
        mask if shared > 1 else None for mask, shared in zip(masks, (cn, cm // config.ctas, cm))
    )
    copies = [
        (
            copy_a[0],
            copy_a[1][None, tile_m // config.ctas, None, cutlass.min(batch, loads_a[2] - 1)],
            copy_a[2],
            mask_a,
        ),
        (*_scale_source(loads_a[1], sfa, work.y, cn, tile_m, batch), mask_a),
    ]
    for load_b, (atom, source, target), sfb in zip(loads_b, copies_b, sfbs):
        copies.append((atom, source[None, tile_n, None, cutlass.min(batch, load_b[2] - 1)], target, mask_b))
        first_atom = tile_n * config.tile_n // ATOM_ROWS
        copies.append((*_scale_source(load_b[1], sfb, work.x, cm, first_atom, batch), mask_sfb))
    return copies


def _issue(copies: list, step: Any, stage: Any, full: cute.Pointer) -> None:
    """The copies of one stage; each signals ``full``."""
    for atom, source, target, mask in copies:
        options = {} if mask is None else {"mcast_mask": mask}
        cute.copy(atom, source[None, step], target[None, stage], tma_bar_ptr=full, **options)


@cute.jit
def load(
    config: cutlass.Constexpr[GemmConfig],
    loads_a: tuple,
    loads_b: tuple,
    base: cute.Pointer,
    barriers: Barriers,
    work: Work,
):
    """The loop of the loading warp. loads_a, loads_b: what ``operands.describe_a`` and ``describe_b`` returned."""
    mma = make_mma(config)
    part = mma.get_slice(work.v)
    a, bs, sfa, sfbs = shared_tensors(config, mma, base)
    cm, cn = config.cluster
    mask_a, mask_b, mask_sfb = multicast_masks(config, work)
    pair_x, y = work.x // config.ctas, work.y
    copy_a = _data_copy(loads_a[0], part.partition_A, a, (config.tile_m, config.tile_k), y, cn)
    copies_b = [
        _data_copy(loads_b[i][0], part.partition_B, bs[i], (config.tile_n, config.tile_k), pair_x, cm // config.ctas)
        for i in range(config.products)
    ]
    stages = SharedPlan(config).stages
    num_bytes = edge_of(config, "operands").full.tx_bytes
    index, phase = Int32(0), Int32(0)
    unit, end = units(config, work)
    while unit < end:
        tile_m, tile_n, batch, first, count = tile_of(config, work, unit, end)
        copies = _copies_of_tile(
            config, loads_a, loads_b, (copy_a, copies_b), (sfa, sfbs), work, (mask_a, mask_b, mask_sfb),
            (tile_m, tile_n, batch),
        )  # fmt: skip
        for step in cutlass.range(first, first + count, unroll=1):
            mbarrier.wait(barriers.address(config, "operands", "empty", index), phase ^ 1)
            full = barriers.pointer(config, "operands", "full", index)
            if work.v == 0:
                with cute.arch.elect_one():
                    mbarrier.expect_bytes(full.toint(), Int32(num_bytes))
            _issue(copies, step, index, full)
            index, phase = advance(stages, index, phase)
        unit = next_unit(config, work, unit, count)
    # commits of other CTAs may still be on their way to this one's barriers: all must come before it ends
    for _ in cutlass.range_constexpr(stages):
        mbarrier.wait(barriers.address(config, "operands", "empty", index), phase ^ 1)
        index, phase = advance(stages, index, phase)

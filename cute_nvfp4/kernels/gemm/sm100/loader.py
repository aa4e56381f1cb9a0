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

from ....ptx import mbarrier
from ....scale_layout import ATOM_ROWS
from ..barriers import Barriers, advance
from ..config import GemmConfig
from ..operand_source import Origin, acquire, origins
from ..pipeline_graph import edge_of
from ..tile_scheduler import Work, next_unit, tile_of, units
from .memory_plan import SharedPlan
from .operands import SharedOperands, make_mma, shared_operands


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


def _data_copy(
    load: tuple, part: Any, shared: cute.Tensor, tile: tuple, place: Any, places: int, index: Any, origin: Origin
) -> tuple:
    """(atom, source ((atom, rest), REST_K), target ((atom, rest), STAGE)) of tile ``index`` of A or of a B."""
    (atom, tensor), _, batches = load
    if origin.row is not None:
        tensor = cute.domain_offset((origin.row, 0, 0), tensor)
    tiles = part(cute.local_tile(tensor, tile, (None, None, None)))  # (MMA, MMA_MN, MMA_K, REST_MN, REST_K, L)
    target, source = cpasync.tma_partition(
        atom, place, cute.make_layout(places), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )
    return atom, source[None, index, None, cutlass.min(origin.batch, batches - 1)], target


def _scale_copy(load: tuple, shared: cute.Tensor, place: Any, places: int, atom_mn: Any, origin: Origin) -> tuple:
    """The same of the scales of a tile, which may start at any atom along MN."""
    _, (atom, tensor), _ = load
    if origin.atom is not None:
        atom_mn = atom_mn + origin.atom
    box = shared.shape[:3]
    tiles = cute.local_tile(cute.domain_offset((0, 0, atom_mn, 0), tensor), box, (0, None, 0, origin.batch))
    target, source = cpasync.tma_partition(
        atom, place, cute.make_layout(places), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )
    return atom, source, target


def _copies_of_tile(
    config: GemmConfig,
    loads_a: tuple,
    loads_b: tuple,
    part: Any,
    shared: SharedOperands,
    work: Work,
    masks: tuple,
    tile: tuple,
) -> list:
    """(atom, source ((atom, rest), REST_K), target ((atom, rest), STAGE), multicast mask, pointer to another map) of
    each copy of a stage."""
    cm, cn = config.cluster
    tile_m, tile_n, batch = tile
    tile_a, tile_b = (config.tile_m, config.tile_k), (config.tile_n, config.tile_k)
    pair_x, pairs = work.x // config.ctas, cm // config.ctas
    at_a, at_b = origins(config, work, batch)
    mask_a, mask_b, mask_sfb = (mask if places > 1 else None for mask, places in zip(masks, (cn, pairs, cm)))
    copies = []
    for load_a, a, sfa in zip(loads_a, shared.sA, shared.sSFA):
        data = _data_copy(load_a, part.partition_A, a, tile_a, work.y, cn, tile_m // config.ctas, at_a)
        copies.append((*data, mask_a, at_a.maps[0]))
        copies.append((*_scale_copy(load_a, sfa, work.y, cn, tile_m, at_a), mask_a, at_a.maps[1]))
    for load_b, b, sfb in zip(loads_b, shared.sB, shared.sSFB):
        copies.append(
            (*_data_copy(load_b, part.partition_B, b, tile_b, pair_x, pairs, tile_n, at_b), mask_b, at_b.maps[0])
        )
        first_atom = tile_n * config.tile_n // ATOM_ROWS
        copies.append((*_scale_copy(load_b, sfb, work.x, cm, first_atom, at_b), mask_sfb, at_b.maps[1]))
    return copies


def _issue(copies: list, step: Any, stage: Any, full: cute.Pointer) -> None:
    """The copies of one stage; each signals ``full``."""
    for atom, source, target, mask, other_map in copies:
        options = {} if mask is None else {"mcast_mask": mask}
        if other_map is not None:
            options["tma_desc_ptr"] = other_map
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
    shared = shared_operands(config, mma, base)
    masks = multicast_masks(config, work)
    stages = SharedPlan(config).stages
    num_bytes = edge_of(config, "operands").full.tx_bytes
    index, phase = Int32(0), Int32(0)
    if cutlass.const_expr(config.maps == "workspace"):
        # the kernel that writes the maps may still run
        cute.arch.griddepcontrol_wait()
    unit, end = units(config, work)
    while unit < end:
        tile_m, tile_n, batch, first, count = tile_of(config, work, unit, end)
        if cutlass.const_expr(config.maps == "workspace"):
            acquire(config, work, batch, unit)
        copies = _copies_of_tile(config, loads_a, loads_b, part, shared, work, masks, (tile_m, tile_n, batch))
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

"""The TMA copies that fill a stage: where a work tile's operands are in global memory, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from ...ptx import mbarrier
from .barriers import Barriers
from .operand_source import Origin
from .operands import OperandLoad, TmaCopy
from .problem import Problem, Scheduler
from .tile_scheduler import CtaPlace, WorkTile


@dataclass(frozen=True)
class Slot:
    """This CTA's part of what several load together: ``index`` of ``count``, sent to the CTAs of ``mask``."""

    index: Int32
    count: int
    mask: Int16


class StageCopy(NamedTuple):
    """One of the copies of a stage, for one work tile."""

    atom: cute.CopyAtom
    source: cute.Tensor  # ((atom, rest), REST_K)
    target: cute.Tensor  # ((atom, rest), STAGE)
    slot: Slot
    tensor_map: cute.Pointer | None


def partition(copy: TmaCopy, slot: Slot, shared: cute.Tensor, tiles: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """This CTA's part of ``shared``, ((atom, rest), STAGE), and of ``tiles``, ((atom, rest), …)."""
    modes = cute.rank(shared) - 1
    shared, tiles = cute.group_modes(shared, 0, modes), cute.group_modes(tiles, 0, modes)
    return cpasync.tma_partition(copy.atom, slot.index, cute.make_layout(slot.count), shared, tiles)


def data_copy(
    load: OperandLoad,
    partition_tile: Any,
    shared: cute.Tensor,
    tile: tuple[int, int],
    index: Int32,
    slot: Slot,
    origin: Origin,
) -> StageCopy:
    """The copy of tile ``index`` of an A or of a B; ``partition_tile``: partition_A or partition_B of the tiled MMA."""
    tensor = load.data.tensor  # (MN, K, L)
    if origin.row is not None:
        tensor = cute.domain_offset((origin.row, 0, 0), tensor)
    tiles = partition_tile(
        cute.local_tile(tensor, tile, (None, None, None))
    )  # (MMA, MMA_MN, MMA_K, REST_MN, REST_K, L)
    target, source = partition(load.data, slot, shared, tiles)  # source: ((atom, rest), REST_MN, REST_K, L)
    matrix = cutlass.min(origin.batch, load.batches - 1)
    return StageCopy(load.data.atom, source[None, index, None, matrix], target, slot, origin.data_map)


def scale_copy(load: OperandLoad, shared: cute.Tensor, atom_mn: Int32, slot: Slot, origin: Origin) -> StageCopy:
    """The copy of the scales of a tile, which may start at any atom along MN."""
    if origin.atom is not None:
        atom_mn = atom_mn + origin.atom
    tensor = cute.domain_offset((0, 0, atom_mn, 0), load.scales.tensor)  # (WORD, REST_K, REST_MN, L)
    tiles = cute.local_tile(tensor, shared.shape[:3], (0, None, 0, origin.batch))  # (WORD, ATOM_K, ATOM_MN, REST_K)
    target, source = partition(load.scales, slot, shared, tiles)  # source: ((atom, rest), REST_K)
    return StageCopy(load.scales.atom, source, target, slot, origin.scale_map)


def issue(copies: list[StageCopy], k_tile: Int32, stage: Int32, full: cute.Pointer) -> None:
    """The copies of one stage; each signals ``full``."""
    for copy in copies:
        options = {"mcast_mask": copy.slot.mask} if copy.slot.count > 1 else {}
        if copy.tensor_map is not None:
            options["tma_desc_ptr"] = copy.tensor_map
        cute.copy(copy.atom, copy.source[None, k_tile], copy.target[None, stage], tma_bar_ptr=full, **options)


class StageLoader(Protocol):
    """What an architecture's loading warp knows: where its CTA is, and the copies of each stage of a work tile."""

    place: CtaPlace

    def copies(self, work: WorkTile) -> list[StageCopy]: ...


@cute.jit
def fill_stages(loader: StageLoader, barriers: Barriers, scheduler: Scheduler, problem: Problem):
    """The loop of the loading warp."""
    index, phase, filled = Int32(0), Int32(0), Int32(0)
    problem.wait()
    cursor, end = scheduler.range()
    while cursor < end:
        tile = scheduler.tile(cursor, end)
        problem.acquire(tile.batch, cursor, loader.place.workers)
        copies = loader.copies(tile)
        for k_tile in cutlass.range(tile.k_first, tile.k_first + tile.k_count, unroll=1):
            # the first round of stages is free: a wait takes 50 cycles, and all of them come before the last MMA
            if filled >= barriers.operands.edge.stages:
                mbarrier.wait(barriers.operands.empty(index), phase ^ 1)
            filled += 1
            full = barriers.operands.full_pointer(index)
            if loader.place.v == 0:
                with cute.arch.elect_one():
                    mbarrier.expect_bytes(full.toint(), Int32(barriers.operands.edge.full.tx_bytes))
            issue(copies, k_tile, index, full)
            index, phase = barriers.operands.advance(index, phase)
        cursor = scheduler.after(cursor, tile)
    # commits of other CTAs may still be on their way to this one's barriers: all must come before it ends
    for _ in cutlass.range(barriers.operands.edge.stages, unroll=1):
        mbarrier.wait(barriers.operands.empty(index), phase ^ 1)
        index, phase = barriers.operands.advance(index, phase)

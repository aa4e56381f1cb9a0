"""The TMA copies that fill a stage: their sources in global memory, and their targets in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from ...ptx import mbarrier
from ...scale_layout import ATOM_ROWS
from .barriers import PipelineState, Ring
from .config import GemmConfig
from .operand_source import Origin
from .operands import Loads, OperandLoad, SharedOperands, TmaCopy
from .problem import Problem, Scheduler
from .stage_loader import fill_stages
from .tile_scheduler import CtaPlace, CursorRange, WorkTile


@dataclass(frozen=True)
class Slot:
    """This CTA's part of a tile that several CTAs load: ``index`` of ``count``, multicast to the CTAs of ``mask``."""

    index: Int32
    count: int
    mask: Int16


class StageCopy(NamedTuple):
    """One of the copies that fill a stage, for one work tile."""

    atom: cute.CopyAtom
    source: cute.Tensor  # ((atom, rest), REST_K)
    target: cute.Tensor  # ((atom, rest), STAGE)
    slot: Slot
    tensor_map: cute.Pointer | None


def partition(copy: TmaCopy, slot: Slot, shared: cute.Tensor, tiles: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """This CTA's parts of ``shared``, as ((atom, rest), STAGE), and of ``tiles``, as ((atom, rest), …)."""
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
    """The copy of tile ``index`` of an A or a B. partition_tile: the tiled MMA's partition_A or partition_B."""
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
    """The copy of a tile's scale factors, which may start at any atom along MN."""
    if origin.atom is not None:
        atom_mn = atom_mn + origin.atom
    tensor = cute.domain_offset((0, 0, atom_mn, 0), load.scales.tensor)  # (WORD, REST_K, REST_MN, L)
    tiles = cute.local_tile(tensor, shared.shape[:3], (0, None, 0, origin.batch))  # (WORD, ATOM_K, ATOM_MN, REST_K)
    target, source = partition(load.scales, slot, shared, tiles)  # source: ((atom, rest), REST_K)
    return StageCopy(load.scales.atom, source, target, slot, origin.scale_map)


def issue(copies: list[StageCopy], k_tile: Int32, stage: Int32, full: cute.Pointer) -> None:
    """Issues the copies of one stage; each signals ``full``."""
    for copy in copies:
        options = {"mcast_mask": copy.slot.mask} if copy.slot.count > 1 else {}
        if copy.tensor_map is not None:
            options["tma_desc_ptr"] = copy.tensor_map
        cute.copy(copy.atom, copy.source[None, k_tile], copy.target[None, stage], tma_bar_ptr=full, **options)


@dataclass(frozen=True)
class TmaCopies:
    """The copies that fill the stages of one work tile by TMA: the ``TileCopies`` of ``stage_loader``."""

    copies: list[StageCopy]
    steps: CursorRange
    place: CtaPlace

    @cute.jit
    def acquire(self, ring: Ring, at: PipelineState, step: Int32, filled: Int32):
        """Waits until the stage is empty."""
        # the first round of stages is free: a wait takes 50 cycles, and these waits would delay the first MMA
        if filled >= ring.edge.stages:
            mbarrier.wait(ring.empty(at.stage), at.phase ^ 1)

    @cute.jit
    def start(self, ring: Ring, stage: Int32, step: Int32):
        """Starts the copies of a stage. The even CTA of a pair announces the bytes of both CTAs."""
        full = ring.full_pointer(stage)
        if self.place.v == 0:
            with cute.arch.elect_one():
                ring.announce(stage)
        issue(self.copies, step, stage, full)


def first_atom(index: Int32, rows: int) -> Int32:
    """The scale atom in which tile ``index`` of ``rows`` rows starts, possibly in the middle of the atom."""
    return index * rows // ATOM_ROWS


class CtaTile(NamedTuple):
    """What a CTA loads of an operand for a work tile: tile ``index`` of ``rows`` rows, which a pair of CTAs shares.

    partition: the tiled MMA's partition_A or partition_B. slot, scale_slot: the CTA's part of what several CTAs load.
    first_atom: the first scale atom of the tile.
    """

    partition: Callable[[cute.Tensor], cute.Tensor]
    rows: int
    index: Int32
    slot: Slot
    first_atom: Callable[[], Int32]
    scale_slot: Slot


@dataclass(frozen=True)
class TmaLoader:
    """The loading warp's access to the copies of any work tile."""

    config: GemmConfig
    loads: Loads
    shared: SharedOperands
    place: CtaPlace
    problem: Problem

    def tiles(self, work: WorkTile) -> Iterator[CtaTile]:
        """This CTA's tile of A, then its tile of B."""
        raise NotImplementedError

    def stage_copies(self, work: WorkTile) -> list[StageCopy]:
        """The copies that fill each stage of a work tile."""
        shared, copies = self.shared, []
        origins = self.problem.origins(work.batch)
        sides = (self.loads.a, shared.sA, shared.sSFA), (self.loads.b, shared.sB, shared.sSFB)
        for (loads, places, scales), origin, tile in zip(sides, origins, self.tiles(work)):
            shape = (tile.rows, self.config.tile_k)
            for load, place, atoms in zip(loads, places, scales):
                copies.append(data_copy(load, tile.partition, place, shape, tile.index, tile.slot, origin))
                copies.append(scale_copy(load, atoms, tile.first_atom(), tile.scale_slot, origin))
        return copies

    def copies(self, tile: WorkTile, cursor: Int32) -> TmaCopies:
        """The copies of a work tile, once its tensor maps are visible."""
        self.problem.acquire(tile.batch, cursor, self.place.workers)
        return TmaCopies(self.stage_copies(tile), CursorRange(tile.k_first, tile.k_first + tile.k_count), self.place)

    @cute.jit
    def fill(self, ring: Ring, scheduler: Scheduler):
        """Runs the loop of the loading warp."""
        self.problem.wait()
        at = fill_stages(self.copies, ring, scheduler)
        # commits of other CTAs may still be on their way to this CTA's barriers, and must arrive before it exits
        for _ in cutlass.range(ring.edge.stages, unroll=1):
            mbarrier.wait(ring.empty(at.stage), at.phase ^ 1)
            at = ring.advance(at)

"""The mainloop of weights that are decoded, for WGMMA, for ``mma.sync``, and for tcgen05.

``produce`` reads a lane's words of a stage, ``multiply`` decodes those of one packed tile and adds its products,
``between`` is what else a warp does while they are under way. Instructions of WGMMA are asynchronous: the words of the
next stage are read, and those of the next tile decoded, while the tensor cores multiply, and a stage is given back once
the products of the tile after it have been started. With ``mma.sync`` one thing comes after the other; so it does with
tcgen05, but that products are under way while the next tile is decoded, and give the stage back themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from ....ptx import async_copy, mbarrier
from ..barriers import PipelineState, Ring
from ..sm90.config import STAGE_TILES, WgmmaConfig
from .decode import PackedLane, load_lane
from .rows import load_rows

WARP = 32


@dataclass(frozen=True)
class OperandMemory:
    """Where operands are in shared memory: the address of the first stage's packed tiles, x, and their barriers.
    tensor: the word that says where the CTA's tensor memory is, on tcgen05."""

    weights: Int32
    sX: cute.Tensor  # (tile_n, stage_k, STAGE)
    ring: Ring
    tensor: cute.Pointer | None = None


@dataclass(frozen=True)
class Products:
    """What a thread multiplies with. An architecture adds its registers, and ``multiply``.

    row_tile, slab: where the slab of its warp is in a stage. thread: of those with the same stages.
    """

    asynchronous: ClassVar[bool]

    config: WgmmaConfig
    memory: OperandMemory
    row_tile: Int32
    slab: Int32
    thread: Int32
    acc: cute.Tensor

    def clear(self) -> None:
        """Begins the sums of a work tile."""
        self.acc.fill(0.0)

    def produce(self, at: PipelineState) -> tuple[Any, ...]:
        """What a lane multiplies of a stage that has come, a value for each of its packed tiles."""
        return self.words(at.stage)

    def words(self, stage: Int32) -> tuple[PackedLane, ...]:
        """A lane's codes and scales of the packed tiles of a stage."""
        cfg, packing, lane = self.config, self.config.weights, self.thread % WARP
        if packing.in_rows:
            rows = self.memory.weights + stage * cfg.weight_bytes + self.row_tile * cfg.tile_bytes
            return load_rows(rows, self.slab, lane, bool(cfg.gate), packing)
        parts = 2 if cfg.half_tiles else 1
        first = self.memory.weights + stage * cfg.weight_bytes + self.row_tile * (cfg.tile_bytes // parts)
        codes = first + self.slab * packing.slab_code_bytes
        scales = first + (packing.code_bytes // parts + self.slab * packing.slab_scale_bytes)
        distances = [i * (packing.tile_bytes // parts) for i in range(cfg.stage_tiles)]
        return tuple(load_lane(codes + at, scales + at, lane, packing) for at in distances)

    def multiply(self, packed: Any, tile: int, part: int, stage: Int32, k_tile: Int32 | int) -> None:
        """Decodes packed tile ``tile`` of a work tile's k-tile ``k_tile``, which is ``part`` of a stage, and adds its
        products."""
        raise NotImplementedError

    def promote(self) -> None:
        """Adds the sums of a k-tile in fp32, where ``config.promoted`` says so."""
        raise NotImplementedError

    @cute.jit
    def release(self, stage: Int32):
        """This warp has read a stage: its lanes by loads, its warpgroup's MMAs by themselves."""
        ring = self.memory.ring
        # weights are this CTA's alone: each lane says that it has read its own
        mbarrier.arrive(ring.empty(stage))
        if cutlass.const_expr(self.config.cluster_rows > 1):
            # x went to every CTA of the cluster: each waits for all
            rank, _, _ = cute.arch.block_idx()
            lane = self.thread % WARP
            if lane < self.config.cluster_rows - 1:
                mbarrier.arrive_after_reads(ring.empty(stage), (rank + 1 + lane) % self.config.cluster_rows)


class Progress(NamedTuple):
    """Where the mainloop is: the last stage whose products it started, the one it multiplies, and that one's words."""

    last: Int32
    at: PipelineState
    packed: tuple[Any, ...]


def nothing(tile: Int32 | int) -> None:
    """There is nothing to do between products."""


@dataclass(frozen=True)
class Mainloop:
    """Sums products over stages of the ring. between: called with the number of each packed tile."""

    products: Products
    between: Callable[[int], None] = nothing

    @cute.jit
    def run(self, at: PipelineState, k_tiles: Int32) -> PipelineState:
        """Adds the products of the next ``k_tiles`` k-tiles; the state after them."""
        now = self.begin(at)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            for first in cutlass.range_constexpr(0, STAGE_TILES, self.products.config.stage_tiles):
                now = self.add_stage(now, first, k_tile, k_tiles)
        if cutlass.const_expr(self.products.asynchronous):
            warpgroup.wait_group(0)
            self.products.release(now.last)
        return now.at

    @cute.jit
    def run_last(self, at: PipelineState, k_tiles: cutlass.Constexpr[int]):
        """Adds the products of the last ``k_tiles`` k-tiles, unrolled; nobody fills their stages again."""
        now = self.begin(at)
        for k_tile in cutlass.range_constexpr(k_tiles):
            for first in cutlass.range_constexpr(0, STAGE_TILES, self.products.config.stage_tiles):
                now = self.add_stage(now, first, k_tile, k_tiles)
        warpgroup.wait_group(0)

    def begin(self, at: PipelineState) -> Progress:
        return Progress(at.stage, at, self.take(at) if self.products.asynchronous else ())

    def take(self, at: PipelineState) -> tuple[Any, ...]:
        """The words of a stage, once they have come."""
        mbarrier.wait(self.products.memory.ring.full(at.stage), at.phase)
        if self.products.config.gathered:
            # rows of x came by cp.async, and wgmma reads in the asynchronous proxy
            async_copy.fence_async_shared()
        return self.products.produce(at)

    @cute.jit
    def add_stage(
        self, now: Progress, first: cutlass.Constexpr[int], k_tile: Int32 | int, k_tiles: Int32 | int
    ) -> Progress:
        """Adds the products of the stage that has packed tile ``first`` of k-tile ``k_tile`` of so many."""
        products, config = self.products, self.products.config
        last, at, packed = now
        if cutlass.const_expr(products.asynchronous):
            following = products.memory.ring.advance(at, config.k_groups)
            for part in cutlass.range_constexpr(config.stage_tiles):
                tile = first + part
                products.multiply(packed[part], tile, part, at.stage, k_tile)
                self.between(k_tile * STAGE_TILES + tile)
                if cutlass.const_expr(part == config.stage_tiles - 1):
                    if tile + 1 < STAGE_TILES or k_tile + 1 < k_tiles:
                        packed = self.take(following)
                if cutlass.const_expr(config.promoted and tile == STAGE_TILES - 1):
                    warpgroup.wait_group(0)
                    products.promote()
                else:
                    # all but the group just committed have been done: the stage before this one is free
                    warpgroup.wait_group(1)
                if cutlass.const_expr(part == 0):
                    if tile > 0 or k_tile > 0:
                        products.release(last)
            last, at = at.stage, following
        else:
            packed = self.take(at)
            for part in cutlass.range_constexpr(config.stage_tiles):
                products.multiply(packed[part], first + part, part, at.stage, k_tile)
                self.between(k_tile * STAGE_TILES + first + part)
            products.release(at.stage)
            at, packed = products.memory.ring.advance(at), ()
        return Progress(last, at, packed)

"""The mainloop of decoded weights, for WGMMA, ``mma.sync`` and tcgen05.

``produce`` reads a lane's words of a stage, ``multiply`` decodes those of one packed tile and adds its products, and
``between`` is what else a warp does while these are in flight. WGMMA is asynchronous: warps read the words of the next
stage, and decode the next packed tile, while the tensor cores multiply. They release a stage once they have started the
products of the tile after it. With ``mma.sync`` the steps follow one another, and so they do with tcgen05. But products
of tcgen05 are in flight while warps decode the next tile, and release the stage when they complete.
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
    """The operands in shared memory: the address of the first stage's packed tiles, x, and the barriers of both.
    tensor: on tcgen05, the word with the address of the CTA's tensor memory."""

    weights: Int32
    sX: cute.Tensor  # (tile_n, stage_k, STAGE)
    ring: Ring
    tensor: cute.Pointer | None = None


@dataclass(frozen=True)
class Products:
    """The operands and accumulators of a thread. Each architecture adds its registers, and ``multiply``.

    row_tile, slab: where the slab of the thread's warp is in a stage. thread: its index among the readers of a stage.
    """

    asynchronous: ClassVar[bool]

    config: WgmmaConfig
    memory: OperandMemory
    row_tile: Int32
    slab: Int32
    thread: Int32
    acc: cute.Tensor

    def clear(self) -> None:
        """Clears the accumulators for a work tile."""
        self.acc.fill(0.0)

    def produce(self, at: PipelineState) -> tuple[Any, ...]:
        """The words that a lane multiplies of a full stage, one value for each packed tile."""
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
        """Decodes packed tile ``tile`` of k-tile ``k_tile``, which is ``part`` of a stage, and adds its products."""
        raise NotImplementedError

    def promote(self) -> None:
        """Adds the sums of a k-tile in fp32, if ``config.promoted``."""
        raise NotImplementedError

    @cute.jit
    def release(self, stage: Int32):
        """Releases a stage that this warp's lanes and its warpgroup's MMAs have read."""
        ring = self.memory.ring
        # weights are in this CTA only: each lane signals that it has read its own
        mbarrier.arrive(ring.empty(stage))
        if cutlass.const_expr(self.config.cluster_rows > 1):
            # x went to every CTA of the cluster, each of which waits for all
            rank, _, _ = cute.arch.block_idx()
            lane = self.thread % WARP
            if lane < self.config.cluster_rows - 1:
                mbarrier.arrive_after_reads(ring.empty(stage), (rank + 1 + lane) % self.config.cluster_rows)


class Progress(NamedTuple):
    """The state of the mainloop: the last stage whose products it started, the current stage, and its words."""

    last: Int32
    at: PipelineState
    packed: tuple[Any, ...]


def nothing(tile: Int32 | int) -> None:
    """Does nothing between products."""


@dataclass(frozen=True)
class Mainloop:
    """Sums products over the stages of the ring. between: called with the index of each packed tile."""

    products: Products
    between: Callable[[int], None] = nothing

    @cute.jit
    def run(self, at: PipelineState, k_tiles: Int32) -> PipelineState:
        """Adds the products of the next ``k_tiles`` k-tiles, and returns the state after them."""
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
        """Adds the products of the last ``k_tiles`` k-tiles, unrolled. No loading warp fills their stages again."""
        now = self.begin(at)
        for k_tile in cutlass.range_constexpr(k_tiles):
            for first in cutlass.range_constexpr(0, STAGE_TILES, self.products.config.stage_tiles):
                now = self.add_stage(now, first, k_tile, k_tiles)
        warpgroup.wait_group(0)

    def begin(self, at: PipelineState) -> Progress:
        return Progress(at.stage, at, self.take(at) if self.products.asynchronous else ())

    def take(self, at: PipelineState) -> tuple[Any, ...]:
        """The words of a stage, once it is full."""
        mbarrier.wait(self.products.memory.ring.full(at.stage), at.phase)
        if self.products.config.gathered:
            # threads copied rows of x by cp.async, and wgmma reads in the asynchronous proxy
            async_copy.fence_async_shared()
        return self.products.produce(at)

    @cute.jit
    def add_stage(
        self, now: Progress, first: cutlass.Constexpr[int], k_tile: Int32 | int, k_tiles: Int32 | int
    ) -> Progress:
        """Adds the products of the stage that begins with packed tile ``first`` of k-tile ``k_tile``."""
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
                    # all wgmmas but the group just committed are complete: the previous stage is free
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

"""x in NVFP4 rows, which the loading warpgroup decodes into the stages that ``wgmma`` reads.

Each of the four warps of the loading warpgroup has slabs of sixteen rows of x. A lane loads codes and scales one stage
ahead, as a lane of operand A does for a weight (``rows``). It decodes them by the same instructions, and stores each
pair of columns where TMA's swizzle would have it; the lanes of a store write to different banks. No launch decodes x
first, and L2 delivers 4.5 bits an element instead of 16. Two of the warps also copy the weight's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ....ptx import mbarrier
from ....ptx.async_copy import fence_async_shared
from ....ptx.memory import load_global, store_shared
from ....scale_layout import ATOM_BYTES, ATOM_ROWS
from ....weight_layout import HALF_SLAB, SLAB_ROWS, STEPS, TILE_ROWS
from ...arith import div, mod
from ..sm90.arguments import RowsOfX, RowWeight
from ..sm90.config import GATHER_THREADS, STAGE_TILES, WARPGROUP, WgmmaConfig
from ..tile_scheduler import StaticScheduler, WorkTile
from .decode import ROW_LANES
from .loaders import StageOrder
from .mainloop import OperandMemory
from .rows import CHUNK, ROW_BYTES, SCALE_BYTES, SCALE_ROWS, WORD, copy_rows, decoded_rows, lane_tiles, rows_of_weight

DECODING_WARPS = WARPGROUP // 32
"""Warps of the loading warpgroup."""
SWIZZLED_BYTES = 128
"""Bytes of a row that are swizzled together: 64 elements, those of a packed tile."""


class LaneRows(NamedTuple):
    """The addresses of a lane's codes and scales of one row of x, at the beginning of K."""

    codes: Int64
    scales: Int64


@dataclass(frozen=True)
class LaneOfX:
    """A lane of a decoding warp, which has slab ``warp`` and every fourth one after it. g, quad: its row in half a
    slab, and its index among the four lanes of that row."""

    config: WgmmaConfig
    x: RowsOfX
    warp: Int32
    g: Int32
    quad: Int32

    @property
    def slabs(self) -> int:
        """Slabs of each warp."""
        return self.config.tile_n // SLAB_ROWS // DECODING_WARPS

    def rows(self, tile: WorkTile) -> list[LaneRows]:
        """The lane's two rows in each slab of a work tile. Rows beyond the last repeat the last row."""
        x, found, data, scale = self.x, [], self.x.data.toint(), self.x.scale.toint()
        if self.config.batched:
            data, scale = data + Int64(tile.batch) * x.batch.codes, scale + Int64(tile.batch) * x.batch.scales
        for i in range(2 * self.slabs):
            row = tile.n * self.config.tile_n + self.warp * SLAB_ROWS + self.g
            row = row + (i // 2 * DECODING_WARPS * SLAB_ROWS + i % 2 * HALF_SLAB)
            row = cutlass.min(row, x.rows - 1)
            codes = data + Int64(row) * x.row_stride + self.quad * CHUNK
            in_atom = mod(row, SCALE_ROWS) * CHUNK + div(mod(row, ATOM_ROWS), SCALE_ROWS) * WORD
            atom = div(row, ATOM_ROWS) * x.atoms + div(self.quad, 2)
            found.append(LaneRows(codes, scale + Int64(atom) * ATOM_BYTES + in_atom))
        return found

    def load(self, rows: list[LaneRows], step: Int32) -> tuple[Uint32, ...]:
        """Loads the words of a stage: four of codes and one of scales for each row."""
        words: list[Uint32] = []
        for row in rows:
            words += load_global(row.codes + Int64(step) * ROW_BYTES, CHUNK)
            words += load_global(row.scales + Int64(step) * SCALE_BYTES, WORD)
        return tuple(words)

    def store(self, words: tuple[Uint32, ...], stage: Int32) -> None:
        """Decodes the words of a stage. stage: the shared address of its x."""
        each, places = CHUNK // WORD + 1, self.places(stage)
        for slab in range(self.slabs):
            low, high = words[2 * slab * each :][:each], words[(2 * slab + 1) * each :][:each]
            lanes = lane_tiles((low[:-1], high[:-1]), (low[-1], high[-1]), self.quad, self.config.weights)
            for tile, packed in enumerate(lanes):
                first = tile * self.config.tile_n + slab * DECODING_WARPS * SLAB_ROWS
                for register, step, pair in decoded_rows(packed, self.config.weights):
                    row = first + register % 2 * HALF_SLAB
                    store_shared(places[2 * step + register // 2] + row * SWIZZLED_BYTES, [pair])

    def places(self, stage: Int32) -> list[Int32]:
        """Where the lane stores its pair in each sixteen bytes of row g of the warp's first slab. Chunk c of row r is
        at chunk c ^ r % 8."""
        row = stage + (self.warp * SLAB_ROWS + self.g) * SWIZZLED_BYTES + self.quad * WORD
        return [row + (self.g ^ chunk) * CHUNK for chunk in range(2 * STEPS)]


@cute.jit
def fill_with_rows(
    order: StageOrder, weight: RowWeight, x: RowsOfX, memory: OperandMemory, scheduler: StaticScheduler, thread: Int32
):
    """Runs the loop of a thread of the loading warpgroup: it fills every free stage with rows of weights and of x.
    thread: the thread in the warpgroup, whose last two warps also copy weights."""
    cfg, ring = order.config, memory.ring
    warp, lane = div(thread, 32), mod(thread, 32)
    own = LaneOfX(cfg, x, warp, div(lane, ROW_LANES), mod(lane, ROW_LANES))
    copier = thread - (WARPGROUP - GATHER_THREADS)
    first_x, at = memory.sX.iterator.toint(), ring.start()
    cursor, end = scheduler.range()
    while cursor < end:
        tile = scheduler.tile(cursor, end)
        steps = order.steps(tile)
        rows = own.rows(tile)
        words = own.load(rows, steps.first)
        for step in cutlass.range(steps.first, steps.end, unroll=1):
            mbarrier.wait(ring.empty(at.stage), at.phase ^ 1)
            if copier >= 0:
                of_weight, row_tile = rows_of_weight(cfg, weight, tile.batch), tile.m * (cfg.tile_m // TILE_ROWS)
                target = memory.weights + at.stage * cfg.weight_bytes
                copy_rows(cfg, of_weight, row_tile, target, copier, step)
                mbarrier.arrive_after_copies(ring.full(at.stage))
            # loads of the next stage are in flight while this one is decoded
            following = own.load(rows, cutlass.min(step + 1, steps.end - 1))
            own.store(words, first_x + at.stage * cfg.x_bytes)
            # wgmma reads in the asynchronous proxy
            fence_async_shared()
            mbarrier.arrive(ring.full(at.stage))
            words = following
            at = ring.advance(at)
        cursor = scheduler.after(cursor, tile)


assert STAGE_TILES * SWIZZLED_BYTES == 4 * ROW_BYTES

"""The loader with stages in shared memory: a warp copies whole lines into a ring of its own with ``cp.async``.

Shared memory (200 KB on an SM) then limits the bytes in flight, instead of registers. Lanes copy sixteen bytes each in
the order of memory, four rows of 128 bytes in an instruction, so that every sector is requested once. They read in the
dot engine's order, 32 bytes of two rows each. Only the lanes of one warp synchronise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.async_copy import copy_async
from ...ptx.memory import load_shared, store_shared
from ..arith import div, mod
from .config import ROW_SEGMENTS, ROWS_SHAPE, ROWS_STRIDE, SEGMENT_BYTES, SLICE_BYTES, TILE_ROWS, GemvConfig
from .dot import BLOCK_K, LANE_BLOCKS, QUAD
from .operands import Fragment, LaneAddresses, MatrixA, Rest, lane_scales, tile_row
from .scales import load_scales

_DATA_BYTES = TILE_ROWS * SLICE_BYTES
_SEGMENT_BLOCKS = 2 * SEGMENT_BYTES // BLOCK_K
# rows of the tile that one instruction of the warp copies, and the number of instructions
_COPY_ROWS = 32 // ROW_SEGMENTS
_COPIES = TILE_ROWS // _COPY_ROWS


class RingStages(NamedTuple):
    """The ring of a warp, as the address in shared memory that inline PTX takes (``cp.async``, ``ld.shared``).

    A stage is a tile's slice, (SEGMENT, ROW) of sixteen bytes, (8, 16) : (16, 128) with Swizzle<1, 4, 3>: segments of
    odd rows are swapped in pairs, so that the eight lanes of a 128-bit access (two rows, every other segment) use all
    banks. The scales follow: (LANE, ROW_OF_LANE, 4), eight bytes for each lane.
    """

    base: Int32
    lane: Int32

    def segment(self, base: Int32, row: Int32, segment: Int32) -> Int32:
        # the swizzle, applied to coordinates: one AND and one XOR
        return base + row * SLICE_BYTES + (segment ^ (row & 1)) * SEGMENT_BYTES

    def scales(self, base: Int32) -> Int32:
        return base + _DATA_BYTES + self.lane * 8


class RingLoader:
    """Copies slices of A into a ring in shared memory, and reads fragments from it."""

    unroll = 1

    def __init__(self, config: GemvConfig) -> None:
        self.config = config
        # a stage is overwritten only after its slice has been used
        self.ahead = config.stages - 1

    def allocate(self, smem: SmemAllocator, warp: Int32, lane: Int32) -> RingStages:
        ring_bytes = self.config.stages * self.config.stage_bytes
        rings = smem.allocate_array(cutlass.Uint8, self.config.warps * ring_bytes, byte_alignment=128)
        return RingStages(rings.toint() + warp * ring_bytes, lane)

    def addresses(self, a: MatrixA, lane: Int32, slice_index: Int32) -> LaneAddresses:
        """The addresses, in tile 0, of the segment that a lane copies first and of the scales that it reads."""
        inside = Int64(slice_index * SLICE_BYTES + mod(lane, ROW_SEGMENTS) * SEGMENT_BYTES)
        data = a.data + Int64(tile_row(0, div(lane, ROW_SEGMENTS), 0)) * a.row + inside
        return LaneAddresses(data, *lane_scales(self.config, a, lane, slice_index))

    def fetch(self, a: MatrixA, where: LaneAddresses, rest: Rest | None, stages: RingStages, stage: Int32) -> None:
        """Starts copying a slice of a tile into ``stage``. rest: None if all of the slice exists."""
        config, lane = self.config, stages.lane
        base = stages.base + stage * config.stage_bytes
        segment, first_row = mod(lane, ROW_SEGMENTS), div(lane, ROW_SEGMENTS)
        for i in range(_COPIES):
            source = where.data + _later_row(i) * a.row
            target = stages.segment(base, first_row + i * _COPY_ROWS, segment)
            for part in range(SEGMENT_BYTES // config.copy_bytes):
                offset = part * config.copy_bytes
                size = None
                if rest is not None:
                    row_of_tile = tile_row(0, first_row, 0) + _later_row(i)
                    blocks = rest.existing_blocks(row_of_tile, segment * _SEGMENT_BLOCKS)
                    size = cutlass.max(cutlass.min(blocks * 8 - offset, config.copy_bytes), 0)
                copy_async(target + offset, source + offset, config.copy_bytes, size, evict_first=True)
        self._copy_scales(where, lane, rest, stages.scales(base))

    def _copy_scales(self, where: LaneAddresses, lane: Int32, rest: Rest | None, target: Int32) -> None:
        config = self.config
        if config.a_scale == "blocked" and rest is None:
            # the lane's two rows are neighbours in the atom
            copy_async(target, where.scale, 8)
        elif config.a_scale == "rowmajor" and config.scale_word:
            for r, address in enumerate(where.scales):
                size = None
                if rest is not None:
                    row = tile_row(0, div(lane, QUAD), r)
                    size = rest.existing_blocks(row, mod(lane, QUAD) * LANE_BLOCKS)
                    size = cutlass.max(cutlass.min(size, LANE_BLOCKS), 0)
                copy_async(target + 4 * r, address, 4, size)
        else:
            # scales that need a mask, or that are single bytes, go through registers
            store_shared(target, load_scales(config, where, lane, rest))

    def take(self, stages: RingStages, stage: Int32) -> Fragment:
        """The lane's fragment of the slice that :meth:`fetch` has copied into ``stage``."""
        lane = stages.lane
        base = stages.base + stage * self.config.stage_bytes
        rows = []
        for r in range(2):
            row = div(lane, QUAD) + 8 * r
            words: list[Uint32] = []
            for i in range(2):
                words += load_shared(stages.segment(base, row, mod(lane, QUAD) * 2 + i), SEGMENT_BYTES)
            rows.append(words)
        return Fragment(rows, load_shared(stages.scales(base), 8))


def _later_row(copy: int) -> Any:
    """Rows from the row that a lane copies with its first instruction to the row of instruction ``copy``."""
    return cute.crd2idx(copy * _COPY_ROWS, cute.make_layout(ROWS_SHAPE, stride=ROWS_STRIDE))

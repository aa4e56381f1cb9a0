"""The loader with stages in registers: each lane loads its own 32 bytes of its two rows, by 256-bit loads.

It is for sm_120a, whose shared memory has no room for :mod:`.ring_loader`'s stages of enough warps. With 128-bit loads
a lane's 32 bytes take two instructions, each of which touches half of every sector, so that L2 gets two requests for
everything; :mod:`.ring_loader` is the loader there.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.memory import load_global, load_global_if
from ..arith import div, mod
from .config import LANE_BYTES, ROWS_STRIDE, SLICE_BYTES, GemvConfig
from .dot import LANE_BLOCKS, QUAD
from .operands import Fragment, LaneAddresses, MatrixA, Rest, lane_scales, tile_row
from .scales import load_scales

_POLICY = {"l1": "no_allocate", "l2": "evict_first"}
_WORDS = LANE_BYTES // 4


class RegisterStages(NamedTuple):
    """The stages of a lane, in registers."""

    data: cute.Tensor  # (WORDS, ROWS, STAGES)
    scales: cute.Tensor  # (ROWS, STAGES)
    lane: Int32


class RegisterLoader:
    """Loads slices of A from global memory to the registers of the lane that multiplies them."""

    def __init__(self, config: GemvConfig) -> None:
        self.config = config
        # slices loaded before the first is used, and stages of an iteration: registers need constant indices
        self.ahead = self.unroll = config.stages

    def allocate(self, smem: SmemAllocator, warp: Int32, lane: Int32) -> RegisterStages:
        stages = self.config.stages
        data = cute.make_rmem_tensor((_WORDS, 2, stages), Uint32)
        return RegisterStages(data, cute.make_rmem_tensor((2, stages), Uint32), lane)

    def addresses(self, a: MatrixA, lane: Int32, slice_index: Int32) -> LaneAddresses:
        """The addresses of the lane's part of its first row, and of its scales, in tile 0."""
        inside = Int64(slice_index * SLICE_BYTES + mod(lane, QUAD) * LANE_BYTES)
        data = a.data + Int64(tile_row(0, div(lane, QUAD), 0)) * a.row + inside
        return LaneAddresses(data, *lane_scales(self.config, a, lane, slice_index))

    def fetch(self, a: MatrixA, where: LaneAddresses, rest: Rest | None, stages: RegisterStages, stage: int) -> None:
        """Loads the lane's part of a slice into ``stage``. rest: None if all of the slice exists."""
        lane = stages.lane
        for r in range(2):
            count = None
            if rest is not None:
                count = rest.existing_blocks(tile_row(0, div(lane, QUAD), r), mod(lane, QUAD) * LANE_BLOCKS)
            for w, word in enumerate(self._load(where.data + r * ROWS_STRIDE[1] * a.row, count)):
                stages.data[w, r, stage] = word
        for r, word in enumerate(load_scales(self.config, where, lane, rest)):
            stages.scales[r, stage] = word

    def take(self, stages: RegisterStages, stage: int) -> Fragment:
        """The fragment that :meth:`fetch` has loaded into ``stage``."""
        rows = [[stages.data[w, r, stage] for w in range(_WORDS)] for r in range(2)]
        return Fragment(rows, [stages.scales[r, stage] for r in range(2)])

    def _load(self, address: Int64, count: Int32 | None) -> list[Uint32]:
        width = self.config.vector_bytes
        words: list[Uint32] = []
        if count is None:
            for i in range(LANE_BYTES // width):
                words += load_global(address + i * width, width, **_POLICY)
        else:
            for i in range(LANE_BLOCKS):
                words += load_global_if(Int32(count > i), address + i * 8, 8, **_POLICY)
        return words

"""Rows of x that lie anywhere, from global memory to the stages of a WGMMA kernel: ``cp.async`` by each row's index.

Two warps copy sixteen bytes a lane, eight rows and the 128 bytes that are swizzled together at a time: a lane's place
in the swizzle is the same in each. Rows are those of slots, of which a token has ``top``. A thread says at the stage's
barrier when its copies have come, and who multiplies orders them before its reads (``Mainloop.take``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...ptx import mbarrier
from ...ptx.async_copy import copy_async
from ..arith import ceil_div, div, mod
from ..gemm.barriers import Ring
from ..gemm.packed.loaders import StageOrder
from ..gemm.sm90.config import GATHER_THREADS
from ..gemm.sm90.groups import GroupTile, PackedRows
from ..gemm.stage_loader import ThreadCopies

WARP = 32
CHUNK = 16
"""Bytes that a lane copies at a time."""
CHUNKS = 8
"""Chunks that are swizzled together: 128 bytes of a row."""
ROW_BYTES = CHUNK * CHUNKS
ROWS = GATHER_THREADS // CHUNKS
"""Rows that the two warps copy at a time: as many as a swizzle has."""


@dataclass(frozen=True)
class GatheredX:
    """The copies of rows by one of the threads that gather. shared: address of the first stage's x, (tile_n, stage_k)
    swizzled."""

    order: StageOrder
    groups: PackedRows
    shared: Int32
    thread: Int32

    def copies(self, tile: GroupTile, cursor: Int32) -> ThreadCopies:
        """The copies of a work tile."""
        return ThreadCopies(self.order.steps(tile), partial(self.start, self.places(tile), tile.width))

    def places(self, tile: GroupTile) -> list[Int32]:
        """Where rows of x begin that this lane knows, in chunks: those of every eighth copy of the eight lanes of a
        row, for all of them. Rows beyond the group's last are the last."""
        groups, routed, x = self.groups, self.groups.arguments.routed, self.groups.arguments.one.x
        lane, found = mod(self.thread, CHUNKS), []
        row_chunks = Int32(x.row_stride * groups.config.x_item // CHUNK)
        first, most = groups.table.read("row", tile.group) + tile.x_row, tile.x_rows - tile.x_row - 1
        for i in range(ceil_div(groups.config.tile_n, ROWS * CHUNKS)):
            row = (i * CHUNKS + lane) * ROWS + div(self.thread, CHUNKS)
            slot = cute.make_tensor(routed.slots + (first + cutlass.min(row, most)), cute.make_layout(1))[0]
            found.append(slot // routed.top * row_chunks)
        return found

    @cute.jit
    def start(self, places: list[Int32], width: Int32, ring: Ring, stage: Int32, step: Int32):
        """Copies a stage of as many rows as the width of the tile covers; zeros beyond the last element of K."""
        cfg, one = self.groups.config, self.groups.arguments.one
        chunk, row = mod(self.thread, CHUNKS), div(self.thread, CHUNKS)
        k = step * cfg.stage_k + chunk * (CHUNK // cfg.x_item)
        source = one.x.data.toint() + Int64(k) * cfg.x_item
        # chunk c of row r lies at chunk c ^ r % 8, as TMA would swizzle it
        target = self.shared + stage * cfg.x_bytes + row * ROW_BYTES + (chunk ^ row) * CHUNK
        boxes = range(cfg.stage_boxes)
        valid = [cutlass.select_(k + part * cfg.box_k < one.k, Int32(CHUNK), Int32(0)) for part in boxes]
        for box in cutlass.range_constexpr(cfg.tile_n // cfg.box_rows):
            if box * cfg.box_rows < width:
                rows = range(box * cfg.box_rows // ROWS, (box + 1) * cfg.box_rows // ROWS)
                # all of them before the first copy: each answer is 25 clocks away
                lanes = [(self.thread & (WARP - CHUNKS)) + i % CHUNKS for i in rows]
                found = [cute.arch.shuffle_sync(places[i // CHUNKS], lane) for i, lane in zip(rows, lanes)]
                for i, place in zip(rows, found):
                    address = source + Int64(place) * CHUNK
                    for part in boxes:
                        to = target + i * (ROWS * ROW_BYTES) + part * (cfg.x_bytes // cfg.stage_boxes)
                        copy_async(to, address + part * ROW_BYTES, CHUNK, valid[part])
        mbarrier.arrive_after_copies(ring.full(stage))

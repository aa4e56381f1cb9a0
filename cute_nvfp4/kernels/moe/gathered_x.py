"""The gather of rows of x from global memory to the stages of a WGMMA kernel, by ``cp.async``.

Rows of x are those of slots, of which a token has ``top``. The lanes of two warps copy sixteen bytes each: eight rows
at a time, and of each the 128 bytes that are swizzled together. So a lane has the same place in the swizzle in every
copy. A thread arrives at the stage's barrier once its copies are complete, and the consumer fences them before it reads
them (``Mainloop.take``).
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
"""Bytes of one copy of a lane."""
CHUNKS = 8
"""Chunks that are swizzled together: 128 bytes of a row."""
ROW_BYTES = CHUNK * CHUNKS
ROWS = GATHER_THREADS // CHUNKS
"""Rows that the two warps copy at a time: those of a swizzle atom."""


@dataclass(frozen=True)
class GatheredX:
    """The copies of one gathering thread. shared: the address of the first stage's x, (tile_n, stage_k), swizzled."""

    order: StageOrder
    groups: PackedRows
    shared: Int32
    thread: Int32

    def copies(self, tile: GroupTile, cursor: Int32) -> ThreadCopies:
        """The copies of a work tile."""
        return ThreadCopies(self.order.steps(tile), partial(self.start, self.places(tile), tile.width))

    def places(self, tile: GroupTile) -> list[Int32]:
        """The offsets in x, in chunks, of the rows whose index this lane loads. The eight lanes of a row take turns:
        each loads the index for every eighth copy, for all eight. Rows beyond the group's last repeat the last row."""
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
        """Copies the rows of a stage that the width of the tile covers, with zeros beyond the last element of K."""
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
                # shuffle all of them before the first copy: a shuffle has a latency of 25 clocks
                lanes = [(self.thread & (WARP - CHUNKS)) + i % CHUNKS for i in rows]
                found = [cute.arch.shuffle_sync(places[i // CHUNKS], lane) for i, lane in zip(rows, lanes)]
                for i, place in zip(rows, found):
                    address = source + Int64(place) * CHUNK
                    for part in boxes:
                        to = target + i * (ROWS * ROW_BYTES) + part * (cfg.x_bytes // cfg.stage_boxes)
                        copy_async(to, address + part * ROW_BYTES, CHUNK, valid[part])
        mbarrier.arrive_after_copies(ring.full(stage))

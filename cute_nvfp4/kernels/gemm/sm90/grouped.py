"""outᵢ = alphaᵢ · xᵢ · weightᵢᵀ for many problems in one launch, on WGMMA, with packed weights.

``WgmmaGemm`` with work tiles of all groups (``groups``). Weights are runs of bytes, so that only x has tensor maps: one
where the groups are rows of one x, else one for each. A tile has as many rows of x as its group needs: there is a loop
of multiplications for each of a few widths, and x is copied in boxes of their common divisor. Rows of a tile beyond the
end of a group are the next one's, and are not stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from ....ptx import mbarrier
from ....ptx.async_copy import copy_bulk
from ....weight_layout import TILE_BYTES, TILE_K, TILE_ROWS
from ..grouped_scheduler import Table
from ..operands import TmaCopy
from ..tile_scheduler import WorkTile
from .arguments import Activations
from .config import STAGE_TILES, WARPGROUP
from .epilogue import Epilogue
from .grouped_arguments import GroupedWgmmaArguments
from .grouped_config import GroupedWgmmaConfig
from .groups import DealtRows, GroupScheduler, arguments_of
from .wgmma import TYPES, Memory, Position, WgmmaGemm, advance


class GroupedWgmma(WgmmaGemm):
    """The host function and the kernel of one :class:`GroupedWgmmaConfig`."""

    config: GroupedWgmmaConfig
    # finding a group takes more than a loop of copies does
    loading_registers = 40

    @cute.jit
    def __call__(self, arguments: GroupedWgmmaArguments, stream: CUstream):
        """Launches ``arguments.workers`` CTAs."""
        cfg, one = self.config, arguments.one
        copy = self.describe(one.x, one.k)
        passed = arguments._replace(one=one._replace(x=None), workers=None)
        self.kernel(copy, one.x.rows, passed).launch(
            grid=(1, 1, arguments.workers),
            block=(cfg.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    def chunk_layout(self, chunks: int) -> Any:
        """Boxes of x in shared memory: (box_rows, TILE_K, chunks), swizzled."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, TYPES[self.config.dtype])
        return cute.tile_to_shape(atom, (self.config.box_rows, TILE_K, chunks), order=(0, 1, 2))

    def describe(self, x: Activations, k: Int32) -> TmaCopy:
        """On the host: copies of boxes of x."""
        layout = cute.make_layout((x.rows, k), stride=(cute.assume(x.row_stride, 8), 1))
        tensor = cute.make_tensor(x.data, layout)  # (M, K)
        one = cute.slice_(self.chunk_layout(1), (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        made = cpasync.make_tiled_tma_atom(op, tensor, one, (self.config.box_rows, TILE_K))
        return TmaCopy(made[0], made[1])

    @cute.kernel
    def kernel(self, x: TmaCopy, x_rows: Int32, arguments: GroupedWgmmaArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)
        memory = self.allocate()
        table = SmemAllocator().allocate_array(Int64, cfg.table_bytes // 8, byte_alignment=16).toint()
        groups = DealtRows(cfg, arguments, Table(cfg, table), x_rows)
        if warp == 4 * cfg.warpgroups:
            with cute.arch.elect_one():
                cpasync.prefetch_descriptor(x.atom)
                for stage in cutlass.range_constexpr(cfg.ring_stages):
                    mbarrier.initialise(memory.ring.full + 8 * stage, 1)
                    mbarrier.initialise(memory.ring.empty + 8 * stage, 4 * cfg.warpgroups)
                mbarrier.fence_initialised()
        if warp == 0:
            groups.fill()
        cute.arch.sync_threads()
        _, _, worker = cute.arch.block_idx()
        _, _, workers = cute.arch.grid_dim()
        scheduler = GroupScheduler(groups, worker, workers, groups.table.read("total"))
        if group == cfg.warpgroups:
            cute.arch.setmaxregister_decrease(self.loading_registers)
            if warp == 4 * cfg.warpgroups:
                self.load(x, memory, scheduler)
        else:
            cute.arch.setmaxregister_increase(self.registers)
            self.multiply(memory, scheduler, group, thread)

    @cute.jit
    def load(self, x: TmaCopy, memory: Memory, scheduler: GroupScheduler):
        """The loop of the loading warp."""
        cfg, groups = self.config, scheduler.groups
        boxes = cfg.tile_n // cfg.box_rows
        chunks = STAGE_TILES * boxes
        sX = cute.make_tensor(memory.sX.iterator, self.chunk_layout(cfg.ring_stages * chunks).outer)
        at = Position(Int32(0), Int32(0))
        cursor, end = scheduler.range()
        while cursor < end:
            tile = scheduler.tile(cursor, end)
            place = groups.x(tile.group)
            gX = cute.local_tile(
                cute.domain_offset((place.row + tile.x_row, 0), x.tensor), (cfg.box_rows, TILE_K), (None, None)
            )  # (box_rows, TILE_K, REST_M, REST_K)
            tXsX, tXgX = cpasync.tma_partition(
                x.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
            )  # ((atom, rest), CHUNK), ((atom, rest), REST_M, REST_K)
            first, k_tiles = groups.weight(tile.group), groups.k_tiles(tile.group)
            row_tiles = cute.ceil_div(groups.n(tile.group), TILE_ROWS)
            num_bytes = cfg.weight_bytes + tile.width * (cfg.tile_k * 2)
            for k_tile in cutlass.range(tile.k_first, tile.k_first + tile.k_count, unroll=1):
                mbarrier.wait(memory.ring.empty + 8 * at.stage, at.phase ^ 1)
                full = memory.ring.full + 8 * at.stage
                with cute.arch.elect_one():
                    mbarrier.expect_bytes(full, num_bytes)
                    for i in cutlass.range_constexpr(cfg.tile_m // TILE_ROWS):
                        # a row tile beyond the last: any bytes will do, its rows are not stored
                        row_tile = cutlass.min(tile.m * (cfg.tile_m // TILE_ROWS) + i, row_tiles - 1)
                        index = Int64(row_tile) * (k_tiles * STAGE_TILES) + k_tile * STAGE_TILES
                        target = memory.weights + at.stage * cfg.weight_bytes + i * (STAGE_TILES * TILE_BYTES)
                        copy_bulk(target, first + index * TILE_BYTES, Int32(STAGE_TILES * TILE_BYTES), full)
                barrier = cute.make_ptr(Int64, full, cute.AddressSpace.smem, assumed_align=8)
                for box in cutlass.range_constexpr(boxes):
                    if box * cfg.box_rows < tile.width:
                        for half in cutlass.range_constexpr(STAGE_TILES):
                            from_ = tXgX[None, box, k_tile * STAGE_TILES + half]
                            to = tXsX[None, at.stage * chunks + half * boxes + box]
                            cute.copy(x.atom, from_, to, tma_bar_ptr=barrier)
                at = advance(cfg, at)
            cursor = scheduler.after(cursor, tile)

    @cute.jit
    def multiply(self, memory: Memory, scheduler: GroupScheduler, group: Int32, thread: Int32):
        """The loop of a warpgroup: decode, multiply, store."""
        widths = self.config.widths
        at = Position(Int32(0), Int32(0))
        cursor, end = scheduler.range()
        while cursor < end:
            tile = scheduler.tile(cursor, end)
            for i in cutlass.range_constexpr(len(widths)):
                if tile.width == widths[i]:
                    products = self.products(memory, widths[i], group, thread)
                    at = self.sum_products(products, memory, at, tile.k_count)
                    config = replace(self.config, tile_n=widths[i])
                    arguments = arguments_of(scheduler.groups, tile)
                    rows = tile.x_rows - tile.x_row
                    epilogue = Epilogue(config, arguments, rows, memory.epilogue, scheduler, group, thread % WARPGROUP)
                    zero = Int32(0)
                    epilogue.store(products.acc, WorkTile(tile.m, zero, zero, tile.k_first, tile.k_count))
            cursor = scheduler.after(cursor, tile)

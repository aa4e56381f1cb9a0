"""Grouped GEMM of packed weights on WGMMA: outᵢ = alphaᵢ · xᵢ · weightᵢᵀ for many problems in one launch.

``GroupedWgmma`` is ``WgmmaGemm`` with the work tiles of all groups (``groups``), gated or not. Bulk copies load
weights, so that only x needs tensor maps: one where the groups are rows of one x, else one for each group. A tile is as
wide as its group needs: the kernel has a mainloop for each of a few widths, and copies x in boxes of their common
divisor. Rows of a tile beyond the end of a group belong to the next group, and are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from ....ptx import mbarrier
from ....ptx.async_copy import copy_bulk
from ....weight_layout import TILE_ROWS
from ...factors import Factor
from ..arguments import MAP_BYTES
from ..barriers import Ring
from ..grouped_scheduler import Table
from ..operand_source import address_of_map, map_pointer
from ..operands import TmaCopy
from ..packed.first_kernel import first_kernel
from ..packed.loaders import CopiesOf, StageOrder, XSlices, partition
from ..packed.mainloop import Mainloop, OperandMemory
from ..packed.rows import row_copies
from ..stage_loader import OverwritingCopies, fill_stages
from ..tile_scheduler import WorkTile
from .arguments import Activations
from .config import LOADING_WARPS, STAGE_TILES, WARPGROUP
from .epilogue import WarpgroupEpilogue
from .exchange import ClusterSums
from .grouped_arguments import GroupedWgmmaArguments, PackedGroupTable
from .grouped_config import GroupedWgmmaConfig
from .groups import (
    GroupScheduler,
    GroupTile,
    PackedGroups,
    PackedParameters,
    PackedRows,
    PackedWorkspace,
    arguments_of,
)
from .products import SWIZZLES, TYPES
from .wgmma import LOADING_THREADS, WgmmaGemm, WgmmaMemory

WARP = 32


def matrix(config: GroupedWgmmaConfig, data: cute.Pointer, rows: Int32, k: Int32, row_stride: Int64) -> cute.Tensor:
    """x (M, K) of one group as a tensor in global memory."""
    stride = cute.assume(row_stride, 16 // config.x_item), 1
    return cute.make_tensor(data, cute.make_layout((rows, k), stride=stride))


def group_weight_copies(order: StageOrder, groups: PackedGroups, first: Int32) -> CopiesOf:
    """The bulk copies of the packed tiles of a work tile. first: the shared address of the first stage's weights."""
    cfg = order.config

    def copies(tile: GroupTile, cursor: Int32) -> OverwritingCopies:
        source, k_tiles, row_tiles = (f(tile.group) for f in (groups.weight, groups.k_tiles, groups.row_tiles))

        def start(ring: Ring, stage: Int32, step: Int32) -> None:
            full = ring.full(stage)
            with cute.arch.elect_one():
                mbarrier.expect_bytes(full, Int32(cfg.weight_bytes))
                for i in range(cfg.tile_m // TILE_ROWS):
                    # beyond the last row tile any bytes will do: the epilogue does not store these rows
                    row_tile = cutlass.min(tile.m * (cfg.tile_m // TILE_ROWS) + i, row_tiles - 1)
                    index = Int64(row_tile) * (k_tiles * STAGE_TILES) + step * cfg.stage_tiles
                    target = first + stage * cfg.weight_bytes + i * cfg.tile_bytes
                    copy_bulk(target, source + index * cfg.weights.tile_bytes, Int32(cfg.tile_bytes), full)

        return OverwritingCopies(order.steps(tile), start)

    return copies


@dataclass(frozen=True)
class GroupX:
    """The TMA copies of x for all groups. sX: the boxes in shared memory, (box_rows, box_k, CHUNK)."""

    order: StageOrder
    groups: PackedGroups
    x: TmaCopy
    sX: cute.Tensor
    workers: Int32

    def copies(self, tile: GroupTile, cursor: Int32) -> OverwritingCopies:
        """The TMA copies of the boxes of a work tile."""
        cfg, groups = self.order.config, self.groups
        groups.acquire(tile.group, cursor, self.workers)
        place = groups.x(tile.group)
        gX = cute.local_tile(
            cute.domain_offset((place.row + tile.x_row, 0), self.x.tensor), (cfg.box_rows, cfg.box_k), (None, None)
        )  # (box_rows, box_k, REST_M, REST_K)
        # ((atom, rest), CHUNK), ((atom, rest), REST_M, REST_K)
        slices = partition(self.x, self.sX, gX)
        rows = cute.ceil_div(tile.width, cfg.box_rows) * cfg.box_rows
        start = partial(self.start, slices, place.tensor_map, tile.width, rows * (cfg.stage_k * cfg.x_item))
        return OverwritingCopies(self.order.steps(tile), start)

    @cute.jit
    def start(
        self,
        slices: XSlices,
        tensor_map: cute.Pointer | None,
        width: Int32,
        num_bytes: Int32,
        ring: Ring,
        stage: Int32,
        step: Int32,
    ):
        """Copies the boxes of a stage that the width of the tile covers."""
        cfg, full = self.order.config, ring.full_pointer(stage)
        boxes = cfg.tile_n // cfg.box_rows
        options = {} if tensor_map is None else {"tma_desc_ptr": tensor_map}
        with cute.arch.elect_one():
            mbarrier.expect_bytes(full.toint(), num_bytes)
        for box in cutlass.range_constexpr(boxes):
            if box * cfg.box_rows < width:
                for part in cutlass.range_constexpr(cfg.stage_boxes):
                    source = slices.tXgX[None, box, step * cfg.stage_boxes + part]
                    target = slices.tXsX[None, stage * (cfg.stage_boxes * boxes) + part * boxes + box]
                    cute.copy(self.x.atom, source, target, tma_bar_ptr=full, **options)


class GroupedWgmma(WgmmaGemm):
    """The host function and the kernel of one :class:`GroupedWgmmaConfig`."""

    config: GroupedWgmmaConfig

    @cute.jit
    def __call__(self, arguments: GroupedWgmmaArguments, stream: CUstream):
        """Launches ``arguments.workers`` CTAs."""
        cfg, one, groups = self.config, arguments.one, arguments.groups
        if cutlass.const_expr(cfg.maps == "parameters"):
            copies = tuple(self.describe(group.x, group.k) for group in groups)
            # the kernel needs only the tensor maps and the rows of x
            groups = tuple(group._replace(x=group.x._replace(data=None, row_stride=None)) for group in groups)
        else:
            copies = (None if cfg.gathered else self.describe(one.x, one.k),)
        if cutlass.const_expr(cfg.maps == "workspace"):
            self.build_maps(copies[0], groups).launch(grid=(groups.count, 1, 1), block=(WARP, 1, 1), stream=stream)
        if cutlass.const_expr(one is not None and not cfg.gathered):
            one = one._replace(x=one.x._replace(data=None, row_stride=None))
        if cutlass.const_expr(cfg.first is not None):
            first_kernel(cfg.first)(arguments.floats, stream)
        passed = arguments._replace(groups=groups, one=one, floats=None, workers=None)
        self.kernel(copies[0], tuple(copy.atom for copy in copies[1:]), passed).launch(
            grid=(1, 1, arguments.workers),
            block=(cfg.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            # the GEMM starts while another kernel writes the maps, or quantizes or decodes x, and its loads wait for it
            use_pdl=cfg.maps == "workspace" or cfg.first is not None or cfg.routed.of_slots or cfg.programmatic == "x",
        )

    def chunk_layout(self, chunks: int) -> Any:
        """The layout of boxes of x in shared memory: (box_rows, box_k, chunks), swizzled."""
        cfg = self.config
        atom = warpgroup.make_smem_layout_atom(SWIZZLES[cfg.box_k * cfg.x_item], TYPES[cfg.dtype])
        return cute.tile_to_shape(atom, (cfg.box_rows, cfg.box_k, chunks), order=(0, 1, 2))

    def describe(self, x: Activations, k: Int32) -> TmaCopy:
        """Makes the TMA copy of boxes of x, on the host."""
        tensor = matrix(self.config, x.data, x.rows, k, x.row_stride)
        one = cute.slice_(self.chunk_layout(1), (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        made = cpasync.make_tiled_tma_atom(op, tensor, one, (self.config.box_rows, self.config.box_k))
        return TmaCopy(made[0], made[1])

    @cute.kernel
    def build_maps(self, x: TmaCopy, groups: PackedGroupTable):
        """Writes the tensor map of a group in each CTA, one warp: that of ``x`` with the group's address, sizes and
        stride."""
        cute.arch.griddepcontrol_launch_dependents()
        group, _, _ = cute.arch.block_idx()
        names = self.config.words
        row = cute.make_tensor(groups.rows + Int64(group) * len(names), cute.make_layout(len(names)))
        address, rows, k, row_stride = (row[names.index(name)] for name in ("x_data", "m", "k", "x_row_stride"))
        place = SmemAllocator().allocate_array(Int64, MAP_BYTES // 8, byte_alignment=MAP_BYTES)
        data = cute.make_ptr(TYPES[self.config.dtype], address, cute.AddressSpace.gmem, assumed_align=16)
        tensor = matrix(self.config, data, Int32(rows), Int32(k), row_stride)
        with cute.arch.elect_one():
            cpasync.copy_tensormap(x.atom, place)
        cute.arch.sync_warp()
        cpasync.update_tma_descriptor(x.atom, tensor, place)
        cute.arch.sync_warp()
        to = groups.maps.toint() + Int64(group) * MAP_BYTES
        cpasync.cp_fence_tma_desc_release(map_pointer(to, cute.AddressSpace.gmem), place)

    def groups(
        self, x: TmaCopy, atoms: tuple[cute.CopyAtom, ...], arguments: GroupedWgmmaArguments, table: Table
    ) -> PackedGroups:
        """The groups, in the form that ``config.maps`` names."""
        if self.config.maps == "parameters":
            maps = tuple((address_of_map(atom),) for atom in (x.atom, *atoms))
            return PackedParameters(self.config, arguments, table, maps)
        return (PackedWorkspace if self.config.maps == "workspace" else PackedRows)(self.config, arguments, table)

    @cute.kernel
    def kernel(self, x: TmaCopy, atoms: tuple[cute.CopyAtom, ...], arguments: GroupedWgmmaArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)
        memory = self.allocate()
        operands = memory.operands
        table = SmemAllocator().allocate_array(Int64, cfg.table_bytes // 8, byte_alignment=16).toint()
        groups = self.groups(x, atoms, arguments, Table(cfg, table))
        if warp >= LOADING_WARPS:
            self.initialise(memory.barriers, warp - LOADING_WARPS)
        if warp == 1:
            if cutlass.const_expr(x is not None):
                cpasync.prefetch_descriptor(x.atom)
        elif warp == LOADING_WARPS:
            self.wait_for_groups()
            groups.fill()
        self.begin(memory, warp)
        cute.arch.sync_threads()
        _, _, worker = cute.arch.block_idx()
        _, _, workers = cute.arch.grid_dim()
        scheduler = GroupScheduler(groups, worker, workers, groups.table.read("total"))
        if group == 0:
            self.keep_registers(False)
            if warp == 0:
                if cutlass.const_expr(not cfg.weights.in_rows):
                    fill_stages(group_weight_copies(self.order, groups, operands.weights), operands.ring, scheduler)
            elif self.loads_x(warp):
                self.load_x(x, groups, operands, scheduler, workers, thread)
            if cutlass.const_expr(cfg.weights.in_rows):
                if warp >= LOADING_WARPS:
                    own = thread - LOADING_THREADS
                    copies = row_copies(self.order, lambda tile: groups.rows(tile.group), operands.weights, own)
                    fill_stages(copies, operands.ring, scheduler)
        else:
            self.keep_registers(True)
            self.wait_for_x()
            self.multiply(memory, scheduler, group - 1, thread - WARPGROUP)
        self.end(memory, warp)

    def wait_for_groups(self) -> None:
        """A hook: waits for the launch that writes the groups' offsets or table, where there is one."""

    def loads_x(self, warp: Int32) -> cutlass.Boolean:
        """Whether the warp loads x."""
        return warp == 1

    @cute.jit
    def load_x(
        self,
        x: TmaCopy,
        groups: PackedGroups,
        operands: OperandMemory,
        scheduler: GroupScheduler,
        workers: Int32,
        thread: Int32,
    ):
        """Runs the loop of the warp that loads x."""
        cfg = self.config
        chunks = cfg.ring_stages * cfg.stage_boxes * (cfg.tile_n // cfg.box_rows)
        # (box_rows, box_k, CHUNK)
        sX = cute.make_tensor(operands.sX.iterator, self.chunk_layout(chunks).outer)
        groups.wait()
        self.wait_for_x()
        fill_stages(GroupX(self.order, groups, x, sX, workers).copies, operands.ring, scheduler)

    @cute.jit
    def multiply(self, memory: WgmmaMemory, scheduler: GroupScheduler, group: Int32, thread: Int32):
        """Runs the loop of an MMA warpgroup: decode, multiply, store."""
        cfg, own, zero = self.config, thread % WARPGROUP, Int32(0)
        sums = ClusterSums(cfg, zero, None, memory.received, zero, group, own)
        at = memory.operands.ring.start()
        cursor, end = scheduler.range()
        while cursor < end:
            tile = scheduler.tile(cursor, end)
            for i in cutlass.range_constexpr(len(cfg.widths)):
                if tile.width == cfg.widths[i]:
                    products = self.products(memory.operands, cfg.widths[i], group, thread)
                    products.clear()
                    places = memory.epilogue, scheduler, group, own, sums
                    ahead, rows = cfg.asks_ahead(cfg.widths[i]), None
                    if cutlass.const_expr(ahead):
                        factors = scheduler.groups.factors(tile.group)
                        epilogue = self.epilogue(cfg.widths[i], factors, tile, *places).of_tile(self.in_group(tile))
                    elif cutlass.const_expr(cfg.row_factors):
                        rows = self.epilogue(cfg.widths[i], (), tile, *places).of_tile(self.in_group(tile)).rows
                    at = Mainloop(products).run(at, tile.k_count)
                    if cutlass.const_expr(ahead):
                        self.store(epilogue, products, self.in_group(tile), at)
                    else:
                        # the tile and its factors are read again: the mainloop leaves no registers for them
                        done = scheduler.tile(cursor, end)
                        factors = scheduler.groups.factors(done.group)
                        epilogue = replace(self.epilogue(cfg.widths[i], factors, done, *places), rows=rows)
                        self.store(epilogue, products, self.in_group(done), at)
            cursor = scheduler.after(cursor, tile)

    def epilogue(
        self,
        width: int,
        factors: tuple[Factor, ...],
        tile: GroupTile,
        shared: Int32,
        scheduler: GroupScheduler,
        *own: Any,
    ) -> WarpgroupEpilogue:
        """The epilogue of a work tile of ``width`` rows of x. Its output and its x begin where the tile does."""
        arguments = arguments_of(scheduler.groups, tile)
        config = replace(self.config, tile_n=width, widest=self.config.tile_n)
        rows = tile.x_rows - tile.x_row
        return WarpgroupEpilogue(config, arguments, rows, factors, shared, scheduler, *own)

    def in_group(self, tile: GroupTile) -> WorkTile:
        """The work tile, in an output that begins at the tile's first row of x."""
        return WorkTile(tile.m, Int32(0), Int32(0), tile.k_first, tile.k_count)

"""Two small kernels for ``02_async_machine.ipynb``: a ring of tiles fed by TMA, and one tile of block-scaled MMA.

They are made to be read: sizes are compiled in, and every wait is written out. ``async_tools.py`` compiles and runs
them; the notebook tells the story.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

ROWS, COLUMNS = 8, 32  # a tile of x: 8 rows of 128 bytes
TILE_BYTES = ROWS * COLUMNS * 4
CONSUMERS = 2  # warps that read; each takes half of a tile's rows
PRODUCER = 0  # the warp that loads; consumers are warps 1 and 2
OPEN = 1  # a fresh barrier lets waiters for this parity pass: "the phase before the first is over"


@dataclass(frozen=True)
class Ring:
    """y = sums over rows of x, by a producer warp, ``stages`` buffers and two consumer warps.

    x (R, 32) fp32 comes in tiles of (8, 32). Consumer g sums rows 4g … 4g+3 of every tile, a column a lane; its sums
    are row g of y (2, 32) fp32. R is a multiple of 8.

    The other fields plant mistakes. ``wait_empty``: the producer waits until a buffer is free. ``released_by``: how
    many consumer warps say that they have read a buffer (the empty barriers expect as many arrivals).
    ``fence``: what ordinary stores wrote is made visible to TMA before TMA stores it. ``tx_bytes``: what a full barrier
    is told to expect.
    """

    stages: int = 4
    wait_empty: bool = True
    released_by: int = CONSUMERS
    fence: bool = True
    tx_bytes: int = TILE_BYTES

    @cute.jit
    def __call__(self, x: cute.Pointer, y: cute.Pointer, rows: Int32, stream: CUstream):
        source = cute.make_tensor(x, cute.make_layout((rows, COLUMNS), stride=(COLUMNS, 1)))  # (R, 32)
        target = cute.make_tensor(y, cute.make_layout((CONSUMERS, COLUMNS), stride=(COLUMNS, 1)))  # (2, 32)
        # a TMA atom is the instruction and its descriptor: the tensor in global memory, and the box that one copy moves
        tile = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
        load = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, tile, (ROWS, COLUMNS))
        store = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), target, target.layout, (CONSUMERS, COLUMNS)
        )
        self.kernel(*load, *store, rows // ROWS).launch(
            grid=(1, 1, 1), block=(32 * (1 + CONSUMERS), 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, x: cute.Tensor, store: cute.CopyAtom, y: cute.Tensor, tiles: Int32):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        # (8, 32, STAGE): buffer s begins s KiB further on
        layout = cute.make_layout((ROWS, COLUMNS, self.stages), stride=(COLUMNS, 1, ROWS * COLUMNS))
        ring = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        sums = smem.allocate_tensor(
            Float32, cute.make_layout((CONSUMERS, COLUMNS), stride=(COLUMNS, 1)), byte_alignment=128
        )
        full = smem.allocate_array(Int64, self.stages)  # phase n over: tile n of this buffer has come
        empty = smem.allocate_array(Int64, self.stages)  # phase n over: tile n of this buffer has been read
        if warp == PRODUCER:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + stage, 1)  # the producer's arrival, and the bytes it announces
                    cute.arch.mbarrier_init(empty + stage, self.released_by)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp == PRODUCER:
            self.produce(load, x, ring, full, empty, tiles)
        else:
            self.consume(store, y, ring, sums, full, empty, tiles, warp - 1)

    @cute.jit
    def produce(self, load: cute.CopyAtom, x, ring, full, empty, tiles: Int32):
        """One copy a tile, into the next buffer that is free."""
        boxes = cute.local_tile(x, (ROWS, COLUMNS), (None, 0))  # (8, 32, TILE)
        # target ((box), STAGE), source ((box), TILE)
        target, source = cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(boxes, 0, 2)
        )
        stage, parity = Int32(0), Int32(0)
        for tile in cutlass.range(tiles, unroll=1):
            if cutlass.const_expr(self.wait_empty):
                cute.arch.mbarrier_wait(empty + stage, parity ^ OPEN)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tx_bytes)
            cute.copy(load, source[None, tile], target[None, stage], tma_bar_ptr=full + stage)
            stage, parity = self.next(stage, parity)

    @cute.jit
    def consume(self, store: cute.CopyAtom, y, ring, sums, full, empty, tiles: Int32, group: Int32):
        """Four rows of every tile; then the sums go out by TMA."""
        lane = cute.arch.lane_idx()
        total = Float32(0.0)
        stage, parity = Int32(0), Int32(0)
        for _ in cutlass.range(tiles, unroll=1):
            cute.arch.mbarrier_wait(full + stage, parity)
            for row in cutlass.range(ROWS // CONSUMERS, unroll=1):
                total += ring[ROWS // CONSUMERS * group + row, lane, stage]
            cute.arch.sync_warp()  # all lanes have read before one of them says so
            if group < self.released_by:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty + stage)
            stage, parity = self.next(stage, parity)

        sums[group, lane] = total
        if cutlass.const_expr(self.fence):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1, number_of_threads=32 * CONSUMERS)
        if group == 0:
            source, target = cpasync.tma_partition(
                store, 0, cute.make_layout(1), cute.group_modes(sums, 0, 2), cute.group_modes(y, 0, 2)
            )
            cute.copy(store, source, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory outlives the copy

    @cute.jit
    def next(self, stage: Int32, parity: Int32):
        """The next buffer; after the last one the first again, in its next phase."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            parity = parity ^ 1
        return stage, parity

"""Streaming GEMM for few rows of x: out = alpha · x · weightᵀ by ``mma.sync``, packed weights at the speed of memory;
or two such products joined by a gate.

The kernel is persistent. Two warps keep a ring of stages full: one by bulk copies of packed tiles, one by TMA of x. The
MMA warps decode weights into the registers of operand A; rows of x are columns of the MMA. They read a stage into
registers and release it before they decode it. :mod:`.stream_shares` says which CTA has which steps. Partial sums of
warps meet in shared memory, and those of work tiles that are cut in global memory, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ....ptx import mbarrier
from ....ptx.async_copy import copy_bulk, prefetch_bulk
from ....ptx.mma import mma_m16n8k16
from ....weight_layout import SLABS, STEPS
from ...arith import div, mod
from ..barriers import Barriers, Ring, initialise_in_turn, make_barriers
from ..pipeline_graph import barrier_words
from ..stage_loader import Filled, OverwritingCopies, fill_stages, fill_tile
from .decode import decode_step, load_lane, sum_factors
from .first_kernel import first_kernel
from .pipelines import stream_pipelines
from .stream_arguments import StreamArguments
from .stream_config import LOADING_WARPS, MMA_COLUMNS, WARP, StreamConfig
from .stream_shares import Segment, Segments, Shares, shares_of
from .stream_sums import Sums, TileOutput
from .stream_x import SharedX, StageX, TmaCopy, X


@dataclass(frozen=True)
class StreamMemory:
    """Shared memory of a CTA: x, the addresses of weights and of sums, and the barriers."""

    x: SharedX
    weights: Int32
    sums: Int32
    barriers: Barriers

    @property
    def ring(self) -> Ring:
        return self.barriers.operands


class WeightSource(NamedTuple):
    """The global addresses of a work tile's codes, and of its scales, in its first packed tile."""

    codes: Int64
    scales: Int64


class Place(NamedTuple):
    """The place of an MMA warp: its slabs (``m``), its turn at the stages (``k``), and the lane."""

    m: Int32
    k: Int32
    lane: Int32


class Stream:
    """The host function and the kernel of one :class:`StreamConfig`."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.x = X(config)

    @cute.jit
    def __call__(self, arguments: StreamArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs."""
        cfg, x = self.config, arguments.x
        if cutlass.const_expr(cfg.first is not None):
            first_kernel(cfg.first)(arguments.floats, stream)
        work_tiles = cute.ceil_div(arguments.weight.rows, cfg.out_rows)
        shares = shares_of(work_tiles, arguments.weight.k_tiles // cfg.stage_tiles, arguments.ctas)
        # arguments that only the host uses do not become kernel parameters
        passed = arguments._replace(x=x._replace(data=None, row_stride=None), floats=None, k=None, ctas=None)
        self.kernel(self.x.describe(x, arguments.k), shares, passed).launch(
            grid=(arguments.ctas, 1, 1),
            block=(cfg.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas_per_sm,
            # nothing needs L1: all of it can be shared memory (and so the DSL need not query a device)
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=bool(cfg.programmatic),
        )

    @cute.kernel
    def kernel(self, x: TmaCopy, shares: Shares, arguments: StreamArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = self.allocate()
        # the loading warps come first, and nothing may delay them: the other warps initialise the barriers
        if warp >= LOADING_WARPS:
            initialise_in_turn(memory.barriers, warp - LOADING_WARPS, cfg.warps)
        elif warp == 1:
            self.x.prefetch(x)
        walk = Segments(shares, cta)
        first = shares.segment(cta, Int32(0))
        source = self.weight_source(arguments, first.work_tile)
        if cutlass.const_expr(cfg.programmatic):
            if warp == 0:
                self.prefetch_weights(source, first, mod(thread, WARP))
            # in this order the next launch, too, begins only after the launches before this one have ended
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # the barriers of the ring are initialised
        cute.arch.sync_threads()
        if warp == 0:
            self.load_weights(arguments, memory, walk, first, source)
            if shares.whole > 0:
                self.sums(arguments, memory, shares, cta, thread).add_cut(thread, WARP)
        elif warp == 1:
            stages = self.x.stages(x, arguments.x, memory.x)
            fill_stages(partial(self.x_copies, stages), memory.ring, walk)
        else:
            index = warp - LOADING_WARPS
            place = Place(mod(index, cfg.warps_m), div(index, cfg.warps_m), mod(thread, WARP))
            sums = self.sums(arguments, memory, shares, cta, thread)
            self.multiply(memory, walk, place, sums)
            if shares.whole == 0:
                sums.add_cut(sums.thread, WARP * cfg.warps)

    def sums(self, arguments: StreamArguments, memory: StreamMemory, shares: Shares, cta: Int32, thread: Int32) -> Sums:
        own, rows, columns = thread - LOADING_WARPS * WARP, arguments.weight.rows, arguments.x.rows
        place = rows, columns, arguments.out, arguments.out_stride, sum_factors(arguments, self.config.weights.factor)
        return Sums(
            self.config, arguments.partials, shares, cta, memory.sums, own, lambda tile: TileOutput(tile, *place)
        )

    def allocate(self) -> StreamMemory:
        cfg, smem, graph = self.config, SmemAllocator(), stream_pipelines(self.config)
        x = self.x.allocate(smem)
        weight_bytes = cfg.ring_stages * cfg.stage_tiles * cfg.tile_bytes
        weights = smem.allocate_array(cutlass.Uint8, weight_bytes, byte_alignment=128)
        sums = smem.allocate_array(cutlass.Uint8, cfg.sums_bytes, byte_alignment=128)
        barriers = make_barriers(graph, smem.allocate_array(Int64, barrier_words(graph)), addresses=True)
        return StreamMemory(x, weights.toint(), sums.toint(), barriers)

    @cute.jit
    def load_weights(
        self, arguments: StreamArguments, memory: StreamMemory, walk: Segments, segment: Segment, source: WeightSource
    ):
        """Runs the loop of the warp that loads weights. It computes each segment and its source ahead of their use: the
        caller computes the first ones before the CTA's barriers are initialised."""
        filled = Filled(Int32(0), memory.ring.start())
        cursor, end = walk.range()
        while cursor < end:
            filled = fill_tile(self.weight_copies(segment, source, memory.weights), memory.ring, filled)
            cursor = walk.after(cursor, segment)
            segment = walk.tile(cursor, end)
            source = self.weight_source(arguments, segment.work_tile)

    def weight_copies(self, segment: Segment, source: WeightSource, first: Int32) -> OverwritingCopies:
        """The bulk copies of a work tile's packed tiles in a segment. first: the shared address of the first stage's
        weights."""
        num_bytes = self.config.stage_tiles * self.config.tile_bytes

        def start(ring: Ring, stage: Int32, step: Int32) -> None:
            full = ring.full(stage)
            with cute.arch.elect_one():
                mbarrier.expect_bytes(full, Int32(num_bytes))
                self.copy_weights(source, step, first + stage * num_bytes, full)

        return OverwritingCopies(segment.steps, start)

    def x_copies(self, stages: StageX, segment: Segment, cursor: Int32) -> OverwritingCopies:
        """The TMA copies of x in a segment."""

        def start(ring: Ring, stage: Int32, step: Int32) -> None:
            full = ring.full(stage)
            with cute.arch.elect_one():
                mbarrier.expect_bytes(full, Int32(self.config.stage_tiles * self.config.x_bytes))
            self.x.copy(stages, step, stage, full)

        return OverwritingCopies(segment.steps, start)

    def copy_weights(self, source: WeightSource, step: Int32, target: Int32, full: Int32) -> None:
        """Starts the copies of a work tile's slabs of the packed tiles of a step."""
        cfg, packing = self.config, self.config.weights
        distance = Int64(step) * (cfg.stage_tiles * packing.tile_bytes)
        codes, scales = source.codes + distance, source.scales + distance
        if cfg.slabs == SLABS:
            copy_bulk(target, codes, Int32(cfg.stage_tiles * packing.tile_bytes), full)
            return
        code_bytes, scale_bytes = cfg.slabs * packing.slab_code_bytes, cfg.slabs * packing.slab_scale_bytes
        for i in range(cfg.stage_tiles):
            tile = target + i * cfg.tile_bytes
            copy_bulk(tile, codes + i * packing.tile_bytes, Int32(code_bytes), full)
            copy_bulk(tile + code_bytes, scales + i * packing.tile_bytes, Int32(scale_bytes), full)

    @cute.jit
    def prefetch_weights(self, source: WeightSource, segment: Segment, lane: Int32):
        """Prefetches the first packed tiles of a segment into L2, one a lane. L2 stays coherent with what other
        launches write later; shared memory would not."""
        cfg, packing = self.config, self.config.weights
        if lane < segment.count * cfg.stage_tiles:
            distance = Int64(segment.first * cfg.stage_tiles + lane) * packing.tile_bytes
            if cutlass.const_expr(cfg.slabs == SLABS):
                prefetch_bulk(source.codes + distance, Int32(packing.tile_bytes))
            else:
                prefetch_bulk(source.codes + distance, Int32(cfg.slabs * packing.slab_code_bytes))
                prefetch_bulk(source.scales + distance, Int32(cfg.slabs * packing.slab_scale_bytes))

    def weight_source(self, arguments: StreamArguments, work_tile: Int32) -> WeightSource:
        """The addresses of a work tile's slabs in its first packed tile."""
        return self.source_in(arguments.weight.tiles.toint(), arguments.weight.k_tiles, work_tile)

    def source_in(self, matrix: Int64, k_tiles: Int32, work_tile: Int32) -> WeightSource:
        """``weight_source`` in the packed matrix at the address ``matrix``."""
        parts, packing = SLABS // self.config.slabs, self.config.weights
        first = matrix + Int64(div(work_tile, parts)) * k_tiles * packing.tile_bytes
        slab = mod(work_tile, parts) * self.config.slabs
        scales = first + (packing.code_bytes + slab * packing.slab_scale_bytes)
        return WeightSource(first + slab * packing.slab_code_bytes, scales)

    @cute.jit
    def multiply(self, memory: StreamMemory, walk: Segments, place: Place, sums: Sums):
        """Runs the loop of an MMA warp. It is not ``mainloop``: a warp reads a whole stage into registers and releases
        it before it decodes, and its turns fall on different steps in each segment."""
        cfg = self.config
        # (REGISTER, MMA_N, SLAB)
        acc = cute.make_rmem_tensor((4, cfg.columns // MMA_COLUMNS, cfg.warp_slabs), Float32)
        at, step = memory.ring.start(place.k), place.k
        cursor, end = walk.range()
        while cursor < end:
            segment = walk.tile(cursor, end)
            cursor = walk.after(cursor, segment)
            # the loads from global memory that this starts are in flight during the steps
            out = sums.output_of(segment.work_tile)
            acc.fill(0.0)
            while step < cursor:
                mbarrier.wait(memory.ring.full(at.stage), at.phase)
                self.add_stage(acc, memory, at.stage, place)
                step = step + cfg.warps_k
                at = memory.ring.advance(at, cfg.warps_k)
            out = sums.completed(out)
            sums.put(acc, place)
            sums.finish(segment, out)
            sums.after(segment)

    def add_stage(self, acc: cute.Tensor, memory: StreamMemory, stage: Int32, place: Place) -> None:
        """Reads a stage, releases it, and adds its products."""
        cfg, packing, lane = self.config, self.config.weights, place.lane
        weights = memory.weights + stage * (cfg.stage_tiles * cfg.tile_bytes)
        code_bytes, scale_bytes = packing.slab_code_bytes, packing.slab_scale_bytes
        codes = weights + place.m * (cfg.warp_slabs * code_bytes)
        scales = weights + cfg.slabs * code_bytes + place.m * (cfg.warp_slabs * scale_bytes)
        tiles, slabs = range(cfg.stage_tiles), range(cfg.warp_slabs)
        places = [[(t * cfg.tile_bytes, s) for s in slabs] for t in tiles]
        packed = [
            [load_lane(codes + at + s * code_bytes, scales + at + s * scale_bytes, lane, packing) for at, s in row]
            for row in places
        ]
        x = self.x.load(memory.x, stage, lane)
        # each lane signals that it has read its own part
        mbarrier.arrive(memory.ring.empty(stage))
        for t in tiles:
            for step in range(STEPS):
                for s in slabs:
                    a = decode_step(packed[t][s], step, packing)
                    for n, b in enumerate(x[t][step]):
                        c = [acc[i, n, s] for i in range(4)]
                        for i, value in enumerate(mma_m16n8k16(a, b, c, cfg.dtype)):
                            acc[i, n, s] = value

"""out = alpha · x · weightᵀ for few rows of x: packed weights at the speed of memory, multiplied by mma.sync; or
two such products, joined by a gate.

Persistent. Two warps keep a ring of stages full: one by bulk copies of packed tiles, one by TMA of x. The others decode
weights into registers, operand A of the MMA; the rows of x are its columns. They read a stage into registers and give
it back before they decode it. Which CTA has which steps says :mod:`.stream_shares`; partial sums meet in shared memory,
and those of units that are cut in global memory, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ....ptx import mbarrier
from ....ptx.async_copy import copy_bulk
from ....ptx.mma import mma_m16n8k16
from ....weight_layout import SLABS, STEPS
from ...arith import div, mod
from .decode import decode_step, load_lane, product_alphas
from .stream_arguments import StreamArguments
from .stream_config import LOADING_WARPS, MMA_COLUMNS, WARP, StreamConfig
from .stream_shares import Segment, Shares, deal
from .stream_sums import Sums
from .stream_x import SharedX, TmaCopy, X


class Memory(NamedTuple):
    """Shared memory: x, and addresses of the weights, of sums, and of the first full and empty barrier."""

    x: SharedX
    weights: Int32
    sums: Int32
    full: Int32
    empty: Int32


class Position(NamedTuple):
    """A stage of the ring, and the phase of its barriers."""

    stage: Int32
    phase: Int32


class UnitSource(NamedTuple):
    """Addresses of a unit's codes and of its scales in its first packed tile."""

    codes: Int64
    scales: Int64


class Place(NamedTuple):
    """A warp that multiplies: its slabs, its turn at the stages, and the lane."""

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
        units = cute.ceil_div(arguments.weight.rows, cfg.out_rows)
        shares = deal(units, arguments.weight.k_tiles // cfg.stage_tiles, arguments.ctas)
        # what only the host uses does not become a parameter of the kernel
        passed = arguments._replace(x=x._replace(data=None, row_stride=None), k=None, ctas=None)
        self.kernel(self.x.describe(x, arguments.k), shares, passed).launch(
            grid=(arguments.ctas, 1, 1),
            block=(cfg.threads, 1, 1),
            min_blocks_per_mp=cfg.ctas_per_sm,
            # nothing lives in L1: all of it can be shared memory (and the DSL need not ask a device what it has)
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: TmaCopy, shares: Shares, arguments: StreamArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = self.allocate()
        # the warps that load are the oldest: nothing may hold them up; the others make the barriers
        if warp >= LOADING_WARPS:
            self.initialise(memory, warp - LOADING_WARPS)
        elif warp == 1:
            self.x.prefetch(x)
        first = shares.segment(cta, Int32(0))
        source = self.unit_source(arguments, first.unit)
        # the ring's barriers are there
        cute.arch.sync_threads()
        if warp == 0:
            self.load_weights(arguments, memory, shares, cta, first, source)
            if shares.whole > 0:
                self.sums(arguments, memory, shares, cta, thread).add_cut(thread, WARP)
        elif warp == 1:
            self.load_x(x, arguments, memory, shares, cta)
        else:
            index = warp - LOADING_WARPS
            place = Place(mod(index, cfg.warps_m), div(index, cfg.warps_m), mod(thread, WARP))
            sums = self.sums(arguments, memory, shares, cta, thread)
            self.multiply(memory, shares, cta, place, sums)
            if shares.whole == 0:
                sums.add_cut(sums.thread, WARP * cfg.warps)

    @cute.jit
    def initialise(self, memory: Memory, turn: Int32):
        """Makes the barriers, of which each warp has every so many: one thread would take 10 ns for each."""
        cfg = self.config
        with cute.arch.elect_one():
            for first in cutlass.range_constexpr(0, cfg.ring_stages, cfg.warps):
                stage = first + turn
                if stage < cfg.ring_stages:
                    mbarrier.initialise(memory.full + 8 * stage, LOADING_WARPS)
                    mbarrier.initialise(memory.empty + 8 * stage, WARP * cfg.warps_m)
            mbarrier.fence_initialised()

    def sums(self, arguments: StreamArguments, memory: Memory, shares: Shares, cta: Int32, thread: Int32) -> Sums:
        own = thread - LOADING_WARPS * WARP
        return Sums(
            self.config, arguments, shares, cta, memory.sums, own, product_alphas(arguments, self.config.weights)
        )

    def allocate(self) -> Memory:
        cfg, smem = self.config, SmemAllocator()
        x = self.x.allocate(smem)
        weight_bytes = cfg.ring_stages * cfg.stage_tiles * cfg.tile_bytes
        weights = smem.allocate_array(cutlass.Uint8, weight_bytes, byte_alignment=128)
        sums = smem.allocate_array(cutlass.Uint8, cfg.sums_bytes, byte_alignment=128)
        barriers = smem.allocate_array(Int64, 2 * cfg.ring_stages).toint()
        full, empty = barriers, barriers + 8 * cfg.ring_stages
        return Memory(x, weights.toint(), sums.toint(), full, empty)

    def advance(self, at: Position, count: int) -> Position:
        """``count`` stages further; they divide the ring."""
        following = at.stage + count
        last = following >= self.config.ring_stages
        stage = cutlass.select_(last, following - self.config.ring_stages, following)
        return Position(stage, cutlass.select_(last, at.phase ^ 1, at.phase))

    @cute.jit
    def load_weights(
        self,
        arguments: StreamArguments,
        memory: Memory,
        shares: Shares,
        cta: Int32,
        segment: Segment,
        source: UnitSource,
    ):
        """The loop of the warp that loads weights; ``segment`` is the first."""
        cfg = self.config
        weight_bytes = cfg.stage_tiles * cfg.tile_bytes
        at, cursor, end = Position(Int32(0), Int32(0)), Int32(0), shares.steps(cta)
        while cursor < end:
            for k in cutlass.range(segment.first, segment.first + segment.count, unroll=1):
                mbarrier.wait_to_overwrite(memory.empty + 8 * at.stage, at.phase ^ 1)
                full = memory.full + 8 * at.stage
                with cute.arch.elect_one():
                    mbarrier.expect_bytes(full, Int32(weight_bytes))
                    self.copy_weights(source, k, memory.weights + at.stage * weight_bytes, full)
                at = self.advance(at, 1)
            cursor = cursor + segment.count
            segment = shares.segment(cta, cursor)
            source = self.unit_source(arguments, segment.unit)

    @cute.jit
    def load_x(self, x: TmaCopy, arguments: StreamArguments, memory: Memory, shares: Shares, cta: Int32):
        """The loop of the warp that loads x."""
        cfg = self.config
        stages = self.x.stages(x, arguments.x, memory.x)
        at, cursor, end = Position(Int32(0), Int32(0)), Int32(0), shares.steps(cta)
        while cursor < end:
            segment = shares.segment(cta, cursor)
            for k in cutlass.range(segment.first, segment.first + segment.count, unroll=1):
                mbarrier.wait_to_overwrite(memory.empty + 8 * at.stage, at.phase ^ 1)
                full = memory.full + 8 * at.stage
                with cute.arch.elect_one():
                    mbarrier.expect_bytes(full, Int32(cfg.stage_tiles * cfg.x_bytes))
                self.x.copy(stages, k, at.stage, full)
                at = self.advance(at, 1)
            cursor = cursor + segment.count

    def unit_source(self, arguments: StreamArguments, unit: Int32) -> UnitSource:
        """Of a unit's part of its first packed tile."""
        units, packing = SLABS // self.config.slabs, self.config.weights
        row_tile = Int64(div(unit, units)) * arguments.weight.k_tiles * packing.tile_bytes
        first = arguments.weight.tiles.toint() + row_tile
        slab = mod(unit, units) * self.config.slabs
        scales = first + (packing.code_bytes + slab * packing.slab_scale_bytes)
        return UnitSource(first + slab * packing.slab_code_bytes, scales)

    def copy_weights(self, source: UnitSource, k: Int32, target: Int32, full: Int32) -> None:
        """Copies a unit's part of the tiles of step ``k``."""
        cfg, packing = self.config, self.config.weights
        distance = Int64(k) * (cfg.stage_tiles * packing.tile_bytes)
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
    def multiply(self, memory: Memory, shares: Shares, cta: Int32, place: Place, sums: Sums):
        """The loop of a warp that multiplies."""
        cfg = self.config
        # (REGISTER, MMA_COLUMNS of x, SLAB)
        acc = cute.make_rmem_tensor((4, cfg.columns // MMA_COLUMNS, cfg.warp_slabs), Float32)
        at, step = Position(place.k, Int32(0)), place.k
        cursor, end = Int32(0), shares.steps(cta)
        while cursor < end:
            segment = shares.segment(cta, cursor)
            cursor = cursor + segment.count
            acc.fill(0.0)
            while step < cursor:
                mbarrier.wait(memory.full + 8 * at.stage, at.phase)
                self.add_stage(acc, memory, at.stage, place)
                step = step + cfg.warps_k
                at = self.advance(at, cfg.warps_k)
            sums.put(acc, place)
            sums.finish(segment)

    def add_stage(self, acc: cute.Tensor, memory: Memory, stage: Int32, place: Place) -> None:
        """Reads a stage, gives it back, and adds its products."""
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
        # each lane says that it has read its own
        mbarrier.arrive(memory.empty + 8 * stage)
        for t in tiles:
            for step in range(STEPS):
                for s in slabs:
                    a = decode_step(packed[t][s], step, packing)
                    for n, b in enumerate(x[t][step]):
                        c = [acc[i, n, s] for i in range(4)]
                        for i, value in enumerate(mma_m16n8k16(a, b, c, cfg.dtype)):
                            acc[i, n, s] = value

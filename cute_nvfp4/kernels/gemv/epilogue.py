"""The epilogue of the GEMV: it sums over lanes, warps and CTAs, scales the sums, and stores them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint64
from cutlass.memory import SmemAllocator

from ...ptx import mbarrier
from ...ptx.cluster import remote_address, store_async_word
from ...ptx.memory import load_shared
from ...ptx.move import f32_bits, f32_from_bits
from ...ptx.warp import sum_lanes
from ..arith import div, mod
from ..factors import factor_of, scaled
from .arguments import GemvArguments
from .config import TILE_ROWS, GemvConfig
from .dot import QUAD
from .operands import Span, tile_row
from .scales import SCALE_SHIFT


class Mailbox(NamedTuple):
    """Shared memory in which a CTA receives the sums of the other CTAs of its cluster.

    sums: address of (TILES * 16, CLUSTER - 1) in fp32, with rows in the order of :meth:`Epilogue.total`. barrier:
    address of the mbarrier that counts their bytes. rank: of the CTA in its cluster.
    """

    sums: Int32
    barrier: Int32
    rank: Int32


class Epilogue:
    """Reduces, scales and stores the sums of a CTA, (LANES, ROW_OF_LANE, WARPS_K, TILES) in shared memory.

    factor: the factor that the sums of the dot engine lack.
    """

    def __init__(self, config: GemvConfig, factor: float) -> None:
        self.config = config
        self.factor = factor

    def allocate(self, smem: SmemAllocator, rank: Int32) -> Mailbox | None:
        """Allocates shared memory for the sums of the other CTAs of the cluster."""
        cfg = self.config
        if cfg.cluster == 1:
            return None
        sums = smem.allocate_array(Float32, cfg.tiles * TILE_ROWS * (cfg.cluster - 1), byte_alignment=16)
        return Mailbox(sums.toint(), smem.allocate_array(Uint64, 1, byte_alignment=8).toint(), rank)

    @cute.jit
    def open(self, mailbox: Mailbox, tiles: Span, thread: Int32):
        """Announces that this CTA runs and, in the first CTA, the bytes that the others will send."""
        if thread == 0:
            mbarrier.initialise(mailbox.barrier, 1)
            mbarrier.fence_initialised()
            if mailbox.rank == 0:
                mbarrier.expect_bytes(mailbox.barrier, tiles.count * (4 * TILE_ROWS * (self.config.cluster - 1)))
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def finish(
        self,
        arguments: GemvArguments,
        sums: cute.Tensor,
        mailbox: Mailbox | None,
        tiles: Span,
        thread: Int32,
        batch: Int32,
        scales: tuple[Float32, ...],
    ):
        """Stores the rows of the tiles once all warps of this CTA have written their sums."""
        cute.arch.sync_threads()
        if cutlass.const_expr(self.config.cluster == 1):
            self.store(arguments, sums, mailbox, tiles, thread, batch, scales)
        else:
            cute.arch.cluster_wait()
            if mailbox.rank > 0:
                self.send(sums, mailbox, tiles, thread)
            else:
                mbarrier.wait(mailbox.barrier, Int32(0), cluster=True)
                self.store(arguments, sums, mailbox, tiles, thread, batch, scales)

    def total(self, sums: cute.Tensor, output: Int32) -> Float32:
        """The CTA's sum of row output // 4. Four lanes compute it, one for each lane of the quad that summed it."""
        row_of_tile, tile_of_cta = mod(div(output, QUAD), TILE_ROWS), div(output, TILE_ROWS * QUAD)
        quad, row_of_lane = mod(row_of_tile, 8), div(row_of_tile, 8)
        total = Float32(0.0)
        for w in range(self.config.warps_k):
            total = total + sums[quad * QUAD + mod(output, QUAD), row_of_lane, w, tile_of_cta]
        return sum_lanes(total, QUAD)

    @cute.jit
    def send(self, sums: cute.Tensor, mailbox: Mailbox, tiles: Span, thread: Int32):
        """Sends the sums of this CTA to the first CTA of its cluster."""
        barrier = remote_address(mailbox.barrier, Int32(0))
        target = remote_address(mailbox.sums, Int32(0)) + (mailbox.rank - 1) * (4 * self.config.tiles * TILE_ROWS)
        for output in cutlass.range(thread, tiles.count * TILE_ROWS * QUAD, self.config.threads, unroll=1):
            total = self.total(sums, output)
            if mod(output, QUAD) == 0:
                store_async_word(target + output, f32_bits(total), barrier)

    def global_scales(self, arguments: GemvArguments) -> tuple[Float32, ...]:
        """The operands' global scales. They have the latency of global memory: load them before the products."""
        given = [(self.config.a_global, arguments.a_global), (self.config.b_global, arguments.b_global)]
        return tuple(cute.make_tensor(pointer, cute.make_layout(1))[0] for there, pointer in given if there)

    @cute.jit
    def store(
        self,
        arguments: GemvArguments,
        sums: cute.Tensor,
        mailbox: Mailbox | None,
        tiles: Span,
        thread: Int32,
        batch: Int32,
        scales: tuple[Float32, ...],
    ):
        """Sums over lanes, warps and CTAs, and stores the scaled rows of the cluster's tiles."""
        cfg = self.config
        # the dot engine and the scales' decoding leave out a power of two
        factor = factor_of(arguments.alpha, scales, SCALE_SHIFT * self.factor)
        out_layout = cute.make_layout(arguments.m, stride=arguments.c_strides.row)  # (M) of this batch
        out = cute.make_tensor(arguments.c + Int64(batch) * arguments.c_strides.batch, out_layout)
        for output in cutlass.range(thread, tiles.count * TILE_ROWS * QUAD, cfg.threads, unroll=1):
            row_of_tile = mod(div(output, QUAD), TILE_ROWS)
            tile_of_cta = div(output, TILE_ROWS * QUAD)
            total = self.total(sums, output)
            for other in cutlass.range_constexpr(cfg.cluster - 1):
                word = load_shared(mailbox.sums + (other * cfg.tiles * TILE_ROWS + div(output, QUAD)) * 4, 4)[0]
                total = total + f32_from_bits(word)
            row = tile_row(tiles.first + tile_of_cta, mod(row_of_tile, 8), div(row_of_tile, 8))
            if row < arguments.m and mod(output, QUAD) == 0:
                out[row] = scaled(total, factor).to(arguments.c.dtype)

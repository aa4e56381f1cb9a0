"""The largest finite magnitude of a tensor, from which its global scale is computed.

Warps walk chunks of rows. Each lane has at least four loads in flight: the lanes of a warp read 2 KiB or more at a time
where x is aligned to 16 bytes. Where elements are rotated first, a lane reads 64 contiguous bytes. Magnitudes compare
as their bits do. A thread that meets infinity or NaN examines its elements again, one by one.

There are two ways. :class:`Amax` as a kernel is a pass of its own: the maxima of the CTAs meet in one atomic maximum,
which the quantizing kernel reads. Where x is small, the quantizing kernel finds the maximum itself
(:meth:`Amax.of_tensor`): each of its clusters reads all of x, which costs less than a second launch. Warps send their
maxima to every CTA of the cluster. No other memory is written, no CTA waits for another cluster, and the result does
not depend on an order.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.cluster import remote_address, store_remote
from ...ptx.memory import atomic_max_global, load_global_if, load_shared, store_shared
from ...ptx.move import f32_bits
from ...ptx.warp import max_lanes
from ..arith import div, mod
from .arguments import AmaxArguments, Chunks, QuantizeArguments
from .block.definition import largest_magnitude, to_f32
from .config import AMAX_RUN, WARP, QuantizeConfig
from .rotation import rotated_words

_INFINITY = 0x7F800000


class Amax:
    """The kernel of one :class:`QuantizeConfig`, of which it uses ``arch``, ``dtype``, ``hadamard``, ``vector_bytes``
    and ``warps``; within the quantizing kernel also ``cluster``."""

    def __init__(self, config: QuantizeConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: AmaxArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs for each matrix."""
        # arguments that only the host uses do not become kernel parameters
        self.kernel(arguments._replace(batch=None, ctas=None)).launch(
            grid=(arguments.ctas, arguments.batch, 1), block=(WARP * self.config.warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: AmaxArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(div(thread, WARP)), mod(thread, WARP)
        # (WARPS)
        found = SmemAllocator().allocate_tensor(Uint32, cute.make_layout(cfg.warps), byte_alignment=16)
        largest = self.of_matrix(arguments, batch, cta * cfg.warps + warp, ctas * cfg.warps, lane)
        if lane == 0:
            found[warp] = largest
        cute.arch.sync_threads()
        if thread == 0:
            for w in cutlass.range_constexpr(1, cfg.warps):
                largest = cutlass.max(largest, found[w])
            atomic_max_global(arguments.amax.toint(), largest)

    @cute.jit
    def of_tensor(self, arguments: QuantizeArguments, smem: SmemAllocator, thread: Int32) -> Uint32:
        """The bits of the largest finite magnitude of all matrices. All threads of a cluster call it together."""
        cfg = self.config
        cta, _, _ = cute.arch.block_idx()
        _, batch, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(div(thread, WARP)), mod(thread, WARP)
        count, own = cfg.cluster * cfg.warps, mod(cta, cfg.cluster) * cfg.warps + warp
        # (WARPS, CLUSTER), the same in every CTA
        found = smem.allocate_array(Uint32, count, byte_alignment=16).toint()
        if cutlass.const_expr(cfg.cluster > 1):
            # no CTA writes to one that has not started; this one reads while the others start
            cute.arch.cluster_arrive_relaxed()
        largest = Uint32(0)
        for number in cutlass.range(batch, unroll=1):
            largest = cutlass.max(largest, self.of_matrix(arguments, number, own, count, lane))
        if cutlass.const_expr(cfg.cluster > 1):
            cute.arch.cluster_wait()
            if lane < cfg.cluster:
                store_remote(remote_address(found + 4 * own, lane), largest)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            if lane == 0:
                store_shared(found + 4 * own, [largest])
            cute.arch.sync_threads()
        maxima = [load_shared(found + 4 * mod(lane + i, count), 4)[0] for i in range(0, count, WARP)]
        return max_lanes(functools.reduce(cutlass.max, maxima))

    @cute.jit
    def of_matrix(self, arguments: Any, batch: Int32, first: Int32, step: Int32, lane: Int32) -> Uint32:
        """The bits of the largest finite magnitude of a warp's chunks: ``first``, and every ``step``-th after it."""
        cfg, chunks, kind = self.config, arguments.chunks, self.config.after_rotation
        start = arguments.x.toint() + Int64(batch) * arguments.x_strides.batch
        largest = Uint32(0)
        # an unsigned division takes a third of the instructions
        row = Int32(Uint32(first) // Uint32(chunks.in_row))
        chunk = first - row * chunks.in_row
        for _ in cutlass.range(first, chunks.count, step, unroll=1):
            words = self.load(start, arguments.x_strides.row, row, chunk, lane, chunks)
            if cutlass.const_expr(cfg.hadamard):
                words = rotated_words(cfg, words, Uint32(arguments.signs))
            bits = f32_bits(largest_magnitude(kind, words))
            if bits >= Uint32(_INFINITY):
                bits = Uint32(0)
                for value in to_f32(kind, words):
                    magnitude = f32_bits(value) & Uint32(0x7FFFFFFF)
                    magnitude = cutlass.select_(magnitude >= Uint32(_INFINITY), Uint32(0), magnitude)
                    bits = cutlass.max(bits, magnitude)
            largest = cutlass.max(largest, bits)
            row, chunk = row + chunks.row_step, chunk + chunks.chunk_step
            if chunk >= chunks.in_row:
                row, chunk = row + 1, chunk - chunks.in_row
        return max_lanes(largest)

    def load(self, start: Int64, stride: Int64, row: Int32, chunk: Int32, lane: Int32, chunks: Chunks) -> list[Uint32]:
        """A lane's words of a chunk of a row; zeros beyond the row's end.

        The address is a sum: a coordinate of a layout (ROW, BYTE) takes the same instructions in another order.
        """
        cfg = self.config
        width, count = cfg.vector_bytes, cfg.amax_loads
        mine, step = (AMAX_RUN, width) if cfg.hadamard else (width, width * WARP)
        offset = chunk * cfg.chunk_bytes + lane * mine
        address = start + Int64(row) * stride
        words = []
        for i in range(count):
            inside = cutlass.select_(offset + i * step < chunks.row_bytes, Int32(1), Int32(0))
            words += load_global_if(inside, address + Int64(offset + i * step), width, l1="no_allocate")
        return words

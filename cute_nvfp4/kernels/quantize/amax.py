"""The largest finite magnitude of a tensor: the first of the two passes where the global scale is to be computed.

Warps walk chunks of rows, 2 KiB at a time where x is aligned to 16 bytes, so that each lane has four loads under way
(where elements are to be rotated first, of its own 64 bytes, elsewhere of every 32nd part of the chunk);
their maxima meet in shared memory, and those of the CTAs in one atomic maximum (magnitudes are ordered as
their bits are). A thread that meets infinity or NaN takes its elements again, one by one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.memory import atomic_max_global, load_global_if
from ...ptx.move import f32_bits
from ...ptx.warp import max_lanes
from ..arith import div, mod
from .arguments import AmaxArguments
from .block.definition import largest_magnitude, to_f32
from .config import WARP, QuantizeConfig
from .rotation import rotated_words

_LOADS = 4
# bytes of whole rotations, which a lane takes together
_RUN = 64
_INFINITY = 0x7F800000


class Amax:
    """The kernel of one :class:`QuantizeConfig`; only its ``arch``, ``dtype``, ``hadamard``, ``vector_bytes`` and
    ``warps`` count."""

    def __init__(self, config: QuantizeConfig) -> None:
        self.config = config

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row that a warp takes at once."""
        return _RUN * WARP if self.config.hadamard else self.config.vector_bytes * WARP * _LOADS

    @cute.jit
    def __call__(self, arguments: AmaxArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs for each matrix."""
        # what only the host uses does not become a parameter of the kernel
        self.kernel(arguments._replace(batch=None, ctas=None)).launch(
            grid=(arguments.ctas, arguments.batch, 1), block=(WARP * self.config.warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: AmaxArguments):
        cfg, row_bytes, strides = self.config, arguments.row_bytes, arguments.x_strides
        thread, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(div(thread, WARP)), mod(thread, WARP)
        # (WARPS)
        found = SmemAllocator().allocate_tensor(Uint32, cute.make_layout(cfg.warps), byte_alignment=16)
        start = arguments.x.toint() + Int64(batch) * strides.batch
        kind = cfg.after_rotation
        largest = Uint32(0)
        count = arguments.rows * arguments.chunks
        for number in cutlass.range(cta * cfg.warps + warp, count, ctas * cfg.warps, unroll=1):
            row, chunk = number // arguments.chunks, number % arguments.chunks
            words = self.load(start, strides.row, row, chunk, lane, row_bytes)
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
        largest = max_lanes(largest)
        if lane == 0:
            found[warp] = largest
        cute.arch.sync_threads()
        if thread == 0:
            for w in cutlass.range_constexpr(1, cfg.warps):
                largest = cutlass.max(largest, found[w])
            atomic_max_global(arguments.amax.toint(), largest)

    def load(
        self, start: Int64, stride: Int64, row: Int32, chunk: Int32, lane: Int32, row_bytes: Int32
    ) -> list[Uint32]:
        """A lane's words of a chunk of a row; zeros beyond the row's end."""
        width, count, step = self.config.vector_bytes, _LOADS, self.config.vector_bytes * WARP
        offset = chunk * self.chunk_bytes + lane * width
        if self.config.hadamard:
            count, step = _RUN // width, width
            offset = chunk * self.chunk_bytes + lane * _RUN
        address = start + Int64(row) * stride
        words = []
        for i in range(count):
            inside = cutlass.select_(offset + i * step < row_bytes, Int32(1), Int32(0))
            words += load_global_if(inside, address + Int64(offset + i * step), width, l1="no_allocate")
        return words

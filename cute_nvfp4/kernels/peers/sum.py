"""The sum of rows over the GPUs of a host, in one launch and without a barrier.

Each GPU writes its rows into the memory of the others, then waits for theirs in its own. A word there is ``EMPTY``
until it is written, so that the data needs neither flags nor fences, and travels one way only. Three slots take turns
(Lamport's rule, as in TensorRT-LLM's one-shot all-reduce). The slot of one call is emptied in the next call, and the
other GPUs write it again in the call after that, which they begin only once they have received the next call's data.
The slot's index lies in GPU memory, so that a CUDA graph may record any number of calls.

Every GPU adds in the order of the ranks, and all of them get the same bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from ...ptx.convert import bf16x2_to_f32, f16x2_to_f32
from ...ptx.encode import f32x2_to_16bit
from ...ptx.memory import load_global, load_system, store_global, store_system
from .config import EMPTY, SLOTS, STATE_BYTES, VECTOR_BYTES, PeerSumArguments, PeerSumConfig

OTHER_NANS = 0x7FFF7FFF
"""The word that is sent in place of ``EMPTY``."""


class PeerSum:
    """The host function and the kernel of one :class:`PeerSumConfig`."""

    def __init__(self, config: PeerSumConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: PeerSumArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs."""
        cfg = self.config
        self.kernel(arguments._replace(ctas=None)).launch(
            grid=(arguments.ctas, 1, 1), block=(cfg.threads, 1, 1), stream=stream, use_pdl=cfg.early
        )

    @cute.kernel
    def kernel(self, arguments: PeerSumArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if cutlass.const_expr(cfg.early):
            # the launch before may be such a sum: it writes the rows and the state
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.add(arguments, thread, cta, ctas)

    @cute.jit
    def add(self, arguments: PeerSumArguments, thread: Int32, cta: Int32, ctas: Int32):
        """The work of a CTA: send, add what arrives, empty the slot of the call before."""
        cfg = self.config
        state = arguments.state.toint() + Int64(cta) * STATE_BYTES
        slot, before = (Int32(x) for x in load_global(state, STATE_BYTES))
        first, step = cta * cfg.threads + thread, ctas * cfg.threads
        own = arguments.received[cfg.rank].toint()
        i = first
        while i < arguments.vectors:
            self.send(arguments, self.place(arguments, slot, i), i)
            i = i + step
        i = first
        while i < arguments.vectors:
            at = Int64(i) * VECTOR_BYTES
            words = self.sum_of(arguments, own, slot, i)
            store_global(arguments.out.toint() + at, words)
            i = i + step
        emptied = cutlass.select_(slot == 0, Int32(SLOTS - 1), slot - 1)
        i = first
        while i < before:
            place = own + self.place(arguments, emptied, i)
            for rank in cutlass.range_constexpr(cfg.ranks):
                if cutlass.const_expr(rank != cfg.rank):
                    store_global(place + rank * arguments.part_bytes, [Uint32(EMPTY)] * 4)
            i = i + step
        # after this barrier all threads have read the state
        cute.arch.sync_threads()
        if thread == 0:
            following = cutlass.select_(slot == SLOTS - 1, Int32(0), slot + 1)
            store_global(state, [following, arguments.vectors])

    def place(self, arguments: PeerSumArguments, slot: Int32, vector: Int32) -> Int64:
        """Bytes from the start of received memory to a vector of the first rank's part of a slot."""
        return Int64(slot) * self.config.ranks * arguments.part_bytes + Int64(vector) * VECTOR_BYTES

    def send(self, arguments: PeerSumArguments, place: Int64, vector: Int32) -> None:
        """Writes a vector of this rank's rows into the memory of the others."""
        words = load_global(arguments.y.toint() + Int64(vector) * VECTOR_BYTES, VECTOR_BYTES)
        words = [cutlass.select_(word == Uint32(EMPTY), Uint32(OTHER_NANS), word) for word in words]
        for rank in self.config.others:
            store_system(arguments.received[rank].toint() + place + self.config.rank * arguments.part_bytes, words)

    def sum_of(self, arguments: PeerSumArguments, own: Int64, slot: Int32, vector: Int32) -> list[Uint32]:
        """The sum of a vector over the ranks; it waits for the rows that have not arrived yet."""
        cfg, total = self.config, [Float32(0.0)] * 8
        to_f32 = bf16x2_to_f32 if cfg.dtype == "bfloat16" else f16x2_to_f32
        for rank in range(cfg.ranks):
            if rank == cfg.rank:
                words = load_global(arguments.y.toint() + Int64(vector) * VECTOR_BYTES, VECTOR_BYTES)
            else:
                words = self.arrived(own + self.place(arguments, slot, vector) + rank * arguments.part_bytes)
            values = [x for word in words for x in to_f32(word)]
            total = [a + b for a, b in zip(total, values)] if rank else values
        return [f32x2_to_16bit(total[i], total[i + 1], cfg.dtype) for i in range(0, 8, 2)]

    @cute.jit
    def arrived(self, address: Int64):
        """The vector that another GPU writes at ``address``, once all of its words have arrived."""
        a, b, c, d = load_system(address)
        while (a == EMPTY) | (b == EMPTY) | (c == EMPTY) | (d == EMPTY):
            a, b, c, d = load_system(address)
        return [a, b, c, d]

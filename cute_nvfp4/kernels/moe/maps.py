"""Routing maps: a stable sort of slots by expert, on the device, in one launch and without atomics.

Each CTA has an expert. Its warps share the slots, and count those of smaller experts and those of its own expert. The
sum of the first counts is the CTA's first row; adding the second counts of the warps before it gives a warp its first
row. Then each warp goes through its share again and writes. No CTA waits for another, and the rows of an expert have
the order of their slots under any schedule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.memory import store_global
from ..arith import ceil_div, div, mod
from .config import VECTOR_BYTES, WARP, MapsArguments, MapsConfig, ZeroedRows

NOWHERE, BEYOND = -1, -2
"""In place of an expert: NOWHERE for a slot without a row, BEYOND for an index beyond the last slot."""


class Maps(NamedTuple):
    """The four routing maps in global memory."""

    mOffsets: cute.Tensor  # (EXPERTS + 1)
    mSlots: cute.Tensor  # (ROWS): the slot of a row
    mExperts: cute.Tensor  # (ROWS): its expert
    mRows: cute.Tensor  # (SLOTS): the row of a slot, or -1


def maps_of(maps: Any, experts: Int32, slots: Int32) -> Maps:
    """The maps, which are contiguous in this order from the pointer ``maps`` on."""
    first = experts + 1
    sizes = (first, slots, slots, slots)
    starts = (0, first, first + slots, first + 2 * slots)
    return Maps(*[cute.make_tensor(maps + start, cute.make_layout(n)) for start, n in zip(starts, sizes)])


class RoutingMaps:
    """The host function and the kernel of one :class:`MapsConfig`."""

    def __init__(self, config: MapsConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: MapsArguments, stream: CUstream):
        """Launches a CTA for each expert, and the CTAs that clear rows."""
        block, ctas = (WARP * self.config.warps, 1, 1), arguments.experts
        if cutlass.const_expr(self.config.zeroed):
            ctas = ctas + arguments.sums.ctas
        self.kernel(arguments).launch(grid=(ctas, 1, 1), block=block, stream=stream)

    @cute.kernel
    def kernel(self, arguments: MapsArguments):
        # CTAs of the next product may start meanwhile: they wait for the maps
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        expert, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.config.zeroed):
            if expert < arguments.experts:
                self.sort(arguments, expert, thread)
            else:
                self.zero(arguments.sums, expert - arguments.experts, thread)
        else:
            self.sort(arguments, expert, thread)

    @cute.jit
    def zero(self, sums: ZeroedRows, cta: Int32, thread: Int32):
        """Clears every ``ctas``-th row."""
        for row in cutlass.range(cta, sums.count, sums.ctas, unroll=1):
            first = sums.data.toint() + Int64(row) * sums.stride
            step = WARP * self.config.warps * VECTOR_BYTES
            for at in cutlass.range(thread * VECTOR_BYTES, sums.row_bytes, step, unroll=1):
                store_global(first + at, [Uint32(0)] * 4)

    @cute.jit
    def sort(self, arguments: MapsArguments, expert: Int32, thread: Int32):
        """Writes the maps of an expert's slots."""
        warps = self.config.warps
        lane, warp = mod(thread, WARP), div(thread, WARP)
        maps = maps_of(arguments.maps, arguments.experts, arguments.slots)
        # a strip has 32 slots, one for each lane of a warp
        strips = ceil_div(arguments.slots, WARP)
        share = (strips + (warps - 1)) // warps
        first = warp * share
        last = cutlass.min(first + share, strips)
        less, equal = Int32(0), Int32(0)
        for strip in cutlass.range(first, last, self.ahead, unroll=1):
            chosen = self.chosen_of_strips(arguments, strip, last, lane)
            for i in cutlass.range_constexpr(self.ahead):
                less += cute.arch.popc(cute.arch.vote_ballot_sync((chosen[i] >= 0) & (chosen[i] < expert)))
                equal += cute.arch.popc(cute.arch.vote_ballot_sync(chosen[i] == expert))
        smem = SmemAllocator()
        sCounts = smem.allocate_tensor(Int32, cute.make_layout((2, warps)), byte_alignment=16)  # (LESS EQUAL, WARPS)
        if lane == 0:
            sCounts[0, warp] = less
            sCounts[1, warp] = equal
        cute.arch.sync_threads()
        begin, row, count = Int32(0), Int32(0), Int32(0)
        for other in cutlass.range_constexpr(warps):
            begin += sCounts[0, other]
            count += sCounts[1, other]
            row += cutlass.select_(warp > other, sCounts[1, other], Int32(0))
        row += begin
        for strip in cutlass.range(first, last, self.ahead, unroll=1):
            chosen = self.chosen_of_strips(arguments, strip, last, lane)
            for i in cutlass.range_constexpr(self.ahead):
                slot = (strip + i) * WARP + lane
                mine = cute.arch.vote_ballot_sync(chosen[i] == expert)
                if chosen[i] == expert:
                    at = row + cute.arch.popc(mine & ((Int32(1) << lane) - 1))
                    maps.mSlots[at] = slot
                    maps.mExperts[at] = expert
                    maps.mRows[slot] = at
                # the CTA of expert 0 writes -1 for slots without a row
                if (expert == 0) & (chosen[i] == NOWHERE):
                    maps.mRows[slot] = Int32(-1)
                row += cute.arch.popc(mine)
        if thread == 0:
            maps.mOffsets[expert] = begin
            if expert == arguments.experts - 1:
                maps.mOffsets[arguments.experts] = begin + count

    @property
    def ahead(self) -> int:
        """Strips of ids that a warp loads at a time: each load has the latency of L2."""
        return 4 if self.config.warps > 1 else 1

    def chosen_of_strips(self, arguments: MapsArguments, strip: Int32, last: Int32, lane: Int32) -> list[Int32]:
        """The experts of a lane's slots in the next ``ahead`` strips, which it loads before it uses the first."""
        found = []
        for i in range(self.ahead):
            end = cutlass.select_(strip + i < last, arguments.slots, Int32(0))
            found.append(self.chosen(arguments, (strip + i) * WARP + lane, end))
        return found

    def chosen(self, arguments: MapsArguments, slot: Int32, end: Int32) -> Int32:
        """The expert of a slot; ``NOWHERE`` if the slot has no row; ``BEYOND`` from slot ``end`` on."""
        mIds = cute.make_tensor(arguments.ids, cute.make_layout(arguments.slots))  # (SLOTS)
        chosen = mIds[cutlass.min(slot, arguments.slots - 1)]
        chosen = chosen - arguments.offset
        here = (chosen >= 0) & (chosen < arguments.experts)
        return cutlass.select_(slot < end, cutlass.select_(here, Int32(chosen), Int32(NOWHERE)), Int32(BEYOND))

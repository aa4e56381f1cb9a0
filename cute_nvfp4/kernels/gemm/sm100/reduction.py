"""Reductions over the CTAs of a cluster that share a tile along K, in a fixed order, so that results are reproducible.

Each CTA stores one slice of the tile's columns. The others send their sums of that slice to its shared memory by
st.async. It adds them to its own sums, in the order of the CTAs along K after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....ptx import mbarrier
from ....ptx.cluster import remote_address, store_async
from ....ptx.memory import load_shared_floats
from ..barriers import Ring
from ..reduction import FLOATS, Exchange
from ..tile_scheduler import CtaPlace


@dataclass(frozen=True)
class ClusterExchange(Exchange):
    """The exchange of sums through distributed shared memory, for split_k. received: address of other CTAs' slots."""

    ring: Ring
    received: Int32
    place: CtaPlace

    def slot(self, index: int) -> Int32:
        return self.received + index * self.slot_bytes

    def part_after(self, distance: int) -> Int32:
        """The part along K of the CTA that comes ``distance`` after this one, cyclically."""
        return (self.place.part + distance) % self.config.split_k

    def rank(self, part: Int32) -> Int32:
        cm, cn = self.config.cluster
        return part * (cm * cn) + self.place.y * cm + self.place.x

    @cute.jit
    def announce(self):
        """Announces, in one thread, the bytes of partial sums that this work tile brings."""
        if self.row == 0:
            self.ring.announce()

    def send(self, distance: int, column: int, values: list[cute.Tensor]) -> None:
        """Sends an epilogue tile to the CTA ``distance`` after this one. column: from the start of that CTA's slice."""
        rank = self.rank(self.part_after(distance))
        # the receiver finds this CTA split_k - distance places after itself
        slot = self.slot(self.config.split_k - distance - 1)
        barrier = remote_address(self.ring.full(), rank)
        target = remote_address(slot, rank)
        for p, j, offset in self.quads(column):
            store_async(target + offset, [values[p][j + i] for i in range(FLOATS)], barrier)

    def add_received(self, column: int, values: list[cute.Tensor]) -> None:
        """Adds the sums of all other CTAs along K to an epilogue tile of this CTA's slice."""
        for index in range(self.config.split_k - 1):
            start = self.slot(index)
            for p, j, offset in self.quads(column):
                received = load_shared_floats(start + offset)
                for i in range(FLOATS):
                    values[p][j + i] = values[p][j + i] + received[i]

    @cute.jit
    def give_back(self):
        """Tells the other CTAs along K that this warp has read their sums; one thread of every warp arrives."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for distance in cutlass.range_constexpr(1, self.config.split_k):
                mbarrier.arrive_at(self.ring.empty(), self.rank(self.part_after(distance)))

"""Equal shares of all k-tiles, each walked from its end: a CTA waits only for CTAs before it.

A CTA's first work tile is then the one whose last k-tiles belong to the CTA after it: it writes partial sums at once.
Its last work tile is the one whose first k-tiles the CTAs before it had as *their* first: it adds their sums, which
have been there for long. CTAs start in the order of their index, so that none waits for one that cannot start, and no
cooperative launch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from ..tile_scheduler import CursorRange, Share, StaticScheduler, StreamKScheduler, WorkTile


@dataclass(frozen=True)
class DescendingStreamK(StreamKScheduler):
    """The cursor counts the k-tiles that the CTA has done."""

    def range(self) -> CursorRange:
        return CursorRange(Int32(0), self.share_of(self.place.worker).count)

    def tile(self, cursor: Int32, end: Int32) -> WorkTile:
        last = self.share_of(self.place.worker).first + (end - cursor) - 1
        index, k_last = last // self.k_tiles, last % self.k_tiles
        count = cutlass.min(k_last + 1, end - cursor)
        return self._placed(index, Share(k_last + 1 - count, count))


SCHEDULERS = {"static": StaticScheduler, "stream_k": DescendingStreamK}

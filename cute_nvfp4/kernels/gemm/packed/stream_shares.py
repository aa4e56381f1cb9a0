"""The work of each CTA of the streaming GEMM: work tiles along the rows of the weight, cut along K where needed.

Of T work tiles each of C CTAs gets ⌊T / C⌋ whole ones. Fewer than C work tiles are left. Their K steps are distributed
in equal shares of consecutive steps, which the CTAs multiply first: when a CTA has done its whole work tiles, all parts
of the cut ones were written long ago, and the CTA that adds them up does not wait. A share is at most one work tile
long, so it lies in at most two. The CTA that has a work tile's last step adds up its parts, in the order of K. It waits
only for CTAs with a lower index.

Where the work tiles belong to groups, only the device knows their number. It then does not distribute a few cut work
tiles to all CTAs: adding up a work tile of many parts takes longer than the smaller shares save. And it cuts none if
that would save fewer steps than it costs: each work tile that is left is then the share of one CTA.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64

from ..tile_scheduler import CursorRange

MOST_PARTS = 6
"""The most parts of a work tile, on average, where the device computes the shares."""


class Segment(NamedTuple):
    """K steps of one work tile: ``count`` steps from ``first`` on."""

    work_tile: Int32
    first: Int32
    count: Int32

    @property
    def steps(self) -> CursorRange:
        return CursorRange(self.first, self.first + self.count)


class Shares(NamedTuple):
    """How the CTAs share the work.

    k_steps: steps of a work tile. reciprocal: ⌈2³² / k_steps⌉.
    cut: the number of work tiles that are cut, which are the first ones. whole: whole work tiles of every CTA.
    each, rest: every CTA has ``each`` steps of cut work tiles, and the first ``rest`` CTAs one more.
    sharing: only so many CTAs, the first ones, have steps of cut work tiles; None: all CTAs have.
    """

    k_steps: Int32
    reciprocal: Int64
    cut: Int32
    each: Int32
    rest: Int32
    whole: Int32
    sharing: Int32 | None = None

    def first_step(self, cta: Int32) -> Int32:
        """The first step of the cut work tiles that CTA ``cta`` has."""
        if self.sharing is not None:
            cta = cutlass.min(cta, self.sharing)
        return cta * self.each + cutlass.min(cta, self.rest)

    def cut_steps(self, cta: Int32) -> Int32:
        """The number of steps of cut work tiles that CTA ``cta`` has."""
        steps = self.each + Int32(cta < self.rest)
        return steps if self.sharing is None else cutlass.select_(cta < self.sharing, steps, Int32(0))

    def steps(self, cta: Int32) -> Int32:
        """The number of all steps that CTA ``cta`` has."""
        return self.cut_steps(cta) + self.whole * self.k_steps

    def work_tile_of(self, step: Int32) -> Int32:
        """step // k_steps, exact while step · k_steps < 2³². A division would delay the first copies."""
        return Int32((Int64(step) * self.reciprocal) >> 32)

    def segment(self, cta: Int32, cursor: Int32) -> Segment:
        """The segment that CTA ``cta`` multiplies from its step ``cursor`` on."""
        in_cut = self.cut_steps(cta)
        within = cursor < in_cut
        whole = (self.cut + cta * self.whole) * self.k_steps + cursor - in_cut
        position = cutlass.select_(within, self.first_step(cta) + cursor, whole)
        work_tile = self.work_tile_of(position)
        first = position - work_tile * self.k_steps
        left = cutlass.select_(within, in_cut - cursor, self.k_steps)
        return Segment(work_tile, first, cutlass.min(self.k_steps - first, left))


class Segments(NamedTuple):
    """The segments of one CTA, as a tile scheduler. The cursor counts the CTA's steps."""

    shares: Shares
    cta: Int32

    def range(self) -> CursorRange:
        return CursorRange(Int32(0), self.shares.steps(self.cta))

    def tile(self, cursor: Int32, end: Int32) -> Segment:
        return self.shares.segment(self.cta, cursor)

    def after(self, cursor: Int32, tile: Segment) -> Int32:
        return cursor + tile.count


class StepsOfTile(NamedTuple):
    """The K steps of a work tile, and ⌈2³² / k_steps⌉, both computed on the host."""

    k_steps: Int32
    reciprocal: Int64


def steps_of_tile(k_steps: Int32) -> StepsOfTile:
    """The record for work tiles of ``k_steps`` steps."""
    return StepsOfTile(k_steps, (Int64((1 << 32) - 1) + Int64(k_steps)) // Int64(k_steps))


def shares_of(work_tiles: Int32, k_steps: Int32, ctas: Int32) -> Shares:
    """The shares of ``ctas`` CTAs, computed on the host."""
    whole = work_tiles // ctas
    cut = work_tiles - whole * ctas
    total = cut * k_steps
    return Shares(*steps_of_tile(k_steps), cut, total // ctas, total % ctas, whole)


def shares_of_groups(work_tiles: Int32, steps: StepsOfTile, ctas: Int32, cost: int) -> Shares:
    """The shares of ``ctas`` CTAs, computed on the device. work_tiles: may be 0. cost: steps that a CTA multiplies in
    the time that adding up the parts of a work tile takes."""
    whole = work_tiles // ctas
    left = work_tiles - whole * ctas
    total = left * steps.k_steps
    gain = ctas * steps.k_steps - total
    sharing = cutlass.select_(gain > cost * ctas, cutlass.min(ctas, left * MOST_PARTS), left)
    sharing = cutlass.max(sharing, Int32(1))
    return Shares(*steps, left, total // sharing, total % sharing, whole, sharing)

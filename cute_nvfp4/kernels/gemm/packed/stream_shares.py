"""What each CTA of the streaming GEMM multiplies: work tiles of rows of the weight, cut along K where needed.

Of T work tiles each of C CTAs gets ⌊T / C⌋ whole ones. The K steps of the others, fewer than C, are distributed in
equal shares of consecutive ones, which the CTAs multiply first: when a CTA has done its whole work tiles, all parts of
the cut ones have long been written, and whoever adds them up waits for nobody. A share is at most one work tile long,
so it lies in at most two; the CTA that has a work tile's last step adds up its parts, in the order of K. It waits for
CTAs of lower index only.

Where the work tiles are of groups, only the device knows how many there are. A few cut ones are then not distributed to
all CTAs: a work tile of many parts takes longer to add up than its share saves. And none is cut where that would save
fewer steps than it costs: each of those that are left is then the share of one CTA.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64

from ..tile_scheduler import CursorRange

MOST_PARTS = 6
"""Of a work tile, about, where the device computes the shares."""


class Segment(NamedTuple):
    """K steps of one work tile: ``count`` from ``first`` on."""

    work_tile: Int32
    first: Int32
    count: Int32

    @property
    def steps(self) -> CursorRange:
        return CursorRange(self.first, self.first + self.count)


class Shares(NamedTuple):
    """How the work is distributed.

    k_steps: of a work tile; reciprocal: ⌈2³² / k_steps⌉; cut: work tiles that are cut, the first ones; each, rest:
    steps of them for every CTA, and one more for the first ``rest``; whole: work tiles of every CTA. sharing: the first
    CTAs, which alone have steps of cut ones (None: all have).
    """

    k_steps: Int32
    reciprocal: Int64
    cut: Int32
    each: Int32
    rest: Int32
    whole: Int32
    sharing: Int32 | None = None

    def first_step(self, cta: Int32) -> Int32:
        """First step of the cut work tiles that CTA ``cta`` has."""
        if self.sharing is not None:
            cta = cutlass.min(cta, self.sharing)
        return cta * self.each + cutlass.min(cta, self.rest)

    def cut_steps(self, cta: Int32) -> Int32:
        """Steps of cut work tiles that it has."""
        steps = self.each + Int32(cta < self.rest)
        return steps if self.sharing is None else cutlass.select_(cta < self.sharing, steps, Int32(0))

    def steps(self, cta: Int32) -> Int32:
        """All steps that it has."""
        return self.cut_steps(cta) + self.whole * self.k_steps

    def work_tile_of(self, step: Int32) -> Int32:
        """step // k_steps, exact while step · k_steps < 2³²: a division would hold up the first copies."""
        return Int32((Int64(step) * self.reciprocal) >> 32)

    def segment(self, cta: Int32, cursor: Int32) -> Segment:
        """What a CTA multiplies from its step ``cursor`` on."""
        in_cut = self.cut_steps(cta)
        within = cursor < in_cut
        whole = (self.cut + cta * self.whole) * self.k_steps + cursor - in_cut
        position = cutlass.select_(within, self.first_step(cta) + cursor, whole)
        work_tile = self.work_tile_of(position)
        first = position - work_tile * self.k_steps
        left = cutlass.select_(within, in_cut - cursor, self.k_steps)
        return Segment(work_tile, first, cutlass.min(self.k_steps - first, left))


class Segments(NamedTuple):
    """The segments of one CTA, as a tile scheduler; the cursor counts its steps."""

    shares: Shares
    cta: Int32

    def range(self) -> CursorRange:
        return CursorRange(Int32(0), self.shares.steps(self.cta))

    def tile(self, cursor: Int32, end: Int32) -> Segment:
        return self.shares.segment(self.cta, cursor)

    def after(self, cursor: Int32, tile: Segment) -> Int32:
        return cursor + tile.count


class StepsOfTile(NamedTuple):
    """K steps of a work tile, and ⌈2³² / k_steps⌉, both computed on the host."""

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
    """The shares of ``ctas`` CTAs, computed on the device; ``work_tiles`` may be 0. cost: steps of a CTA that take as
    long as to add up the parts of a work tile."""
    whole = work_tiles // ctas
    left = work_tiles - whole * ctas
    total = left * steps.k_steps
    gain = ctas * steps.k_steps - total
    sharing = cutlass.select_(gain > cost * ctas, cutlass.min(ctas, left * MOST_PARTS), left)
    sharing = cutlass.max(sharing, Int32(1))
    return Shares(*steps, left, total // sharing, total % sharing, whole, sharing)

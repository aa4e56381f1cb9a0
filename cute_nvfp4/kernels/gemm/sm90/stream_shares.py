"""What each CTA of the streaming GEMM multiplies: units of rows of the weight, cut along K where they do not divide.

Of U units each of C CTAs gets ⌊U / C⌋ whole ones. The K steps of the others, fewer than C, are dealt in equal shares of
consecutive ones, which the CTAs multiply first: when a CTA has done its whole units, all parts of the cut ones have
long been written, and whoever adds them up waits for nobody. A share is at most one unit long, so it lies in at most
two; the CTA that has a unit's last step adds up its parts, in the order of K. It waits for CTAs of lower index only.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64

from ..tile_scheduler import CursorRange


class Segment(NamedTuple):
    """K steps of one unit: ``count`` from ``first`` on."""

    unit: Int32
    first: Int32
    count: Int32

    @property
    def steps(self) -> CursorRange:
        return CursorRange(self.first, self.first + self.count)


class Shares(NamedTuple):
    """How the work is dealt.

    k_steps: of a unit; reciprocal: ⌈2³² / k_steps⌉; cut: units that are cut, the first ones; each, rest: steps of them
    for every CTA, and one more for the first ``rest``; whole: units of every CTA.
    """

    k_steps: Int32
    reciprocal: Int64
    cut: Int32
    each: Int32
    rest: Int32
    whole: Int32

    def first_step(self, cta: Int32) -> Int32:
        """First step of the cut units that CTA ``cta`` has."""
        return cta * self.each + cutlass.min(cta, self.rest)

    def cut_steps(self, cta: Int32) -> Int32:
        """Steps of cut units that it has."""
        return self.each + Int32(cta < self.rest)

    def steps(self, cta: Int32) -> Int32:
        """All steps that it has."""
        return self.cut_steps(cta) + self.whole * self.k_steps

    def unit_of(self, step: Int32) -> Int32:
        """step // k_steps, exact while step · k_steps < 2³²: a division would hold up the first copies."""
        return Int32((Int64(step) * self.reciprocal) >> 32)

    def segment(self, cta: Int32, cursor: Int32) -> Segment:
        """What a CTA multiplies from its step ``cursor`` on."""
        in_cut = self.cut_steps(cta)
        within = cursor < in_cut
        whole = (self.cut + cta * self.whole) * self.k_steps + cursor - in_cut
        position = cutlass.select_(within, self.first_step(cta) + cursor, whole)
        unit = self.unit_of(position)
        first = position - unit * self.k_steps
        left = cutlass.select_(within, in_cut - cursor, self.k_steps)
        return Segment(unit, first, cutlass.min(self.k_steps - first, left))


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


def deal(units: Int32, k_steps: Int32, ctas: Int32) -> Shares:
    """On the host."""
    whole = units // ctas
    cut = units - whole * ctas
    total = cut * k_steps
    reciprocal = (Int64((1 << 32) - 1) + Int64(k_steps)) // Int64(k_steps)
    return Shares(k_steps, reciprocal, cut, total // ctas, total % ctas, whole)

"""Regions: granules that are always accessed together, and a shadow that keeps their common history once.

All CTAs copy, read and free a tile as a whole. Its granules then have one history, and one of them can stand for all. A
*region* is a set of granules of a CTA of which every access so far, in every CTA of the wave, has touched all or none;
its least granule is its *leader*. An access to part of a region divides the region first, and the new leader takes over
the history. So the checks handle a few granules where an access touches thousands.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.checks.shadow import Actor, Shadow

Moved = Callable[[np.ndarray, np.ndarray], None]


class Regions:
    """The regions of the ``count`` granules of a CTA.

    ``leader`` (count,) is the leader of each granule's region; ``size`` at a leader is the number of granules of its
    region. ``moved(old, new)`` is called when granules ``new`` become leaders: the history of ``old`` is theirs too.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.leader, self.size = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.size[0] = count
        self.single = np.zeros(count, bool)
        self._known: dict[bytes, np.ndarray] = {}

    def leaders(self, granules: np.ndarray, moved: Moved) -> np.ndarray:
        """Divides regions so that ``granules`` (m,) are whole ones, and returns their leaders in order."""
        key = granules.tobytes()
        found = self._known.get(key)
        if found is None:
            self._divide(np.unique(granules), moved, each=False)
            found = self._known[key] = np.unique(self.leader[granules])
        return found

    def part(self, granules: np.ndarray, moved: Moved) -> None:
        """Makes each of the ``granules``, an array of any shape, a region of its own."""
        if not self.single.take(granules).all():
            self._divide(np.unique(granules), moved, each=True)

    def _divide(self, granules: np.ndarray, moved: Moved, each: bool) -> None:
        """Divides regions so that ``granules`` (in order, once each) are whole regions; with ``each``, each is one."""
        old, count = np.unique(self.leader[granules], return_counts=True)
        cut = np.zeros(self.count, bool)
        cut[old[self.size[old] > (1 if each else count)]] = True
        members = np.flatnonzero(cut[self.leader])
        if not len(members):
            return
        self._known.clear()
        inside = np.zeros(self.count, bool)
        inside[granules] = True
        before = self.leader[members]
        name = np.where(inside[members], self.count + (members if each else before), before)
        _, first, which, size = np.unique(name, return_index=True, return_inverse=True, return_counts=True)
        leaders = members[first]
        self.leader[members] = leaders[which]
        self.size[leaders], self.single[leaders] = size, size == 1
        new = leaders != before[first]
        moved(before[first][new], leaders[new])


class CtaShadow(Shadow):
    """The shadow of a memory of which each of ``ctas`` CTAs has ``granules`` granules, numbered CTA by CTA.

    The history of a region stands at its leader. ``told`` is called with all granules of an access.
    """

    def __init__(self, ctas: int, granules: int, told: Callable[..., None]) -> None:
        super().__init__(ctas * granules, told)
        self.granules, self.regions = granules, Regions(granules)
        self.asked: tuple[np.ndarray, np.ndarray] | None = None

    def tile(self, cta: np.ndarray, granules: np.ndarray, who: Actor, write: bool, flag: bool) -> None:
        """Makes an :meth:`access` to ``granules`` (k, m), or (1, m) for all, of CTAs (k,)."""
        self.access(self.places(cta, granules), who, write, flag)

    def part(self, index: np.ndarray) -> None:
        """Makes each of the granules ``index`` a region of its own, in all CTAs."""
        self.asked = None
        self.regions.part(index % self.granules, self._moved)

    def places(self, cta: np.ndarray, granules: np.ndarray) -> np.ndarray:
        """Returns the leaders (k, c) of ``granules`` (k, m), or (1, m) for all, of CTAs (k,)."""
        self.asked = cta, granules
        if len(granules) > 1 and (granules == granules[0]).all():
            granules = granules[:1]
        for row in granules:
            found = self.regions.leaders(row, self._moved)
        if len(granules) == 1:
            return (cta * self.granules)[:, None] + found
        # once more, because a row may have divided the regions of another; padding names a leader twice
        rows = [self.regions.leaders(row, self._moved) for row in granules]
        most = max(map(len, rows))
        wide = np.stack([np.pad(row, (0, most - len(row)), "edge") for row in rows])
        return (cta * self.granules)[:, None] + wide

    def leaders(self, index: np.ndarray) -> np.ndarray:
        """Returns the leader of each of the granules ``index``."""
        inside = index % self.granules
        return index - inside + self.regions.leader[inside]

    def _moved(self, old: np.ndarray, new: np.ndarray) -> None:
        planes = [p for p in (self.readers, self.atomics) if p is not None]
        arrays = [self.last, *(a for p in planes for a in (p.mask, *p.store[: p.count]))]
        for array in arrays:
            by_cta = array.reshape(-1, self.granules)
            known = by_cta[:, old]
            if known.any():
                by_cta[:, new] = known

    def report(self, kind: str, who: Actor, index: np.ndarray, bad: np.ndarray, epochs: np.ndarray) -> None:
        if self.asked is not None:
            cta, granules = self.asked
            every = (cta * self.granules)[:, None] + granules
            bad, epochs = np.broadcast_to(bad, index.shape), np.broadcast_to(epochs, index.shape)
            at = np.stack([np.searchsorted(*pair) for pair in zip(index, self.leaders(every))])
            bad, epochs, index = np.take_along_axis(bad, at, 1), np.take_along_axis(epochs, at, 1), every
        super().report(kind, who, index, bad, epochs)

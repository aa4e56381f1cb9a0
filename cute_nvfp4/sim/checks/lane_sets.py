"""Which lanes made an access together, for kernels in which some lanes of a warp meet without the others.

Where all lanes of a warp meet or none, it is enough to know that several lanes made an access (``MANY``). After a
bar.warp.sync of some lanes it matters which. The values of an epoch's lane field above ``MANY`` then stand for sets of
lanes; the sets of a wave are numbered as they come.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep


class LaneSets:
    """The lane fields of one wave: ``masks`` (64,) has the lanes of each, a bit for each lane. 0 stands for lanes that
    are not known, of ``MANY`` and of fields that are still free."""

    def __init__(self) -> None:
        self.masks = np.zeros(64, np.uint32)
        self.masks[: ep.MANY] = np.uint32(1) << np.arange(ep.MANY, dtype=np.uint32)
        self._fields = {int(mask): field for field, mask in enumerate(self.masks[: ep.MANY])}

    def fields(self, masks: np.ndarray) -> np.ndarray:
        """Returns the lane fields (int64) of sets of lanes, ``MANY`` for no lane and for new sets if no field is
        free."""
        sets, which = np.unique(masks, return_inverse=True)
        return np.array([self._field(mask) for mask in sets.tolist()], np.int64)[which].reshape(masks.shape)

    def _field(self, mask: int) -> int:
        free = len(self._fields) + 1
        if mask and mask not in self._fields and free < len(self.masks):
            self._fields[mask], self.masks[free] = free, mask
        return self._fields.get(mask, ep.MANY)

    def of(self, active: np.ndarray) -> np.ndarray:
        """Returns the lane fields (n, 1) of ``active`` lanes, booleans (n, 32)."""
        return self.fields(np.packbits(active, axis=1, bitorder="little").view(np.uint32))

    def lanes(self, field: int) -> np.ndarray:
        """Returns the lanes (32,) of a field as booleans, none if they are not known."""
        return (self.masks[field] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)

    def gathered(self, index: np.ndarray, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Combines the lanes of a warp that touch one granule. ``epoch`` has the shape of ``index``, flat. Returns the
        places in both arrays that stand for a granule and a warp, and the lane field of each."""
        order = np.lexsort((ep.by_many(epoch), index))
        place, by = index[order], epoch[order]
        agent = ep.by_many(by)
        first = np.flatnonzero(np.r_[True, (place[1:] != place[:-1]) | (agent[1:] != agent[:-1])])
        masks = self.masks[ep.lanes(by)]
        lanes = self.fields(np.bitwise_or.reduceat(masks, first))
        lanes[np.logical_or.reduceat(masks == 0, first)] = ep.MANY
        return order[first], lanes

    def merge(self, old: np.ndarray, epoch: np.ndarray, both: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Merges epochs with ``old`` ones of the same warps where ``both``; returns them, and which cannot be merged.

        An epoch says when all its lanes made their accesses. So lanes of an older epoch can only be added if its clock
        is the same, and need not be added if they are lanes of the newer one too.
        """
        mine, theirs = (self.masks[ep.lanes(np.ascontiguousarray(e))] for e in (epoch, old))
        known = (mine != 0) & (theirs != 0)
        covered = known & (theirs & ~mine == 0)
        apart = both & known & ~covered & (ep.clocks(old) != ep.clocks(np.ascontiguousarray(epoch)))
        lanes = np.where(known, self.fields(mine | theirs), ep.MANY)
        return np.where(both & ~covered & ~apart, ep.by_lane(epoch, lanes), epoch), apart

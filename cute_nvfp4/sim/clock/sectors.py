"""The sectors of global memory that L2 holds while a launch is executed, and the bytes that come from DRAM."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cute_nvfp4.sim.machine.global_memory import SECTOR, GlobalMemory


class _Region(NamedTuple):
    """When each sector of a region was last touched, and last written. Time counts the sectors that have come into L2,
    from 1; 0 is never."""

    touched: np.ndarray
    written: np.ndarray


class Sectors:
    """The sectors that a launch has touched. L2 starts empty, or ``warm`` with all of them. The least recently used
    sectors leave it: a sector is gone once ``capacity`` bytes have come in since its last use, and is then fetched
    again. ``fetched`` and ``stored`` are bytes from and to DRAM, ``again`` the bytes of sectors that have come back."""

    def __init__(self, memory: GlobalMemory, warm: bool, capacity: float) -> None:
        self._memory, self.warm, self._capacity = memory, warm, int(capacity) // SECTOR
        self._regions: dict[int, _Region] = {}
        self._now = 1
        self.fetched = self.stored = self.again = 0.0

    def touch(self, sectors: np.ndarray, kind: str) -> np.ndarray:
        """Touches sectors (n,) in one step of the launch. Returns the share of each (n,) that its reader must fetch
        from DRAM, or that its writer sends there. The readers or writers of a sector in one step share it equally.
        Later stores to the sector send nothing while it is in L2, which joins them."""
        share, came = np.zeros(len(sectors)), 0
        kept_since = max(1, self._now - self._capacity)
        for region in self._memory.regions:
            base, end = region.base // SECTOR, -(-region.end // SECTOR)
            inside = (sectors >= base) & (sectors < end)
            if not inside.any():
                continue
            if region.base not in self._regions:
                touched = (np.ones if self.warm else np.zeros)(end - base, np.int32)
                self._regions[region.base] = _Region(touched, np.zeros(end - base, np.int32))
            known, at = self._regions[region.base], sectors[inside] - base
            gone = known.touched[at] < kept_since
            fresh = gone if kind == "load" else known.written[at] < kept_since
            came += len(np.unique(at[gone])) if gone.any() else 0
            self.again += SECTOR * len(np.unique(at[gone & (known.touched[at] > 0)])) if kept_since > 1 else 0
            if fresh.any():
                low = int(at.min())
                asked = np.bincount(at - low)
                share[inside] = np.where(fresh, 1.0 / asked[at - low], 0.0)
            known.touched[at] = self._now
            if kind != "load":
                known.written[at] = self._now
        self._now += came
        if kind == "load":
            self.fetched += SECTOR * float(share.sum())
        else:
            self.stored += SECTOR * float(share.sum())
        return share

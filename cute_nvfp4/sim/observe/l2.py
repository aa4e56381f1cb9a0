"""A model of the L2 cache, which tells DRAM traffic from requests. No GPU documents its replacement policy.

The model assumes one cache of the architecture's nominal size, which is empty when the launch starts. The cache is
fully associative, with pages of 2 KB, of which it evicts the least recently used one. Only the 32-byte sectors of a
page that are accessed are fetched and take room. A store fills its sectors without reading them, and a sector stored in
part counts as whole. An atomic reads and writes. L1 filters nothing. Accesses come in the order of the simulation; an
instruction that many warps execute together is one access, in the order of its addresses. Waves that a GPU would
overlap come one after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.host.device import DEFAULT_ARCH, DEVICES
from cute_nvfp4.sim.machine.global_memory import SECTOR

PAGE_SECTORS = 64
"""Sectors of a page of 2 KB, whose states fit the bits of one integer."""


@dataclass(frozen=True)
class L2Traffic:
    """The bytes between the modelled L2 and DRAM in one launch.

    ``capacity_bytes`` is the size of the cache. ``read_bytes`` came from DRAM; ``refetched_bytes`` of them had been in
    the cache before. ``written_bytes`` went to DRAM when their page was evicted; ``dirty_bytes`` were still to be
    written when the launch ended.
    """

    capacity_bytes: int
    read_bytes: int
    refetched_bytes: int
    written_bytes: int
    dirty_bytes: int


class L2:
    """The modelled cache during one launch; ``capacity`` is its size in bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._room = capacity // SECTOR
        self._pages: OrderedDict[int, list[int]] = OrderedDict()  # page -> [valid, dirty], a bit a sector
        self._left: dict[int, int] = {}
        self._resident = self._read = self._again = self._written = 0

    @staticmethod
    def of(target: str) -> L2:
        """Returns the cache of the GPU that stands for a PTX target, or of the default GPU for an unknown target."""
        return L2(DEVICES.get(target, DEVICES[DEFAULT_ARCH]).l2_bytes)

    def access(self, kind: str, sectors: np.ndarray) -> None:
        """Accesses ``sectors`` (m,), distinct sector numbers (address / 32) in increasing order. ``kind`` is "load",
        "store" or "atomic"."""
        if not len(sectors):
            return
        page = sectors // PAGE_SECTORS
        bit = np.uint64(1) << (sectors % PAGE_SECTORS).astype(np.uint64)
        starts = np.flatnonzero(np.r_[True, page[1:] != page[:-1]])
        get, again = self._pages.get, self._pages.move_to_end
        for number, wanted in zip(page[starts].tolist(), np.bitwise_or.reduceat(bit, starts).tolist()):
            entry = get(number)
            # the common case, without a call: a page that is read is mostly there
            if kind == "load" and entry is not None and not wanted & ~entry[0]:
                again(number)
            else:
                self._page(number, wanted, kind)

    def _page(self, number: int, wanted: int, kind: str) -> None:
        entry = self._pages.get(number)
        if entry is None:
            entry = self._pages[number] = [0, 0]
        else:
            self._pages.move_to_end(number)
        missing = wanted & ~entry[0]
        if missing:
            if kind != "store":
                self._read += missing.bit_count()
                self._again += (missing & self._left.get(number, 0)).bit_count()
            entry[0] |= missing
            self._resident += missing.bit_count()
        if kind != "load":
            entry[1] |= wanted
        while self._resident > self._room and len(self._pages) > 1:
            old, (valid, dirty) = self._pages.popitem(last=False)
            self._resident -= valid.bit_count()
            self._written += dirty.bit_count()
            self._left[old] = self._left.get(old, 0) | valid

    def traffic(self) -> L2Traffic:
        dirty = sum(entry[1].bit_count() for entry in self._pages.values())
        return L2Traffic(self.capacity, *(SECTOR * n for n in (self._read, self._again, self._written, dirty)))

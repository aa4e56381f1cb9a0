"""The L2 model against an independent cache that looks at one sector at a time."""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.sim.observe.l2 import L2, PAGE_SECTORS
from tests.simulator.ptx_lab import launch_kernel, module

SECTOR = 32


class Reference:
    """Pages in a list, the least recently used first; sectors in sets."""

    def __init__(self, sectors: int) -> None:
        self.room, self.order = sectors, []
        self.valid, self.dirty, self.known = set(), set(), set()
        self.read = self.again = self.written = 0

    def access(self, kind: str, sectors) -> None:
        pages = []
        for s in sectors:
            if s // PAGE_SECTORS not in pages:
                pages.append(s // PAGE_SECTORS)
        for page in pages:
            if page in self.order:
                self.order.remove(page)
            self.order.append(page)
            for s in sectors:
                if s // PAGE_SECTORS == page:
                    self._sector(kind, s)
            while len(self.valid) > self.room and len(self.order) > 1:
                self._evict(self.order.pop(0))

    def _sector(self, kind: str, s: int) -> None:
        if kind != "store" and s not in self.valid:
            self.read += 1
            self.again += s in self.known
        self.valid.add(s)
        self.known.add(s)
        if kind != "load":
            self.dirty.add(s)

    def _evict(self, page: int) -> None:
        gone = {s for s in self.valid if s // PAGE_SECTORS == page}
        self.written += len(gone & self.dirty)
        self.valid -= gone
        self.dirty -= gone


@pytest.mark.parametrize("room", [1, 40, 200, 100_000])
def test_random_accesses(room: int) -> None:
    rng = np.random.default_rng(room)
    cache, reference = L2(room * SECTOR), Reference(room)
    for _ in range(300):
        start = rng.integers(0, 20) * PAGE_SECTORS
        sectors = np.unique(start + rng.integers(0, 3 * PAGE_SECTORS, rng.integers(1, 30)))
        kind = str(rng.choice(["load", "store", "atomic"]))
        cache.access(kind, sectors)
        reference.access(kind, sectors.tolist())
    t = cache.traffic()
    expected = (reference.read, reference.again, reference.written, len(reference.dirty))
    assert (t.read_bytes, t.refetched_bytes, t.written_bytes, t.dirty_bytes) == tuple(SECTOR * n for n in expected)
    assert (reference.again > 0) == (room < 1000)


def test_a_stream_that_does_not_fit_is_fetched_again() -> None:
    cache = L2(2 * PAGE_SECTORS * SECTOR)
    for _ in range(3):
        for page in range(3):
            cache.access("load", np.arange(PAGE_SECTORS) + page * PAGE_SECTORS)
    assert cache.traffic().read_bytes == 9 * PAGE_SECTORS * SECTOR
    assert cache.traffic().refetched_bytes == 6 * PAGE_SECTORS * SECTOR


def test_stores_are_not_read_and_leave_their_data_behind() -> None:
    cache = L2(1 << 20)
    cache.access("store", np.arange(8))
    cache.access("load", np.arange(16))
    assert (cache.traffic().read_bytes, cache.traffic().dirty_bytes) == (8 * SECTOR, 8 * SECTOR)


@pytest.mark.parametrize(("target", "size"), [("sm_90a", 50), ("sm_100a", 126)])
def test_capacity_is_that_of_the_target(target: str, size: int) -> None:
    text = module("ld.global.b32 %r1, [%p0];", 1).replace("sm_100a", target)
    result = launch_kernel(text, [np.zeros(8, "u4")], counters=True)
    assert result.l2.capacity_bytes == size << 20 and result.l2.read_bytes == SECTOR

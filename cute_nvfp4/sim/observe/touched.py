"""The bytes of global memory that a launch reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener, Mask, Values
from cute_nvfp4.sim.machine.global_memory import GlobalMemory, Region
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group, Wave

_WIDEST = 16


class Runs(NamedTuple):
    """Ranges of bytes, from ``first`` (m,) up to but not including ``last`` (m,), in increasing order and with gaps
    between them."""

    first: np.ndarray
    last: np.ndarray

    @staticmethod
    def of(first: np.ndarray, last: np.ndarray) -> Runs:
        """Returns the union of ranges (m,), which may overlap and come in any order."""
        order = np.argsort(first, kind="stable")
        first, reach = first[order], np.maximum.accumulate(last[order])
        starts = np.flatnonzero(np.r_[True, first[1:] > reach[:-1]])
        return Runs(first[starts], reach[np.r_[starts[1:] - 1, len(first) - 1]])

    def shared(self, other: Runs) -> tuple[int, int] | None:
        """Returns the first range of bytes (begin, end) that both have, None where they have none in common."""
        after = np.searchsorted(other.last, self.first, "right")
        inside = np.flatnonzero(after < len(other.first))
        hit = inside[other.first[after[inside]] < self.last[inside]]
        if not len(hit):
            return None
        i, j = hit[0], after[hit[0]]
        return int(max(self.first[i], other.first[j])), int(min(self.last[i], other.last[j]))


class Touched(Listener):
    """A client that marks the bytes of each tensor that are read or written, with a mark for the width of an access."""

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._marks: dict[tuple[int, bool, int], tuple[Region, np.ndarray]] = {}

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        self._wave = wave
        return (self,)

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        if space == "global":
            self._lanes(g, a, host, mask, False)

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        if space == "global":
            self._lanes(g, a, host, mask, True)

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        if space == "global":
            self._lanes(g, a, host, mask, True)

    def issued(self, pending: Pending, queued: bool) -> None:
        if not queued:
            self.completed(pending)

    def completed(self, pending: Pending) -> None:
        # cp.async is executed as loads; the tensor core does not access global memory
        for f in pending.footprints(self._wave) if pending.engine in ("tma", "store") else ():
            if f.space == "global" and f.place.length:
                address = np.asarray(f.place.address)
                bits = int(np.bitwise_or.reduce(address, axis=None)) | f.place.length if address.size else 1
                self._mark(address.ravel(), f.place.length, min(bits & -bits, _WIDEST), f.write)

    def closed(self) -> None:
        self._wave = None

    def _lanes(self, g: Group, a: Access, host: np.ndarray, mask: Mask, write: bool) -> None:
        if mask is not None or g.mask is not None:
            lanes = g.lanes(mask)
            host = np.broadcast_to(host, lanes.shape)[lanes]
        self._mark(host.ravel(), a.total, a.total, write)

    def _mark(self, address: np.ndarray, length: int, unit: int, write: bool) -> None:
        """Marks ``length`` bytes at each address (m,). Addresses and length are multiples of ``unit``."""
        if not address.size:
            return
        low, high = int(address.min()), int(address.max()) + length
        region = self._memory.find(low)
        if region is not None and high <= region.end:
            self._mark_in(region, address, length, unit, write)
            return
        for region in self._memory.regions:  # accesses outside all of them are out of bounds
            inside = (address >= region.base) & (address + length <= region.end)
            if inside.any():
                self._mark_in(region, address[inside], length, unit, write)

    def _mark_in(self, region: Region, address: np.ndarray, length: int, unit: int, write: bool) -> None:
        key = (region.base, write, unit)
        if key not in self._marks:
            self._marks[key] = region, np.zeros((region.end - 1) // unit - region.base // unit + 1, bool)
        index = address // unit - region.base // unit
        if length > unit:
            index = (index[:, None] + np.arange(length // unit)).ravel()
        self._marks[key][1][index] = True

    def runs(self) -> Iterator[tuple[Region, bool, Runs]]:
        """Yields (tensor, whether the bytes are written, the bytes) for all that was touched."""
        found: dict[tuple[int, bool], list[tuple[Region, np.ndarray]]] = {}
        for (base, write, unit), (region, seen) in self._marks.items():
            edges = np.flatnonzero(np.diff(seen, prepend=False, append=False)).reshape(-1, 2) + base // unit
            found.setdefault((base, write), []).append((region, edges * unit))
        for (_, write), parts in found.items():
            edges = np.concatenate([edges for _, edges in parts])
            yield parts[0][0], write, Runs.of(edges[:, 0], edges[:, 1])

"""The shadow of global memory: one for each tensor, for the whole launch.

Only tensors that the launch writes have a shadow. Reads of a tensor before its first write are noted (addresses and
clocks only) and entered into the shadow at that write. Each cluster has its own clocks, so the label of an epoch is
here the number of the cluster, and the label of the instruction stands in another array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.shadow import Actor, Shadow
from cute_nvfp4.sim.checks.sparse import zeros
from cute_nvfp4.sim.machine.global_memory import GlobalMemory, Region

MOST_NOTES = 1 << 24
"""The most reads of single lanes that are noted; beyond that, the oldest note of the tensor with most is dropped."""


class Watched(Shadow):
    """The shadow of one tensor, in granules of ``grain`` bytes.

    ``wrote`` and ``read_by`` (granules,) are the labels of the instructions of the last write and the last read.
    ``constant`` (granules,) are those of the last loads of what the launch must not write, None before the first one.
    """

    def __init__(self, region: Region, grain: int, told: Callable[..., None], foreign: Callable | None) -> None:
        self.region, self.grain, self.start = region, grain, region.base & ~15
        size = -(-(region.end - self.start) // grain)
        super().__init__(size, told, foreign)
        self.wrote, self.read_by = zeros(size, np.uint16), zeros(size, np.uint16)
        self.constant: np.ndarray | None = None

    def report(self, *conflict: Any) -> None:
        self.told(self, *conflict)

    def granules(self, address: np.ndarray, width: int) -> tuple[np.ndarray, int]:
        """Returns the first granule of the ``width`` bytes at each address, and their number; whole granules only."""
        offset = address - self.start
        grain = self.grain
        if grain == 1 or not (offset & (grain - 1)).any():
            return offset // grain, max(1, width // grain)
        return -(-offset // grain), max(1, (width - grain + 1) // grain)

    def changes(self, index: np.ndarray, who: Actor, write: bool, label: int) -> None:
        """Reports granules that one instruction reads as constant (ld.global.nc, ldu) and another writes, whatever
        orders the two (PTX ISA, "ld.global.nc": "the data should be read-only within the kernel")."""
        if write:
            found = self.constant
        else:
            found = self.wrote
            self.constant = np.zeros_like(self.wrote) if self.constant is None else self.constant
            self.constant[index] = label
        if found is not None and (bad := found.take(index) != 0).any():
            self.report("constant", who, index, bad, self.last.take(index))


Enter = Callable[[Watched], tuple[np.ndarray, Actor, int]]
"""A function that returns the granules, the actor and the instruction's label of an access to a tensor."""


class NoClocks:
    """The clocks of an actor that knows nothing, so that a noted read replaces no other read."""

    room, generic, met_lanes = 0, 0, ()
    flat = np.zeros(1 << 16, np.int32)

    def __init__(self, clocks: Clocks) -> None:
        self.lane_sets, self.bits = clocks.lane_sets, clocks.bits

    @staticmethod
    def thread_of(component: np.ndarray) -> np.ndarray:
        """Returns the components unchanged: reads of global memory never have the kind "load"."""
        return component


class GlobalShadows:
    """The shadows of all tensors of a launch.

    ``grain`` is the number of bytes of the kernel's narrowest store to global memory. ``written`` is called with each
    tensor before its first write. ``notes`` has the reads of tensors that nobody has written: the number of lanes, the
    function that enters the read, and whether it is a constant load. Each wave sets ``told`` and ``foreign``.
    """

    def __init__(self, memory: GlobalMemory, grain: int, written: Callable[[Region], None]) -> None:
        self.memory, self.grain, self.written = memory, min(grain, 16), written
        self.watched: dict[int, Watched] = {}
        self.notes: dict[int, list[tuple[int, Enter, bool]]] = {}
        self.noted = 0
        self.told: Callable[..., None] | None = None
        self.foreign: Callable | None = None

    def touch(self, region: Region, write: bool, lanes: int, enter: Enter, constant: bool = False) -> None:
        """Checks and records an access of ``lanes`` lanes; ``constant`` marks a load of what nobody may write."""
        watched = self.watched.get(region.base)
        if watched is None:
            if not write:
                if region.writable:
                    self._note(region, lanes, enter, constant)
                return
            watched = self._watch(region)
        watched.told, watched.foreign = self.told, self.foreign
        index, who, label = enter(watched)
        if constant or (write and watched.constant is not None):
            watched.changes(index, who, write, label)
        if write:
            watched.write(index, who)
            watched.wrote[index] = label
        else:
            watched.read(index, who, initialised=True)
            watched.read_by[index] = label

    def _note(self, region: Region, lanes: int, enter: Enter, constant: bool) -> None:
        self.notes.setdefault(region.base, []).append((lanes, enter, constant))
        self.noted += lanes
        while self.noted > MOST_NOTES:
            most = max(self.notes.values(), key=len)
            self.noted -= most.pop(0)[0]

    def _watch(self, region: Region) -> Watched:
        self.written(region)
        watched = Watched(region, self.grain, self.told, self.foreign)
        self.watched[region.base] = watched
        for lanes, enter, constant in self.notes.pop(region.base, []):
            index, who, label = enter(watched)
            if constant:
                watched.changes(index, who, False, label)
            blind = replace(who, clocks=NoClocks(who.clocks), base=np.zeros_like(who.base), distinct=False)
            watched.readers.place(index, blind)
            watched.read_by[index] = label
            self.noted -= lanes
        return watched

    def by_region(self, addresses: np.ndarray, length: int = 1):
        """Yields each region and a mask of the addresses whose ``length`` bytes lie in it, None if all do.

        Addresses may have any shape. Those in no region are left out: the access itself is out of bounds.
        """
        low, high = int(addresses.min()), int(addresses.max())
        region = self.memory.find(low)
        if region is not None and high + length <= region.end:
            yield region, None
            return
        for region in self.memory.regions:
            inside = (addresses >= region.base) & (addresses + length <= region.end)
            if inside.any():
                yield region, inside

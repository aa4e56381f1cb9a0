"""Flags in global memory: the stores that raise them, and the loads that wait for them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

Key = tuple[int, int, int]
"""An event that warps wait for: a CTA of the grid, and then one of

- an mbarrier's slot and phase,
- a named barrier (-1 - its number) and how often it opened before,
- ``recorder.CLUSTER`` and the phase of the cluster's barrier, where the CTA is the cluster's first one,
- ``FLAG`` and the number of a load of flags.
"""
FLAG = -200
"""The second word of the key of a load of flags."""


class Raise(NamedTuple):
    """The ``number``-th store of flags by CTA ``cta`` at a PTX instruction. ``keys`` are the loads of flags that wait
    for it, None where the CTA is not replayed."""

    cta: int
    instruction: int
    number: int
    keys: list[Key] | None


class Flags:
    """The flags of one launch. ``waits_for`` has, for each CTA of the grid, the CTAs whose flags it has seen."""

    def __init__(self, expected: Counter[Key]) -> None:
        self._expected = expected
        self._at: dict[int, Raise] = {}
        self._raised: dict[int, list[Raise]] = defaultdict(list)
        self._count: Counter[tuple[int, int]] = Counter()
        self._elsewhere: list[tuple[Key, Raise]] = []
        self._looks = 0
        self.waits_for: dict[int, set[int]] = defaultdict(set)

    def __bool__(self) -> bool:
        return bool(self._at)

    def raised(self, addresses: Iterable[int], cta: int, instruction: int, replayed: bool) -> list[Key]:
        """Notes a store of flags. Returns the list of the loads that wait for it, to which later loads are added."""
        number = self._count[cta, instruction] = self._count[cta, instruction] + 1
        made = Raise(cta, instruction, number, [] if replayed else None)
        for address in addresses:
            self._at[address] = made
        if replayed:
            self._raised[instruction].append(made)
        return made.keys if replayed else []

    def looked(self, addresses: Iterable[int], cta: int, replayed: bool) -> list[Key]:
        """Notes a load that has seen flags. Returns a list of its own key if it waits for another CTA's store in this
        launch, else an empty list."""
        found = {id(r): r for r in map(self._at.get, addresses) if r is not None and r.cta != cta}
        self.waits_for[cta] |= {r.cta for r in found.values()}
        if not found or not replayed:
            return []
        self._looks += 1
        key = (cta, FLAG, self._looks)
        for r in found.values():
            if r.keys is None:
                self._elsewhere.append((key, r))
            else:
                self._expected[key] += 1
                r.keys.append(key)
        return [key]

    def settle(self) -> int:
        """Lets stores of replayed CTAs stand for those of other CTAs: for each, the one at the same instruction with
        the nearest number, and of these that of the nearest CTA. Returns how many waits find no such store."""
        unknown = 0
        for key, r in self._elsewhere:
            alike = [other for other in self._raised[r.instruction] if other.cta != key[0]]
            if alike:
                nearest = min(alike, key=lambda other: (abs(other.number - r.number), abs(other.cta - r.cta)))
                self._expected[key] += 1
                nearest.keys.append(key)
            unknown += not alike
        self._elsewhere.clear()
        return unknown

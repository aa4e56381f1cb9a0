"""Flags in global memory: who raises them, and who waits until they are raised."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

Key = tuple[int, int, int]
FLAG = -200
"""The second word of the key of an event "these flags are raised"."""


class Raise(NamedTuple):
    """The ``number``-th store of CTA ``cta`` at a PTX instruction; ``keys`` are the events that it is a part of, None
    where the CTA is not replayed."""

    cta: int
    instruction: int
    number: int
    keys: list[Key] | None


class Flags:
    """The flags of one launch. ``waits_for`` has, for each CTA of the grid, those whose flags it has seen."""

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
        """A store of flags; the list of those who wait for it."""
        number = self._count[cta, instruction] = self._count[cta, instruction] + 1
        made = Raise(cta, instruction, number, [] if replayed else None)
        for address in addresses:
            self._at[address] = made
        if replayed:
            self._raised[instruction].append(made)
        return made.keys if replayed else []

    def looked(self, addresses: Iterable[int], cta: int, replayed: bool) -> list[Key]:
        """A load that has seen flags; the event that it waits for, if anybody raised them in this launch."""
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
        """Lets the store of a replayed CTA stand for one of a CTA that is not: of the same instruction, as often done,
        the nearest in the grid. Returns how many waits have nothing that stands for what they wait for."""
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

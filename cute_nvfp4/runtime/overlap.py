"""Whether what a launch writes is apart from what it reads: checked in every call, by addresses alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import OperandError

FEW = 3
"""Parts that are written up to which each is compared with all else."""


def near(start: int, end: int, places: Iterable[int], sizes: Iterable[int]) -> bool:
    """Whether bytes from ``start`` to ``end`` meet one of the ranges: then a call looks closely."""
    for at, size in zip(places, sizes):
        if at < end and start < at + size:
            return True
    return False


def overlap(spans: Iterable[tuple[int, int, bool]]) -> bool:
    """Whether bytes that are written are of another span, too. spans: start, end, and whether they are written."""
    last_read = last_written = 0
    for start, end, written in sorted(spans):
        if start < last_written or (written and start < last_read):
            return True
        if written:
            last_written = end
        else:
            last_read = max(last_read, end)
    return False


class OverlapCheck:
    """What the varying values of a launch must satisfy.

    sizes: bytes of what is read, by its place among the values. written: place and bytes of each part that is written;
    a part is apart from the parts before it, too.
    """

    def __init__(self, sizes: Mapping[int, int], written: Sequence[tuple[int, int]]) -> None:
        self.sizes, self.written = sizes, written
        self._every = [*((i, size, False) for i, size in sizes.items()), *((i, size, True) for i, size in written)]
        others, self._checks = dict(sizes), []
        for place, size in written:
            self._checks.append((place, size, tuple(others.items())))
            others[place] = size

    def near(self, values: Sequence[Any]) -> bool:
        """Whether what a call with ``values`` writes meets what it reads, or itself."""
        if len(self._checks) > FEW:
            return overlap([(values[i], values[i] + size, written) for i, size, written in self._every])
        for place, size, others in self._checks:
            start = values[place]
            end = start + size
            for i, other in others:
                at = values[i]
                if at < end and start < at + other:
                    return True
        return False

    def check(self, values: Sequence[Any]) -> None:
        """Raises ``OperandError`` where ``near``."""
        if self.near(values):
            got = "bytes of an input, or of another part of it"
            raise OperandError.of("memory of out", got=got, expected="memory of its own")

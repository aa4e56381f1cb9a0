"""Checks, in every call and by addresses alone, that a launch does not write what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import OperandError

FEW = 3
"""Up to so many written parts, each is compared with all other parts; more are sorted."""


def overlap(spans: Iterable[tuple[int, int, bool]]) -> bool:
    """Whether a written span meets another span. spans: start, end, and whether it is written."""
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
    """The check that what a launch writes overlaps neither its inputs nor itself.

    sizes: the bytes of each input, by its position among the varying values. written: position and bytes of each
    written part; a part must also be apart from the parts before it.
    """

    def __init__(self, sizes: Mapping[int, int], written: Sequence[tuple[int, int]]) -> None:
        self.sizes, self.written = sizes, written
        self._every = [*((i, size, False) for i, size in sizes.items()), *((i, size, True) for i, size in written)]
        others, self._checks = dict(sizes), []
        for index, size in written:
            self._checks.append((index, size, tuple(others.items())))
            others[index] = size

    def near(self, values: Sequence[Any]) -> bool:
        """Whether the output of a call with ``values`` overlaps an input, or itself."""
        if len(self._checks) > FEW:
            return overlap([(values[i], values[i] + size, written) for i, size, written in self._every])
        for index, size, others in self._checks:
            start = values[index]
            end = start + size
            for i, other in others:
                at = values[i]
                if at < end and start < at + other:
                    return True
        return False

    def check(self, values: Sequence[Any]) -> None:
        """Raises ``OperandError`` if they overlap."""
        if self.near(values):
            got = "bytes of an input, or of another part of it"
            raise OperandError.of("memory of out", got=got, expected="memory of its own")

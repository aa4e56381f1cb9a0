"""A dictionary of limited size, and a cache of function results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

LIMIT = 4096
F = TypeVar("F", bound=Callable)


class Bounded(dict):
    """Keeps the ``LIMIT`` entries that were added last. A lookup does not count as use."""

    def find(self, key: Any) -> Any:
        """The value of ``key``, or None; also None if the key is not hashable."""
        try:
            return self.get(key)
        except TypeError:
            return None

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= LIMIT and key not in self:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, value)


def remembered(function: F) -> F:
    """``functools.lru_cache`` for functions that refuse unhashable arguments themselves: those bypass the cache."""
    cached = functools.lru_cache(LIMIT)(function)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            hash((*args, *named.values()))
        except TypeError:
            return function(*args, **named)
        return cached(*args, **named)

    return call

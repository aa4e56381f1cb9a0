"""A dictionary that forgets its oldest entries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

LIMIT = 4096
F = TypeVar("F", bound=Callable)


class Bounded(dict):
    """Keeps the last ``LIMIT`` entries that were added. A lookup is a dictionary's: it does not count as use."""

    def find(self, key: Any) -> Any:
        """The value that was added with ``key``, or None; also for a key with something unhashable in it."""
        try:
            return self.get(key)
        except TypeError:
            return None

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= LIMIT:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, value)


def remembered(function: F) -> F:
    """``functools.lru_cache``; arguments with something unhashable in them go to the function, which refuses them."""
    cached = functools.lru_cache(LIMIT)(function)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            hash((*args, *named.values()))
        except TypeError:
            return function(*args, **named)
        return cached(*args, **named)

    return call

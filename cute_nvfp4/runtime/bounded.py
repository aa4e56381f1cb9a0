"""A dictionary that forgets its oldest entries."""

from __future__ import annotations

from typing import Any

LIMIT = 4096


class Bounded(dict):
    """Keeps the last ``LIMIT`` entries that were added. A lookup is a dictionary's: it does not count as use."""

    def find(self, key: Any) -> Any:
        """What was added with ``key``, or None; also for a key with something unhashable in it."""
        try:
            return self.get(key)
        except TypeError:
            return None

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= LIMIT:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, value)

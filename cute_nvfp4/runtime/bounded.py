"""A dictionary that forgets its oldest entries."""

from __future__ import annotations

from typing import Any

LIMIT = 4096


class Bounded(dict):
    """Keeps the last ``LIMIT`` entries that were added. A lookup is a dictionary's: it does not count as use."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= LIMIT:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, value)

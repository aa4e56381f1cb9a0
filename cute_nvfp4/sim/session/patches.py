"""``Patches``: replaces attributes and items for the length of a session, and restores them after it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Replacements of attributes and items, which ``restore`` undoes in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Sets ``owner.name`` and returns its previous value, None if it had none."""
        # ``restore`` must not put an inherited attribute into the class
        before = vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)
        self._undo.append(functools.partial(_put_back, setattr, delattr, owner, name, before))
        setattr(owner, name, value)
        return None if before is _ABSENT else before

    def item(self, mapping: Any, key: Any, value: Any) -> None:
        """Sets ``mapping[key]`` until ``restore``."""
        before = mapping.get(key, _ABSENT)
        self._undo.append(functools.partial(_put_back, operator.setitem, operator.delitem, mapping, key, before))
        mapping[key] = value

    def at_end(self, undo: Callable[[], object]) -> None:
        """Has ``restore`` call ``undo``."""
        self._undo.append(undo)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _put_back(put: Callable[..., None], take: Callable[..., None], owner: Any, name: Any, before: Any) -> None:
    if before is _ABSENT:
        take(owner, name)
    else:
        put(owner, name, before)

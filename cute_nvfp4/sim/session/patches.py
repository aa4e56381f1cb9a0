"""Attributes replaced for the length of a session, and put back after it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Replaces attributes and undoes it in the opposite order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Sets ``owner.name`` and returns what it was (None where there was nothing)."""
        # what a class inherits must not be put into it when the session ends
        before = vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)
        self._undo.append(functools.partial(_put_back, setattr, delattr, owner, name, before))
        setattr(owner, name, value)
        return None if before is _ABSENT else before

    def item(self, mapping: Any, key: Any, value: Any) -> None:
        """Sets ``mapping[key]``."""
        before = mapping.get(key, _ABSENT)
        self._undo.append(functools.partial(_put_back, operator.setitem, operator.delitem, mapping, key, before))
        mapping[key] = value

    def at_end(self, undo: Callable[[], object]) -> None:
        """Calls ``undo`` when the session ends."""
        self._undo.append(undo)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _put_back(put: Callable[..., None], take: Callable[..., None], owner: Any, name: Any, before: Any) -> None:
    if before is _ABSENT:
        take(owner, name)
    else:
        put(owner, name, before)

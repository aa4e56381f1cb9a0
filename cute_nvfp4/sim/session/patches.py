"""Attributes replaced for the length of a session, and put back after it."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """Replaces attributes and undoes it in the opposite order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Sets ``owner.name`` and returns what it was (None where there was nothing)."""
        # what a class inherits must not be put into it when the session ends
        before = vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)
        self._undo.append((owner, name, before))
        setattr(owner, name, value)
        return None if before is _ABSENT else before

    def item(self, mapping: Any, key: str, value: Any) -> None:
        """Sets ``mapping[key]``."""
        self._undo.append((mapping, f"[{key}", mapping.get(key, _ABSENT)))
        mapping[key] = value

    def restore(self) -> None:
        while self._undo:
            owner, name, before = self._undo.pop()
            if name.startswith("["):
                if before is _ABSENT:
                    owner.pop(name[1:], None)
                else:
                    owner[name[1:]] = before
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

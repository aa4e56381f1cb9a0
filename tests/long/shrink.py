"""Finds the smallest case that fails in the same way, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

Fails = Callable[[Any], bool]


def smaller(value: Any, default: Any = MISSING) -> Iterator[Any]:
    """Yields simpler values than ``value``: the default (nothing is simpler than it); smaller numbers, fewer
    elements."""
    if default is not MISSING:
        if value == default:
            return
        yield default
    if is_dataclass(value):
        for field in fields(value):
            for other in smaller(getattr(value, field.name), field.default):
                yield replace(value, **{field.name: other})
    elif isinstance(value, bool):
        pass
    elif isinstance(value, int):
        yield from dict.fromkeys(x for x in (1, value // 2, value // 2 & ~31, value - 32, value - 1) if 0 < x < value)
    elif isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], tuple):
        half = len(value) // 2
        yield from (value[:half], value[half:])
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
            for other in smaller(value[i]):
                yield (*value[:i], other, *value[i + 1 :])
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            for other in smaller(part):
                yield (*value[:i], other, *value[i + 1 :])


def shrunk(case: Any, fails: Fails, seconds: float = 120.0) -> Any:
    """Makes ``case`` smaller for as long as it fails and there is time."""
    end, tried = time.monotonic() + seconds, {case}
    again = True
    while again:
        again = False
        for candidate in smaller(case):
            if time.monotonic() > end:
                return case
            if candidate in tried:
                continue
            tried.add(candidate)
            if fails(candidate):
                case, again = candidate, True
                break
    return case

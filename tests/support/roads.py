"""Tries bad input on both roads of a call: without a plan, and after a good call was planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest

from cute_nvfp4.runtime.launch import SimLauncher


def table(test: Callable[..., Any]) -> list[tuple]:
    """The rows that a test is parametrized with."""
    (mark,) = [x for x in test.pytestmark if x.name == "parametrize"]
    return list(mark.args[1])


class Roads:
    """The plans of one operation: none, or those of the ``good`` calls, which are made once. more: other caches of
    calls, which have a road of their own."""

    def __init__(self, calls: dict, good: Iterable[Callable[[], Any]], *more: dict) -> None:
        self._calls = (calls, *more)
        for kept in self._calls:
            kept.clear()
        # plans do not depend on what runs, so nothing needs to run
        with mock.patch.object(SimLauncher, "__call__", lambda *args: None):
            for call in good:
                call()
        self._warm = [dict(kept) for kept in self._calls]
        assert all(self._warm), "no good call was planned"

    def refused(self, bad: Callable[[], Any]) -> str:
        """What both roads say of ``bad``: the same type and message, except for addresses."""
        said = []
        for roads in ([{}] * len(self._calls), self._warm):
            for kept, plans in zip(self._calls, roads):
                kept.clear()
                kept.update(plans)
            with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
                bad()
            message = str(error.value)
            said.append((type(error.value), re.sub("0x[0-9a-f]+", "0x…", message)))
        assert said[0] == said[1], f"planned calls refuse it in other words: {said}"
        return message

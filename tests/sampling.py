"""Which tests of a sweep the default run takes: so many that every value of every axis occurs in one of them.

A sweep is a test function whose mark says so: ``@pytest.mark.sweep``, of its module or its own. Its axes are what
``parametrize`` (and fixtures with parameters) give it; names that one ``parametrize`` sets together are one axis.
``sweep(n)`` is for a single axis of many cases, mutants for instance: of those one in n is taken.

What is taken depends on the tests' ids alone: not on their order, nor on the process or the machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import pytest

Values = frozenset[tuple[str, object]]
"""The values of one test: (axis, value)."""


def rank(name: str) -> int:
    """A number that depends on ``name`` alone, evenly spread."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def covering(tests: Mapping[str, Values]) -> set[str]:
    """Names of tests that together have every value; each next one has the most that are new."""
    left = set().union(*tests.values())
    order = sorted(tests, key=rank)
    taken: set[str] = set()
    while left:
        best = max(order, key=lambda name: len(tests[name] & left))
        taken.add(best)
        left -= tests[best]
    return taken


def one_in(n: int, tests: Iterable[str]) -> set[str]:
    """One in ``n`` of ``tests``, at least one."""
    order = sorted(tests, key=rank)
    return set(order[: -(-len(order) // n)])


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of sweeps that the default run does not take."""
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow") and hasattr(item, "callspec"):
            sweeps.setdefault(item.nodeid.split("[")[0], []).append(item)
    return [item for tests in sweeps.values() for item in _left_out(tests)]


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of the tests of one function."""
    (n,) = items[0].get_closest_marker("sweep").args or (1,)
    tests = {item.nodeid: frozenset(item.callspec.indices.items()) for item in items}
    taken = covering(tests) if n == 1 else one_in(n, tests)
    return [item for item in items if item.nodeid not in taken]

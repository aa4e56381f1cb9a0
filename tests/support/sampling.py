"""Chooses the tests of a sweep for the default run: enough that each value of each axis occurs in one of them.

A sweep is a test function marked ``@pytest.mark.sweep``, by itself or with its module. Its axes are what
``parametrize`` (and fixtures with parameters) give it; names that one ``parametrize`` sets together are one axis.
``sweep(n)``: where the only axis is one of cases, such as mutants, one in n runs. ``sweep(shared=(axis, …))``:
functions of a module with one of these axes cover it together, each with one test at least. ``sweep(n, draws=(axis,
…))``: values of these axes are draws, seeds or schedules; one in n of them must occur.

The choice depends on the tests' ids alone: not on their order, nor on the process or the machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import pytest

Values = frozenset[tuple[object, object]]
"""The values of one test: (axis, value)."""

SWEEPS = pytest.StashKey[list[tuple[list[pytest.Item], list[pytest.Item]]]]()
"""Key of the configuration: the tests of each sweep, and those of them in this run."""


def rank(name: str) -> int:
    """A number that depends on ``name`` alone, evenly distributed."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def covering(tests: Mapping[str, Values]) -> set[str]:
    """Names of tests that together have every value. Greedy: each next test has the most new values."""
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


def values(item: pytest.Item) -> Values:
    """The values of a test: one for each ``parametrize`` it has, and for each fixture with parameters."""
    params = item.callspec.params
    axes = [names(mark) for mark in item.iter_markers("parametrize")]
    together = {name for axis in axes for name in axis}
    axes += [(name,) for name in params if name not in together]
    return frozenset((axis, repr([params[name] for name in axis])) for axis in axes)


def names(mark: pytest.Mark) -> tuple[str, ...]:
    """The names that a ``parametrize`` sets."""
    argument: str | Sequence[str] = mark.args[0]
    return tuple(x.strip() for x in argument.split(",")) if isinstance(argument, str) else tuple(argument)


def sweeps(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests of each function that is a sweep."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow") and hasattr(item, "callspec"):
            found.setdefault(item.nodeid.split("[")[0], []).append(item)
    return list(found.values())


def wanted(item: pytest.Item) -> Values:
    """The values of a test that must occur: its function, its values of shared axes, and of its function's axes."""
    function, mark = item.nodeid.split("[")[0], item.get_closest_marker("sweep")
    shared, draws, n = mark.kwargs.get("shared", ()), mark.kwargs.get("draws", ()), (*mark.args, 1)[0]
    must = [x for x in values(item) if ",".join(x[0]) not in draws or rank(f"{function} {x}") % n == 0]
    found = {(axis if ",".join(axis) in shared else (function, *axis), value) for axis, value in must}
    return frozenset(found | {(function, "")})


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of sweeps that the default run leaves out."""
    covered: dict[str, dict[str, Values]] = {}
    taken: set[str] = set()
    for tests in sweeps(items):
        n, module = part(tests[0]), tests[0].nodeid.split("::")[0]
        if n == 1:
            covered.setdefault(module, {}).update((item.nodeid, wanted(item)) for item in tests)
        else:
            taken |= one_in(n, [item.nodeid for item in tests])
    for tests in covered.values():
        taken |= covering(tests)
    return [item for tests in sweeps(items) for item in tests if item.nodeid not in taken]


def part(item: pytest.Item) -> int:
    """The n of "one in n tests of this function": the mark's ``n``, or 1 where the function has several axes."""
    (n,) = item.get_closest_marker("sweep").args or (1,)
    return n if len(values(item)) == 1 else 1

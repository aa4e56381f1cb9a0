"""The default run has every value of every axis of every sweep; which tests have them depends on their names alone."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
from support import sampling

AXES = {"arch": ("sm_100a", "sm_90a"), "format,rule": [("nvfp4", "max"), ("mxfp4", "max"), ("mxfp4", "floor")],
        "dtype": ("half", "float", "bfloat16")}  # fmt: skip


def items(
    name: str = "test_edges", *sweep: int, skip: str = "", shared: tuple[str, ...] = (), draws: tuple[str, ...] = ()
) -> list:
    """What pytest collects of a function with these axes; ``skip``: an axis that is a fixture's, and has no mark."""
    found = []
    for values in itertools.product(*AXES.values()):
        params: dict[str, str] = {}
        for axis, value in zip(AXES, values):
            params.update(zip(axis.split(","), value if "," in axis else (value,)))
        marks = [pytest.mark.parametrize(axis, AXES[axis]).mark for axis in AXES if axis != skip]
        marks.append(pytest.mark.sweep(*sweep, shared=shared, draws=draws).mark)
        found.append(
            SimpleNamespace(
                nodeid=f"file.py::{name}[{'-'.join(params.values())}]",
                callspec=SimpleNamespace(params=params),
                iter_markers=lambda kind, marks=marks: [m for m in marks if m.name == kind],
                get_closest_marker=lambda kind, marks=marks: next((m for m in marks if m.name == kind), None),
            )
        )
    return found


def taken(given: list) -> set[str]:
    gone = {item.nodeid for item in sampling.left_out(given)}
    return {item.nodeid for item in given} - gone


def missing(given: list) -> set:
    """Values of sweeps that no test in the default run has."""
    names = taken(given)
    everything = set().union(*(sampling.values(item) for item in given))
    return everything - set().union(*(sampling.values(item) for item in given if item.nodeid in names))


@pytest.mark.parametrize("skip", ["", "arch"])
def test_every_value_occurs(skip: str) -> None:
    """Pairs of names that are set together are one axis: three values, where two and two would do."""
    given = items(skip=skip)
    assert not missing(given) and 3 <= len(taken(given)) < len(given) / 2


def test_a_dropped_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file's check fails, if the sampler leaves out a test that alone has a value; so it does for every n-th."""
    covering = sampling.covering
    monkeypatch.setattr(sampling, "covering", lambda tests: set(list(covering(tests))[1:]))
    assert missing(items())
    monkeypatch.setattr(sampling, "covering", lambda tests: set(sorted(tests)[::3]))
    assert missing(items())


def test_neither_order_nor_other_tests_matter() -> None:
    given = items()
    first = taken(given)
    for seed in range(5):
        mixed = [*given, *items("test_others")]
        random.Random(seed).shuffle(mixed)
        assert {name for name in taken(mixed) if "test_edges" in name} == first


def test_shared_axes_are_covered_together() -> None:
    """Two functions have every value of what they share between them, each has its own of the rest."""
    names = ("test_edges", "test_others")
    given = [item for name in names for item in items(name, shared=("format,rule", "dtype"))]
    apart = [item for name in names for item in items(name)]
    kept = [item for item in given if item.nodeid in taken(given)]
    of = {name: [item for item in kept if f"::{name}[" in item.nodeid] for name in names}
    assert not missing(given) and len(taken(given)) < len(taken(apart))
    for tests in of.values():
        assert {item.callspec.params["arch"] for item in tests} == set(AXES["arch"])
    assert any({item.callspec.params["dtype"] for item in tests} < set(AXES["dtype"]) for tests in of.values())


def test_of_draws_some_occur() -> None:
    """One in n of them; every value of the other axes, and a test at least where no draw must occur."""
    for n in (1, 2, 1000):
        given = items("test_edges", n, draws=("format,rule", "dtype"))
        kept = [item for item in given if item.nodeid in taken(given)]
        assert {item.callspec.params["arch"] for item in kept} == set(AXES["arch"])
        assert len(kept) == {1: len(taken(items())), 1000: len(AXES["arch"])}.get(n, len(kept))
    assert len(taken(items("test_edges", 2, draws=("format,rule", "dtype")))) <= len(taken(items()))


def test_random_sweeps_are_covered() -> None:
    draw = random.Random(1)
    for _ in range(50):
        tests = {f"t{i}": frozenset((a, draw.randrange(5)) for a in range(4)) for i in range(draw.randrange(1, 60))}
        found = sampling.covering(tests)
        assert set().union(*(tests[name] for name in found)) == set().union(*tests.values())


def test_one_in_n() -> None:
    """Of a single axis; several are covered all the same."""
    tests = {f"t[{i}]": i for i in range(17)}
    assert len(sampling.one_in(3, tests)) == 6 and len(sampling.one_in(100, tests)) == 1
    assert taken(items("test_edges", 3)) == taken(items())


def test_this_run(request: pytest.FixtureRequest) -> None:
    """Of the tests that were collected: for every sweep the sampled ones have every value."""
    whole: set = set()
    sample: set = set()
    for tests, kept in request.config.stash[sampling.SWEEPS]:
        assert kept, tests[0].nodeid
        if sampling.part(tests[0]) == 1:
            # a shared axis is one of the module
            for found, some in ((whole, tests), (sample, kept)):
                module = tests[0].nodeid.split("::")[0]
                found |= {(module, *value) for item in some for value in sampling.wanted(item)}
    assert sample == whole

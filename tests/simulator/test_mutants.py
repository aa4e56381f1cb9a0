"""Every mutant of a compiled kernel is noticed, or explained (``tests/simulator/mutation``).

A sample here; all of them with ``-m slow``, or by ``python -m tests.long --only mutant``.
"""

from __future__ import annotations

import pytest

from tests.simulator.mutation import products, survivors
from tests.simulator.mutation.judge import judge, reached
from tests.simulator.mutation.programs import NAMES, subject
from tests.simulator.mutation.sites import Mutant, mutants

SMALL = ("gemm", "group")
"""Kernels that the default run executes; the larger ones are slow."""


@pytest.mark.parametrize("name", [x if x in SMALL else pytest.param(x, marks=pytest.mark.slow) for x in NAMES])
def test_no_hazard_in_the_kernel_itself(name: str) -> None:
    verdict = judge(subject(name), None)
    assert not verdict.by, verdict.message


def unexplained(name: str, chosen: list[Mutant]) -> list[str]:
    """Those mutants of a kernel that are neither noticed nor explained."""
    assert chosen
    left = [m for m in chosen if not survivors.explained(name, m)[0]]
    return [f"{m.name}: {m.old}" for m in left if not judge(subject(name), m).by]


def executed(name: str) -> list[Mutant]:
    """The mutants of lines that the kernel's problem executes."""
    one = subject(name) if name in NAMES else products.subject(name)
    lines = reached(one)
    return [m for m in mutants(one.ptx) if m.line in lines]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_mutants(name: str) -> None:
    assert not unexplained(name, executed(name)[10::40])


def test_a_survivor_without_an_explanation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, ordinal = "drop fence", 1
    (fence,) = [m for m in executed("gemm") if (m.kind, m.ordinal) == (kind, ordinal)]
    assert not unexplained("gemm", [fence])
    monkeypatch.delitem(survivors.HARMLESS, ("gemm", kind, ordinal))
    assert unexplained("gemm", [fence]) == [f"{fence.name}: fence.mbarrier_init.release.cluster;"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [*NAMES, *products.names("sm_90a"), *products.names("sm_120a")])
def test_explanations_are_of_mutants_that_exist(name: str) -> None:
    known = {(name, m.kind, m.ordinal) for m in executed(name)}
    assert {k for k in (*survivors.HARMLESS, *survivors.NOT_NOTICED) if k[0] == name} <= known


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_all_mutants(name: str) -> None:
    assert not unexplained(name, executed(name))

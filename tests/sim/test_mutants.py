"""Every mutant of a compiled kernel is noticed, or proved harmless (``tests/sim/mutation``).

A sample here; all of them with ``-m slow``, or by ``python -m tests.sim.mutation``.
"""

from __future__ import annotations

import pytest

from tests.sim.mutation.judge import judge, reached
from tests.sim.mutation.programs import NAMES, subject
from tests.sim.mutation.sites import mutants
from tests.sim.mutation.survivors import explained


@pytest.mark.parametrize("name", NAMES)
def test_no_hazard_in_the_kernel_itself(name: str) -> None:
    verdict = judge(subject(name), None)
    assert not verdict.by, verdict.message


def unnoticed(name: str, every: int) -> list[str]:
    """Mutants of a kernel that are neither noticed nor explained."""
    one = subject(name)
    lines = reached(one)
    chosen = [m for m in mutants(one.ptx) if m.line in lines][every // 2 :: every]
    assert chosen
    missed = [m for m in chosen if not judge(one, m).by]
    return [f"{m.name}: {m.old}" for m in missed if not explained(name, m)[0]]


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_mutants(name: str) -> None:
    assert not unnoticed(name, 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_all_mutants(name: str) -> None:
    assert not unnoticed(name, 1)

"""Mutants of compiled kernels, by named sites: each is noticed, or proved harmless (``tests/simulator/mutation``)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.long.depends import PACKED
from tests.long.family import Family, Gone, Once
from tests.simulator.mutation import subjects
from tests.simulator.mutation.judge import judge, reached
from tests.simulator.mutation.sites import Mutant, mutants
from tests.simulator.mutation.survivors import explained


@dataclass(frozen=True)
class MutantCase:
    """One change of a kernel; ``ordinal`` counts those of its kind."""

    kernel: str
    kind: str
    ordinal: int


def _every(arch: str, kernel: str) -> list[MutantCase]:
    """Those of lines that the kernel's problem executes."""
    one = subjects.subject(kernel)
    lines = reached(one)
    return [MutantCase(kernel, mutant.kind, mutant.ordinal) for mutant in mutants(one.ptx) if mutant.line in lines]


def _mutant(case: MutantCase) -> Mutant:
    every = mutants(subjects.subject(case.kernel).ptx)
    found = [m for m in every if (m.kind, m.ordinal) == (case.kind, case.ordinal)]
    if not found:
        raise Gone
    return found[0]


def _prepare(case: MutantCase) -> Once:
    mutant = _mutant(case)

    def once() -> str:
        verdict = judge(subjects.subject(case.kernel), mutant)
        assert not verdict.refuted, f"{mutant.name}: {verdict.by} under {verdict.schedule}, though proved determined"
        if verdict.by:
            return verdict.by
        what, _ = explained(case.kernel, mutant)
        assert what, f"{mutant.name} is not noticed: {mutant.old}"
        return what

    return once


FAMILIES = (
    Family(
        "mutant", MutantCase, _prepare, every=_every, parts=subjects.names, archs=subjects.ARCHS, weight=6,
        ptx=lambda case: subjects.subject(case.kernel).ptx, rooms=(*PACKED, "harness/problems/data.py"),
    ),
)  # fmt: skip

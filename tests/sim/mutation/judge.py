"""Whether a mutant is noticed, by what, and under which schedule."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim import Result, Schedule, adversarial

from .sites import Mutant

WRONG = "wrong result"


@dataclass(frozen=True)
class Verdict:
    """``by``: a hazard's class, "wrong result", a class that warns where it did not before, or "" for nothing."""

    mutant: str
    by: str
    schedule: str = ""
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Subject:
    """A kernel under test: ``run(ptx, **options)`` simulates it on fixed data with poisoned outputs and returns
    whether the result is right, and the simulator's counters."""

    name: str
    ptx: str
    run: Callable[..., tuple[bool, Result]]
    schedules: Sequence[Schedule] = tuple(adversarial(7))


def judge(subject: Subject, mutant: Mutant | None) -> Verdict:
    """Runs the mutant (or the kernel itself, for None) with checks on, schedule after schedule, until something is
    noticed."""
    ptx = subject.ptx if mutant is None else mutant.apply(subject.ptx)
    name, start = mutant.name if mutant else "the kernel itself", time.perf_counter()
    for schedule in subject.schedules:
        try:
            right, result = subject.run(ptx, schedule=schedule, checks=True, step_limit=60_000)
        except SimError as error:
            return Verdict(name, type(error).__name__, str(schedule), str(error), time.perf_counter() - start)
        if not right:
            return Verdict(name, WRONG, str(schedule), "", time.perf_counter() - start)
    if mutant is not None:
        more = rules(result) - rules(subject.run(subject.ptx, checks=True)[1])
        if more:
            return Verdict(name, f"warning {min(more)}", "", "", time.perf_counter() - start)
    return Verdict(name, "", seconds=time.perf_counter() - start)


def rules(result: Result) -> Counter[str]:
    """At how many instructions each class of warning was found."""
    return Counter(f.rule for f in result.findings)


def reached(subject: Subject) -> set[int]:
    """Lines of the PTX that the subject's problem executes: a change elsewhere changes nothing."""
    right, result = subject.run(subject.ptx)
    assert right
    return set(result.lines)

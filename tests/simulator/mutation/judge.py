"""Whether a mutant is noticed, by what, and under which schedule."""

from __future__ import annotations

import functools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim import Deadlock, Result, Schedule, holding_back
from cute_nvfp4.sim.equivalence import FIRST, Determined, schedules

from .sites import Mutant

WRONG, UNDETERMINED = "wrong result", "the schedule decides"


@dataclass(frozen=True)
class Verdict:
    """``by``: a hazard's class, "wrong result", a class that warns where it did not before, "the schedule decides"
    where it did not (``sim.equivalence``), or "" for nothing. ``refuted``: the first schedule had proved that no check
    would notice it under another, or the first three that nothing would."""

    mutant: str
    by: str
    schedule: str = ""
    message: str = ""
    seconds: float = 0.0
    refuted: bool = False


@dataclass(frozen=True)
class Subject:
    """A kernel under test: ``run(ptx, **options)`` simulates it on fixed data with poisoned outputs and returns
    whether the result is right, and the simulator's counters."""

    name: str
    ptx: str
    run: Callable[..., tuple[bool, Result]]
    schedules: Sequence[Schedule] = tuple(schedules(7))


def judge(subject: Subject, mutant: Mutant | None) -> Verdict:
    """Runs the mutant (or the kernel itself, for None) with checks on, schedule after schedule, until something is
    noticed. Where the first ones prove nothing, each warp is held back too."""
    ptx = subject.ptx if mutant is None else mutant.apply(subject.ptx)
    name, start = mutant.name if mutant else "the kernel itself", time.perf_counter()
    causes = Determined()
    for number, schedule in enumerate((*subject.schedules, *holding_back(warps_of(ptx)))):
        first = number < len(FIRST)
        proved = number > 0 and not causes.doubts
        if proved and schedule.warps == "held":
            break
        try:
            right, _ = subject.run(
                ptx, schedule=schedule, checks=True, step_limit=60_000, others=[causes] if first else []
            )
        except SimError as error:
            refuted = proved and not (first and isinstance(error, Deadlock))
            return Verdict(name, type(error).__name__, str(schedule), str(error), time.perf_counter() - start, refuted)
        if not right:
            return Verdict(name, WRONG, str(schedule), "", time.perf_counter() - start, proved and not first)
    if mutant is not None:
        more = rules(subject.run(ptx, strict=True)[1]) - own_rules(subject)
        if more:
            return Verdict(name, f"warning {min(more)}", "", "", time.perf_counter() - start)
        if causes.doubts and not doubts(subject):
            return Verdict(name, UNDETERMINED, "", min(causes.doubts), time.perf_counter() - start)
    return Verdict(name, "", seconds=time.perf_counter() - start)


def warps_of(ptx: str) -> int:
    """Of a CTA of the first kernel."""
    return math.prod(int(n) for n in re.search(r"\.(?:req|max)ntid\s+([\d, ]+)", ptx)[1].split(",")) // 32


@functools.cache
def doubts(subject: Subject) -> set[str]:
    """Why another schedule might do something else in the kernel itself."""
    causes = Determined()
    subject.run(subject.ptx, schedule=subject.schedules[0], others=[causes])
    return causes.doubts


@functools.cache
def own_rules(subject: Subject) -> Counter[str]:
    """Warnings of the kernel itself."""
    return rules(subject.run(subject.ptx, strict=True)[1])


def rules(result: Result) -> Counter[str]:
    """At how many instructions each class of warning was found."""
    return Counter(f.rule for f in result.findings)


@functools.cache
def reached(subject: Subject) -> set[int]:
    """Lines of the PTX that the subject's problem executes: a change elsewhere changes nothing."""
    right, result = subject.run(subject.ptx)
    assert right
    return set(result.lines)

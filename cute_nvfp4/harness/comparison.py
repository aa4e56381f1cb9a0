"""Several submissions to one problem, compared side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import SubmissionError
from .evaluation import Evaluation
from .results import CaseResult, RunResult
from .timing import geometric_mean


@dataclass(frozen=True)
class Figure:
    """One quantity to compare. kind: "measured" (on a GPU), "modelled" (by the simulator's clock), "counted" (by the
    simulator) or "compiled" (read from the cubin); figures of different kinds share no column. of: the figure of a
    case, None if it has none. plotted: whether the page shows bars of it."""

    key: str
    title: str
    kind: str
    of: Callable[[CaseResult], float | None]
    digits: int = 0
    plotted: bool = True

    def text(self, value: float | None) -> str:
        return "-" if value is None else f"{value:,.{self.digits}f}"

    def ratio(self, value: float | None, first: float | None) -> str:
        """The ratio to the first submission's value; "" if they are equal."""
        return f"×{value / first:.2f}" if value is not None and first and value != first else ""


def _count(name: str) -> Callable[[CaseResult], float | None]:
    return lambda case: case.counters.get(name)


def _sectors_each(case: CaseResult) -> float | None:
    requests = case.counters.get("load_requests")
    return case.counters["load_sectors"] / requests if requests else None


def _bytes_read(case: CaseResult) -> float | None:
    """Sectors that threads' loads touch, request by request, plus the bytes of TMA and bulk copies."""
    if not case.launches:
        return None
    return 32 * case.counters.get("load_sectors", 0) + case.counters.get("async_load_bytes", 0)


def _largest(name: str) -> Callable[[CaseResult], float | None]:
    def of(case: CaseResult) -> float | None:
        return max((x for launch in case.launches if (x := getattr(launch, name)) is not None), default=None)

    return of


def _mean_us(case: CaseResult) -> float | None:
    return case.gpu.mean / 1e3 if case.gpu else None


def _modelled_us(case: CaseResult) -> float | None:
    """The modelled time; None for a case without a score, whose time leaves out a part of its work."""
    return None if case.unscored else case.modelled_us


MODELLED = Figure("modelled_us", "modelled, µs", "modelled", _modelled_us, 2)
FIGURES = (
    Figure("mean_us", "mean of a call, µs", "measured", _mean_us, 2),
    MODELLED,
    Figure("launches", "launches", "counted", _count("launches"), plotted=False),
    Figure("instructions", "warp instructions", "counted", _count("instructions")),
    Figure("load_requests", "load requests", "counted", _count("load_requests"), plotted=False),
    Figure("sectors_per_request", "sectors a load request", "counted", _sectors_each, 2),
    Figure("bytes_read", "bytes asked for (sectors, TMA)", "counted", _bytes_read),
    Figure("distinct_load_bytes", "bytes read at least once", "counted", _count("distinct_load_bytes"), plotted=False),
    Figure("mma_operations", "MMA instructions", "counted", _count("mma_operations")),
    Figure("shared_passes", "bank passes", "counted", _count("shared_passes")),
    Figure(
        "shared_ideal_passes", "bank passes without conflicts", "counted", _count("shared_ideal_passes"), plotted=False
    ),
    Figure("registers", "registers a thread", "compiled", _largest("registers")),
    Figure("spills", "spill instructions", "compiled", _largest("spills")),
)

TIMES = {"measured": FIGURES[0], "modelled": MODELLED}
"""The figures that are times, by kind."""


@dataclass(frozen=True)
class Contestant:
    """One submission: its run, or the reason why it cannot be loaded."""

    name: str
    path: Path
    run: RunResult | None
    refusal: str = ""

    @property
    def passed(self) -> bool:
        return self.run is not None and self.run.passed

    @property
    def verdict(self) -> str:
        if self.run is None:
            return "cannot be loaded"
        return f"{sum(case.passed for case in self.run.cases)} of {len(self.run.cases)}"

    def case(self, position: int) -> CaseResult | None:
        return None if self.run is None else self.run.cases[position]

    def figure(self, figure: Figure, position: int) -> float | None:
        """The figure of the case at ``position``; None if the case failed, as a wrong kernel's figures mean nothing."""
        case = self.case(position)
        return figure.of(case) if case is not None and case.passed else None

    def mean(self, figure: Figure) -> float | None:
        """The geometric mean over the cases, as in the contest; None unless every case has the figure."""
        if self.run is None:
            return None
        values = [self.figure(figure, position) for position in range(len(self.run.cases))]
        if any(value is None for value in values):
            return None
        return geometric_mean(values) if all(values) else 0.0

    def to_dict(self) -> dict:
        if self.run is None:
            return {"name": self.name, "submission": str(self.path), "passed": False, "refusal": self.refusal}
        content = self.run.to_dict()
        for position, case in enumerate(content["cases"]):
            case["figures"] = {figure.key: self.figure(figure, position) for figure in FIGURES}
        means = {figure.key: self.mean(figure) for figure in FIGURES}
        return {"name": self.name, **content, "geometric_means": means, "refusal": ""}


@dataclass(frozen=True)
class Comparison:
    """Contestants that ran the same cases, in the given order."""

    contestants: Sequence[Contestant]

    @property
    def passed(self) -> bool:
        return all(contestant.passed for contestant in self.contestants)

    @property
    def run(self) -> RunResult | None:
        """Any of the runs: all have the same problem, mode, device and cases."""
        return next((contestant.run for contestant in self.contestants if contestant.run), None)

    def figures(self, kind: str, position: int | None = None) -> list[Figure]:
        """The figures of a kind that some contestant has, in one case or in any; counts only if one is not 0."""
        places = range(len(self.run.cases) if self.run else 0) if position is None else [position]

        def known(figure: Figure) -> bool:
            values = (contestant.figure(figure, place) for contestant in self.contestants for place in places)
            return any(value is not None and (value or kind != "counted") for value in values)

        return [figure for figure in FIGURES if figure.kind == kind and known(figure)]

    def times_faster(self, contestant: Contestant) -> dict[str, float | None]:
        """How many times faster than the first submission it is, by geometric means of measured and of modelled times;
        None where either has no such time."""
        pairs = {kind: (self.contestants[0].mean(of), contestant.mean(of)) for kind, of in TIMES.items()}
        return {kind: first / own if first and own else None for kind, (first, own) in pairs.items()}

    def to_dict(self) -> dict:
        """A JSON-ready dictionary. ``times_faster`` compares each submission with the first."""
        found = [one.to_dict() | {"times_faster": self.times_faster(one)} for one in self.contestants]
        return {"passed": self.passed, "submissions": found}


def compare(
    paths: Sequence[Path], prepare: Callable[[Path], Evaluation], run: Callable[[Evaluation], RunResult]
) -> Comparison:
    """Judges one submission after the other. One that cannot be loaded does not stop the others.

    Raises:
        HarnessError: the request is impossible for all of them, or a file does not exist.
    """
    found = []
    for name, path, evaluation in zip(_names(paths), paths, [_prepared(prepare, path) for path in paths]):
        try:
            if isinstance(evaluation, SubmissionError):
                raise evaluation
            found.append(Contestant(name, path, run(evaluation)))
        except SubmissionError as error:
            found.append(Contestant(name, path, None, str(error)))
    return Comparison(found)


def _prepared(prepare: Callable[[Path], Evaluation], path: Path) -> Evaluation | SubmissionError:
    """Validates a submission before any runs, so that a bad option is not refused after minutes of the first one."""
    try:
        return prepare(path)
    except SubmissionError as error:
        return error


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest distinct names of the submissions: their files' names if those differ, else paths."""
    stems = [path.stem for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    shared = os.path.commonpath([path.resolve().parent for path in paths])
    return [os.path.relpath(path.resolve().with_suffix(""), shared) for path in paths]

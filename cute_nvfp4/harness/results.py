"""The results of a run as plain data, ready for tables, JSON and the evaluator's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from .counters import Launch, totals
from .modelled_score import ModelledKernels
from .schema import Case, spec
from .timing import Timing

VERDICTS = ("right", "launched-nothing", "wrong", "hazard", "refused")
"""The verdicts on a case; only the first is a pass. ``launched-nothing``: the result is right, but no launch can have
made it. ``refused``: there is no answer, or a rule was broken."""


@dataclass
class CaseResult:
    """One case. ``verdict`` is one of ``VERDICTS``, or "" while it is unknown.

    ``gpu`` has GPU times, ``wall_s`` is the wall time of the checked call on a CPU backend. Both are of one call: for a
    timed repeat, which makes ``batch`` calls, they are the mean. Neither stands in for the other: on a CPU backend
    ``gpu`` is None, on CUDA ``wall_s`` is None. ``launches`` are those of one call in the simulator, with their
    counters; ``counters`` has their number and the sums. ``modelled_us`` is the clock's time of these launches, and
    stands in for neither. ``nothing`` says why the launches cannot have made a right answer, ``unscored`` why a case
    that passes has no part in a modelled score. ``expected_s`` is the expected duration of a call without a GPU.
    """

    index: int
    case: Case
    seed: int
    verdict: str = ""
    error: str = ""
    details: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    calls_checked: int = 0
    batch: int = 1
    wall_s: float | None = None
    gpu: Timing | None = None
    peer: Timing | None = None
    peer_name: str = ""
    useful_bytes: int = 0
    expected_s: float | None = None
    counters: dict[str, int] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    modelled_us: float | None = None
    nothing: str = ""
    unscored: str = ""
    profile: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict == "right"

    def add_launches(self, launches: Sequence[Launch]) -> None:
        """Records a call's launches in the simulator, with the sums of their counters."""
        self.launches, self.counters = list(launches), totals(launches)
        times = [launch.modelled_us for launch in launches]
        self.modelled_us = sum(times) if times and None not in times else None

    def to_dict(self) -> dict:
        own = asdict(replace(self, launches=[]))
        own |= {"passed": self.passed, "spec": spec(self.case)}
        return own | {"launches": [launch.model_dump() for launch in self.launches]}


@dataclass
class RunResult:
    """A run of one submission in one mode. ``isolation`` has the layers between it and the judge (``sandbox``),
    ``ranking_by`` says how the score follows from the cases' times (``timing.SCORES``), and ``notes`` tell the
    submission's author what was done for it."""

    problem: str
    mode: str
    backend: str
    arch: str | None
    device: str
    data: str
    submission: str
    seed: int | None
    versions: dict[str, str]
    cases: list[CaseResult] = field(default_factory=list)
    copy_bytes_s: float | None = None
    score_us: float | None = None
    modelled_score_us: float | None = None
    modelled_kernels: ModelledKernels | None = None
    clock: str = ""
    ranking_by: str = "geom"
    isolation: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every case passed; False without cases."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    def to_dict(self) -> dict:
        """A JSON-ready dictionary. Names of times end in what they count (``_us``); the simulator counts counters."""
        own = {name: value for name, value in vars(self).items() if name != "cases"}
        if self.modelled_kernels is not None:
            own["modelled_kernels"] = self.modelled_kernels._asdict()
        return own | {"passed": self.passed, "cases": [case.to_dict() for case in self.cases]}

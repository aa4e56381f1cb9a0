"""The events that ``cute-nvfp4 eval --json-lines`` prints, one a line, in a versioned schema (docs/how-to/agents.md).

Programs read these lines, so that no field changes its name, type or meaning without a new ``VERSION``.
``tests/harness/test_lines.py`` compares the schema with what was recorded for the version.
"""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .counters import Launch
from .errors import EXIT_BAD_TEST_FILE, EXIT_CHECK_FAILED, EXIT_NO_POPCORN_FD, EXIT_PASS, EXIT_USAGE
from .results import VERDICTS, CaseResult, RunResult
from .schema import spec

VERSION = 1
SCHEMA = f"cute_nvfp4.eval/{VERSION}"


class _Line(BaseModel):
    """The fields of all events: the schema, and the submission that the event is about ("" for none)."""

    model_config = ConfigDict(extra="forbid")

    schema_version: str = SCHEMA
    submission: str = ""


class CaseName(BaseModel):
    """A case that will run: its index, and its sizes on one line."""

    index: int
    spec: str


class Started(_Line):
    """A submission will be judged on ``cases``."""

    event: Literal["started"] = "started"
    problem: str
    mode: str
    backend: str
    arch: str
    data: str
    cases: list[CaseName]


class Working(_Line):
    """A case has begun, or a long launch reports progress; ``expected_s`` is an estimate from before the case."""

    event: Literal["working"] = "working"
    case: int
    state: str
    expected_s: float | None


class Measured(BaseModel):
    """Times of one call on a GPU, in microseconds."""

    runs: int
    mean_us: float
    error_us: float
    best_us: float
    median_us: float


class SavingLine(BaseModel):
    """A possible saving (``--mode profile --report FILE``): in words, what to do, where, and how much at most."""

    what: str
    advice: str
    where: str
    modelled_us: float | None


class LaunchLine(BaseModel):
    """A simulated launch. The clock models times, the simulator counts counters; ``warnings`` are the checks'."""

    kernel: str
    grid: list[int]
    block: list[int]
    cluster: list[int]
    counters: dict[str, int]
    warnings: list[str]
    modelled_us: float | None
    roofline_us: float | None
    bound_by: str
    savings: list[SavingLine]


class CaseLine(_Line):
    """A case has been judged. ``measured`` is of a GPU, ``modelled_us`` of the clock; neither replaces the other."""

    event: Literal["case"] = "case"
    case: int
    spec: str
    verdict: Literal["right", "launched-nothing", "wrong", "hazard", "refused"]
    passed: bool
    error: str
    details: str
    calls_checked: int
    max_abs_error: float | None
    max_rel_error: float | None
    measured: Measured | None
    modelled_us: float | None
    unscored: str
    launches: list[LaunchLine]


class Ended(_Line):
    """All cases of a submission have been judged. Scores are by ``ranking_by``: one measured, one modelled."""

    event: Literal["ended"] = "ended"
    passed: bool
    verdicts: dict[str, int]
    measured_score_us: float | None
    modelled_score_us: float | None
    ranking_by: str
    clock: str
    device: str
    isolation: list[str]
    notes: list[str]
    exit_code: int


class Failed(_Line):
    """Nothing was judged: the request is impossible, or the submission cannot be loaded."""

    event: Literal["failed"] = "failed"
    error: str
    exit_code: int


EVENTS = (Started, Working, CaseLine, Ended, Failed)
EXIT_CODES = {
    "every case passed": EXIT_PASS,
    "bad usage": EXIT_USAGE,
    "no POPCORN_FD": EXIT_NO_POPCORN_FD,
    "a check failed, or the submission could not be loaded": EXIT_CHECK_FAILED,
    "bad task file": EXIT_BAD_TEST_FILE,
}


def case_line(result: CaseResult, submission: str) -> CaseLine:
    """The event for a case that has been judged."""
    gpu = result.gpu
    times = gpu and {"mean_us": gpu.mean, "error_us": gpu.err, "best_us": gpu.best, "median_us": gpu.median}
    return CaseLine(
        submission=submission,
        case=result.index,
        spec=spec(result.case),
        verdict=result.verdict,
        passed=result.passed,
        error=result.error,
        details=result.details,
        calls_checked=result.calls_checked,
        max_abs_error=result.max_abs,
        max_rel_error=result.max_rel,
        measured=gpu and Measured(runs=gpu.runs, **{name: value / 1e3 for name, value in times.items()}),
        modelled_us=result.modelled_us,
        unscored=result.unscored,
        launches=[_launch_line(launch) for launch in result.launches],
    )


def _launch_line(launch: Launch) -> LaunchLine:
    savings = launch.profile.savings if launch.profile is not None else ()
    return LaunchLine(
        kernel=launch.kernel,
        grid=list(launch.grid),
        block=list(launch.block),
        cluster=list(launch.cluster),
        counters=launch.counters,
        warnings=launch.warnings,
        modelled_us=launch.modelled_us,
        roofline_us=launch.roofline_us,
        bound_by=launch.bound_by,
        savings=[SavingLine(what=s.what, advice=s.advice, where=s.where, modelled_us=s.microseconds) for s in savings],
    )


def ended(run: RunResult) -> Ended:
    """The event for a run that has ended."""
    return Ended(
        submission=run.submission,
        passed=run.passed,
        verdicts={verdict: sum(case.verdict == verdict for case in run.cases) for verdict in VERDICTS},
        measured_score_us=run.score_us,
        modelled_score_us=run.modelled_score_us,
        ranking_by=run.ranking_by,
        clock=run.clock,
        device=run.device,
        isolation=run.isolation,
        notes=run.notes,
        exit_code=EXIT_PASS if run.passed else EXIT_CHECK_FAILED,
    )


def schema() -> dict[str, Any]:
    """The schema in plain words: the fields of every event with their types, and the exit codes."""
    events = {event.model_fields["event"].default: _fields(event) for event in EVENTS}
    return {"schema": SCHEMA, "events": events, "exit_codes": EXIT_CODES}


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {name: _kind(field.annotation) for name, field in model.model_fields.items()}


def _kind(annotation: Any) -> Any:
    """A type as JSON: its name, the fields of a record, ``[…]`` for a list, ``{"one of": …}`` for alternatives."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _fields(annotation)
    if origin is Literal:
        return {"one of": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"any of": [_kind(argument) for argument in arguments]}
    if origin is list:
        return [_kind(arguments[0])]
    if origin is dict:
        return {"dictionary of": _kind(arguments[1])}
    return "null" if annotation is type(None) else annotation.__name__

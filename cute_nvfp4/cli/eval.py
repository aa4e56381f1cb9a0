"""``cute-nvfp4 eval``: runs a submission on a problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .eval_lines import judge_lines, told_errors
from .eval_options import (
    Allow,
    Arch,
    Backend,
    CaseNumber,
    ClockName,
    Collect,
    Data,
    Definition,
    DslCompat,
    Html,
    Jobs,
    JsonLines,
    Mode,
    OneSubmission,
    ProblemName,
    ProfileReport,
    Schedules,
    ScheduleText,
    Seed,
    Solution,
    Strict,
    Submissions,
    TaskFile,
    Timeout,
    TraceFile,
    Traces,
    Workloads,
)
from .output import STDOUT, JsonOption, check_writable, shown_errors, stderr, stdout, write_json

if TYPE_CHECKING:
    from ..harness.evaluation import Evaluation
    from ..harness.results import RunResult
    from ..harness.schema import Task


def evaluate(
    problem: ProblemName = None,
    submissions: Submissions = None,
    submission: OneSubmission = None,
    mode: Mode = "test",
    backend: Backend = "auto",
    arch: Arch = None,
    clock: ClockName = "",
    data: Data = "public",
    json: JsonOption = "",
    json_lines: JsonLines = False,
    html: Html = None,
    seed: Seed = None,
    case: CaseNumber = None,
    timeout: Timeout = None,
    task: TaskFile = None,
    jobs: Jobs = 1,
    schedules: Schedules = 1,
    schedule: ScheduleText = "",
    trace: TraceFile = None,
    profile_report: ProfileReport = None,
    allow: Allow = None,
    collect: Collect = False,
    dsl_compat: DslCompat = False,
    strict: Strict = False,
    definition: Definition = None,
    solution: Solution = None,
    workloads: Workloads = None,
    traces: Traces = None,
) -> None:
    """Runs submissions on a problem: are they right, how fast are they.

    Exit codes: 0 pass, 112 a check failed, 113 bad task file, 2 anything unknown. With POPCORN_FD set, the results of
    one submission are also written there as 'key: value' lines; POPCORN_SEED is mixed into every case's seed.
    """
    for option, file in (("--trace", trace), ("--html", html), ("--report", profile_report), ("--traces", traces)):
        check_writable(option, str(file or ""))
    paths = [*(submissions or []), *([submission] if submission else [])]
    with shown_errors(), told_errors() if json_lines else contextlib.nullcontext():
        from ..harness.errors import EXIT_CHECK_FAILED, HarnessError
        from ..harness.evaluation import Evaluation, Options, task_of
        from ..harness.folder.task import is_folder

        if definition is not None:
            if solution is None or problem or task or html:
                raise HarnessError("--definition takes one --solution, and no problem, no --task and no --html")
            paths, problem = [solution], ""
        elif solution or workloads or traces:
            raise HarnessError("--solution, --workloads and --traces belong to --definition FILE")
        elif task is not None and is_folder(task):
            paths, problem = [*([Path(problem)] if problem else []), *paths], ""
        elif problem is None:
            raise HarnessError("what to judge? Name a problem (nvfp4_gemv, ...), or give --task FOLDER/task.yml")
        options = Options(problem, mode, None, backend, arch, data, task, seed=seed, case=case, timeout=timeout)
        several = len(paths) > 1
        if several and (trace or profile_report):
            what = "--trace writes the timeline" if trace else "--report writes the profile"
            raise HarnessError(f"{what} of one submission; several were given")
        if profile_report and html:
            raise HarnessError("--report writes a profile, and --html a comparison without one: give one of them")
        options = replace(options, schedules=schedules, schedule=schedule, trace=trace, inspect=several or bool(html))
        options = replace(options, report=profile_report)
        options = replace(options, allow=tuple(allow or ()), collect=collect, strict=strict, jobs=jobs)
        options = replace(options, dsl_compat=dsl_compat, clock=clock)

        def prepare(path: Path | None) -> Evaluation:
            own = replace(options, submission=path)
            if definition is None:
                return Evaluation(own)
            from ..harness.flashinfer.evaluation import BenchEvaluation

            return BenchEvaluation(own, definition, workloads, traces)

        if json_lines:
            if json or html:
                raise HarnessError("--json-lines takes the place of --json and --html: give one of them")
            passed = judge_lines(paths or [None], prepare, profile_report)
        elif several or html:
            passed = _compare(paths or [prepare(None).submission.path], prepare, task_of(options), json, html)
        else:
            passed = _judge(prepare(paths[0] if paths else None), json)
    if not passed:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _judge(evaluation: Evaluation, json: str) -> bool:
    """Runs one submission and shows its results; returns whether it passed."""
    from ..harness.errors import SubmissionError
    from ..harness.profile_report import write_report
    from ..harness.protocol import report, report_refusal
    from ..harness.report import print_run

    try:
        run = _run(evaluation)
    except SubmissionError as error:
        report_refusal(error)
        raise
    report(run)
    if json:
        write_json(run.to_dict(), json)
    if json != STDOUT:
        print_run(run, evaluation.task, stdout())
    if evaluation.options.report:
        write_report(run, evaluation.options.report, stderr() if json == STDOUT else stdout())
    return run.passed


def _compare(
    paths: list[Path], prepare: Callable[[Path], Evaluation], task: Task, json: str, html: Path | None
) -> bool:
    """Runs submissions one after the other and shows their results side by side; returns whether all passed."""
    from ..harness.comparison import compare
    from ..harness.comparison_page import write_page
    from ..harness.comparison_report import print_comparison
    from ..harness.errors import SubmissionError
    from ..harness.protocol import report, report_refusal
    from ..harness.report import print_run

    comparison = compare(paths, prepare, _run)
    run = comparison.run if len(paths) == 1 else None
    if len(paths) == 1:  # the protocol has one submission only
        report(run) if run else report_refusal(SubmissionError(comparison.contestants[0].refusal))
    if json:
        write_json(run.to_dict() if run else comparison.to_dict(), json)
    if html:
        write_page(comparison, task, html)
    if json != STDOUT:
        print_run(run, task, stdout()) if run else print_comparison(comparison, task, stdout())
    return comparison.passed


def duration(seconds: float) -> str:
    """The expected duration of a case, as the end of a progress line; "" if it is short."""
    if seconds < 20:
        return ""
    return f", about {seconds:.0f} s here" if seconds < 90 else f", about {seconds / 60:.0f} minutes here"


def _run(evaluation: Evaluation) -> RunResult:
    """Runs with a progress line on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from ..harness.schema import spec

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr(), transient=True) as progress:
        line = progress.add_task("starting the submission", total=len(evaluation.numbered))

        def show(result, state: str) -> None:
            if state == "start":
                about = duration(result.expected_s) if result.expected_s is not None else ""
                progress.update(line, description=f"case {result.index}: {spec(result.case)}{about}")
                return
            if state != "done":  # the progress of a long launch
                progress.update(line, description=f"case {result.index}: {state}")
                return
            progress.advance(line)
            if not result.passed:
                progress.console.print(Text(f"case {result.index} failed: ", "red") + Text(result.error))

        return evaluation.run(show)

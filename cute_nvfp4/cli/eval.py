"""``cute-nvfp4 eval``: runs a submission on a problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import STDOUT, JsonOption, check_writable, shown_errors, stderr, stdout, write_json

if TYPE_CHECKING:
    from ..harness.evaluate import Evaluation
    from ..harness.results import RunResult


def evaluate(
    problem: Annotated[str, typer.Argument(help="Name of the problem, such as nvfp4_gemv.", show_default=False)],
    submission: Annotated[
        Path | None, typer.Option(help="Python file with custom_kernel(data); the library's own kernel by default.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="test (is it right), benchmark (time it), leaderboard (check every repeat), profile.")
    ] = "test",
    backend: Annotated[
        str, typer.Option(help="auto (cuda where there is a GPU, else sim), cuda, sim or reference.")
    ] = "auto",
    arch: Annotated[
        str | None, typer.Option(help="Architecture the simulator runs: sm_100a, sm_90a, ...", show_default="sm_100a")
    ] = None,
    data: Annotated[
        str, typer.Option(help="public (the problem's kind draws) or full (all E2M1 codes, scales of any size).")
    ] = "public",
    json: JsonOption = "",
    seed: Annotated[int | None, typer.Option(help="Replaces the seed of every case.", show_default=False)] = None,
    case: Annotated[int | None, typer.Option(help="Runs one case only, numbered from 0.", show_default=False)] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that one call may take.", show_default="the task file's")
    ] = None,
    task: Annotated[
        Path | None,
        typer.Option(help="Task file with other shapes, seeds or tolerances.", show_default="the problem's"),
    ] = None,
    schedules: Annotated[
        int, typer.Option(metavar="N", help="Simulator: N schedules of warps and engines that look for trouble.")
    ] = 1,
    schedule: Annotated[
        str, typer.Option(metavar="TEXT", help="Simulator: one schedule of your own, such as seed=3,tma=lazy.")
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="Simulator: writes a timeline of the first call for ui.perfetto.dev.", show_default=False),
    ] = None,
) -> None:
    """Runs a submission on a problem: is it right, how fast is it.

    Exit codes: 0 pass, 112 a check failed, 113 bad task file, 2 anything unknown. With POPCORN_FD set, results are
    also written there as 'key: value' lines; POPCORN_SEED is mixed into every case's seed.
    """
    check_writable("--trace", str(trace or ""))
    with shown_errors():
        from ..harness.errors import EXIT_CHECK_FAILED, SubmissionError
        from ..harness.evaluate import Evaluation, Options
        from ..harness.protocol import report, report_refusal

        options = Options(problem, mode, submission, backend, arch, data, task, seed=seed, case=case, timeout=timeout)
        evaluation = Evaluation(replace(options, schedules=schedules, schedule=schedule, trace=trace))
        try:
            run = _run(evaluation)
        except SubmissionError as error:
            report_refusal(error)
            raise
        report(run)
    if json:
        write_json(run.to_dict(), json)
    if json != STDOUT:
        from ..harness.report import print_run

        print_run(run, evaluation.task, stdout())
    if not run.passed:
        raise typer.Exit(EXIT_CHECK_FAILED)


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
                progress.update(line, description=f"case {result.index}: {spec(result.case)}")
                return
            progress.advance(line)
            if not result.passed:
                progress.console.print(Text(f"case {result.index} failed: ", "red") + Text(result.error))

        return evaluation.run(show)

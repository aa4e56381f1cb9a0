"""``cute-nvfp4 eval --json-lines``: prints one event a line on standard output, as it happens."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .output import stderr

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ..harness.evaluation import Evaluation
    from ..harness.results import CaseResult


def _tell(event: BaseModel) -> None:
    """Prints an event in one write, since several threads may print events."""
    from ..sim.observe.json_text import json_text

    sys.stdout.write(json_text(event.model_dump(), indent=None) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def told_errors() -> Iterator[None]:
    """Prints an error of the library as an event, and raises it again."""
    from ..errors import CuteNvfp4Error
    from ..harness.lines import Failed

    try:
        yield
    except CuteNvfp4Error as error:
        _tell(Failed(error=str(error), exit_code=getattr(error, "exit_code", 2)))
        raise


def judge_lines(
    paths: Sequence[Path | None], prepare: Callable[[Path | None], Evaluation], profiles: Path | None
) -> bool:
    """Judges submissions one after the other and prints events; returns whether all passed. A submission that cannot be
    loaded does not stop the others. profiles: the file of ``--report``, or None.

    Raises:
        HarnessError: the request is impossible.
    """
    from ..harness.errors import SubmissionError
    from ..harness.lines import Failed
    from ..harness.profile_report import write_report
    from ..harness.protocol import report, report_refusal

    passed = True
    for path in paths:
        name = str(path or "")
        try:
            run = _judge(prepare(path))
            passed &= run.passed
            if len(paths) == 1:  # the protocol has one submission only
                report(run)
            if profiles is not None:
                write_report(run, profiles, stderr())
        except SubmissionError as error:
            if len(paths) == 1:
                report_refusal(error)
            _tell(Failed(submission=name, error=str(error), exit_code=error.exit_code))
            passed = False
    return passed


def _judge(evaluation: Evaluation):
    """Runs one submission and prints its events."""
    from ..harness.lines import CaseName, Started, Working, case_line, ended
    from ..harness.schema import spec

    name = str(evaluation.submission.path)
    started = Started(
        submission=name,
        problem=evaluation.problem.name,
        mode=evaluation.options.mode,
        backend=evaluation.backend,
        arch=evaluation.arch or "",
        data=evaluation.options.data,
        cases=[CaseName(index=index, spec=spec(case)) for index, case in evaluation.numbered],
    )
    _tell(started)

    def show(result: CaseResult, state: str) -> None:
        if state == "done":
            line = case_line(result, name)
        else:
            line = Working(submission=name, case=result.index, state=state, expected_s=result.expected_s)
        _tell(line)

    run = evaluation.run(show)
    _tell(ended(run))
    return run

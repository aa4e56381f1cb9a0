"""The evaluator's protocol: ``key: value`` lines on the file descriptor in ``POPCORN_FD``."""

from __future__ import annotations

import base64
import os
from typing import TextIO

from .errors import HarnessError, SubmissionError
from .results import RunResult
from .schema import spec

FD_VARIABLE = "POPCORN_FD"


def lines(run: RunResult) -> list[str]:
    """The lines of a run. Times are in nanoseconds, and benchmarks report GPU times only.

    The ``report`` of a profile is the profiler's table in base64, since a value is a single line.
    """
    kind = "test" if run.mode in ("test", "profile") else "benchmark"
    out = [f"{kind}-count: {len(run.cases)}"]
    for index, case in enumerate(run.cases):
        key = f"{kind}.{index}"
        out.append(f"{key}.spec: {spec(case.case)}")
        if kind == "benchmark" and case.gpu is not None and case.passed:
            timing = case.gpu
            names = ("runs", "mean", "std", "err", "best", "worst")
            out += [f"{key}.{name}: {getattr(timing, name)}" for name in names]
        else:
            out.append(f"{key}.status: {'pass' if case.passed else 'fail'}")
        if case.profile:
            out.append(f"{key}.report: {base64.b64encode(case.profile.encode()).decode()}")
        if case.error:
            out.append(f"{key}.error: {' '.join(case.error.split())}")
    out.append(f"check: {'pass' if run.passed else 'fail'}")
    return out


def open_channel() -> TextIO | None:
    """The protocol's channel, or None if ``POPCORN_FD`` is not set.

    Raises:
        HarnessError: ``POPCORN_FD`` is not an open, writable descriptor.
    """
    text = os.environ.get(FD_VARIABLE)
    if not text:
        return None
    try:
        return os.fdopen(os.dup(int(text)), "w")
    except (ValueError, OSError) as error:
        raise HarnessError(f"{FD_VARIABLE} is {text!r}, which is not an open file descriptor: {error}") from error


def report(run: RunResult) -> None:
    """Writes ``run`` to the channel, if there is one."""
    _write(lines(run))


def report_refusal(error: SubmissionError) -> None:
    """Writes to the channel, if there is one, that the submission cannot be loaded."""
    _write([f"error: {' '.join(str(error).split())}", "check: fail"])


def _write(content: list[str]) -> None:
    channel = open_channel()
    if channel is not None:
        with channel:
            channel.writelines(f"{line}\n" for line in content)

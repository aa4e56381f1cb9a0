"""The modelled score of a submission's kernels without launch overhead, and its uncertainty."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import yaml

from ..sim.clock.machine import machine
from .timing import score

FILE = Path(__file__).parent / "clock_errors.yml"
"""The file that ``benchmarks/timing_errors.py`` writes."""


class ClockErrors(NamedTuple):
    """Quantiles of known over modelled times, of ``launches`` kernels that the clock was not fitted to; launch overhead
    is left out.

    known: "measured" by us after the prediction, or "published" by others. low, middle, high: a twentieth of the ratios
    lie below ``low``, half below ``middle``, a twentieth above ``high``.
    """

    known: str
    launches: int
    low: float
    middle: float
    high: float


@functools.cache
def clock_errors(clock: str) -> ClockErrors | None:
    """The errors of a clock; None if nobody has compared it with known times."""
    found = yaml.safe_load(FILE.read_text()).get(clock)
    return ClockErrors(**found) if found else None


class ModelledKernels(NamedTuple):
    """The score of modelled times without launch overhead, in microseconds, as a profiler would report them. It lies
    between ``low_us`` and ``high_us`` if the clock's error is that of nine in ten launches whose time is known. A mean
    of several kernels gets no narrower span, since kernels of one kind have similar errors.

    known: "measured" by us or "published"; launches: the number of known times.
    """

    score_us: float
    low_us: float
    high_us: float
    known: str
    launches: int


def modelled_kernels(calls: Iterable[tuple[float, int]], clock: str, ranking_by: str) -> ModelledKernels | None:
    """The score of ``calls``: modelled microseconds of each case, and its number of launches. Each launch counts as
    long as an empty kernel runs, if that is known. None if nobody has compared the clock with known times."""
    found, on = clock_errors(clock), machine(clock)
    if found is None:
        return None
    empty = on["launch.duration_us"] if "launch.duration_us" in on.figures else 0.0
    us = score([us + launches * (empty - on["launch.empty_us"]) for us, launches in calls], ranking_by)
    return ModelledKernels(us, found.low * us, found.high * us, found.known, found.launches)


def said_of(kernels: ModelledKernels, name: str) -> str:
    """A line of the report. name: of the score."""
    return (
        f"kernels alone ({name} without launches): {kernels.score_us:.2f} µs modelled, {kernels.low_us:.2f} to "
        f"{kernels.high_us:.2f} µs if the clock is off as in nine of ten of {kernels.launches} {kernels.known} launches"
    )

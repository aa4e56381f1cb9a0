"""The profiles of a run: as a file, and as a few lines."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..sim.profile.page import Profile, sentence, written
from .report import kernel_text
from .results import RunResult
from .schema import spec

_SPOTS = 3


def write_report(run: RunResult, path: Path, console: Console) -> None:
    """Writes the profile of every launch of every case to ``path``, and prints where most could be saved."""
    found = [(case, launch.profile) for case in run.cases for launch in case.launches if launch.profile]
    path.write_text(written([profile for _, profile in found], path.suffix))
    for case, profile in found:
        console.print(
            Text(f"case {case.index} · {spec(case.case)} · {kernel_text(profile.kernel)}", "bold"), soft_wrap=True
        )
        for line in _lines(profile):
            console.print(Text(line), soft_wrap=True)
    console.print(Text(f"{len(found)} launches profiled: {path}"), soft_wrap=True)


def _lines(profile: Profile) -> list[str]:
    """A summary: the time, the largest possible savings, and the most expensive lines."""
    duration = profile.value("Duration")
    time = (
        "not timed"
        if duration is None
        else f"{duration:.2f} us modelled on {profile.clock.upper()}, without the launch"
    )
    lines = [f"  {time}"]
    lines += [f"  {number}. {sentence(saving)}" for number, saving in enumerate(profile.savings, 1)]
    spots = ", ".join(f"{spot.where} {spot.share:.0%}" for spot in profile.python[:_SPOTS])
    return [*lines, f"  hot lines: {spots}"]

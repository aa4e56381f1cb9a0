"""The options of ``cute-nvfp4 eval``: their types and their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ProblemName = Annotated[
    str | None,
    typer.Argument(
        help="Name of the problem, such as nvfp4_gemv; with --task of a problem folder the first submission.",
        show_default=False,
    ),
]
Submissions = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Python files with custom_kernel(data): several are compared. The library's own kernel by default.",
        show_default=False,
    ),
]
OneSubmission = Annotated[
    Path | None, typer.Option(help="One submission; the same as naming it as the argument.", show_default=False)
]
Mode = Annotated[
    str, typer.Option(help="test (is it right), benchmark (time it), leaderboard (check every repeat), profile.")
]
Backend = Annotated[str, typer.Option(help="auto (cuda where there is a GPU, else sim), cuda, sim or reference.")]
Arch = Annotated[
    str | None, typer.Option(help="Architecture the simulator runs: sm_100a, sm_90a, ...", show_default="sm_100a")
]
ClockName = Annotated[
    str,
    typer.Option("--clock", metavar="GPU", help="GPU of modelled times: b200, h200, h100.", show_default="--arch's"),
]
Data = Annotated[
    str, typer.Option(help="public (drawn as the contest draws it) or full (every E2M1 code, scales over all of E4M3).")
]
Definition = Annotated[
    Path | None,
    typer.Option(help="FlashInfer-Bench: a Definition's JSON, in the place of a problem.", show_default=False),
]
Solution = Annotated[
    Path | None, typer.Option(help="FlashInfer-Bench: the Solution's JSON, in Python.", show_default=False)
]
Workloads = Annotated[
    Path | None,
    typer.Option(help="FlashInfer-Bench: workloads, one a line; a small random one by default.", show_default=False),
]
Traces = Annotated[
    Path | None,
    typer.Option(help="FlashInfer-Bench: writes a Trace for each workload, one a line.", show_default=False),
]
JsonLines = Annotated[
    bool, typer.Option("--json-lines", help="Prints events for programs, a line of JSON each, as they happen.")
]
Html = Annotated[
    Path | None,
    typer.Option(help="Writes a page with tables and plots, one file that needs no other.", show_default=False),
]
Seed = Annotated[int | None, typer.Option(help="Replaces the seed of every case.", show_default=False)]
CaseNumber = Annotated[int | None, typer.Option(help="Runs one case only, numbered from 0.", show_default=False)]
Timeout = Annotated[float | None, typer.Option(help="Seconds that one call may take.", show_default="the task file's")]
TaskFile = Annotated[
    Path | None,
    typer.Option(
        help="Task file with other shapes, seeds or tolerances; or that of a problem folder in the public format.",
        show_default="the problem's",
    ),
]
Jobs = Annotated[int, typer.Option(metavar="N", help="Without a GPU: N processes share the cases.")]
Schedules = Annotated[
    int, typer.Option(metavar="N", help="Simulator: N schedules of warps and engines that look for trouble.")
]
ScheduleText = Annotated[
    str, typer.Option(metavar="TEXT", help="Simulator: one schedule of your own, such as seed=3,tma=lazy.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(help="Simulator: writes a timeline of the first call for ui.perfetto.dev.", show_default=False),
]
ProfileReport = Annotated[
    Path | None,
    typer.Option(
        "--report",
        help="Simulator, mode profile: writes what Nsight Compute's details page has, as .txt, .csv or .json.",
        show_default=False,
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="CLASS", help="Simulator: go on past hazards of this class; may be given again."),
]
Collect = Annotated[
    bool, typer.Option("--continue", help="Simulator: go on past every hazard a check finds, and list them all.")
]
DslCompat = Annotated[
    bool,
    typer.Option(
        "--dsl-compat", help="Brings back names that the CuTe DSL has dropped since 4.2, and says which ones are used."
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Simulator: warn of fences and barriers that NVIDIA's kernels leave out.")
]

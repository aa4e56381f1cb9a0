"""``cute-nvfp4 sim`` and ``python -m cute_nvfp4 sim``: runs a CUDA program on a machine without a GPU.

``json_schema`` describes what ``--json`` writes.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .eval_options import ClockName
from .output import check_writable, fail, say, shown_errors, stderr, write_json
from .sim_findings import show_findings
from .sim_options import Options
from .sim_outcome import EXIT_HAZARD, EXIT_INTERNAL, EXIT_NOT_MODELLED, launch_line, show_outcome

if TYPE_CHECKING:
    from ..sim.machine.schedule import Schedule
    from ..sim.observe.trace import Trace
    from ..sim.session import LaunchRecord, Session

__all__ = ["EXIT_HAZARD", "EXIT_INTERNAL", "EXIT_NOT_MODELLED", "Options", "app", "sim"]
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def sim(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="Python program, and its own arguments.", show_default=False),
    ],
    arch: Annotated[
        str, typer.Option(metavar="ARCH", help="sm_90a (H200), sm_100a (B200), sm_103a (B300), sm_120a (RTX 5090) …")
    ] = "sm_100a",
    schedule: Annotated[
        str, typer.Option(metavar="TEXT", help="How warps and engines interleave: seed=3,tma=lazy,tensor=eager.")
    ] = "",
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the schedule, or of the schedules.")] = None,
    schedules: Annotated[
        int, typer.Option(metavar="N", min=1, help="Run N times under schedules that look for trouble.")
    ] = 1,
    checks: Annotated[bool, typer.Option(help="Look for hazards that a run need not show.")] = True,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="CLASS", help="Go on past hazards of this class; may be given again.")
    ] = None,
    collect: Annotated[
        bool, typer.Option("--continue", help="Go on past every hazard a check finds, and list them all.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Warn of fences and barriers that NVIDIA's kernels leave out, too.")
    ] = False,
    counters: Annotated[
        bool, typer.Option("--counters", help="Count instructions, copies, sectors, conflicts, waits.")
    ] = False,
    timed: Annotated[
        bool, typer.Option("--time", help="Say how long each launch would take: a modelled time.")
    ] = False,
    clock_name: ClockName = "",
    launch_us: Annotated[
        float | None,
        typer.Option(metavar="US", help="What a launch costs on your host.", show_default="the machine file's"),
    ] = None,
    figures: Annotated[
        list[str] | None, typer.Option("--figure", metavar="NAME=VALUE", help="Another figure of the GPU for --time.")
    ] = None,
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Write a timeline for ui.perfetto.dev; modelled times with --time.")
    ] = "",
    json: Annotated[
        str, typer.Option(metavar="FILE", help="Write outcome, launches and counts as JSON (- prints it).")
    ] = "",
    benchmarks: Annotated[
        str, typer.Option(metavar="once|full", help="How often the DSL's benchmark helpers run their function.")
    ] = "once",
    step_limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Blocks a kernel may execute.", show_default="the simulator's")
    ] = 0,
    dsl_compat: Annotated[
        bool, typer.Option("--dsl-compat", help="Bring back names the CuTe DSL has dropped since 4.2, and list them.")
    ] = False,
    execute: Annotated[bool, typer.Option(help="Run the kernels, or only list the launches.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no line about a launch that ends well.")] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Show the line that launched a kernel.")] = False,
) -> None:
    """Runs an unmodified CuTe DSL program as if this machine had the GPU.

    Host code runs for real, kernels run in the simulator. What follows SCRIPT
    belongs to the program. Times between CUDA events are counted work, not times.

    Exit status: the program's own (1 where it ends with an exception), or
    \b
      2  an option, SCRIPT or a file to write is not usable
     70  an error of the simulator itself
    111  the program needs something that is not modelled
    112  a hazard, even if the program went on after it
    130  interrupted
    """
    from ..sim.checks.findings import known

    # before numpy is loaded: the simulator's products are small, and numpy's threads would only compete with torch's
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    chosen = _schedule(schedule, seed, several=schedules > 1)
    with shown_errors():
        known(allow or ())
    if strict and not checks:
        fail("--strict looks for more than the checks do: it cannot go with --no-checks", 2)
    if benchmarks not in ("once", "full"):
        fail(f"--benchmarks: got {benchmarks!r}, expected once or full", 2)
    _exists(script)
    for name, path in (("--trace", trace), ("--json", json)):
        check_writable(name, path)
    clock = _clock(arch, timed, clock_name, launch_us is not None or bool(figures))
    options = Options(script, list(context.args), arch, str(chosen), checks, counters, clock, trace=trace, json=json)
    options.quiet, options.traceback, options.execute = quiet, with_traceback, execute
    options.benchmarks, options.step_limit, options.figures = benchmarks, step_limit, _figures(figures or [])
    options.figures |= {} if launch_us is None else {"launch.empty_us": launch_us}
    options.allow, options.collect, options.strict = tuple(allow or ()), collect, strict
    options.dsl_compat = dsl_compat
    if schedules == 1:
        status = _run(options)
    else:
        from .sim_schedules import run_schedules

        status = run_schedules(options, schedules, chosen.seed)
    raise typer.Exit(status)


def _schedule(text: str, seed: int | None, several: bool) -> Schedule:
    """The schedule of ``--schedule`` and ``--seed``. several: whether ``--schedules`` asks for more than one."""
    from ..sim.machine.schedule import Schedule

    with shown_errors():
        chosen = Schedule.parse(text)
    if several and text:
        fail("--schedules makes the schedules itself: give --schedule or --schedules, not both", 2)
    return chosen if seed is None else dataclasses.replace(chosen, seed=seed)


def _exists(script: str) -> None:
    """Refuses a program that does not exist, which may be an unknown option."""
    if not Path(script).is_file():
        kind = "option" if script.startswith("-") else "file"
        fail(f"there is no {kind} {script}" + (" (see --help)" if kind == "option" else ""), 2)


def _clock(arch: str, timed: bool, name: str, figures: bool) -> str:
    """The machine whose clock times launches, "" for none. name: of ``--clock``; figures: whether it gets figures."""
    if (figures or name) and not timed:
        fail("--clock, --launch-us and --figure are for modelled times: they need --time", 2)
    if not timed:
        return ""
    from ..sim.clock.machine import clock_of, machine

    with shown_errors():
        found = name or clock_of(arch)
        if machine(found).arch != arch:
            fail(f"--clock {found} is of {machine(found).arch}, and --arch is {arch}", 2)
        return found


def _figures(given: list[str]) -> dict[str, float]:
    """The figures in words of the form NAME=VALUE."""
    try:
        return {name: float(value) for name, value in (word.split("=") for word in given)}
    except ValueError:
        fail(f"--figure: got {' '.join(given)}, expected NAME=VALUE with a number", 2)


def _run(options: Options) -> int:
    """Runs the program in this process, and returns the exit status."""
    try:
        from ..harness import dsl_compat
        from ..runtime.session import simulated_gpu
        from ..sim.machine.schedule import Schedule
        from ..sim.observe.heartbeat import Heartbeat
        from ..sim.observe.trace import Trace
        from ..sim.session.script import run_script
    except ImportError as error:
        fail(f"the simulator cannot start: {error}; `cute-nvfp4 doctor` says what is missing", 2)

    more: dict[str, Any] = {"checks": options.checks, "counters": options.counters}
    more |= {"allow": options.allow, "on_hazard": "collect" if options.collect else "raise", "strict": options.strict}
    if options.clock:
        from ..sim.clock.machine import machine

        with shown_errors():
            more["clock"] = machine(options.clock).with_figures(options.figures)
    more |= {"step_limit": options.step_limit} if options.step_limit else {}
    trace = Trace() if options.trace and not options.clock else None
    more |= {"trace": trace} if trace is not None else {}
    begin, error, status = time.perf_counter(), None, 1
    progress = _Progress(options.quiet)
    more |= {"others": (Heartbeat(progress.beat, progress.every),)}
    with shown_errors():
        with simulated_gpu(
            options.arch,
            benchmarks=options.benchmarks,
            execute=options.execute,
            observe=progress.observe,
            schedule=Schedule.parse(options.schedule),
            **more,
        ) as session:
            if options.dsl_compat:
                dsl_compat.install()
            try:
                status = run_script(options.script, options.arguments)
            except BaseException as raised:
                error = raised
            finally:
                progress.close()
    for old, new in dsl_compat.USED.items():
        say(f"{old} is {new} in this DSL (--dsl-compat)")
    seconds = time.perf_counter() - begin
    if trace is not None:
        _write_trace(trace, options.trace)
    repeat = shlex.join(options.command(options.schedule))
    status, outcome = show_outcome(
        session, status, error, options.script, repeat, full=options.traceback, traced=bool(options.trace)
    )
    show_findings(session, options.quiet)
    if options.counters:
        from .sim_counters import counter_lines

        for line in counter_lines(session, stderr().width):
            say(line)
    if options.clock:
        from .sim_times import time_line, time_lines

        for line in time_lines(session):
            say(line)
        if options.trace:
            write_json(time_line(session), options.trace)
    if not options.quiet:
        _show_summary(options, session, status, outcome)
    if options.json:
        from .sim_report import report

        asked = ("script", "arguments", "arch", "schedule", "checks", "allow", "strict")
        run = {name: getattr(options, name) for name in asked}
        run |= {"status": status, "outcome": outcome, "seconds": seconds}
        write_json(report(session, run, error), options.json)
    return status


def _write_trace(trace: Trace, path: str) -> None:
    """Writes the timeline. If the disk refuses it, the command still reports the program's outcome."""
    try:
        trace.write(path)
    except OSError as error:
        say(f"the trace was not written: {error}", "red")
        return
    say(f"trace: {path} (open it at https://ui.perfetto.dev; its time is logical)")
    missing = [f"{count:,} {what}" for what, count in trace.left_out.items() if count]
    if missing:
        say(f"trace: left out {' and '.join(missing)}")


def _show_summary(options: Options, session: Session, status: int, outcome: str) -> None:
    """Prints one line about a program that was not stopped."""
    if outcome not in ("ended", "program failed"):
        return
    count = len(session.launches)
    launches = "1 launch" if count == 1 else f"{count:,} launches"
    if options.execute:
        seconds = sum(r.seconds for r in session.launches)
        launches += f", {session.instructions:,} warp instructions in {seconds:.2f} s of this machine"
        launches += (", no hazard found" if options.checks else ", checks off") if count else ""
    else:
        launches += ", not run"
    say(f"status {status}: {launches}", "dim")


class _Progress:
    """Prints a line to standard error for each launch, and the progress of a long one."""

    def __init__(self, quiet: bool) -> None:
        self._console, self._quiet = stderr(), quiet
        self._status: Any = None
        self.every = 5.0 if self._console.is_terminal else 60.0  # seconds between two lines of a long launch

    def beat(self, line: str) -> None:
        """Reports the progress of a long launch."""
        if self._status is not None:
            self._status.update(line)
        elif not self._quiet:
            say(line, "dim")

    def observe(self, record: LaunchRecord) -> None:
        if self._quiet:
            return
        self.close()
        if not record.ended:
            if self._console.is_terminal:
                self._status = self._console.status(launch_line(record))
                self._status.start()
        else:
            counts = f"{record.seconds:.2f} s, {record.instructions:,} warp instructions"
            say(f"{launch_line(record)}: {counts}", "dim")

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
app.command(context_settings=SETTINGS)(sim)

"""``cute-nvfp4 sim`` and ``python -m cute_nvfp4.sim``: runs a CUDA program on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import fail, shown_errors, stderr, write_json

if TYPE_CHECKING:
    from ..sim.session import LaunchRecord, Session
    from ..sim.trace import Trace

EXIT_HAZARD = 112
EXIT_NOT_MODELLED = 111
EXIT_INTERNAL = 70
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
_NAME_WIDTH = 72


@dataclasses.dataclass
class Options:
    """What the command was asked for."""

    script: str
    arguments: list[str]
    arch: str
    schedule: str = ""
    checks: bool = True
    counters: bool = False
    trace: str = ""
    json: str = ""
    quiet: bool = False
    traceback: bool = False
    benchmarks: str = "once"
    step_limit: int = 0
    execute: bool = True

    def command(self, schedule: str) -> list[str]:
        """The command that repeats this run with one schedule."""
        words = [sys.executable, "-m", "cute_nvfp4.sim", "--arch", self.arch, "--schedule", schedule]
        words += [] if self.checks else ["--no-checks"]
        words += [] if self.benchmarks == "once" else ["--benchmarks", self.benchmarks]
        words += ["--step-limit", str(self.step_limit)] if self.step_limit else []
        words += [] if self.execute else ["--no-execute"]
        return [*words, self.script, *self.arguments]


def sim(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python program, followed by its arguments.", show_default=False)],
    arch: Annotated[str, typer.Option(help="Architecture: sm_90a (H200), sm_100a (B200), sm_103a (B300).")] = "sm_100a",
    schedule: Annotated[
        str, typer.Option(help="How warps and engines interleave, such as 'seed=3,tma=lazy,tensor=eager'.")
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Seed of the schedule (or of the schedules).")] = None,
    schedules: Annotated[
        int, typer.Option(min=1, help="Run the program under this many schedules, each in its own process.")
    ] = 1,
    checks: Annotated[bool, typer.Option(help="Look for hazards that the run itself need not show.")] = True,
    counters: Annotated[bool, typer.Option("--counters", help="Count memory requests, sectors and bytes.")] = False,
    trace: Annotated[str, typer.Option(metavar="FILE", help="Write a timeline for Perfetto.")] = "",
    json: Annotated[str, typer.Option(metavar="FILE", help="Write launches, counts and the outcome as JSON.")] = "",
    benchmarks: Annotated[
        str, typer.Option(help="once: the DSL's benchmark helpers run their function once; full: as often as asked.")
    ] = "once",
    step_limit: Annotated[
        int, typer.Option(help="Blocks of instructions that a kernel may execute.", show_default="the simulator's")
    ] = 0,
    execute: Annotated[bool, typer.Option(help="Run the kernels; without, launches are only recorded.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line for each launch.")] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Show where the program launched it.")] = False,
) -> None:
    """Runs an unmodified CuTe DSL program as if this machine had the GPU: host code for real, kernels in the simulator.

    Exit status: the program's own; 112 where the simulator found a hazard, even if the program went on after it;
    111 where it uses something that is not modelled; 70 for an error of the simulator itself.
    Times between CUDA events are nan: time is not modelled.
    """
    from ..sim.schedule import Schedule

    with shown_errors():
        chosen = Schedule.parse(schedule)
        chosen = chosen if seed is None else dataclasses.replace(chosen, seed=seed)
    if benchmarks not in ("once", "full"):
        fail(f"--benchmarks: got {benchmarks!r}, expected once or full", 2)
    if not Path(script).is_file():
        fail(f"there is no file {script}", 2)
    options = Options(script, list(context.args), arch, str(chosen), checks, counters, trace, json)
    options.quiet, options.traceback, options.execute = quiet, with_traceback, execute
    options.benchmarks, options.step_limit = benchmarks, step_limit
    status = _run(options) if schedules == 1 else _run_schedules(options, schedules, chosen.seed)
    raise typer.Exit(status)


def _run(options: Options) -> int:
    """Runs the program in this process."""
    from ..sim.schedule import Schedule
    from ..sim.session import simulated_gpu
    from ..sim.session.script import run_script
    from ..sim.trace import Trace

    more: dict[str, Any] = {"checks": options.checks, "counters": options.counters}
    more |= {"step_limit": options.step_limit} if options.step_limit else {}
    trace = Trace() if options.trace else None
    more |= {"trace": trace} if trace is not None else {}
    begin, error = time.perf_counter(), None
    progress = _Progress(options.quiet)
    with shown_errors():
        with simulated_gpu(
            options.arch,
            benchmarks=options.benchmarks,
            execute=options.execute,
            observe=progress.observe,
            schedule=Schedule.parse(options.schedule),
            **more,
        ) as session:
            try:
                status = run_script(options.script, options.arguments)
            except BaseException as raised:
                status, error = 1, raised
            finally:
                progress.close()
    if trace is not None:
        _write_trace(trace, options.trace)
    status = _outcome(options, session, status, error)
    if options.counters:
        _show_counters(session)
    if options.json:
        write_json(_report(options, session, status, time.perf_counter() - begin), options.json)
    return status


def _write_trace(trace: Trace, path: str) -> None:
    """Writes the timeline; where the disk does not take it, the program's own outcome is still told."""
    try:
        trace.write(path)
    except OSError as error:
        stderr().print(f"the trace was not written: {error}", style="red", markup=False, soft_wrap=True)
        return
    console = stderr()
    console.print(f"trace: {path} (open it at https://ui.perfetto.dev; its time is logical)", markup=False)
    missing = [f"{count:,} {what}" for what, count in trace.left_out.items() if count]
    if missing:
        console.print(f"trace: left out {' and '.join(missing)}", markup=False, soft_wrap=True)


def _outcome(options: Options, session: Session, status: int, error: BaseException | None) -> int:
    """Shows what stopped the program, and returns the exit status."""
    from ..errors import SimError, TargetError
    from ..sim.errors import UnsupportedInstruction

    if session.failure is not None:
        record, found = session.failure
        kind, code = "hazard", EXIT_HAZARD
        if isinstance(found, UnsupportedInstruction):
            kind, code = "not modelled", EXIT_NOT_MODELLED
        elif not isinstance(found, SimError):
            kind, code = "error in the simulator", EXIT_INTERNAL
        console = stderr()
        console.print(kind, style="bold red", end=": ")
        console.print(f"{type(found).__name__}: {found}", markup=False, soft_wrap=True)
        console.print(f"in launch {record.number}: {_launch_line(record)}", markup=False, soft_wrap=True)
        console.print("repeat with:", shlex.join(options.command(options.schedule)), markup=False, soft_wrap=True)
        if options.traceback or code == EXIT_INTERNAL:
            _show_traceback(found, options.script)
        if error is not None and error is not found and not _comes_from(error, found):
            _show_traceback(error, options.script)
        return code
    if error is None:
        return status
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, (SimError, TargetError)) and not options.traceback:
        stderr().print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
        return EXIT_NOT_MODELLED
    _show_traceback(error, options.script)
    return 1


def _comes_from(error: BaseException, cause: BaseException) -> bool:
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if at is cause:
            return True
        seen.append(at)
        at = at.__cause__ or at.__context__
    return False


def _show_traceback(error: BaseException, script: str) -> None:
    """As Python shows it, without the frames of this command."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != script:
        at = at.tb_next
    at = at or error.__traceback__
    # the DSL shows its own errors in its own way, and looks at the error's traceback
    show = traceback.print_exception if sys.excepthook is sys.__excepthook__ else sys.excepthook
    show(type(error), error.with_traceback(at), at)


def _run_schedules(options: Options, count: int, seed: int) -> int:
    """Runs the program under several schedules; stops at the first that does not end well."""
    from ..sim.schedule import adversarial

    console = stderr()
    for number, schedule in enumerate(adversarial(count, seed)):
        command = options.command(str(schedule))
        extra = ["--quiet"] if options.quiet or number else []
        extra += ["--json", options.json] if options.json else []
        at = command.index(options.script)
        begin = time.perf_counter()
        # the program's own output is shown once, and of a run that fails
        done = subprocess.run([*command[:at], *extra, *command[at:]], capture_output=number > 0)
        line = f"schedule {number + 1} of {count}: {schedule}: status {done.returncode}"
        console.print(f"{line}, {time.perf_counter() - begin:.1f} s", markup=False, soft_wrap=True)
        if done.returncode:
            if number:
                sys.stdout.write(done.stdout.decode(errors="replace"))
                sys.stderr.write(done.stderr.decode(errors="replace"))
            console.print("repeat with:", shlex.join(command), markup=False, soft_wrap=True)
            return done.returncode
    return 0


class _Progress:
    """One line to standard error for each launch, and a clock while a long one runs."""

    def __init__(self, quiet: bool) -> None:
        self._console, self._quiet = stderr(), quiet
        self._status: Any = None

    def observe(self, record: LaunchRecord) -> None:
        if self._quiet:
            return
        self.close()
        if not record.ended:
            if self._console.is_terminal:
                self._status = self._console.status(_launch_line(record))
                self._status.start()
        else:
            counts = f"{record.seconds:.2f} s, {record.instructions:,} warp instructions"
            self._console.print(f"{_launch_line(record)}: {counts}", style="dim", markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _launch_line(record: LaunchRecord) -> str:
    launch = record.launch
    name = launch.kernel if len(launch.kernel) <= _NAME_WIDTH else launch.kernel[: _NAME_WIDTH - 1] + "…"
    cluster = "" if launch.cluster == (1, 1, 1) else f" cluster {launch.cluster}"
    return f"{name} grid {launch.grid} block {launch.block}{cluster}"


def _show_counters(session: Session) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="counted, not measured", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("launch", "kernel", "warp instructions", "loads: DRAM bytes", "stores: DRAM bytes", "classes"):
        table.add_column(column)
    for record in session.launches:
        if record.result is None:
            continue
        distinct = record.result.distinct_bytes
        most = sorted(record.result.classes.items(), key=lambda item: -item[1])[:5]
        table.add_row(
            str(record.number),
            record.launch.kernel[:40],
            f"{record.instructions:,}",
            f"{distinct.get('load', 0):,}",
            f"{distinct.get('store', 0):,}",
            ", ".join(f"{name} {count:,}" for name, count in most),
        )
    stderr().print(table)


def _report(options: Options, session: Session, status: int, seconds: float) -> dict[str, Any]:
    failure = None
    if session.failure is not None:
        record, error = session.failure
        failure = {"kind": type(error).__name__, "message": str(error), "launch": record.number}
    launches = []
    for record in session.launches:
        entry = dataclasses.asdict(record.launch)
        entry["params"] = [len(p) for p in record.launch.params]
        entry |= {"seconds": record.seconds, "instructions": record.instructions}
        if record.result is not None and options.counters:
            entry["counters"] = dataclasses.asdict(record.result)
        launches.append(entry)
    return {
        "script": options.script,
        "arguments": options.arguments,
        "arch": options.arch,
        "schedule": options.schedule,
        "checks": options.checks,
        "status": status,
        "failure": failure,
        "seconds": seconds,
        "launches": launches,
    }


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
app.command(context_settings=SETTINGS)(sim)

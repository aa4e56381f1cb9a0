"""The tables of a run. Measured, modelled, wall and published times never share a column or a table."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .counters import Launch
from .evaluation import no_clock, percent_of_copy
from .modelled_score import said_of
from .results import CaseResult, RunResult
from .sandbox import OUT_OF_REACH
from .schema import Case, Task, spec
from .timing import SCORES

_KERNEL_WIDTH = 32
COUNTED = (
    "warp instr.",
    "load req.",
    "sectors\neach",
    "TMA, bulk\nbytes read",
    "DRAM bytes\n(model)",
    "MMA\nM·N·K",
    "bank passes\n(ideal)",
)
"""The columns for a launch in the simulator."""


def table_of(title: str | None = None) -> Table:
    """A new table in the style of all reports."""
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def shape_text(case: Case, task: Task) -> str:
    """The sizes of a case on one line: ``m=128 n=4096``."""
    return " ".join(f"{name}={_value(case[name])}" for name in task.parameters if name in case)


def _value(value: object) -> str:
    """A size, or the sizes of all groups: ``80,176,128``; ``8×4096`` if all are equal."""
    if not isinstance(value, list):
        return str(value)
    if len(value) > 1 and len(set(value)) == 1:
        return f"{len(value)}×{value[0]}"
    return ",".join(str(entry) for entry in value)


def _case_table(title: str, task: Task) -> Table:
    """A table with a row for each case: its index, its shape, and the columns that the caller adds."""
    table = table_of(title)
    table.add_column("#", justify="right")
    table.add_column("shape", no_wrap=not task.grouped)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _check_table(run: RunResult, task: Task) -> Table:
    where = f"{run.backend}, {run.arch}" if run.arch else run.backend
    table = _case_table(f"{run.problem} · {run.mode} · {where} · {run.data} data · {run.device}", task)
    for name in ("seed", "checks"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for name in ("max abs\nerror", "max rel\nerror"):
        table.add_column(name, justify="right")
    cpu = any(case.wall_s is not None for case in run.cases)
    if cpu:
        what = "simulation" if run.backend == "sim" else "CPU call"
        table.add_column(f"{what},\nwall s", justify="right")
    for case in run.cases:
        verdict = Text(case.verdict, "green" if case.passed else "bold red")
        row = [str(case.index), shape_text(case.case, task), str(case.seed), str(case.calls_checked), verdict]
        row += [_number(case.max_abs), _number(case.max_rel)]
        table.add_row(*row, *([_number(case.wall_s)] if cpu else []))
    return table


def _time_table(run: RunResult, task: Task) -> Table:
    peer = next((case.peer_name for case in run.cases if case.peer_name), "peer")
    batch = max(case.batch for case in run.cases)
    each = f", means of {batch} calls on {batch} inputs" if batch > 1 else ""
    table = _case_table(f"measured on {run.device}: GPU times, L2 cold and clean{each}", task)
    for name in ("runs", "mean µs", "± err", "std", "best", "median", "worst", "useful MB", "TB/s", "% of copy"):
        table.add_column(name, justify="right")
    table.add_column(f"{peer} µs", justify="right")
    table.add_column("faster by", justify="right")
    for case in run.cases:
        timing = case.gpu
        if timing is None:
            continue
        microseconds = [timing.mean, timing.err, timing.std, timing.best, timing.median, timing.worst]
        percent = "-" if run.copy_bytes_s is None else f"{percent_of_copy(case, run.copy_bytes_s):.1f}"
        table.add_row(
            str(case.index),
            shape_text(case.case, task),
            str(timing.runs),
            *(f"{value / 1e3:.2f}" for value in microseconds),
            f"{case.useful_bytes / 1e6:.1f}",
            f"{case.useful_bytes / timing.mean / 1e3:.2f}",
            percent,
            "-" if case.peer is None else f"{case.peer.mean / 1e3:.2f}",
            "-" if case.peer is None else f"{case.peer.mean / timing.mean:.2f}x",
        )
    return table


def _counter_table(run: RunResult, task: Task) -> Table | None:
    if not any(case.launches for case in run.cases):
        return None
    table = _case_table("counted by the simulator, each launch of one call", task)
    for name in ("kernel", "grid", "block"):
        table.add_column(name)
    for name in COUNTED:
        table.add_column(name, justify="right")
    for case in run.cases:
        for times, launch in alike(case.launches):
            table.add_row(str(case.index), shape_text(case.case, task), *_who(times, launch), *counted(launch.counters))
    return table


def _who(times: int, launch: Launch) -> tuple[str, str, str]:
    """A launch's kernel, with the number of launches like it, its grid and its block."""
    grid, block = ("x".join(map(str, extent)) for extent in (launch.grid, launch.block))
    return (f"{times} × " if times > 1 else "") + kernel_text(launch.kernel), grid, block


def kernel_text(name: str) -> str:
    """A kernel's name without the prefix of all DSL kernels, shortened to ``_KERNEL_WIDTH``."""
    name = name.removeprefix("kernel_cutlass_")
    return name if len(name) <= _KERNEL_WIDTH else name[: _KERNEL_WIDTH - 1] + "…"


def alike(launches: list[Launch]) -> list[tuple[int, Launch]]:
    """Sets of launches that are identical but for their seconds: the number in each, and one of them."""
    found: dict[str, tuple[int, Launch]] = {}
    for launch in launches:
        key = launch.model_dump_json(exclude={"seconds"})
        found[key] = found.get(key, (0, launch))[0] + 1, launch
    return list(found.values())


def counted(counters: dict[str, int]) -> list[str]:
    """The cells of a launch under ``COUNTED``; "-" for a count of 0."""

    def cell(name: str) -> str:
        return f"{counters[name]:,}" if counters.get(name) else "-"

    requests, passes = counters.get("load_requests"), counters.get("shared_passes")
    each = f"{counters['load_sectors'] / requests:.2f}" if requests else "-"
    banks = f"{passes:,} ({counters['shared_ideal_passes']:,})" if passes else "-"
    names = "instructions", "load_requests", None, "async_load_bytes", "dram_read_bytes", "mma_multiply_adds"
    return [each if name is None else cell(name) for name in names] + [banks]


def _warnings(run: RunResult) -> list[str]:
    """A line for each class of the simulator's warnings, with the place where it was found first."""
    first: dict[str, str] = {}
    for case in run.cases:
        for text in (text for launch in case.launches for text in launch.warnings):
            first.setdefault(text.rpartition(" [")[2], f"case {case.index}: {text}")
    return list(first.values())


def modelled_title(run: RunResult) -> str:
    """The title of a table of modelled times, which names the clock and says that nothing was measured."""
    return f"modelled times on {run.clock.upper()} (docs/explanation/timing.md): nothing here was measured"


def of_cases(run: RunResult, task: Task) -> str:
    """How many of the task's cases a score is of, as text; "" if it is of all."""
    ran, known = len(run.cases), len(task.benchmarks)
    return f", of {ran} of {known} cases" if ran < known else ""


def why_untimed(run: RunResult) -> str:
    """Why a run that should report times has no modelled ones; "" if it has a clock or a GPU."""
    if run.clock or run.backend == "cuda" or run.mode not in ("benchmark", "leaderboard"):
        return ""
    if run.backend != "sim":
        return f"No modelled times: backend {run.backend} launches nothing; --backend sim does."
    if run.mode != "benchmark":
        return f"No modelled times in mode {run.mode}: --mode benchmark has them."
    return f"No modelled times: {no_clock(run.arch)}."


def _modelled_table(run: RunResult, task: Task) -> Table:
    """The clock's times of the launches of one call, one after the other, each with the cost of a launch."""
    table = table_of(modelled_title(run))
    table.add_column("shape", no_wrap=not task.grouped)
    for name in ("launches", "modelled, µs", "roofline, µs"):
        table.add_column(name, justify="right")
    table.add_column("bound by")
    for case in run.cases:
        if case.modelled_us is not None:
            roofline = sum(launch.roofline_us or 0.0 for launch in case.launches)
            longest = max(case.launches, key=lambda launch: launch.modelled_us or 0.0)
            cells = (str(len(case.launches)), f"{case.modelled_us:.2f}", f"{roofline:.2f}", longest.bound_by)
            table.add_row(shape_text(case.case, task), *cells)
    return table


def _published_table(run: RunResult, task: Task) -> Table | None:
    """Published figures of the cases that ran, and their mean if all ran."""
    bound, public = task.speed_of_light, task.public_results
    if bound is None and public is None:
        return None
    table = table_of("published figures: nothing here was measured in this run")
    table.add_column("shape", no_wrap=not task.grouped)
    if bound:
        table.add_column(f"{bound.gpu} speed of light, µs\n(computed)", justify="right")
    if public:
        table.add_column(f"{public.gpu} best public result, µs\n(measured by others)", justify="right")
    for case in run.cases:
        values = [figures.microseconds[case.index] for figures in (bound, public) if figures]
        table.add_row(shape_text(case.case, task), *(f"{value:g}" for value in values))
    if public and len(run.cases) == len(task.benchmarks):
        table.add_row("geometric mean", *([""] if bound else []), f"{public.geometric_mean:g}", style="dim")
    return table


def _failure(case: CaseResult) -> Panel:
    parts = [Text(case.error, "bold")]
    if case.details:
        parts.append(Text("\n" + case.details))
    return Panel(Group(*parts), title=f"case {case.index} · {spec(case.case)}", title_align="left", border_style="red")


def print_run(run: RunResult, task: Task, console: Console) -> None:
    """Prints the tables of ``run``, then the failures with their reasons, then a summary of one line."""
    timed = run.mode in ("benchmark", "leaderboard")
    console.print(_check_table(run, task))
    if run.backend == "sim" and run.mode == "test":
        console.print("Wall times are of the simulation, with compiling; they say nothing of a GPU.")
    if any(case.gpu for case in run.cases):
        console.print(_time_table(run, task))
        if run.copy_bytes_s:
            console.print(f"device-to-device copy in this run: {run.copy_bytes_s / 1e12:.2f} TB/s (read + written)")
    elif timed:
        console.print(
            f"No GPU ran: backend {run.backend} gives no GPU times, and there is no measured score.", style="yellow"
        )
        if why := why_untimed(run):
            console.print(why, style="yellow", soft_wrap=True)
        if any(case.modelled_us is not None for case in run.cases):
            console.print(_modelled_table(run, task))
    counters = _counter_table(run, task) if run.mode != "leaderboard" else None
    if counters:
        console.print(counters)
    for line in _warnings(run):
        console.print(Text(line, "dim"), soft_wrap=True)
    published = _published_table(run, task) if timed else None
    if published:
        console.print(published)
    for case in run.cases:
        if case.profile:
            console.print(Text(f"case {case.index} · {spec(case.case)}\n{case.profile}"), soft_wrap=True)
        if case.error:
            console.print(_failure(case))
    for case in run.cases:
        if case.unscored:
            console.print(Text(f"case {case.index} has no part in a score: {case.unscored}", "yellow"), soft_wrap=True)
    for note in run.notes:
        console.print(Text(note, "yellow"), soft_wrap=True)
    console.print(Text(f"between submission and judge: {', '.join(run.isolation) or 'nothing'}", "dim"))
    if OUT_OF_REACH not in run.isolation:
        console.print("The submission can reach the judge's memory here: there is no score.", style="yellow")
    passed = sum(case.passed for case in run.cases)
    style = "bold green" if run.passed else "bold red"
    console.print(f"{passed} of {len(run.cases)} cases passed: {run.submission}", style=style, soft_wrap=True)
    name, part = SCORES[run.ranking_by], of_cases(run, task)
    if run.modelled_score_us is not None:
        what = f"modelled score ({name} of modelled times{part}): {run.modelled_score_us:.2f} µs"
        console.print(f"{what} by the clock of {run.clock.upper()}, not measured")
    if run.modelled_kernels is not None:
        console.print(said_of(run.modelled_kernels, name), soft_wrap=True)
    if run.score_us is not None:
        what = f"score ({name} of the means{part}): {run.score_us:.2f} µs on {run.device}"
        console.print(what, style="bold")

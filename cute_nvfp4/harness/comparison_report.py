"""The tables of a comparison: one for each kind of figure, with a column for each submission."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .comparison import MODELLED, TIMES, Comparison, Figure
from .report import modelled_title, of_cases, shape_text, table_of, why_untimed
from .sandbox import OUT_OF_REACH
from .schema import Task
from .timing import SCORES

_TITLES = {
    "measured": "measured on {device}: GPU times, L2 cold and clean",
    "counted": "counted by the simulator, over the launches of one call",
    "compiled": "read from the machine code, the largest of a call's launches",
}


def print_comparison(comparison: Comparison, task: Task, console: Console) -> None:
    """Prints the verdicts, the figures side by side, and the failures with their reasons."""
    run = comparison.run
    where = f" · {run.mode} · {run.backend}{f', {run.arch}' if run.arch else ''} · {run.data} data" if run else ""
    console.print(Text(f"{task.name}{where}", "bold"))
    console.print(_verdicts(comparison))
    if run and comparison.figures("modelled"):
        console.print(Text(modelled_title(run), "bold"), soft_wrap=True)
        console.print(_modelled(comparison, task))
    for line in notes(comparison):
        console.print(Text(line, "yellow"), soft_wrap=True)
    for kind, title in _TITLES.items():
        if run and comparison.figures(kind):
            console.print(Text(title.format(device=run.device), "bold"))
            console.print(_side_by_side(comparison, kind, task))
    for contestant in comparison.contestants:
        if contestant.refusal:
            console.print(Text(f"{contestant.name}: ", "bold red") + Text(contestant.refusal), soft_wrap=True)
        for case in contestant.run.cases if contestant.run else []:
            if case.error:
                where = f"{contestant.name}, case {case.index}: "
                console.print(Text(where, "bold red") + Text(case.error), soft_wrap=True)
    right = sum(contestant.passed for contestant in comparison.contestants)
    style = "bold green" if comparison.passed else "bold red"
    console.print(f"{right} of {len(comparison.contestants)} submissions are right", style=style)


def _verdicts(comparison: Comparison) -> Table:
    """A row for each submission: cases that are right, its time, and how many times faster than the first it is."""
    table = table_of()
    table.add_column("submission")
    table.add_column("cases right")
    kinds = [kind for kind, of in TIMES.items() if any(one.mean(of) for one in comparison.contestants)]
    first = comparison.contestants[0].name
    for kind in kinds:
        table.add_column(f"{kind} µs,\ngeometric mean", justify="right")
        table.add_column(f"times faster\nthan {first}", justify="right")
    for contestant in comparison.contestants:
        verdict = Text(contestant.verdict, "green" if contestant.passed else "bold red")
        faster, cells = comparison.times_faster(contestant), []
        for kind in kinds:
            time = contestant.mean(TIMES[kind])
            cells += [f"{time:.2f}" if time else "-", f"{faster[kind]:.2f}" if faster[kind] else "-"]
        table.add_row(contestant.name, verdict, *cells)
    return table


def notes(comparison: Comparison) -> list[str]:
    """The reasons why expected modelled times are missing, one line each."""
    run = comparison.run
    if run is None:
        return []
    if not run.clock:
        return [why] if (why := why_untimed(run)) else []
    found = []
    for contestant in comparison.contestants:
        for case in contestant.run.cases if contestant.run else []:
            if case.passed and MODELLED.of(case) is None:
                why = case.unscored or "the clock has timed none of its launches, or not all"
                found.append(f"{contestant.name}, case {case.index} has no modelled time: {why}")
        if contestant.run and OUT_OF_REACH not in contestant.run.isolation:
            found.append(f"{contestant.name} can reach the judge's memory here: it has no score")
    return found


def modelled_rows(comparison: Comparison, task: Task) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """The rows of modelled times: number and shape of a case, and each submission's time with its ratio to the first's.
    In mode benchmark the scores come last."""
    run, contestants = comparison.run, comparison.contestants
    rows = [
        (str(case.index), shape_text(case.case, task), _with_ratios(comparison, MODELLED, position))
        for position, case in enumerate(run.cases)
    ]
    if run.mode != "benchmark":
        return rows
    scores = [contestant.run and contestant.run.modelled_score_us for contestant in contestants]
    return [*rows, ("", f"score: {SCORES[run.ranking_by]}{of_cases(run, task)}", _against_first(MODELLED, scores))]


def _modelled(comparison: Comparison, task: Task) -> Table:
    """The table of modelled times: a row for each case, a column for each submission, the scores at the end."""
    table = table_of()
    table.add_column("#", justify="right")
    table.add_column("shape", no_wrap=not task.grouped)
    for contestant in comparison.contestants:
        table.add_column(f"{contestant.name},\nmodelled µs", justify="right")
    for number, shape, cells in modelled_rows(comparison, task):
        if not number:
            table.add_section()
        table.add_row(number, shape, *_joined(cells), style=None if number else "bold")
    return table


def _side_by_side(comparison: Comparison, kind: str, task: Task) -> Table:
    """The table of one kind: a row for each case and figure, with ratios to the first submission."""
    table = table_of()
    table.add_column("#", justify="right")
    table.add_column("shape", no_wrap=not task.grouped)
    table.add_column(kind)
    for contestant in comparison.contestants:
        table.add_column(contestant.name, justify="right")
    for position, case in enumerate(comparison.run.cases):
        head = (str(case.index), shape_text(case.case, task))
        for figure in comparison.figures(kind, position):
            table.add_row(*head, figure.title, *_joined(_with_ratios(comparison, figure, position)))
            head = ("", "")
        table.add_section()
    return table


def _with_ratios(comparison: Comparison, figure: Figure, position: int) -> list[tuple[str, str]]:
    return _against_first(figure, [contestant.figure(figure, position) for contestant in comparison.contestants])


def _against_first(figure: Figure, values: list[float | None]) -> list[tuple[str, str]]:
    return [(figure.text(value), figure.ratio(value, values[0])) for value in values]


def _joined(cells: list[tuple[str, str]]) -> list[str]:
    return ["  ".join(cell).rstrip() for cell in cells]

"""Tables of a comparison, a column for each submission: counted, compiled and measured figures stand apart."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .comparison import Comparison, Figure
from .report import shape_text, table_of
from .schema import Task

_TITLES = {
    "measured": "measured on {device}: GPU times, L2 cold and clean",
    "counted": "counted by the simulator, over the launches of one call",
    "compiled": "read from the machine code, the largest of a call's launches",
}


def print_comparison(comparison: Comparison, task: Task, console: Console) -> None:
    """Prints who is right, what was found side by side, and what failed and why."""
    run = comparison.run
    where = f" · {run.mode} · {run.backend}{f', {run.arch}' if run.arch else ''} · {run.data} data" if run else ""
    console.print(Text(f"{task.name}{where}", "bold"))
    console.print(_verdicts(comparison))
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
    table = table_of()
    table.add_column("submission")
    table.add_column("cases right")
    timed = any(contestant.run and contestant.run.score_us for contestant in comparison.contestants)
    if timed:
        table.add_column("measured µs,\ngeometric mean", justify="right")
    for contestant in comparison.contestants:
        score = contestant.run.score_us if contestant.run else None
        verdict = Text(contestant.verdict, "green" if contestant.passed else "bold red")
        table.add_row(contestant.name, verdict, *([f"{score:.2f}" if score else "-"] if timed else []))
    return table


def _side_by_side(comparison: Comparison, kind: str, task: Task) -> Table:
    """A row for each case and figure; from the second submission on with the ratio to the first."""
    table = table_of()
    table.add_column("#", justify="right")
    table.add_column("shape", no_wrap=not task.grouped)
    table.add_column(kind)
    for contestant in comparison.contestants:
        table.add_column(contestant.name, justify="right")
    for position, case in enumerate(comparison.run.cases):
        head = (str(case.index), shape_text(case.case, task))
        for figure in comparison.figures(kind, position):
            table.add_row(*head, figure.title, *_cells(comparison, figure, position))
            head = ("", "")
        table.add_section()
    return table


def _cells(comparison: Comparison, figure: Figure, position: int) -> list[str]:
    values = [contestant.figure(figure, position) for contestant in comparison.contestants]
    return [f"{figure.text(value)}  {figure.ratio(value, values[0])}".rstrip() for value in values]

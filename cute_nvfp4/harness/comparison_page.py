"""A comparison as one self-contained HTML file: tables, and bars as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .comparison import Comparison, Contestant, Figure
from .comparison_report import modelled_rows, notes
from .counters import Launch
from .report import COUNTED, alike, counted, kernel_text, modelled_title, shape_text
from .schema import Task

COLORS = ("#3b76c4", "#e0813a", "#3a9a6b", "#b5539c", "#8a7a3d", "#6d63c9", "#c94f4f", "#5f7f8c")
KINDS = {
    "measured": "Measured on the GPU named above, L2 cold and clean, launch included",
    "modelled": "By the simulator's clock, launch included; nothing here was measured",
    "counted": "Counted by the simulator over the launches of one call; counts, not time",
    "compiled": "Read from the machine code; the largest of a call's launches",
}
_TEMPLATE = "comparison.html.j2"


@dataclass(frozen=True)
class Bar:
    """One bar. share: of the longest bar of the case, from 0 to 1; None if there is nothing to draw."""

    name: str
    color: str
    text: str
    share: float | None


@dataclass(frozen=True)
class Panel:
    """One figure as bars. Each case has its own scale, since cases differ by orders of magnitude."""

    title: str
    cases: list[tuple[str, list[Bar]]]


@dataclass(frozen=True)
class Row:
    """A contestant's row in the first table. cells: geometric means, each with its ratio to the first contestant's."""

    contestant: Contestant
    color: str
    verdict: str
    cells: list[tuple[str, str]]


def write_page(comparison: Comparison, task: Task, path: Path) -> None:
    """Writes the page to ``path``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cute_nvfp4.harness", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    kinds = {kind: found for kind in KINDS if (found := comparison.figures(kind))}
    figures = [figure for kind, found in kinds.items() for figure in found if kind != "modelled"]
    text = environment.get_template(_TEMPLATE).render(
        task=task,
        run=comparison.run,
        figures=figures,
        rows=[_row(comparison, position, figures) for position in range(len(comparison.contestants))],
        panels={kind: _panels(comparison, found, task) for kind, found in kinds.items()},
        kinds=KINDS,
        modelled_title=modelled_title(comparison.run) if comparison.run else "",
        modelled=modelled_rows(comparison, task) if "modelled" in kinds else [],
        notes=notes(comparison),
        launches=_launches(comparison, task),
        launch_heads=COUNTED,
    )
    path.write_text(text)


def _color(position: int) -> str:
    return COLORS[position % len(COLORS)]


def _row(comparison: Comparison, position: int, figures: list[Figure]) -> Row:
    contestant, first = comparison.contestants[position], comparison.contestants[0]
    cells = []
    for figure in figures:
        value, other = contestant.mean(figure), first.mean(figure)
        cells.append((figure.text(value), figure.ratio(value, other)))
    return Row(contestant, _color(position), contestant.verdict, cells)


def _panels(comparison: Comparison, figures: list[Figure], task: Task) -> list[Panel]:
    """The panels that have something to draw."""
    panels = [_panel(comparison, figure, task) for figure in figures if figure.plotted]
    return [panel for panel in panels if any(bar.share for _, bars in panel.cases for bar in bars)]


def _panel(comparison: Comparison, figure: Figure, task: Task) -> Panel:
    cases = []
    for position, case in enumerate(comparison.run.cases):
        values = [contestant.figure(figure, position) for contestant in comparison.contestants]
        longest = max((value for value in values if value), default=1.0)
        bars = [
            Bar(contestant.name, _color(number), figure.text(value), None if value is None else value / longest)
            for number, (contestant, value) in enumerate(zip(comparison.contestants, values))
        ]
        cases.append((shape_text(case.case, task), bars))
    return Panel(figure.title, cases)


@dataclass(frozen=True)
class LaunchRow:
    """Identical launches of one contestant in one case."""

    name: str
    color: str
    kernel: str
    launch: Launch
    cells: list[str]


def _launches(comparison: Comparison, task: Task) -> list[tuple[str, list[LaunchRow]]]:
    """The cases in which the simulator launched kernels, with every contestant's launches."""
    found = []
    for position, case in enumerate(comparison.run.cases if comparison.run else []):
        rows = [
            LaunchRow(
                contestant.name,
                _color(number),
                _times(times) + kernel_text(launch.kernel),
                launch,
                counted(launch.counters),
            )
            for number, contestant in enumerate(comparison.contestants)
            if contestant.run
            for times, launch in alike(contestant.run.cases[position].launches)
        ]
        if rows:
            found.append((shape_text(case.case, task), rows))
    return found


def _times(count: int) -> str:
    return f"{count} × " if count > 1 else ""

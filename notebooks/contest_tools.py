"""Helpers of ``06_contest.ipynb``: they judge submissions in the harness, and show their counters side by side."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from IPython.display import Markdown, display
from rich.console import Console

from cute_nvfp4.harness.comparison import FIGURES, Comparison, Contestant
from cute_nvfp4.harness.comparison_page import COLORS
from cute_nvfp4.harness.comparison_report import print_comparison
from cute_nvfp4.harness.evaluation import Evaluation, Options, task_of

PROBLEM, CASE = "nvfp4_gemv", 3  # M = 256, K = 7168, L = 1
SHOWN = ("instructions", "load_requests", "sectors_per_request", "bytes_read", "registers", "spills")
FIGURE = {figure.key: figure for figure in FIGURES}
FOLDER = Path(tempfile.mkdtemp(prefix="contest-"))
"""The folder of the submissions."""
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
judged: list[Contestant] = []


def judge(name: str) -> None:
    """Judges ``name.py`` as ``cute-nvfp4 eval`` does; shows its counters beside those of earlier files."""
    contestant = _run(name)
    assert contestant.passed, contestant.run.cases[0].error
    judged.append(contestant)
    print(f"{name}.py is right, also on new contents at the same addresses")
    table()
    plot()


def tell(name: str) -> None:
    """Judges a submission that is wrong, and prints the verdict."""
    (case,) = _run(name).run.cases
    assert not case.passed
    print(case.error.replace(f"{FOLDER}/", ""))


def _run(name: str) -> Contestant:
    path = FOLDER / f"{name}.py"
    options = Options(PROBLEM, submission=path, backend="sim", data="full", case=CASE, inspect=True)
    return Contestant(name, path, Evaluation(options).run())


def value(contestant: Contestant, key: str) -> float:
    """A figure of the contestant's only case."""
    return contestant.figure(FIGURE[key], 0)


def table() -> None:
    lines = [["", *(FIGURE[key].title for key in SHOWN)], ["---"] + ["--:"] * len(SHOWN)]
    lines += [[x.name, *(FIGURE[key].text(value(x, key)) for key in SHOWN)] for x in judged]
    display(Markdown("\n".join("| " + " | ".join(line) + " |" for line in lines)))


def plot() -> None:
    """Draws bars of three figures for the submissions so far."""
    import matplotlib.pyplot as plt

    panels = (("instructions", 1e3, "warp instructions, thousands"), ("bytes_read", 1e6, "bytes asked for, MB"))
    figure, axes = plt.subplots(1, 3, figsize=(10, 0.7 + 0.3 * len(judged)), sharey=True)
    names = [x.name for x in judged]
    for axis, (key, unit, title) in zip(axes, (*panels, ("registers", 1, "registers a thread"))):
        bars = axis.barh(names, [value(x, key) / unit for x in judged], color=COLORS[: len(judged)], height=0.7)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    plt.show()


def side_by_side() -> None:
    """Prints what ``cute-nvfp4 eval`` prints of all submissions so far."""
    console = Console(width=124, force_jupyter=False, force_terminal=False, color_system=None, highlight=False)
    print_comparison(Comparison(judged), task_of(Options(PROBLEM)), console)


def excerpt(name: str, first: str, last: str) -> None:
    """Prints the lines of a file from the one that begins with ``first`` to the one before ``last``."""
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(first))
    end = next(i for i, line in enumerate(lines) if i > begin and line.startswith(last))
    print("\n".join(lines[begin:end]).rstrip())

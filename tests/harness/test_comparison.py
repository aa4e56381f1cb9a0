"""``cute-nvfp4 eval PROBLEM A.py B.py``: several submissions side by side, as tables, JSON and a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from submission_files import HONEST, TINY, ZEROS
from typer.testing import CliRunner

from cute_nvfp4.cli.main import app
from cute_nvfp4.harness.comparison import FIGURES, Comparison, Contestant
from cute_nvfp4.harness.comparison_page import write_page
from cute_nvfp4.harness.comparison_report import print_comparison
from cute_nvfp4.harness.counters import Launch
from cute_nvfp4.harness.problem import get_problem
from cute_nvfp4.harness.results import CaseResult, RunResult
from cute_nvfp4.harness.sandbox import OUT_OF_REACH
from cute_nvfp4.harness.schema import load_task
from cute_nvfp4.harness.starters import starter
from cute_nvfp4.harness.timing import Timing, geometric_mean

TASK = load_task(get_problem("nvfp4_gemv").folder / "task.yml")
BY_KEY = {figure.key: figure for figure in FIGURES}


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["eval", "nvfp4_gemv", *map(str, arguments)])


def contestant(
    name: str,
    instructions: list[int],
    *,
    micros: list[float] = (),
    modelled: list[float] = (),
    failed: int | None = None,
) -> Contestant:
    """A submission that was counted in some cases and, with ``micros``, measured; with ``modelled``, the clock gave
    times (µs)."""
    run = RunResult("nvfp4_gemv", "test", "sim", "sm_100a", "a device", "public", f"{name}.py", None, {"torch": "2"})
    for index, count in enumerate(instructions):
        verdict = "right" if index != failed else "wrong"
        case = CaseResult(index, TASK.tests[index], 1111, verdict=verdict, error="" if index != failed else "bad")
        counters = {"instructions": count, "load_requests": 10, "load_sectors": 25, "shared_passes": 0}
        extent = (1, 1, 1)
        case.add_launches(
            [
                Launch(
                    kernel=f"<{name}>",
                    grid=extent,
                    block=extent,
                    cluster=extent,
                    counters=counters,
                    registers=40,
                    modelled_us=modelled[index] if modelled else None,
                )
            ]
        )
        if micros:
            case.gpu = Timing(10, 1e3 * micros[index], 1.0, 1.0, 1.0, 1.0, 1.0)
        run.cases.append(case)
    if modelled:
        run.mode, run.clock, run.isolation = "benchmark", "b200", [OUT_OF_REACH]
        run.modelled_score_us = geometric_mean(modelled) if run.passed else None
    return Contestant(name, Path(f"{name}.py"), run)


def test_figures_of_a_case_that_failed_are_not_compared() -> None:
    one = contestant("one", [100, 400], failed=1)
    assert one.figure(BY_KEY["instructions"], 0) == 100
    assert one.figure(BY_KEY["instructions"], 1) is None and one.mean(BY_KEY["instructions"]) is None


def test_means_are_geometric_and_counts_that_nobody_has_are_left_out() -> None:
    both = Comparison([contestant("a", [100, 400]), contestant("b", [50, 50], micros=[2.0, 8.0])])
    a, b = both.contestants
    assert a.mean(BY_KEY["instructions"]) == pytest.approx(200) and b.mean(BY_KEY["mean_us"]) == pytest.approx(4)
    assert a.mean(BY_KEY["mean_us"]) is None
    shown = {kind: [figure.key for figure in both.figures(kind)] for kind in ("measured", "counted", "compiled")}
    assert shown == {
        "measured": ["mean_us"],
        "counted": ["launches", "instructions", "load_requests", "sectors_per_request", "bytes_read"],
        "compiled": ["registers"],
    }
    assert a.figure(BY_KEY["sectors_per_request"], 0) == 2.5 and a.figure(BY_KEY["bytes_read"], 0) == 32 * 25


def test_measured_and_counted_figures_share_no_table() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, quiet=True)
    print_comparison(Comparison([contestant("a", [100]), contestant("b", [50], micros=[2.0])]), TASK, console)
    with console.capture() as captured:
        console.quiet = False
        print_comparison(Comparison([contestant("a", [100]), contestant("b", [50], micros=[2.0])]), TASK, console)
    text = captured.get()
    measured, counted = text.index("measured on a device"), text.index("counted by the simulator")
    assert "instructions" not in text[measured:counted] and "µs" not in text[counted:]
    assert re.search(r"warp instructions +100 +50 +×0.50", text)


class Reader(HTMLParser):
    """Notes what a page loads, and whether its tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    refused = Contestant("d", Path("d.py"), None, "syntax error in <d.py>")
    some = [
        contestant("a", [100, 400]),
        contestant("b", [50, 50], micros=[2, 8]),
        contestant("c", [1, 1], failed=1),
        refused,
    ]
    write_page(Comparison(some), TASK, path)
    text = path.read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and reader.sources == [] and "<script" not in text
    assert "&lt;a&gt;" in text and "syntax error in &lt;d.py&gt;" in text  # names and errors are text, not tags
    assert 'width="122.0"' in text  # 50 of 100 instructions: half of the longest bar
    measured, counted = text.index("<h2>Measured</h2>"), text.index("<h2>Counted</h2>")
    assert "mean of a call, µs" in text[measured:counted] and "warp instructions" in text[counted:]


def test_kernels_of_ones_own_are_compared(tmp_path: Path) -> None:
    """Two starters and one that cannot be loaded, in the simulator: the others are judged all the same."""
    broken, page, file = tmp_path / "broken.py", tmp_path / "page.html", tmp_path / "out.json"
    broken.write_text("def custom_kernel(:\n")
    paths = [tmp_path / f"starter_{style.replace('-', '_')}.py" for style in ("cute", "inline-ptx")]
    for path, style in zip(paths, ("cute", "inline-ptx")):
        path.write_text(starter("nvfp4_gemv", style))
    done = invoke(*paths, broken, "--backend", "sim", "--case", 0, "--html", page, "--json", file)
    assert done.exit_code == 112, done.output
    assert "2 of 3 submissions are right" in done.output and "syntax error in" in done.output
    cute, ptx, refused = json.loads(file.read_text())["submissions"]
    assert (cute["name"], ptx["name"]) == ("starter_cute", "starter_inline_ptx")
    assert "syntax error" in refused["refusal"]
    figures = [one["cases"][0]["figures"] for one in (cute, ptx)]
    assert figures[1]["instructions"] < 0.6 * figures[0]["instructions"]
    assert all(0 < found["registers"] < 64 and found["spills"] == 0 for found in figures)
    assert figures[0]["sectors_per_request"] == 12.5 and figures[0]["distinct_load_bytes"] == 128 * 144 + 144 + 16
    assert "starter_inline_ptx" in page.read_text()


def test_a_page_of_one_submission_and_its_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    read, write = os.pipe()
    monkeypatch.setenv("POPCORN_FD", str(write))
    done = invoke(HONEST, "--task", TINY, "--backend", "reference", "--html", tmp_path / "page.html")
    os.close(write)
    with os.fdopen(read) as lines:
        assert "check: pass\n" in lines.readlines()
    assert done.exit_code == 0 and (tmp_path / "page.html").exists()
    monkeypatch.delenv("POPCORN_FD")
    alone = invoke(HONEST, "--task", TINY, "--backend", "reference")
    rows = [[line for line in text.splitlines() if "right" in line] for text in (done.stdout, alone.stdout)]
    assert len(rows[0]) == len(rows[1]) > 1, "--html takes nothing from what the terminal shows"


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([HONEST, ZEROS, "--trace", "t.json"], "--trace writes the timeline of one submission"),
        ([HONEST, "nowhere.py"], "submission nowhere.py does not exist"),
        ([HONEST, "--html", "/nowhere/page.html"], "--html: cannot write /nowhere/page.html"),
    ],
)
def test_what_is_refused_before_anything_runs(
    arguments: list, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())

"""Modelled times of several submissions side by side: what is printed and drawn is what ``--json`` has."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from submission_files import TINY
from test_comparison import TASK, contestant, invoke

from cute_nvfp4.errors import CuteNvfp4Error
from cute_nvfp4.harness.comparison import Comparison
from cute_nvfp4.harness.comparison_page import write_page
from cute_nvfp4.harness.comparison_report import notes, print_comparison
from cute_nvfp4.harness.evaluation import Evaluation, Options
from cute_nvfp4.harness.starters import starter
from cute_nvfp4.sim.clock.tools import found

THREE = TASK.model_copy(update={"benchmarks": TASK.tests[:3]})
TITLE = "modelled times on B200 (docs/explanation/timing.md): nothing here was measured"


def printed(comparison: Comparison, task=THREE) -> str:
    console = Console(width=160, file=io.StringIO())
    print_comparison(comparison, task, console)
    return console.file.getvalue()


def page(comparison: Comparison, path: Path) -> str:
    """The words of the page, without tags."""
    write_page(comparison, THREE, path)
    return " ".join(re.sub(r"<[^>]*>", " ", path.read_text().split("</style>")[1]).split())


def a_faster_one() -> Comparison:
    """The second executes more instructions, and takes less time."""
    slow = contestant("slow", [100, 100, 100], modelled=[10.0, 20.0, 40.0])
    return Comparison([slow, contestant("fast", [300, 300, 300], modelled=[5.0, 4.0, 4.0])])


def test_ratios_of_modelled_times_and_the_scores_last(tmp_path: Path) -> None:
    text = printed(a_faster_one())
    rows = text[text.index(TITLE) : text.index("counted by")]
    cells = [re.findall(r"(?<= )×?\d+\.\d+", line) for line in rows.splitlines()]
    times = [["10.00", "5.00", "×0.50"], ["20.00", "4.00", "×0.20"], ["40.00", "4.00", "×0.10"]]
    assert [cell for cell in cells if cell] == [*times, ["20.00", "4.31", "×0.22"]]
    assert "score: geometric mean" in rows and " of 3 cases" not in rows and "warp instructions" not in rows
    drawn = page(a_faster_one(), tmp_path / "page.html")
    drawn = drawn[drawn.index(TITLE) : drawn.index("Counted by")]
    for row in (*times, ["score: geometric mean", "20.00", "4.31", "×0.22"]):
        assert " ".join(row) in drawn


def test_a_row_has_verdict_time_and_how_often_faster() -> None:
    """The geometric means are 20 and 4.31 µs; who has no time, or is wrong, is no times faster."""
    first, fast = a_faster_one().contestants
    wrong = contestant("wrong", [1, 1, 1], modelled=[1.0, 1.0, 1.0], failed=0)
    three = Comparison([first, fast, wrong])
    rows = [line.split() for line in printed(three).splitlines() if line.split()[:1] in (["slow"], ["fast"], ["wrong"])]
    assert rows[0] == ["slow", "3", "of", "3", "20.00", "1.00"] and rows[1] == ["fast", "3", "of", "3", "4.31", "4.64"]
    assert rows[2] == ["wrong", "2", "of", "3", "-", "-"]
    told = [one["times_faster"] for one in three.to_dict()["submissions"]]
    assert told[1] == {"measured": None, "modelled": pytest.approx((2 * 5 * 10) ** (1 / 3))}
    assert told[2] == {"measured": None, "modelled": None}


def test_a_score_says_of_how_many_cases_it_is() -> None:
    one = Comparison([contestant(name, [100], modelled=[2.0]) for name in ("a", "b")])
    assert "score: geometric mean, of 1 of 3 cases" in printed(one)


def test_modelled_and_measured_times_share_no_table(tmp_path: Path) -> None:
    both = Comparison([contestant("a", [100], modelled=[2.0]), contestant("b", [50], micros=[3.0])])
    text = printed(both)
    modelled, measured = text.index(TITLE), text.index("measured on a device")
    assert "3.00" not in text[modelled:measured] and "2.00" not in text[measured:]
    drawn = page(both, tmp_path / "page.html")
    first, counted = drawn.index("mean of a call, µs"), drawn.index("Counted by")
    assert "modelled" not in drawn[:first] and "3.00" not in drawn[drawn.index(TITLE) : counted]


def test_what_has_no_modelled_time_says_why_and_has_no_ratio(tmp_path: Path) -> None:
    """A wrong submission, and one of whose work torch did a part: neither is faster than the first."""
    first = contestant("first", [100, 100], modelled=[10.0, 20.0])
    wrong = contestant("wrong", [10, 10], modelled=[1.25, 2.65], failed=1)
    partly = contestant("partly", [10, 10], modelled=[1.75, 2.75])
    partly.run.cases[0].unscored, partly.run.modelled_score_us = "torch wrote 5 bytes", None
    comparison = Comparison([first, wrong, partly])
    for text in (printed(comparison), page(comparison, tmp_path / "page.html")):
        rows = text[text.index(TITLE) :]
        assert "1.25" in rows and "2.75" in rows and "2.65" not in rows and "1.75" not in rows
        assert "partly, case 0 has no modelled time: torch wrote 5 bytes" in text
    assert re.search(r"score: geometric mean, of 2 of 3 cases +14.14 +- +-", printed(comparison))


@pytest.mark.parametrize(
    "changes,why",
    [
        ({"arch": "sm_80"}, "No modelled times: there is no clock of sm_80; --arch "),
        ({"arch": "sm_100a"}, "No modelled times: the clock needs ptxas and nvdisasm: pip install "),
        ({"backend": "reference", "arch": None}, "No modelled times: backend reference launches nothing"),
        ({"mode": "leaderboard"}, "No modelled times in mode leaderboard: --mode benchmark has them."),
        ({"backend": "cuda"}, ""),
        ({"mode": "test"}, ""),
    ],
)
def test_without_a_clock_one_line_says_why(changes: dict, why: str, tmp_path: Path) -> None:
    one = contestant("a", [100])
    vars(one.run).update({"mode": "benchmark"} | changes)
    comparison = Comparison([one])
    assert len(notes(comparison)) == bool(why)
    for text in (printed(comparison), page(comparison, tmp_path / "page.html")):
        assert "modelled times on" not in text and why in text.replace("&#39;", "'")


@pytest.mark.sim_only("models times")
@pytest.mark.skipif(not found("ptxas") or not found("nvdisasm"), reason="no ptxas")
def test_two_starters_have_the_modelled_times_of_the_json(tmp_path: Path) -> None:
    paths, file, html = [tmp_path / "one.py", tmp_path / "two.py"], tmp_path / "out.json", tmp_path / "page.html"
    for path, style in zip(paths, ("cute", "inline-ptx")):
        path.write_text(starter("nvfp4_gemv", style))
    words = ("--task", TINY, "--backend", "sim", "--arch", "sm_100a", "--mode", "benchmark")
    done = invoke(*paths, *words, "--json", file, "--html", html)
    assert done.exit_code == 0, done.output
    runs = json.loads(file.read_text())["submissions"]
    times = [run["cases"][0]["modelled_us"] for run in runs]
    assert [run["cases"][0]["figures"]["modelled_us"] for run in runs] == times
    assert [run["modelled_score_us"] for run in runs] == pytest.approx(times)
    row = f"{times[0]:.2f} {times[1]:.2f} ×{times[1] / times[0]:.2f}"
    drawn = " ".join(re.sub(r"<[^>]*>", " ", html.read_text()).split())
    for text in (" ".join(done.output.split()), drawn):
        rows = text[text.index("modelled times on B200") :]
        assert f"m=130 k=80 l=2 {row}" in rows and f"score: geometric mean {row}" in rows


@pytest.mark.parametrize(
    "options,message",
    [
        ({"clock": "h100"}, "for modelled times"),
        ({"clock": "h100", "mode": "benchmark", "arch": "sm_100a"}, "--clock h100 is of sm_90a, and --arch is sm_100a"),
        ({"clock": "h300", "mode": "benchmark"}, "expected one of b200, h100, h200"),
        ({"clock": "b200", "mode": "benchmark", "backend": "reference"}, "for modelled times"),
    ],
)
def test_a_clock_that_cannot_be_had_is_refused(options, message):
    with pytest.raises(CuteNvfp4Error, match=message):
        Evaluation(Options(**{"problem": "nvfp4_gemv", "backend": "sim", "task_file": TINY} | options))


@pytest.mark.skipif(not (found("ptxas") and found("nvdisasm")), reason="the clock needs ptxas and nvdisasm")
def test_the_clock_that_was_asked_for():
    given = {"problem": "nvfp4_gemv", "mode": "benchmark", "backend": "sim", "task_file": TINY}
    asked = Evaluation(Options(**given, clock="h100"))
    assert (asked.clock, asked.arch) == ("h100", "sm_90a")
    assert Evaluation(Options(**given, arch="sm_90a")).clock == "h200"

"""Tables, JSON and protocol lines of a finished run, from made-up results."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from cute_nvfp4.harness.counters import Launch
from cute_nvfp4.harness.evaluation import percent_of_copy
from cute_nvfp4.harness.problem import get_problem
from cute_nvfp4.harness.protocol import lines
from cute_nvfp4.harness.report import print_run
from cute_nvfp4.harness.results import CaseResult, RunResult
from cute_nvfp4.harness.schema import Task, load_task
from cute_nvfp4.harness.timing import Timing

PROBLEM = get_problem("nvfp4_gemv")
TASK = load_task(PROBLEM.folder / "task.yml")
COUNTERS = {"instructions": 123456, "load_requests": 200, "load_sectors": 500}
LAUNCH = Launch(kernel="gemv", grid=(4, 1, 1), block=(128, 1, 1), cluster=(1, 1, 1), counters=COUNTERS)
TIMES = Timing.of([20_000.0, 22_000.0])


def a_run(backend: str, **changes) -> RunResult:
    gpu = backend == "cuda"
    run = RunResult("nvfp4_gemv", "benchmark", backend, "sm_90a", "a device", "public", "mine.py", None, {"torch": "2"})
    for index, case in enumerate(TASK.benchmarks):
        result = CaseResult(index, case, 1111, "right", max_abs=0.0, max_rel=0.0, calls_checked=3)
        result.useful_bytes = PROBLEM.useful_bytes(case)
        if gpu:
            result.gpu, result.peer, result.peer_name = TIMES, replace(TIMES, mean=63_000.0), "torch bf16 bmm"
        else:
            result.wall_s = 1.25
            result.add_launches([LAUNCH] * 3)
        run.cases.append(result)
    run.copy_bytes_s = 4.25e12 if gpu else None
    run.score_us = 21.0 if gpu else None
    vars(run).update(changes)
    return run


def printed(run: RunResult) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_run(run, TASK, console)
    return console.export_text()


def test_gpu_times_stand_beside_their_peers_and_not_beside_published_figures():
    text = printed(a_run("cuda"))
    first, second = text.split("published figures: nothing here was measured in this run")
    row = next(line for line in first.splitlines() if "21.00" in line)
    # mean, err, std, best, median, worst, useful MB, TB/s, % of copy, peer, ratio
    assert row.split()[4:] == [
        "2",
        "21.00",
        "1.00",
        "1.41",
        "20.00",
        "21.00",
        "22.00",
        "66.1",
        "3.15",
        "74.0",
        "63.00",
        "3.00x",
    ]
    assert "wall" not in text
    for figure in ("8.622", "18.4", "18.55", "(computed)", "(measured by others)"):
        assert figure in second and figure not in first
    assert "score (geometric mean of the means): 21.00 µs on a device" in text


def test_a_simulation_shows_counters_and_wall_time_and_no_gpu_time():
    text = printed(a_run("sim"))
    assert "simulation" in text and "wall s" in text and "1.25" in text
    assert "123,456" in text and "2.50" in text and "3 × gemv" in text  # sectors of a request, launches alike
    assert "No GPU ran" in text
    assert "mean µs" not in text and "score (" not in text


def test_a_score_of_some_cases_says_so_and_stands_under_no_published_mean():
    run = a_run("sim", clock="b200", modelled_score_us=7.5)
    every = printed(run)
    assert "score (geometric mean of modelled times): 7.50" in every and every.count("geometric mean ") == 2
    run.cases = run.cases[1:2]
    text = printed(run)
    assert "score (geometric mean of modelled times, of 1 of 3 cases): 7.50" in text
    published = text[text.index("published figures") :].split("between submission")[0]
    assert "17.275" in published and "8.622" not in published and "geometric mean" not in published


def test_failures_are_shown_with_their_details():
    run = a_run("sim")
    run.cases[1].verdict, run.cases[1].error, run.cases[1].details = "wrong", "[red]wrong[/red]", "Traceback: line 3"
    text = printed(run)
    assert "wrong" in text and "[red]wrong[/red]" in text and "Traceback: line 3" in text
    assert "2 of 3 cases passed" in text


def test_protocol_lines_of_a_benchmark():
    found = dict(line.split(": ", 1) for line in lines(a_run("cuda")))
    assert found["benchmark-count"] == "3"
    assert found["benchmark.1.spec"] == "m: 4096; k: 7168; l: 8; seed: 1111"
    numbers = {name: float(found[f"benchmark.0.{name}"]) for name in ("runs", "mean", "std", "err", "best", "worst")}
    expected = {"runs": 2, "mean": 21_000, "std": 1414.21, "err": 1000, "best": 20_000, "worst": 22_000}
    assert numbers == pytest.approx(expected, rel=1e-5)  # nanoseconds
    assert found["check"] == "pass" and "benchmark.0.status" not in found


def test_protocol_never_reports_a_wall_time_as_a_benchmark():
    found = dict(line.split(": ", 1) for line in lines(a_run("sim")))
    assert not [key for key in found if key.endswith(("mean", "best"))]
    assert found["benchmark.0.status"] == "pass"


def grouped_run() -> tuple[RunResult, Task]:
    """A measured run of the grouped problem, whose repeats made 15 calls."""
    problem = get_problem("nvfp4_group_gemm")
    task = load_task(problem.folder / "task.yml")
    run = RunResult("nvfp4_group_gemm", "benchmark", "cuda", "sm_100a", "a device", "public", "mine.py", None, {})
    for index, case in enumerate(task.benchmarks):
        result = CaseResult(index, case, 1111, "right", max_abs=0.0, max_rel=0.0, calls_checked=17, batch=15, gpu=TIMES)
        result.useful_bytes, result.peer, result.peer_name = problem.useful_bytes(case), TIMES, "loop of torch bf16 mm"
        run.cases.append(result)
    return run, task


def test_groups_are_shown_in_short_and_batches_are_named():
    run, task = grouped_run()
    console = Console(width=200, record=True, file=io.StringIO())
    print_run(run, task, console)
    text = console.export_text()
    assert "m=80,176,128,72,64,248,96,160 n=8×4096 k=8×7168" in text and "m=192,320 n=2×3072 k=2×4096" in text
    assert "GPU times, L2 cold and clean, means of 15 calls on 15 inputs" in text
    assert "loop of torch bf16 mm" in text
    assert "means of" not in printed(a_run("cuda"))  # one call a repeat


def test_protocol_lines_of_a_grouped_problem():
    found = dict(line.split(": ", 1) for line in lines(grouped_run()[0]))
    assert found["benchmark.2.spec"] == "m: [192, 320]; n: [3072, 3072]; k: [4096, 4096]; seed: 1111"
    assert float(found["benchmark.2.mean"]) == 21_000


def test_protocol_errors_are_one_line():
    run = a_run("cuda")
    run.cases[0].verdict, run.cases[0].error = "wrong", "wrong\n  at row 3"
    found = lines(run)
    assert "benchmark.0.error: wrong at row 3" in found and "check: fail" in found
    assert not [line for line in found if line.startswith("benchmark.0.mean")]


def test_json_is_whole():
    content = json.loads(json.dumps(a_run("cuda").to_dict()))
    assert content["cases"][0]["gpu"]["mean"] == 21_000
    assert content["cases"][0]["spec"].startswith("m: 7168")
    assert content["passed"] is True and content["cases"][0]["verdict"] == "right"


def test_percent_of_copy():
    case = a_run("cuda").cases[0]
    assert percent_of_copy(case, 4.25e12) == pytest.approx(100 * case.useful_bytes / 21e-6 / 4.25e12)


def test_no_cases_is_not_a_pass():
    assert not a_run("cuda", cases=[]).passed

"""The harness on a GPU: times, peers, and cheats that only a GPU makes possible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from submission_files import CHEATS, TINY

from cute_nvfp4.harness.errors import SubmissionError
from cute_nvfp4.harness.evaluation import Evaluation, Options
from cute_nvfp4.harness.flashinfer.evaluation import BenchEvaluation

FOLDERS = Path(__file__).parent / "folders"
KINDS = sorted(path.parent.name for path in FOLDERS.glob("*/task.yml"))
BENCH = Path(__file__).parents[1] / "data" / "flashinfer"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(name: str, mode: str, problem: str = "nvfp4_gemv"):
    submission = CHEATS / "submissions" / f"{name}.py"
    task = TINY if problem == "nvfp4_gemv" else CHEATS / f"tiny_{problem.removeprefix('nvfp4_')}.yml"
    return Evaluation(Options(problem, mode, submission, "cuda", task_file=task)).run()


@pytest.mark.parametrize("name", ["honest", "own_output"])
@pytest.mark.parametrize("mode", ["test", "benchmark", "leaderboard", "profile"])
def test_honest_submissions_pass(name, mode):
    result = run(name, mode)
    assert result.passed, [case.error for case in result.cases]
    timed = mode in ("benchmark", "leaderboard")
    for case in result.cases:
        assert case.wall_s is None  # a wall time would be taken for a GPU time
        assert (case.gpu is not None) is timed
        if timed:
            assert case.gpu.best > 1_000 and case.peer.mean > 1_000  # ns
    assert (result.score_us is not None) is timed


@pytest.mark.parametrize(
    "name,mode,message",
    [
        ("early_stream", "leaderboard", "elements are wrong"),
        ("early_stream", "benchmark", "elements are wrong"),
        ("late_stream", "leaderboard", "elements are wrong"),
        ("late_stream", "benchmark", "elements are wrong"),
        ("cache_by_pointer", "leaderboard", "call 2, fresh data"),
        ("cache_by_pointer", "benchmark", "call 2, fresh data"),
        ("stale_output", "leaderboard", "elements are wrong"),
        ("input_mutation", "test", "changed its inputs: sfa"),
        ("partial_output", "test", "may never have been written"),
    ],
)
def test_cheats_are_caught(name, mode, message):
    result = run(name, mode)
    assert not result.passed
    assert any(message in case.error for case in result.cases), [case.error for case in result.cases]


@pytest.mark.parametrize("problem", ["nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm"])
@pytest.mark.parametrize("mode", ["test", "benchmark", "leaderboard", "profile"])
def test_honest_products_pass(problem, mode):
    result = run("naive", mode, problem)
    assert result.passed, [case.error for case in result.cases]
    for case in result.cases:
        if mode in ("benchmark", "leaderboard"):
            assert case.batch == 4 and case.gpu.best > 1_000 and case.peer.mean > 1_000  # ns of one call
        if mode == "leaderboard":
            assert case.calls_checked >= 4 * case.gpu.runs + 2


# Putting work off is caught in leaderboard mode only, which makes batches of other lengths.
BATCH_CHEATS = [
    ("aliased_batch", "benchmark"),
    ("aliased_batch", "leaderboard"),
    ("stale_products", "benchmark"),
    ("stale_products", "leaderboard"),
    ("deferred_batch", "leaderboard"),
]


@pytest.mark.parametrize("problem", ["nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm"])
@pytest.mark.parametrize("name,mode", BATCH_CHEATS)
def test_cheats_with_batches_are_caught(problem, name, mode):
    result = run(name, mode, problem)
    assert not result.passed and result.score_us is None
    assert any("in the batch: " in case.error for case in result.cases), [case.error for case in result.cases]


def with_fault(text: str, fault: str) -> str:
    assert text.count('FAULT = ""\n') == 1
    return text.replace('FAULT = ""\n', f'FAULT = "{fault}"\n')


@pytest.mark.parametrize("mode", ["test", "benchmark", "leaderboard"])
@pytest.mark.parametrize("folder", KINDS)
def test_a_folder_is_judged_and_timed(folder, mode):
    task, submission = FOLDERS / folder / "task.yml", FOLDERS / folder / "submission.py"
    result = Evaluation(Options("", mode, submission, "cuda", task_file=task)).run()
    assert result.passed, [case.error for case in result.cases]
    for case in result.cases:
        assert (case.gpu is not None) is (mode != "test")
        if case.gpu is not None:
            assert case.gpu.best > 1_000  # ns
    assert (result.score_us is not None) is (mode != "test")


@pytest.mark.parametrize("folder", KINDS)
def test_a_wrong_kernel_fails_in_its_folder(folder, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(with_fault((FOLDERS / folder / "submission.py").read_text(), "wrong"))
    result = Evaluation(Options("", "test", mine, "cuda", task_file=FOLDERS / folder / "task.yml")).run()
    assert not result.passed and {case.verdict for case in result.cases} == {"wrong"}


@pytest.mark.parametrize("fault,status", [("", "PASSED"), ("wrong", "INCORRECT_NUMERICAL")])
def test_traces_of_flashinfer_bench_name_the_gpu(fault, status, tmp_path):
    content = json.loads((BENCH / "solution.json").read_text())
    content["sources"][1]["content"] = f'FAULT = "{fault}"\n'
    solution, traces = tmp_path / "solution.json", tmp_path / "traces.jsonl"
    solution.write_text(json.dumps(content))
    options = Options("", "benchmark", solution, "cuda")
    try:
        BenchEvaluation(options, BENCH / "definition.json", BENCH / "workloads.jsonl", traces).run()
    except SubmissionError:
        assert fault  # the first workload ends the run
    for line in traces.read_text().splitlines():
        told = json.loads(line)["evaluation"]
        assert told["status"] == status, told["log"]
        assert told["environment"]["hardware"] == torch.cuda.get_device_name().replace(" ", "_")
        if not fault:
            assert told["performance"]["latency_ms"] > 1e-3 and "measured" in told["environment"]["libs"]["times"]


@pytest.mark.parametrize("name", ["rewritten_tolerances", "answers_on_disk", "thread_after_the_clock", "lazy_outputs"])
def test_cheats_of_the_process_are_caught(name, tmp_path):
    shutil.copy(CHEATS / "submissions" / "honest.py", tmp_path)
    submission = Path(shutil.copy(CHEATS / "isolation" / f"{name}.py", tmp_path / "submission.py"))
    result = Evaluation(Options("nvfp4_gemv", "benchmark", submission, "cuda", task_file=TINY)).run()
    assert not result.passed and result.score_us is None

"""The harness on a GPU: times, peers, and cheats that only a GPU makes possible."""

from __future__ import annotations

import pytest
import torch
from submission_files import CHEATS, TINY

from cute_nvfp4.harness.evaluation import Evaluation, Options

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

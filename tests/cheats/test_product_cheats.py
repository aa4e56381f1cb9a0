"""Submissions to the GEMM-like problems that try to pass without doing the work, or do it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_nvfp4.harness.evaluation import Evaluation, Options

HERE = Path(__file__).parent
PROBLEMS = ("gemm", "dual_gemm", "group_gemm")


def run(problem: str, name: str, mode: str, data: str = "public"):
    submission, task = HERE / "submissions" / f"{name}.py", HERE / f"tiny_{problem}.yml"
    return Evaluation(Options(f"nvfp4_{problem}", mode, submission, "reference", data=data, task_file=task)).run()


def errors(result) -> list[str]:
    return [case.error for case in result.cases if not case.passed]


@pytest.mark.sweep
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("data", ["public", "full"])
def test_naive_submissions_pass_in_test_mode(problem, data):
    result = run(problem, "naive", "test", data)
    assert result.passed, errors(result)
    assert sorted(case.calls_checked for case in result.cases) == [1, 2]  # the smallest a second time


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_call_of_every_batch_is_checked_in_leaderboard_mode(problem):
    result = run(problem, "naive_own_outputs", "leaderboard", "full")
    assert result.passed, errors(result)
    (case,) = result.cases
    # two repeats of four calls; two or three calls before the first, and perhaps before the second
    assert case.batch == 4 and 8 + 2 <= case.calls_checked <= 8 + 6
    assert case.wall_s is not None and case.gpu is None


def test_the_last_repeat_is_checked_whole_in_benchmark_mode():
    result = run("group_gemm", "naive", "benchmark")
    assert result.passed, errors(result)
    assert result.cases[0].calls_checked == 1 + 4 + 1


# (problem, submission, mode, part of the message)
CHEATS = [
    ("gemm", "stale_products", "leaderboard", "elements are wrong"),
    ("group_gemm", "stale_products", "test", "call 2, fresh data"),
    ("gemm", "aliased_batch", "leaderboard", "in the batch: "),
    ("dual_gemm", "aliased_batch", "benchmark", "call 1 of 4 in the batch: "),
    ("group_gemm", "aliased_batch", "leaderboard", "in the batch: output "),
    ("gemm", "one_of_the_batch", "leaderboard", "may never have been written"),
    ("gemm", "one_of_the_batch", "benchmark", "in the batch: 720 of 720 elements are wrong"),
    ("gemm", "deferred_batch", "leaderboard", "may never have been written"),
    ("dual_gemm", "ungated", "test", "elements are wrong"),
    ("dual_gemm", "gate_on_the_other", "test", "elements are wrong"),
    ("group_gemm", "exchanged_groups", "test", "output 0: "),
    ("group_gemm", "first_group_for_all", "test", "output 1: "),
    ("group_gemm", "untouched_group", "test", "output 2: 48 of 48 elements are wrong"),
    ("group_gemm", "missing_group", "test", "returned 2 outputs, expected 3"),
    ("group_gemm", "repeated_group", "test", "output 1: "),
    ("group_gemm", "group_input_view", "test", "the output 1 shares memory with the input b1"),
    ("group_gemm", "group_input_mutation", "test", "changed its inputs: sfa1_permuted"),
]


@pytest.mark.parametrize("problem,name,mode,message", CHEATS, ids=[f"{p}-{n}-{m}" for p, n, m, _ in CHEATS])
def test_cheat_is_caught(problem, name, mode, message):
    result = run(problem, name, mode)
    assert not result.passed
    assert any(message in error for error in errors(result)), errors(result)


def test_one_call_at_a_time_does_not_see_a_shared_output():
    """Why whole batches are checked."""
    assert run("gemm", "aliased_batch", "test").passed

"""Submissions that try to pass without doing the work: each must fail, and for the right reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_nvfp4.harness.errors import SubmissionError
from cute_nvfp4.harness.evaluation import Evaluation, Options

HERE = Path(__file__).parent


def run(name: str, mode: str, data: str = "public", backend: str = "reference"):
    options = Options(
        "nvfp4_gemv",
        mode=mode,
        submission=HERE / "submissions" / f"{name}.py",
        backend=backend,
        data=data,
        task_file=HERE / "tiny.yml",
    )
    return Evaluation(options).run()


@pytest.mark.parametrize("name,data", [("honest", "public"), ("own_output", "full")])
def test_honest_submissions_pass(name, data):
    result = run(name, "leaderboard", data)
    assert result.passed, result.cases[0].error
    assert result.cases[0].calls_checked == 3  # the first call and each of the two repeats


# (submission, mode, part of the message)
CHEATS = [
    ("stale_output", "leaderboard", "elements are wrong"),
    ("stale_output", "test", "call 2, fresh data"),
    ("cache_by_pointer", "leaderboard", "call 2, fresh data"),
    ("cache_by_pointer", "benchmark", "call 2, fresh data"),
    ("cache_by_shape", "leaderboard", "call 2, fresh data"),
    ("input_mutation", "test", "changed its inputs: sfa"),
    ("input_view", "test", "shares memory with the input a"),
    ("zeros", "test", "elements are wrong"),
    ("untouched", "test", "may never have been written"),
    ("partial_output", "leaderboard", "may never have been written"),
    ("patched_worker", "benchmark", "replaced __main__._clock"),
    ("forged_answer", "test", "may never have been written"),
    ("forged_nonsense", "test", "sent an answer of the wrong form"),
    ("exit_zero", "test", "the process died while running custom_kernel (exit code 0)"),
    ("lazy_output", "test", "returned a Lazy, expected a torch.Tensor"),
    ("even_elements", "test-full", "elements are wrong"),
]


@pytest.mark.parametrize("name,mode,message", CHEATS, ids=[f"{name}-{mode}" for name, mode, _ in CHEATS])
def test_cheat_is_caught(name, mode, message):
    mode, _, data = mode.partition("-")
    result = run(name, mode, data or "public")
    assert not result.passed
    assert result.score_us is None
    errors = [case.error for case in result.cases if not case.passed]
    assert any(message in error for error in errors), errors


@pytest.mark.parametrize(
    "name,replaced",
    [
        ("patched_timer", "time.perf_counter_ns, Event.elapsed_time"),
        ("patched_checker", "torch.equal"),
        ("patched_tensor", "Tensor.copy_"),
    ],
)
def test_cheat_is_caught_when_it_is_imported(name, replaced):
    with pytest.raises(SubmissionError, match="the submission replaced") as caught:
        run(name, "leaderboard")
    assert replaced in str(caught.value)


def test_public_draws_alone_do_not_see_ignored_elements():
    """Why ``--data full`` exists: every high nibble of the public data is zero."""
    assert run("even_elements", "test").passed


def test_a_right_answer_without_a_launch_is_no_pass_in_the_simulated_gpu():
    (case,) = run("own_output", "leaderboard", "full", "sim").cases
    assert case.verdict == "launched-nothing" and "no kernel was launched" in case.error, case.error


@pytest.mark.parametrize(
    "name,mode,message",
    [
        ("stale_output", "test", "call 2, fresh data"),
        ("input_mutation", "test", "changed its inputs: sfa"),
        ("lazy_output", "test", "returned a Lazy, expected a torch.Tensor"),
    ],
)
def test_cheat_is_caught_in_the_simulated_gpu(name, mode, message):
    """Tensors are on "cuda" there; the other cheats do nothing that depends on where tensors are."""
    result = run(name, mode, backend="sim")
    errors = [case.error for case in result.cases if not case.passed]
    assert any(message in error for error in errors), errors

"""The isolated process: crashes, hangs, exceptions and bad outputs cost one case and say what happened."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from submission_files import HONEST, TINY

from cute_nvfp4.harness.checker import Check
from cute_nvfp4.harness.errors import HarnessError, SubmissionError
from cute_nvfp4.harness.evaluation import Evaluation, Options
from cute_nvfp4.harness.problem import get_problem, known_problems
from cute_nvfp4.harness.runner import CallFailed, Runner, worst
from cute_nvfp4.harness.schema import load_task
from cute_nvfp4.harness.submission import Submission, directives, read_submission

# Misbehaves on demand: the number of elements of c tells which case this is.
MISBEHAVING = """
import ctypes, os, sys, time
import torch
sys.path.insert(0, {honest!r})
from honest import gemv

def helper_that_fails():
    print("about to fail")
    raise ValueError("no such tile")

def custom_kernel(data):
    c = data[-1]
    rows = c.shape[0]
    if rows == 1:
        helper_that_fails()
    if rows == 2:
        os.abort()
    if rows == 3:
        time.sleep(1000)
    if rows == 4:
        return c.float()
    if rows == 5:
        return c[:, 0]
    if rows == 6:
        return None
    if rows == 7:
        return c[:1].expand_as(c)
    if rows == 8:
        raise SystemExit(0)
    if rows == 9:
        return [c, c]
    c.copy_(gemv(data))
    return c
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    path = tmp_path_factory.mktemp("submission") / "submission.py"
    path.write_text(MISBEHAVING.format(honest=str(HONEST.parent)))
    problem = get_problem("nvfp4_gemv")
    cases = [case(rows) for rows in range(1, 12)]
    tolerances = load_task(TINY).tolerances
    options = {"backend": "reference", "arch": None, "tolerances": tolerances, "timeout": 30.0}
    with Runner(problem, Submission.read(path), cases, **options) as started:
        yield started


def case(rows: int) -> dict:
    return {"m": rows, "k": 32, "l": 1, "seed": rows}


def test_exception_shows_the_lines_of_the_submission(runner):
    with pytest.raises(CallFailed, match="ValueError: no such tile") as caught:
        runner.call(case(1), 1)
    details = caught.value.details
    assert 'raise ValueError("no such tile")' in details and "helper_that_fails" in details
    assert "about to fail" in details  # what it printed
    assert "worker.py" not in details


@pytest.mark.parametrize(
    "rows,message",
    [
        (4, r"output is float32 \[4, 1, 1\] on cpu, expected float16 \[4, 1, 1\] on cpu"),
        (5, r"output is float16 \[5, 1\] on cpu"),
        (6, "returned a NoneType, expected a torch.Tensor"),
        (7, "broadcast view"),
        (8, "SystemExit: 0"),
        (9, "returned 2 outputs, expected 1"),
    ],
)
def test_what_is_not_an_output_is_refused(runner, rows, message):
    with pytest.raises(CallFailed, match=message):
        runner.call(case(rows), 1)


def test_a_crash_costs_one_case(runner):
    with pytest.raises(CallFailed, match=r"the process died while running custom_kernel \(signal SIGABRT\)"):
        runner.call(case(2), 1)
    assert runner.call(case(10), 1).check.passed


def test_a_hang_is_ended_after_the_timeout(runner, monkeypatch):
    monkeypatch.setattr(runner, "timeout", 1.0)
    with pytest.raises(CallFailed, match="timed out after 1 s while running custom_kernel"):
        runner.call(case(3), 1)
    monkeypatch.undo()
    assert runner.call(case(11), 1).check.passed


LISTS = """
import sys
sys.path.insert(0, {honest!r})
from products import answers

def custom_kernel(data):
    out = answers(data)
    rows = out[0].shape[0]
    if rows == 1:
        return out[0]
    if rows == 2:
        return [out[0], None]
    if rows == 3:
        return [out[0], out[1].float()]
    if rows == 4:
        return [out[0], out[1][:1].expand_as(out[1])]
    if rows == 5:
        return [(out[0],), out[1]]
    if rows == 6:
        return dict(enumerate(out))
    return out
"""


@pytest.fixture(scope="module")
def list_runner(tmp_path_factory):
    path = tmp_path_factory.mktemp("lists") / "submission.py"
    path.write_text(LISTS.format(honest=str(HONEST.parent)))
    cases = [list_case(rows) for rows in range(1, 8)]
    options = {"backend": "reference", "arch": None, "batch": 3, "timeout": 30.0}
    with Runner(
        get_problem("nvfp4_group_gemm"), Submission.read(path), cases, tolerances=load_task(TINY).tolerances, **options
    ) as started:
        yield started


def list_case(rows: int) -> dict:
    return {"m": [rows, 9], "n": [4, 3], "k": [32, 16], "seed": rows}


@pytest.mark.parametrize(
    "rows,message",
    [
        (1, "returned 1 outputs, expected 2"),
        (2, "returned a NoneType as output 1, expected a torch.Tensor"),
        (3, r"output 1 is float32 \[9, 3, 1\] on cpu, expected float16 \[9, 3, 1\] on cpu"),
        (4, "the output 1 is a broadcast view"),
        (5, "returned a tuple as output 0, expected a torch.Tensor"),
        (6, "returned 1 outputs, expected 2"),
    ],
)
def test_what_is_not_a_list_of_outputs_is_refused(list_runner, rows, message):
    with pytest.raises(CallFailed, match=message):
        list_runner.call(list_case(rows), 1)
    with pytest.raises(CallFailed, match="call 1 of 2 in the batch: .*" + message):
        list_runner.call(list_case(rows), 1, calls=2)


def test_a_batch_is_checked_call_by_call_and_timed_as_one(list_runner):
    outcome = list_runner.call(list_case(7), 1, calls=3)
    assert outcome.check.passed and outcome.calls == 3


def test_tensors_of_the_submission_are_poisoned_before_the_next_request():
    """Two cases with the same contents (nvfp4_gemv has such) must both be computed."""
    path = HONEST.parent / "kept_by_content.py"
    options = {"backend": "reference", "arch": None, "tolerances": load_task(TINY).tolerances}
    with Runner(get_problem("nvfp4_group_gemm"), Submission.read(path), [list_case(7)], **options) as started:
        assert started.call(list_case(7), 1).check.passed
        again = started.call(list_case(7), 1).check
    assert not again.passed and "may never have been written" in again.message


def test_the_inputs_of_a_batch_differ_and_their_places_are_shuffled(list_runner):
    staged = [list_runner._stage(list_case(7), seed, 3) for seed in range(8)]
    assert len({tuple(inputs) for inputs in staged}) > 1  # orders
    drawn = [inputs["a0"].numpy().tobytes() for calls in staged for inputs in calls.values()]
    assert len(set(drawn)) == 24


def _evaluate(path: Path, **options):
    return Evaluation(Options("nvfp4_gemv", submission=path, backend="reference", task_file=TINY, **options))


@pytest.mark.parametrize("turn", [1, -1])
def test_a_nan_error_is_the_largest_wherever_it_stands(turn):
    finite, undefined = Check(True, "", 1.0, 0.5), Check(False, "output 1 is NaN", math.nan, math.nan)
    verdict = worst([finite, undefined][::turn])
    assert not verdict.passed and verdict.message == "output 1 is NaN"
    assert math.isnan(verdict.max_abs) and math.isnan(verdict.max_rel)
    assert worst([finite, Check(True, "", 2.0, 0.25)]) == Check(True, "", 2.0, 0.5)


def test_a_submission_without_custom_kernel(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("def kernel(data):\n    return data[-1]\n")
    with pytest.raises(SubmissionError, match=r"empty.py: empty.py defines no function custom_kernel\(data\)"):
        _evaluate(path).run()


def test_a_submission_that_cannot_be_imported(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import torch\nfrom task import input_t, output_t\nimport a_module_that_is_not_there\n")
    with pytest.raises(SubmissionError, match="No module named 'a_module_that_is_not_there'") as caught:
        _evaluate(path).run()
    assert "line 3" in str(caught.value)  # so `task` was there


def test_a_syntax_error_shows_the_line(tmp_path):
    path = tmp_path / "typo.py"
    path.write_text("import torch\ndef custom_kernel(data)\n    return 1\n")
    with pytest.raises(SubmissionError, match=r"syntax error in .*typo.py, line 2") as caught:
        read_submission(path)
    assert "def custom_kernel(data)\n" in str(caught.value) and str(caught.value).endswith("^")


def test_a_missing_file_and_a_binary_one(tmp_path):
    with pytest.raises(HarnessError, match="does not exist; it is a Python file"):
        read_submission(tmp_path / "none.py")
    path = tmp_path / "binary.py"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SubmissionError, match="cannot be read as Python source"):
        read_submission(path)


def test_directives():
    source = "#!POPCORN leaderboard nvfp4_gemv\n#!POPCORN gpu B200\n\n# words\nimport torch\n#!POPCORN gpu H100\n"
    assert directives(source) == {"leaderboard": "nvfp4_gemv", "gpu": "B200"}


def test_a_submission_to_another_problem_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("#!POPCORN leaderboard nvfp4_gemm\n")
    with pytest.raises(HarnessError, match="is a submission to 'nvfp4_gemm'"):
        _evaluate(path)


@pytest.mark.parametrize("name", known_problems())
def test_our_own_submission_is_found_and_names_its_problem(name):
    evaluation = Evaluation(Options(name, backend="sim"))
    assert directives(evaluation.submission.source) == {"leaderboard": name, "gpu": "B200"}
    assert len(evaluation.numbered) == 10

"""Submissions that import Triton, on a machine where Triton is installed and finds no driver of a GPU."""

from __future__ import annotations

from pathlib import Path

from cute_nvfp4.harness.evaluation import Evaluation, Options

SUBMISSION = Path(__file__).parent / "own_kernels" / "gemv_triton.py"


def judged(path: Path):
    """The result of the smallest correctness shape in the simulated GPU."""
    (case,) = Evaluation(Options(problem="nvfp4_gemv", backend="sim", case=0, submission=path)).run().cases
    return case


def test_importing_triton_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text(SUBMISSION.read_text().replace("LAUNCH = True", "LAUNCH = False"))
    case = judged(path)
    assert case.verdict == "launched-nothing" and case.max_abs == 0.0, case.error


def test_a_launch_by_triton_is_refused_with_what_to_do() -> None:
    case = judged(SUBMISSION)
    assert not case.passed
    assert "has no driver for Triton" in case.error and "--backend cuda" in case.error
    assert "zero[(triton.cdiv(c.numel(), 128),)]" in case.details and "jit.py" not in case.details

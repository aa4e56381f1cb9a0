"""Submissions with kernels of their own, judged without a GPU: in the simulated GPU of ``--backend sim``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from cute_nvfp4.harness.evaluation import Evaluation, Options

KERNELS = Path(__file__).parent / "own_kernels"


def judge(path: Path, **options):
    """The result of the smallest correctness shape."""
    options = {"problem": "nvfp4_gemv", "backend": "sim", "case": 0, "submission": path} | options
    run = Evaluation(Options(**options)).run()
    (case,) = run.cases
    return case


def with_fault(folder: Path, fault: str, hidden: bool = False) -> Path:
    """``gemv_shared.py`` with one thing wrong in it."""
    text = (KERNELS / "gemv_shared.py").read_text()
    assert 'FAULT = ""' in text
    path = folder / "submission.py"
    path.write_text(text.replace('FAULT = ""', f'FAULT = "{fault}"').replace("HIDE = False", f"HIDE = {hidden}"))
    return path


def test_raw_pointers_and_a_compiled_function_for_each_shape():
    case = judge(KERNELS / "gemv_pointers.py", data="full")
    assert case.passed, case.error
    (launch,) = case.launches
    assert (launch.grid, launch.block) == ((32, 1, 1), (128, 1, 1))
    # a row's 128 bytes of codes, 16 of scales; the vector is the same for all rows, the result is fp16
    assert launch.counters["distinct_load_bytes"] == 128 * (128 + 16) + 128 + 32
    assert launch.counters["distinct_store_bytes"] == 256 and launch.counters["store_requests"] == 128
    assert case.counters == {"launches": 1} | launch.counters


@pytest.mark.slow
def test_dlpack_under_schedules_that_look_for_trouble(tmp_path):
    trace = tmp_path / "trace.json"
    case = judge(KERNELS / "gemv_shared.py", data="full", arch="sm_90a", schedules=2, trace=trace)
    assert case.passed, case.error
    assert case.calls_checked == 3  # two schedules, and the smallest case a second time
    assert any("st.shared" in str(event) for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.parametrize(
    "fault,message",
    [
        ("wrong", "128 of 128 elements are wrong"),
        ("out of bounds", r"hazard: OutOfBounds: .* past the end of tensor 'a' \(16384 bytes\)"),
        ("deadlock", "hazard: Deadlock: .* wait at barrier 1"),
        ("writes an input", "hazard: ReadOnlyWrite: .* tensor 'a' is read-only"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_said(fault, message, tmp_path):
    case = judge(with_fault(tmp_path, fault), data="full")
    assert not case.passed
    error = " ".join(case.error.split())
    assert re.search(message, error), error
    if fault != "wrong":
        assert "submission.py:" in error and "in launch 0 of the call" in error
        assert case.details.startswith("launched at") and "_compiled(*arguments, stream)" in case.details
        assert "simulation.py" not in case.details


@pytest.mark.slow
def test_several_launches_on_streams_with_torch_between_them():
    case = judge(KERNELS / "gemv_split.py", data="full")
    assert case.passed, case.error
    assert [launch.grid for launch in case.launches] == [(128, 1, 1)] * 3
    assert case.launches[0].counters["instructions"] == case.launches[1].counters["instructions"]
    assert case.counters["launches"] == 3 and case.counters["distinct_store_bytes"] == 2 * 512 + 256


@pytest.mark.parametrize(
    "wait,where",
    [
        (
            "main.wait_event(done)",
            r"is written by launch 1 .* on stream .* and read by launch 2 .* on the default stream",
        ),
        (
            "stream.wait_event(ready)",
            r"is written by torch's \w+ on the default stream.* and read by launch 1 .* on stream",
        ),
    ],
)
def test_a_wait_between_streams_that_is_missing_fails_the_case(wait, where, tmp_path):
    text = (KERNELS / "gemv_split.py").read_text()
    path = tmp_path / "submission.py"
    assert text.count(wait) == 1
    path.write_text(text.replace(wait, "pass"))
    case = judge(path)
    error = " ".join(case.error.split())
    assert error.startswith("hazard: Race: byte ") and re.search(where, error), error
    assert judge(path, allow=("stream-order",)).passed


@pytest.mark.slow
def test_an_answer_left_on_another_stream_fails_the_case(tmp_path):
    path = tmp_path / "submission.py"
    path.write_text(
        "import torch\n\nfrom cute_nvfp4.harness.problems.nvfp4_gemv.submission import custom_kernel as right\n\n\n"
        "def custom_kernel(data):\n    side = torch.cuda.Stream()\n    side.wait_stream(torch.cuda.current_stream())\n"
        "    with torch.cuda.stream(side):\n        return right(data)\n"
    )
    case = judge(path)
    assert not case.passed
    assert "on stream" in case.error and "and read by torch's clone on the default stream" in case.error


def test_tensor_cores_are_counted(tmp_path):
    """All ten shapes of the problem pass; they take some 35 s together. The kernel's files lie beside it."""
    shutil.copytree(KERNELS.parents[1] / "simulator" / "blackwell", tmp_path / "blackwell")
    shutil.copy(KERNELS / "gemm_tcgen05.py", tmp_path)
    case = judge(tmp_path / "gemm_tcgen05.py", problem="nvfp4_gemm", data="full")
    assert case.passed, case.error
    (launch,) = case.launches
    assert launch.counters["mma_multiply_adds"] == 128 * 256 * 256
    # both tiles load A's 128 rows, 128 columns of B, and the scales of them
    assert launch.counters["async_load_bytes"] == 2 * 2 * 128 * (128 + 16)


def test_what_torch_cannot_do_here_is_named(tmp_path):
    path = tmp_path / "submission.py"
    path.write_text(
        "import torch\n\n\ndef custom_kernel(data):\n    torch.cuda.get_sync_debug_mode()\n    return data[-1]\n"
    )
    case = judge(path)
    assert not case.passed and "get_sync_debug_mode is not modelled" in case.error and "simulated session" in case.error


def test_a_class_of_hazards_that_is_allowed_is_a_warning(tmp_path):
    path = with_fault(tmp_path, "race")
    case = judge(path, data="full", allow=("race", "race-in-warp"))
    assert case.passed, case.error
    (launch,) = case.launches
    assert [text.rpartition(" ")[2] for text in launch.warnings] == ["[race-in-warp]", "[race]"]
    case = judge(path, data="full", allow=("race-in-warp",))
    assert not case.passed and case.error.startswith("hazard: Race: ") and "[race]" in case.error


def test_going_on_past_hazards_lists_them_and_fails_the_case(tmp_path):
    case = judge(with_fault(tmp_path, "race"), data="full", collect=True)
    assert not case.passed
    assert re.findall(r"\[race[a-z-]*\]", case.error) == ["[race-in-warp]", "[race]"], case.error
    assert "in launch 0 of the call" in case.error


def test_a_hazard_that_the_submission_hides_is_found(tmp_path):
    case = judge(with_fault(tmp_path, "race", hidden=True))
    assert not case.passed
    assert "hazard: Race" in case.error and "of the shared memory" in case.error and "nothing orders" in case.error

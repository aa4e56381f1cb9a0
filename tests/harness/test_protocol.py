"""The public protocol from a parent's side, heard through POPCORN_FD; ``test_eval_command.py`` has mode test."""

from __future__ import annotations

import base64
import os
import threading
from pathlib import Path

import pytest
from submission_files import KERNEL

from cute_nvfp4.harness import evaluator

CASES = "m: 5; k: 32; l: 2; seed: 11\nm: 7; k: 64; l: 1; seed: 3\n"
SUBMISSION = """#!POPCORN leaderboard nvfp4_gemv
#!POPCORN gpu B200
# the file of a submission may import others beside it, and read them
from pathlib import Path

from arithmetic import custom_kernel as gemv
from task import input_t, output_t

assert Path("constants.txt").read_text() == Path(__file__).with_name("constants.txt").read_text() == "2\\n"


def custom_kernel(data: input_t) -> output_t:
    return gemv(data)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A submission of three files, and a list of cases."""
    path = tmp_path_factory.mktemp("submission")
    (path / "submission.py").write_text(SUBMISSION)
    (path / "arithmetic.py").write_text(KERNEL.read_text())
    (path / "constants.txt").write_text("2\n")
    (path / "cases.txt").write_text(CASES)
    return path


def heard(mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, str]]:
    """The exit code, and the lines by their keys, each of which may come once only."""
    monkeypatch.chdir(folder)
    read, write = os.pipe()
    monkeypatch.setenv("POPCORN_FD", str(write))
    told: list[str] = []

    def listen() -> None:
        with os.fdopen(read) as lines:
            told.extend(lines)

    parent = threading.Thread(target=listen)  # reads while the evaluator runs, as a parent does
    parent.start()
    try:
        code = evaluator.main([mode, "cases.txt"])
    finally:
        os.close(write)
        parent.join(30)
    found = dict(line.rstrip("\n").split(": ", 1) for line in told)
    assert len(found) == len(told)
    return code, found


def expected(kind: str) -> dict[str, str]:
    lines = {f"{kind}-count": "2"}
    for index, case in enumerate(CASES.splitlines()):
        lines |= {f"{kind}.{index}.spec": case, f"{kind}.{index}.status": "pass"}
    return lines | {"check": "pass"}


def test_timed_modes_tell_no_times_without_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert heard("leaderboard", folder, monkeypatch) == (0, expected("benchmark"))


def test_mode_profile_hands_over_the_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = heard("profile", folder, monkeypatch)
    reports = [base64.b64decode(found.pop(f"test.{index}.report")).decode() for index in range(2)]
    assert (code, found) == (0, expected("test"))
    assert all("aten::" in report for report in reports)


def test_a_wrong_answer_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in folder.glob("*.*"):
        (tmp_path / file.name).write_text(file.read_text().replace("return gemv(data)", "return data[-1].zero_()"))
    code, found = heard("benchmark", tmp_path, monkeypatch)
    assert code == 112 and found["check"] == "fail" and found["benchmark.1.status"] == "fail"
    assert "of 7 elements are wrong" in found["benchmark.1.error"]

"""Problem folders in the public format, judged without edits: what is right, wrong, racy, or cannot be run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cute_nvfp4.harness import sandbox
from cute_nvfp4.harness.errors import EXIT_BAD_TEST_FILE, HarnessError, TaskFileError
from cute_nvfp4.harness.evaluation import Evaluation, Options
from cute_nvfp4.harness.folder.task import is_folder, read_folder
from cute_nvfp4.harness.results import RunResult

FOLDERS = Path(__file__).parent / "folders"
KINDS = sorted(path.parent.name for path in FOLDERS.glob("*/task.yml"))
DESERVED = {"": "right", "wrong": "wrong", "race": "hazard"}


def judged(folder: str | Path, submission: Path, **options) -> RunResult:
    options = {"problem": "", "backend": "sim", "case": 0, "submission": submission} | options
    return Evaluation(Options(task_file=FOLDERS / folder / "task.yml", **options)).run()


def with_fault(folder: str, fault: str, to: Path) -> Path:
    """The folder's submission with a fault, in a folder where nothing else is."""
    text = (FOLDERS / folder / "submission.py").read_text()
    assert text.count('\nFAULT = ""\n') == 1
    path = to / "mine.py"
    path.write_text(text.replace('\nFAULT = ""\n', f'\nFAULT = "{fault}"\n'))
    return path


@pytest.mark.sweep
@pytest.mark.parametrize("fault", DESERVED)
@pytest.mark.parametrize("folder", KINDS)
def test_a_submission_gets_what_it_deserves(folder, fault, tmp_path):
    run = judged(folder, with_fault(folder, fault, tmp_path))
    (case,) = run.cases
    assert case.verdict == DESERVED[fault], case.error
    assert run.problem == folder
    if not fault:
        assert case.launches[0].counters["load_bytes"] and case.calls_checked == 2
    if fault == "race":
        assert "Race" in case.error and "mine.py:" in case.error


def folder_with(to: Path, reference: str, task: str = "", files: str = "") -> Path:
    """A folder of its own with this ``reference.py``; returns its name for ``judged``, which takes paths, too."""
    to.mkdir(exist_ok=True)
    (to / "reference.py").write_text(reference)
    listed = "[{name: submission.py, source: '@SUBMISSION@'}, {name: reference.py, source: reference.py}" + files + "]"
    (to / "task.yml").write_text(f"files: {listed}\ntests: [{{size: 40, seed: 3}}]\n{task}\n")
    return to


TORCH_ONLY = "def custom_kernel(data):\n    x, y, alpha, out = data\n    return alpha * x + y\n"


def test_torch_alone_is_right_on_the_cpu_and_launches_nothing_in_the_simulated_gpu(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TORCH_ONLY)
    run = judged("scale", path, backend="reference", case=None)
    assert run.passed and [case.case["size"] for case in run.cases] == [96, 1000]
    (case,) = judged("scale", path).cases
    assert case.verdict == "launched-nothing" and "no kernel was launched" in case.nothing


def test_torch_beside_a_kernel_is_right_and_has_no_modelled_score(tmp_path):
    path = with_fault("scale", "", tmp_path)
    path.write_text(path.read_text().replace("    return out\n", "    return out + 0\n"))
    run = judged("scale", path, mode="benchmark")
    assert run.passed and run.clock and run.modelled_score_us is None
    assert "of the outputs are not what launches wrote" in run.cases[0].unscored


ODD = """
import torch
from collections import namedtuple

Pair = namedtuple("Pair", "left right")

def generate_input(size, seed):
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(size, 6, device="cuda", generator=g)
    y = x.to(torch.bfloat16)
    kinds = [x.to(kind) for kind in (torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)]
    return {
        "strided": x.t(), "cut": x[:, 1:3], "wide": x[:1].expand(4, 6), "scalar": x.sum(), "none": x[:0],
        "kinds": kinds, "layer": torch.nn.Linear(3, 2), "pair": Pair(y, y), 5: (True, None, 1.5, "text"),
        "host": torch.arange(size), "same": y,
    }

def check_implementation(data, output):
    for name in ("strided", "cut", "wide", "scalar", "none", "host", "same"):
        if not torch.equal(output[name], data[name]):
            return False, name
    if output["host"].device.type != "cpu" or output["strides"] != list(data["strided"].stride()):
        return False, "where it lies"
    alike = [a.dtype == b.dtype and torch.equal(a.float(), b.float()) for a, b in zip(output["kinds"], data["kinds"])]
    same = output["weight"].equal(data["layer"].weight) and output[5] == data[5] and output["one"]
    return all(alike) and same, "kinds"
"""
ECHO = """
def custom_kernel(data):
    layer, pair = data.pop("layer"), data.pop("pair")
    del data["kinds"][3]
    data["strides"] = list(data["strided"].stride())
    return data | {"weight": layer.weight.detach(), "one": pair.left is pair.right is data["same"], 5: data[5]}
"""


def test_data_and_outputs_of_any_structure_arrive(tmp_path):
    folder = folder_with(tmp_path / "odd", ODD)
    path = tmp_path / "mine.py"
    path.write_text(ECHO)
    (case,) = judged(folder, path).cases
    assert case.verdict == "launched-nothing", case.error  # the values are right
    path.write_text(ECHO.replace("    return data |", "    data['same'][-1, -1] += 1\n    return data |"))
    (case,) = judged(folder, path).cases
    assert (case.verdict, case.error) == ("wrong", "same")


@pytest.mark.parametrize(
    "returned,message",
    [
        ("{1, 2}", "returned a set, expected tensors"),
        ("data[0].to_sparse()", "expected a plain torch.Tensor"),
        ("None", "the folder's check does not take what custom_kernel returned"),
        ("[data[0]] * 2 + [lambda: 0]", "returned a function"),
    ],
)
def test_what_cannot_be_an_answer_is_refused(returned, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"def custom_kernel(data):\n    return {returned}\n")
    (case,) = judged("scale", path, backend="reference").cases
    assert case.verdict == "refused" and message in case.error


def test_the_folder_judges_by_data_that_the_submission_cannot_change(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def custom_kernel(data):\n    x, y, _, _ = data\n    y.zero_()\n    return x.zero_()\n")
    (case,) = judged("scale", path, backend="reference").cases
    assert case.verdict == "wrong" and "mismatched elements: 96" in case.error
    path.write_text("def custom_kernel(data):\n    x, y, alpha, _ = data\n    return y.add_(x.mul_(alpha))\n")
    assert judged("scale", path, backend="reference").passed  # a clone is there to be changed


FAITHLESS = """
import os
from pathlib import Path
import torch

def generate_input(size, seed):
    return torch.zeros(size, device="cuda")

def check_implementation(data, output):
    reached = []
    for place in PLACES:
        try:
            open(place, "r+b").close()
            reached.append(place)
        except OSError:
            pass
    return not reached, f"reached {reached}"
"""


def test_a_folders_code_reaches_neither_judge_nor_files(tmp_path):
    places = [str(tmp_path / "precious.txt"), f"/proc/{os.getpid()}/mem"]
    Path(places[0]).write_text("mine")
    folder = folder_with(tmp_path / "faithless", FAITHLESS.replace("PLACES", repr(places)))
    path = tmp_path / "mine.py"
    path.write_text("def custom_kernel(data):\n    return data\n")
    run = judged(folder, path, backend="reference")
    if sandbox.OUT_OF_REACH not in run.isolation:
        pytest.skip(f"this system has no layer that keeps processes apart: {run.isolation}")
    assert run.passed, run.cases[0].error


PRYING = """
import os

def custom_kernel(data):
    x, y, alpha, out = data
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (os.getpid(), os.getppid()):
            try:
                os.close(os.open(f"/proc/{name}/mem", os.O_RDWR))
                found.append(name)
            except OSError:
                pass
    assert not found, found
    assert not any("seed" in str(value) for value in data)
    return alpha * x + y
"""


def test_a_submission_reaches_no_other_process(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PRYING)
    run = judged("scale", path, backend="reference")
    if not any("landlock" in layer for layer in run.isolation):
        pytest.skip("needs Landlock: other processes of this user are open to all of them")
    assert run.passed, run.cases[0].error


DRAW, SAME = "def generate_input(size, seed):\n", "def ref_kernel(data):\n    return data\n"


@pytest.mark.parametrize(
    "reference,message",
    [
        (DRAW + "    return size // 0\n" + SAME, "size // 0"),
        ("import nowhere\n", "No module named 'nowhere'"),
        (SAME, "defines no function generate_input"),
        (DRAW + "    return size\n", "neither check_implementation"),
        ("def generate_input(rows):\n    return rows\n" + SAME, "unexpected keyword argument"),
        (DRAW + "    __import__('os')._exit(3)\n" + SAME, "has ended"),
    ],
)
def test_a_fault_of_the_folder_is_not_the_submissions(reference, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def custom_kernel(data):\n    return data\n")
    with pytest.raises(HarnessError, match=message) as caught:
        judged(folder_with(tmp_path / "broken", reference), path, backend="reference")
    assert caught.value.exit_code != 112


@pytest.mark.parametrize(
    "task,files,error,message",
    [
        ("lang: cu", "", HarnessError, "CUDA C.. .lang: cu.: nvcc .* Write the kernel in the CuTe DSL"),
        ("lang: mojo", "", HarnessError, "lang: mojo; expected py"),
        ("multi_gpu: true", "", HarnessError, "several GPUs"),
        ("", ", {name: kernel.cuh, source: kernel.cuh}", TaskFileError, "names kernel.cuh, which does not exist"),
        ("", ", {name: ../outside.py, source: reference.py}", TaskFileError, "expected one inside the folder"),
        ("ranking_by: luck", "", TaskFileError, "ranking_by"),
    ],
)
def test_a_folder_that_cannot_be_judged_is_refused_by_name(task, files, error, message, tmp_path):
    folder = folder_with(tmp_path / "other", "", task, files)
    assert is_folder(folder / "task.yml")
    with pytest.raises(error, match=message):
        read_folder(folder / "task.yml")


def test_a_task_file_of_ours_is_none_of_a_folder(tmp_path):
    ours = Path(__file__).parents[1] / "cheats" / "tiny.yml"
    assert not is_folder(ours)
    with pytest.raises(TaskFileError, match="does not exist") as caught:
        is_folder(tmp_path / "none.yml")
    assert caught.value.exit_code == EXIT_BAD_TEST_FILE


def test_scores_are_the_folders():
    from cute_nvfp4.harness.timing import score

    assert [score([1.0, 4.0, 9.0], kind) for kind in ("last", "mean")] == [9.0, 14 / 3]
    assert score([1.0, 4.0, 16.0], "geom") == pytest.approx(4.0)
    assert read_folder(FOLDERS / "rowsum" / "task.yml").task.ranking_by == "mean"


@pytest.mark.slow
@pytest.mark.parametrize("folder", KINDS)
def test_every_case_passes_in_every_mode(folder):
    path = FOLDERS / folder / "submission.py"
    for mode in ("test", "benchmark", "leaderboard", "profile"):
        run = judged(folder, path, mode=mode, case=None)
        assert run.passed, (mode, [case.error for case in run.cases])
    assert judged(folder, path, case=None, schedules=4).passed

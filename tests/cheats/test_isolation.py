"""Cheats against the judge itself: its memory, process, clock, files, and what it is told. None passes or scores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cute_nvfp4.harness import sandbox
from cute_nvfp4.harness.comparison import compare
from cute_nvfp4.harness.evaluation import Evaluation, Options
from cute_nvfp4.sim.clock.tools import found

HERE = Path(__file__).parent
KERNELS = HERE.parent / "harness" / "own_kernels"
CLOCKED = pytest.mark.skipif(not found("ptxas") or not found("nvdisasm"), reason="no ptxas")


def folder_of(folder: Path, name: str) -> Path:
    """The cheat as a submission, with the files beside it that it pretends with."""
    shared = (KERNELS / "gemv_shared.py").read_text()
    files = {"honest.py": (HERE / "submissions" / "honest.py").read_text(), "gemv_shared.py": shared}
    files["half_right.py"] = shared.replace("total += scale *", "total += 0.5 * scale *")
    files["racing.py"] = shared.replace('FAULT = ""', 'FAULT = "race"')
    files["gemv_copy.py"] = (HERE / "isolation" / "gemv_copy.py").read_text()
    for file, text in files.items():
        (folder / file).write_text(text)
    path = folder / "submission.py"
    path.write_text((HERE / "isolation" / f"{name}.py").read_text())
    return path


def judge(path: Path, mode: str, backend: str, **options):
    task = HERE / "tiny.yml"
    return Evaluation(Options("nvfp4_gemv", mode, path, backend, task_file=task, **options)).run()


CHEATS = [
    # submission, backend, mode, verdict, part of the message
    ("thread_after_the_clock", "reference", "test", "refused", "left 1 thread running"),
    ("thread_after_the_clock", "sim", "test", "refused", "left 1 thread running"),
    ("lazy_outputs", "reference", "test", "refused", "the submission replaced Worker._outputs"),
    ("lazy_outputs", "sim", "test", "refused", "the submission replaced Worker._outputs"),
    ("rewritten_tolerances", "reference", "test", "refused", "Permission"),
    ("quiet_findings", "sim", "test", "hazard", "hazard: Race"),
    ("host_torch", "sim", "test", "launched-nothing", "no kernel was launched"),
    ("empty_kernel", "sim", "test", "launched-nothing", "the launches read 0 bytes"),
    ("unreached_device", "sim", "test", "launched-nothing", "no kernel was launched"),
    ("answers_on_disk", "reference", "benchmark", "wrong", "may never have been written"),
    ("answers_on_disk", "reference", "leaderboard", "wrong", "may never have been written"),
    ("outliving_forger", "reference", "test", "refused", "left 1 process running"),
    ("traces_the_judge", "reference", "test", "refused", "cannot trace the judge"),
    ("reads_the_judge", "reference", "test", "refused", "cannot read the judge"),
    ("stops_the_judge", "reference", "test", "refused", "PermissionError"),
    ("child_process", "reference", "test", "refused", "left 1 process running"),
    ("daemon", "reference", "test", "refused", "left 1 process running"),
    ("knows_the_seed", "reference", "test", "refused", "no seed here"),
    ("writes_the_judges_code", "reference", "test", "refused", "PermissionError"),
    ("writes_beside_itself", "reference", "test", "refused", "wrote files: notes.txt"),
    ("forged_screen", "reference", "test", "refused", "2 of 2 cases passed"),
    ("endless_answer", "reference", "test", "refused", "unreadable answer"),
    ("forged_time", "reference", "test", "refused", "answer of the wrong form"),
    ("forged_description", "reference", "test", "refused", "shares memory with the input b"),
    ("hides_from_eof", "reference", "test", "refused", ""),
    ("truncates_the_arena", "reference", "test", "refused", "PermissionError"),
    ("late_launch", "sim", "test", "refused", ""),
    ("commands_the_device", "sim", "test", "refused", "no operation"),
    ("other_calls_inputs", "reference", "leaderboard", "refused", "changed its inputs"),
    ("forged_device_answer", "sim", "test", "launched-nothing", "no kernel was launched"),
    ("lazy_list", "reference", "test", "refused", "returned 0 outputs"),
    ("lazy_class", "reference", "test", "refused", "returned a Lazy"),
    ("mode_of_torch", "reference", "test", "refused", "left a mode of torch"),
    ("operator_of_torch", "reference", "test", "refused", "left an operator of torch"),
    ("profiles_the_worker", "reference", "test", "refused", "left a function that traces or profiles"),
    ("signal_after_the_clock", "reference", "test", "refused", "left a signal handler"),
    ("garbage_computes", "reference", "test", "refused", "left a function that the garbage collector calls"),
    ("restores_the_worker", "reference", "test", "refused", "replaced Worker._keep"),
    ("changes_the_workers_code", "reference", "test", "refused", "replaced _is_broadcast.__code__"),
]


@pytest.mark.parametrize("name,backend,mode,verdict,message", CHEATS, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CHEATS])
def test_cheat_is_caught(name, backend, mode, verdict, message, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE", str(os.getpid()))
    monkeypatch.setenv("POPCORN_SEED", "7")
    run = judge(folder_of(tmp_path, name), mode, backend)
    assert not run.passed and run.score_us is None and run.modelled_score_us is None
    errors = [(case.verdict, case.error) for case in run.cases]
    assert any(case.verdict == verdict and message in case.error for case in run.cases), errors
    assert all("\x1b" not in case.error + case.details for case in run.cases)


@pytest.mark.skipif(sandbox.landlock_version() < 4, reason="a kernel whose Landlock knows no TCP")
def test_answers_from_the_network(tmp_path):
    run = judge(folder_of(tmp_path, "asks_the_network"), "test", "reference")
    assert all(case.verdict == "refused" and "no way out" in case.error for case in run.cases)


@CLOCKED
@pytest.mark.parametrize(
    "name,why", [("fed_by_the_host", "that no launch had written"), ("overwritten_by_torch", "not what launches wrote")]
)
def test_work_outside_launches_takes_the_score(name, why, tmp_path):
    run = judge(folder_of(tmp_path, name), "benchmark", "sim", arch="sm_90a")
    (case,) = run.cases
    assert case.passed, case.error
    assert run.modelled_score_us is None and why in case.unscored, case.unscored


@CLOCKED
def test_a_kernel_that_does_the_work_has_a_score(tmp_path):
    run = judge(folder_of(tmp_path, "../../harness/own_kernels/gemv_shared"), "benchmark", "sim", arch="sm_90a")
    (case,) = run.cases
    assert case.passed and not case.unscored, (case.error, case.unscored)
    assert run.modelled_score_us == pytest.approx(case.modelled_us)


def test_a_racing_kernel_is_a_hazard_without_any_cheat(tmp_path):
    path = folder_of(tmp_path, "host_torch")
    path.write_text(path.with_name("racing.py").read_text())
    assert judge(path, "test", "sim").cases[0].verdict == "hazard"


def test_a_competitors_file_is_read_before_anybody_runs(tmp_path):
    """The first spoils the second's file where nothing keeps it from that, and its own."""
    names = ("first", "second")
    for name in names:
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name, "host_torch")
    spoiler, victim = (tmp_path / name / "submission.py" for name in names)

    def spoil(evaluation):
        run = evaluation.run()
        for path in (spoiler, victim, victim.with_name("honest.py")):
            path.write_text("raise SystemExit")
        return run

    def prepare(path):
        return Evaluation(Options("nvfp4_gemv", "test", path, "reference", task_file=HERE / "tiny.yml"))

    found_ = compare([spoiler, victim], prepare, spoil)
    assert [contestant.passed for contestant in found_.contestants] == [True, True]


@pytest.mark.parametrize("module", ["cute_nvfp4.harness.evaluator", "cute_nvfp4"])
def test_modules_beside_the_submission_are_not_the_judges(module, tmp_path):
    """Started with ``-m`` Python puts the current folder first on the path."""
    path = folder_of(tmp_path, "host_torch")
    for name in ("yaml", "numpy", "typer", "__future__", "torch", "secrets"):
        (tmp_path / f"{name}.py").write_text("print('check: pass')\nimport os\nos._exit(0)\n")
    path.write_text("#!POPCORN leaderboard nvfp4_gemv\ndef custom_kernel(data):\n    return data[-1]\n")
    (tmp_path / "cases.txt").write_text("m: 5; k: 32; l: 2; seed: 11\n")
    command = [sys.executable, "-m", module]
    words = ["test", "cases.txt"] if module.endswith("evaluator") else ["eval", "nvfp4_gemn", "submission.py"]
    environment = {name: value for name, value in os.environ.items() if name != "POPCORN_FD"}
    environment["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode in (111, 2), (done.stdout, done.stderr)
    assert "check: pass" not in done.stdout


def test_nothing_of_a_submission_outlives_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE", str(os.getpid()))
    read, write = os.pipe()
    monkeypatch.setenv("POPCORN_FD", str(write))
    judge(folder_of(tmp_path, "outliving_forger"), "test", "reference")
    time.sleep(1.0)
    os.close(write)
    with os.fdopen(read) as channel:
        assert channel.read() == ""

"""The command line and the evaluator's protocol, from the outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from submission_files import HONEST, KERNEL, TINY, ZEROS
from typer.testing import CliRunner

from cute_nvfp4.cli.main import app
from cute_nvfp4.harness import evaluator
from cute_nvfp4.sim.clock.tools import found

EVAL = ["eval", "nvfp4_gemv", "--backend", "reference", "--task", str(TINY)]


def invoke(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def channel(monkeypatch):
    """Sets POPCORN_FD; calling it closes the channel and gives what was written, by key."""
    read, write = os.pipe()
    monkeypatch.setenv("POPCORN_FD", str(write))

    def written() -> dict[str, str]:
        os.close(write)
        with os.fdopen(read) as lines:
            return dict(line.rstrip("\n").split(": ", 1) for line in lines)

    return written


def test_pass_writes_tables_json_and_protocol(tmp_path, channel):
    """As users run it, in a process of its own; two more share the cases."""
    file = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "cute_nvfp4",
        *EVAL,
        "--submission",
        str(HONEST),
        "--json",
        str(file),
        "--jobs",
        "2",
    ]
    pass_fds = (int(os.environ["POPCORN_FD"]),)
    done = subprocess.run(command, pass_fds=pass_fds, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert channel() == {
        "test-count": "2",
        "test.0.spec": "m: 5; k: 32; l: 2; seed: 11",
        "test.0.status": "pass",
        "test.1.spec": "m: 130; k: 80; l: 1; seed: 12",
        "test.1.status": "pass",
        "check": "pass",
    }
    assert "2 of 2 cases passed" in done.stdout and "m=130 k=80 l=1" in done.stdout
    content = json.loads(file.read_text())
    assert content["passed"] is True and content["mode"] == "test" and content["backend"] == "reference"
    assert [case["max_abs"] for case in content["cases"]] == [0.0, 0.0]
    assert content["versions"]["torch"]


def test_failure_is_112_with_the_reason_in_every_form(channel, monkeypatch):
    monkeypatch.setenv("POPCORN_SEED", "4")
    result = invoke(*EVAL, "--submission", ZEROS, "--json")
    assert result.exit_code == 112
    lines = channel()
    assert lines["test.1.status"] == "fail" and lines["check"] == "fail"
    assert "elements are wrong" in lines["test.1.error"]
    content = json.loads(result.stdout)  # nothing but JSON on standard output
    assert content["passed"] is False and content["seed"] == 4
    assert content["cases"][0]["seed"] != 11  # POPCORN_SEED is mixed in


def test_benchmark_without_a_gpu_reports_no_times():
    result = invoke(*EVAL, "--submission", HONEST, "--mode", "benchmark")
    assert result.exit_code == 0, result.output
    assert "No GPU ran" in result.output
    assert "published figures: nothing here was measured in this run" not in result.output  # the tiny task has none
    assert "mean µs" not in result.output and "score" not in result.output.replace("no measured score", "")


@pytest.mark.sim_only("models times")
@pytest.mark.skipif(not found("ptxas") or not found("nvdisasm"), reason="no ptxas")
def test_benchmark_without_a_gpu_gives_modelled_times(tmp_path):
    """Of the library's own kernel in the simulated GPU: a time and a score of their own, and none of a GPU."""
    file = tmp_path / "times.json"
    words = (*EVAL, "--backend", "sim", "--arch", "sm_90a", "--mode", "benchmark", "--case", 0, "--json", file)
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "there is no measured score" in text and "modelled score" in text and "nothing here was measured" in text
    assert "kernels alone (geometric mean without launches)" in text
    content = json.loads(file.read_text())
    (case,) = content["cases"]
    assert content["score_us"] is None and case["gpu"] is None and content["clock"] == "h200"
    assert content["modelled_score_us"] == pytest.approx(case["modelled_us"]) and case["modelled_us"] > 3


def test_one_case_with_a_seed_of_ones_own_in_profile_mode(tmp_path):
    file = tmp_path / "profile.json"
    result = invoke(
        *EVAL, "--submission", HONEST, "--mode", "profile", "--case", 1, "--seed", 99, "--data", "full", "--json", file
    )
    assert result.exit_code == 0, result.output
    assert "m: 130; k: 80; l: 1; seed: 12" in result.output and "aten::" in result.output
    content = json.loads(file.read_text())
    assert [case["seed"] for case in content["cases"]] == [99] and content["data"] == "full"


@pytest.mark.sim_only("models times")
@pytest.mark.skipif(not found("ptxas") or not found("nvdisasm"), reason="no ptxas")
def test_a_report_has_the_profile_of_each_launch(tmp_path):
    """Of a kernel in the simulated GPU: what the command prints, the file and --json have agrees."""
    file, report = tmp_path / "run.json", tmp_path / "details.json"
    words = (*EVAL, "--submission", KERNEL, "--backend", "sim", "--arch", "sm_90a", "--mode", "profile", "--case", 0)
    result = invoke(*words, "--report", report, "--json", file)
    assert result.exit_code == 0, result.output
    (launch,) = json.loads(file.read_text())["cases"][0]["launches"]
    (told,) = json.loads(report.read_text())["profiles"]
    assert told == {"schema": 1} | launch["profile"]
    metrics = {m["name"]: m["value"] for s in told["sections"] for m in s["metrics"]}
    assert metrics["Executed PTX Instructions"] == launch["counters"]["instructions"]
    assert metrics["Global Load Sectors"] == launch["counters"]["load_sectors"] and metrics["Duration"] > 0
    assert all(spot["where"].startswith("gemv_shared.py:") for spot in told["python"][:3])
    assert "modelled on H200, without the launch" in result.output and told["python"][0]["where"] in result.output
    assert "modelled score" not in result.output


@pytest.mark.parametrize(
    "arguments,code,message",
    [
        (["eval", "nvfp4_gemn"], 2, "unknown problem 'nvfp4_gemn'; known problems: nvfp4_dual_gemm, nvfp4_gemm"),
        (["eval", KERNEL], 2, f"before the file: cute-nvfp4 eval nvfp4_gemv {KERNEL}"),
        (["eval", "warp.py"], 2, "before the file: cute-nvfp4 eval PROBLEM warp.py"),
        ([*EVAL, "--mode", "tset"], 2, "unknown mode 'tset'; expected one of: test, benchmark, leaderboard, profile"),
        ([*EVAL, "--backend", "gpu"], 2, "unknown backend 'gpu'; expected one of: auto, cuda, sim, reference"),
        ([*EVAL, "--data", "kind"], 2, "unknown data 'kind'"),
        ([*EVAL, "--backend", "sim", "--arch", "sm_80"], 2, "unknown architecture 'sm_80'; expected one of: sm_90a"),
        ([*EVAL, "--allow", "race"], 2, "--allow is for the simulator: it needs --backend sim"),
        ([*EVAL, "--strict"], 2, "--strict is for the simulator: it needs --backend sim"),
        ([*EVAL, "--continue"], 2, "--continue is for the simulator: it needs --backend sim"),
        ([*EVAL, "--mode", "profile", "--report", "p.txt"], 2, "--report is of simulated launches: it needs --backend"),
        ([*EVAL, "--backend", "sim", "--mode", "profile", "--report", "p.pdf"], 2, "expected a name that ends in .txt"),
        ([*EVAL, "--backend", "sim", "--report", "p.txt", "--html", "p.html"], 2, "give one of them"),
        ([*EVAL, "--backend", "sim", "--allow", "rase"], 2, "class of hazards to allow: got 'rase', expected one of"),
        ([*EVAL, "--case", "9"], 2, "case 9 does not exist: 2 cases, numbered from 0"),
        ([*EVAL, "--submission", "nowhere.py"], 2, "submission nowhere.py does not exist"),
        (["eval", "nvfp4_gemv", "--task", "nowhere.yml"], 113, "task file nowhere.yml does not exist"),
    ],
)
def test_what_a_user_can_get_wrong(arguments, code, message):
    result = invoke(*arguments)
    assert result.exit_code == code
    assert message in " ".join(result.output.split())


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke(*EVAL, "--backend", "cuda")
    assert result.exit_code == 2
    assert "needs a CUDA device" in result.output and "--backend sim" in result.output


def test_bad_environment(monkeypatch):
    monkeypatch.setenv("POPCORN_SEED", "lucky")
    result = invoke(*EVAL)
    assert result.exit_code == 2 and "POPCORN_SEED is 'lucky'" in result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the public evaluator sees: a submission and a list of cases."""
    path = tmp_path_factory.mktemp("evaluator")
    (path / "submission.py").write_text("#!POPCORN leaderboard nvfp4_gemv\n" + KERNEL.read_text())
    (path / "good.txt").write_text("m: 5; k: 32; l: 2; seed: 11\n\nm: 7; k: 64; l: 1; seed: 3\n")
    (path / "bad.txt").write_text("m: 5; k: 32\n")
    (path / "uneven.txt").write_text("m: 5; k: 40; l: 1; seed: 1\n")
    (path / "empty.txt").write_text("\n")
    return path


def test_evaluator_passes(folder, channel, monkeypatch):
    monkeypatch.chdir(folder)
    assert evaluator.main(["test", "good.txt"]) == 0
    lines = channel()
    assert (
        lines["test-count"] == "2" and lines["test.1.spec"] == "m: 7; k: 64; l: 1; seed: 3" and lines["check"] == "pass"
    )


def test_a_submission_that_cannot_be_loaded_is_a_failed_check(tmp_path, channel, monkeypatch):
    (tmp_path / "submission.py").write_text("#!POPCORN leaderboard nvfp4_gemv\nraise OSError('no\\nluck')\n")
    (tmp_path / "cases.txt").write_text("m: 5; k: 32; l: 2; seed: 11\n")
    monkeypatch.chdir(tmp_path)
    assert evaluator.main(["test", "cases.txt"]) == 112
    lines = channel()
    assert lines["check"] == "fail" and "OSError: no luck" in lines["error"]


@pytest.mark.parametrize(
    "mode,tests,fd,code,message",
    [
        ("test", "good.txt", False, 111, "POPCORN_FD is not set"),
        ("train", "good.txt", True, 2, "usage: evaluator MODE TEST_FILE"),
        ("test", "bad.txt", True, 113, "bad.txt, line 1: missing ['l', 'seed']"),
        ("test", "uneven.txt", True, 113, "k is 40, must be a multiple of 16"),
        ("test", "empty.txt", True, 113, "holds no cases"),
        ("test", "none.txt", True, 113, "cannot be read"),
    ],
)
def test_evaluator_exit_codes(folder, channel, monkeypatch, capsys, mode, tests, fd, code, message):
    monkeypatch.chdir(folder)
    if not fd:
        monkeypatch.delenv("POPCORN_FD")
    assert evaluator.main([mode, tests]) == code
    assert message in capsys.readouterr().err
    assert channel() == {}  # nothing is reported of a run that did not start


def test_help_loads_no_torch():
    code = "import sys; from cute_nvfp4.cli.main import app; print(sorted({'torch', 'cutlass'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

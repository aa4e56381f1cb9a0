"""``python -m cute_nvfp4 sim``: programs run as under plain python, and what the command says and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import forked
from typer.testing import CliRunner

from cute_nvfp4.cli.main import app as whole
from cute_nvfp4.cli.sim import EXIT_HAZARD, EXIT_NOT_MODELLED, app
from cute_nvfp4.sim.session import current_session

KERNEL = """
import sys
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(a: cute.Tensor, b: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    b[i] = a[i] + 1.0

@cute.jit
def host(a: cute.Tensor, b: cute.Tensor):
    kernel(a, b).launch(grid=(1, 1, 1), block=(32, 1, 1))

def run(n):
    source, target = torch.arange(32.0, device="cuda"), torch.zeros(n, device="cuda")
    host(from_dlpack(source), from_dlpack(target))
    return source, target
"""
GOOD = (
    KERNEL
    + """
if __name__ == "__main__":
    source, target = run(32)
    torch.testing.assert_close(target, source + 1)
    print("PASS", sys.argv[1:])
"""
)
OUTSIDE = KERNEL + "\nrun(20)\n"
SWALLOWED = (
    KERNEL
    + """
try:
    run(20)
except Exception as error:
    print("went on after", type(error).__name__)
"""
)
PLAIN = """
import sys, os, __main__
import neighbour
print(__name__, __file__, sys.argv, sys.path[0] == os.path.dirname(os.path.realpath(__file__)), neighbour.VALUE)
print(__main__ is sys.modules["__main__"], __main__.neighbour.VALUE, __spec__, "__annotations__" in globals())
class Thing: pass
import pickle
assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path):
    def write(text: str, name: str = "program.py") -> str:
        (tmp_path / "neighbour.py").write_text("VALUE = 42\n")
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def command(*arguments: str, run: Callable = subprocess.run) -> subprocess.CompletedProcess:
    """run: ``forked.run`` where it does not matter how Python starts."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "cute_nvfp4", "sim", *arguments]
    return run(words, capture_output=True, text=True, env=environment, timeout=120)


def test_a_program_runs_as_under_python(program) -> None:
    path = program(PLAIN)
    done = command(path, "7", "--arch", "x", "-q")
    plain = subprocess.run(
        [sys.executable, path, "7", "--arch", "x", "-q"], capture_output=True, text=True, check=False
    )
    assert done.stdout == plain.stdout and done.returncode == plain.returncode == 7, done.stderr


def test_a_right_program_passes(program, tmp_path) -> None:
    report = tmp_path / "report.json"
    done = invoke("--json", str(report), "--counters", program(GOOD), "--flag", "1")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "PASS ['--flag', '1']\n"
    assert "grid (1, 1, 1) block (32, 1, 1)" in done.stderr and "warp instructions" in done.stderr
    found = json.loads(report.read_text())
    assert found["status"] == 0 and found["failure"] is None and found["arguments"] == ["--flag", "1"]
    (launch,) = found["launches"]
    assert launch["grid"] == [1, 1, 1] and launch["params"] == [8, 8] and launch["instructions"] > 0
    assert launch["counters"]["distinct_bytes"] == {"load": 128, "store": 128}


def invoke(*arguments: str):
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert current_session() is None
    return result


def test_a_hazard_is_reported_and_can_be_repeated(program) -> None:
    result = invoke(program(OUTSIDE))
    assert result.exit_code == EXIT_HAZARD
    text = " ".join(result.stderr.split())
    assert "hazard: OutOfBounds" in text and "'target (float32[20])'" in text and "program.py:9" in text
    assert "repeat with:" in text and "--schedule seed=0" in text and "Traceback" not in text
    shown = invoke("--traceback", "--quiet", program(OUTSIDE))
    assert "Traceback" in shown.stderr and "run(20)" in shown.stderr and shown.exit_code == EXIT_HAZARD


def test_a_hazard_that_the_program_swallows_is_reported(program) -> None:
    result = invoke(program(SWALLOWED))
    assert result.exit_code == EXIT_HAZARD and "went on after OutOfBounds" in result.stdout
    assert "hazard: OutOfBounds" in " ".join(result.stderr.split())


def test_errors_of_the_program_are_its_own(program) -> None:
    path = program("def f():\n    raise ValueError('mine')\n\nf()\n")
    result = invoke(path)
    text = result.stderr
    assert result.exit_code == 1
    assert "ValueError: mine" in text and "in f" in text and "cute_nvfp4" not in text
    assert invoke(program("raise SystemExit('message')")).exit_code == 1
    assert invoke(program("raise SystemExit")).exit_code == 0
    assert invoke(program("def broken(:\n")).exit_code == 1


def test_names_of_an_older_dsl(program) -> None:
    path = program("import cutlass.cute as cute\nassert cute.make_fragment is cute.make_rmem_tensor\n")
    without, given = command(path, run=forked.run), command("--dsl-compat", path, run=forked.run)
    assert without.returncode == 1 and "before 4.8: --dsl-compat puts it back" in without.stderr
    assert given.returncode == 0, given.stderr
    assert "cutlass.cute.make_fragment is make_rmem_tensor in this DSL (--dsl-compat)" in given.stderr


def test_what_is_not_modelled_has_its_own_status(program) -> None:
    result = invoke(program("import torch\ntorch.cuda.make_graphed_callables(None, ())\n"))
    assert result.exit_code == EXIT_NOT_MODELLED and "make_graphed_callables is not modelled" in result.stderr


def test_launches_without_running_them(program) -> None:
    assert invoke("--no-execute", program(OUTSIDE)).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--schedule", "tma=sometimes", "p.py"), "schedule tma"),
        (("--schedule", "speed=1", "p.py"), "speed=1"),
        (("--benchmarks", "twice", "p.py"), "expected once or full"),
        (("nowhere.py",), "there is no file nowhere.py"),
        (("--fast", "p.py"), "there is no option --fast"),
        (("--schedules", "2", "--schedule", "tma=lazy", "p.py"), "give --schedule or --schedules, not both"),
        (("--figure", "sms=152", __file__), "they need --time"),
        (("--time", "--figure", "sms", __file__), "expected NAME=VALUE"),
        (("--clock", "h100", __file__), "they need --time"),
        (("--time", "--clock", "h100", "--arch", "sm_100a", __file__), "--clock h100 is of sm_90a"),
        (("--time", "--clock", "h300", __file__), "expected one of b200, h100, h200"),
    ],
)
def test_bad_options(arguments, text) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and text in " ".join(result.stderr.split())


def test_an_unknown_architecture_is_refused(program) -> None:
    result = invoke("--arch", "sm_12", program(GOOD))
    assert result.exit_code == 2 and "sm_12" in result.stderr


def test_schedules_stop_at_the_first_that_fails(program) -> None:
    """The second schedule is the lazy one: a program that fails there only, and the command that repeats it."""
    text = (
        "import sys\nfrom cute_nvfp4.sim.session import current_session\nprint('run')\n"
        "sys.exit(5 if current_session().options['schedule'].tma == 'lazy' else 0)\n"
    )
    words = [sys.executable, "-m", "cute_nvfp4", "sim", "--schedules", "3", "--seed", "4", program(text)]
    done = forked.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 5 and done.stdout == "run\nrun\n"
    lines = done.stderr.strip().splitlines()
    ends = [line.split(": ")[-1].rsplit(",", 1)[0] for line in lines if line.startswith("schedule ")]
    assert ends == ["ended well, status 0", "program failed, status 5"]
    assert [line for line in lines if "repeat with:" in line] == [lines[-1]]
    assert "--schedule seed=4,warps=together,tma=lazy" in lines[-1]


def test_the_whole_command_knows_it(program) -> None:
    result = CliRunner().invoke(whole, ["sim", "--quiet", program("print('hello')")])
    assert result.exit_code == 0 and "hello" in result.stdout

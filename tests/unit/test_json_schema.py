"""Every ``--json`` is what ``cute_nvfp4/cli/json_schema.py`` says: the commands' real output is read by its models."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from support import forked

from cute_nvfp4.cli.json_schema import SCHEMAS, made, of_record, schema_of
from cute_nvfp4.sim.clock.tools import found
from cute_nvfp4.sim.observe.json_text import json_text

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "harness"
KERNEL = HARNESS / "own_kernels" / "gemv_shared.py"
TINY = ROOT / "tests" / "cheats" / "tiny.yml"
PROGRAM = """
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def double_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread] * 2.0

@cute.jit
def double(x: cute.Tensor, y: cute.Tensor):
    double_kernel(x, y).launch(grid=[1, 1, 1], block=[32, 1, 1])

x = torch.ones(32, device="cuda")
y = torch.empty_like(x)
double(from_dlpack(x), from_dlpack(y))
"""
TIMED = pytest.mark.skipif(not found("ptxas"), reason="ptxas is not installed")


def output(folder: Path, *words: object, code: int = 0, file: str = "out.json") -> Any:
    """What a command writes to the file, which is named among its words; of a command without it, what it prints."""
    command = [sys.executable, "-m", "cute_nvfp4", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = forked.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=280)
    assert done.returncode == code, done.stdout + done.stderr
    return (folder / file).read_text() if file in words else done.stdout


def read(name: str, text: str) -> Any:
    """The output as the model of its schema."""
    return SCHEMAS[name][1]().model_validate_json(text)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


EVAL = ("eval", "nvfp4_gemv", "--task", TINY, "--case", 0, "--backend", "sim")


def test_of_one_submission(tmp_path: Path) -> None:
    run = read("eval", output(tmp_path, *EVAL, KERNEL, "--json"))
    assert run.passed and run.cases[0].verdict == "right" and run.cases[0].launches[0].counters["instructions"] > 0


@TIMED
def test_of_modelled_times(tmp_path: Path) -> None:
    run = read("eval", output(tmp_path, *EVAL, KERNEL, "--mode", "benchmark", "--json"))
    assert run.modelled_score_us == run.cases[0].modelled_us > 0 and run.modelled_kernels.launches > 0


@TIMED
def test_of_a_profile(tmp_path: Path) -> None:
    words = (*EVAL, KERNEL, "--mode", "profile", "--report", "details.json", "--json")
    (launch,) = read("eval", output(tmp_path, *words)).cases[0].launches
    (page,) = read("profile", (tmp_path / "details.json").read_text()).profiles
    assert launch.profile.sections == page.sections and page.schema_ == 1


def test_of_several_submissions(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nowhere\n")
    found = read("comparison", output(tmp_path, *EVAL, KERNEL, "broken.py", "--json", code=112))
    first, second = found.submissions
    assert first.passed and first.cases[0].figures.instructions > 0 and "nowhere" in second.refusal


def test_of_a_program(program: Path) -> None:
    run = read("sim", output(program, "sim", "--counters", "--json", "out.json", "program.py"))
    assert run.outcome == "ended" and run.launches[0].counters.bank_conflicts == 0
    several = read("schedules", output(program, "sim", "--schedules", 2, "--json", "out.json", "program.py"))
    assert len(several.schedules) == 2


@TIMED
def test_of_a_clocked_program(program: Path) -> None:
    words = ("sim", "--time", "--arch", "sm_90a", "--json", "out.json", "program.py")
    assert read("sim", output(program, *words)).launches[0].timing.microseconds > 0
    lines = read("explain", output(program, "explain", "--arch", "sm_90a", "program.py", "--json"))
    assert lines.kernels[0].python and lines.schema_ == 1


def test_of_a_hazard(program: Path) -> None:
    (program / "wrong.py").write_text(PROGRAM.replace("block=[32", "block=[64"))
    run = read("sim", output(program, "sim", "--json", "out.json", "wrong.py", code=112))
    assert run.outcome == "hazard" and run.failure.kind == "OutOfBounds" and run.launches[0].counters is None


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_of_a_compiled_kernel_and_its_plans(arch: str, tmp_path: Path) -> None:
    sizes = ("--m", 128, "--n", 512, "--k", 512, "--arch", arch)
    assert read("inspect", output(tmp_path, "inspect", "gemm", *sizes, "--json")).plan["mma_loop"]["mmas"]
    assert read("inspect", output(tmp_path, "inspect", "gemv", "--arch", arch, "--ptx", "--json")).ptx
    ranked = read("tune", output(tmp_path, "tune", *sizes, "--model", "--top", 2, "--json"))
    assert ranked.kind == "model" and ranked.problems[0].plans[0].model_us > 0


def test_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    save_file({"a.weight": torch.ones(128, 64).bfloat16()}, tmp_path / "mine" / "model.safetensors")
    report = read("quantize", output(tmp_path, "quantize", "mine", "out", "--json"))
    assert report.layers[0].rows == 128 and report.divergence is None


def test_of_the_machine(tmp_path: Path) -> None:
    assert read("doctor", output(tmp_path, "doctor", "--json", code=0)).findings


def test_a_difference_is_seen(tmp_path: Path) -> None:
    """A field more, a field less, another type."""
    text = output(tmp_path, "quantize", "--help")
    assert "--json" in text
    good = {"bytes": 1, "bytes_before": 2, "layers": [], "skipped": {}, "divergence": None}
    read("quantize", json.dumps(good))
    for wrong in (good | {"more": 1}, good | {"bytes": "many"}, {k: v for k, v in good.items() if k != "skipped"}):
        with pytest.raises(ValidationError):
            read("quantize", json.dumps(wrong))


def test_a_record_gives_its_fields() -> None:
    from cute_nvfp4.nn.report import LayerReport

    model = of_record(LayerReport, "", ("reason",), extra=int)
    assert [*model.model_fields] == [*(name for name in LayerReport.__dataclass_fields__ if name != "reason"), "extra"]
    assert made("X", "", schema=int).model_validate({"schema": 1}).schema_ == 1


def test_the_command_prints_a_schema(tmp_path: Path) -> None:
    assert json.loads(output(tmp_path, "schema", "support")) == schema_of("support")
    assert all(name in output(tmp_path, "schema") for name in ("eval", "sim", "doctor"))
    output(tmp_path, "schema", "none", code=2)


def test_floats_have_no_noise() -> None:
    written = json_text({"a": 0.1 + 0.2, "b": [1e-9 / 3, 5], "c": (True, None), "d": 4.26e12}, indent=None)
    assert written == '{"a": 0.3, "b": [3.33333e-10, 5], "c": [true, null], "d": 4260000000000.0}'
    with pytest.raises(ValueError):
        json_text(float("nan"))

"""``cute-nvfp4 new``: every starter is right as it is, and what the command refuses."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cute_nvfp4.cli.main import app
from cute_nvfp4.harness.checker import check_output
from cute_nvfp4.harness.problem import get_problem, known_problems
from cute_nvfp4.harness.schema import Case, load_task
from cute_nvfp4.harness.starters import starter, styles
from cute_nvfp4.harness.submission import directives
from cute_nvfp4.runtime.session import simulated_gpu

# The smallest sizes at which every index of a starter matters: several CTAs, rows beyond the last, batches, padding.
SMALL: dict[str, Case] = {
    "nvfp4_gemv": {"m": 130, "k": 320, "l": 2, "seed": 1},
    "nvfp4_gemm": {"m": 136, "n": 264, "k": 320, "l": 2, "seed": 1},
    "nvfp4_dual_gemm": {"m": 136, "n": 136, "k": 320, "l": 1, "seed": 1},
    "nvfp4_group_gemm": {"m": [40, 136], "n": [136, 128], "k": [320, 256], "seed": 1},
}
STARTERS = [(problem, style) for problem in known_problems() for style in styles(problem)]


def test_every_problem_has_starters() -> None:
    assert {problem: styles(problem) for problem in known_problems()} == {
        "nvfp4_dual_gemm": ["cute", "torch"],
        "nvfp4_gemm": ["cute", "torch"],
        "nvfp4_gemv": ["cute", "inline-ptx", "torch"],
        "nvfp4_group_gemm": ["cute", "torch"],
    }


@pytest.mark.parametrize("problem,style", STARTERS)
def test_a_starter_says_what_it_is(problem: str, style: str) -> None:
    text = starter(problem, style)
    assert directives(text) == {"leaderboard": problem, "gpu": "B200"}
    assert "cute_nvfp4" not in text  # a file of a contestant's own
    assert "Three things to try next:\n\n    1. " in text
    assert all(f"    {name} " in text for name in ("a", "sfa", "sfa_permuted", "c"))
    # nothing of the template is left, and nothing that a formatter would change first
    assert not any(mark in text for mark in ("{%", "%}", "<<", "{#")) and text.endswith("\n") and "\n\n\n\n" not in text
    assert max(map(len, text.splitlines())) <= 120 and not any(line != line.rstrip() for line in text.splitlines())


def test_the_shared_part_of_two_starters_is_the_same() -> None:
    """GEMM and grouped GEMM have one kernel, and that of two products is made of the same lines but for its Bs."""
    gemm, group, dual = (starter(f"nvfp4_{name}", "cute") for name in ("gemm", "group_gemm", "dual_gemm"))
    kernel = gemm[gemm.index("from typing") : gemm.index("compiled = None")]
    assert len(kernel.splitlines()) > 200 and kernel in group and kernel not in dual
    assert sum(line in dual.splitlines() for line in kernel.splitlines()) > 0.75 * len(kernel.splitlines())


@pytest.mark.parametrize("problem,style", STARTERS)
def test_a_starter_is_right(problem: str, style: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On all E2M1 codes and scales of any size, with the simulator's checks on."""
    described, case = get_problem(problem), SMALL[problem]
    inputs = described.generate(case, 1, "full")
    shapes = {b.name: b for b in described.buffers(case) if b.output}
    outputs = {name: torch.full(b.shape, torch.nan, dtype=getattr(torch, b.dtype)) for name, b in shapes.items()}
    monkeypatch.setitem(sys.modules, "task", types.SimpleNamespace(input_t=tuple, output_t=torch.Tensor))
    with simulated_gpu("sm_100a"):
        path = tmp_path / f"{problem}_{style.replace('-', '_')}.py"
        path.write_text(starter(problem, style))
        kernel = _loaded(path).custom_kernel
        out = kernel(described.views({name: x.cuda() for name, x in (inputs | outputs).items()}))
        found = [x.cpu().numpy() for x in (out if isinstance(out, list) else [out])]
    expected = described.reference(case, inputs)
    assert len(found) == len(expected)
    for got, exact in zip(found, expected):
        check = check_output(got, exact, load_task(described.folder / "task.yml").full_range_tolerances)
        assert check.passed, check.message


def _loaded(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def new(*arguments: object):
    return CliRunner().invoke(app, ["new", *map(str, arguments)])


def test_new_writes_a_submission_that_eval_takes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    done = new("nvfp4_gemv", "--style", "torch", "--output", path)
    assert done.exit_code == 0 and f"cute-nvfp4 eval nvfp4_gemv {path}" in done.output
    judged = CliRunner().invoke(app, ["eval", "nvfp4_gemv", str(path), "--case", "0", "--backend", "reference"])
    assert judged.exit_code == 0 and "1 of 1 cases passed" in judged.output


def test_new_writes_over_nothing_unless_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "submission.py").write_text("mine")
    refused = new("nvfp4_gemv")
    assert refused.exit_code == 2 and "submission.py exists" in refused.output and "--force" in refused.output
    assert (tmp_path / "submission.py").read_text() == "mine"
    assert new("nvfp4_gemv", "--force").exit_code == 0
    assert (tmp_path / "submission.py").read_text() == starter("nvfp4_gemv", "cute")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["nvfp4_gemn"], "unknown problem 'nvfp4_gemn'"),
        (["nvfp4_gemm", "--style", "inline-ptx"], "style: got inline-ptx, expected for nvfp4_gemm one of: cute, torch"),
        (["nvfp4_gemv", "--output", "/nowhere/at/all.py"], "cannot write /nowhere/at/all.py"),
    ],
)
def test_what_new_refuses(arguments: list[str], message: str) -> None:
    done = new(*arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())

"""Task files and test files: what is in ours, and how bad ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cute_nvfp4.harness.errors import EXIT_BAD_TEST_FILE, HarnessError, TaskFileError
from cute_nvfp4.harness.problem import get_problem, known_problems, mix_seed
from cute_nvfp4.harness.schema import load_task, parse_spec, spec
from cute_nvfp4.harness.timing import geometric_mean

PROBLEM = get_problem("nvfp4_gemv")
TASK = PROBLEM.folder / "task.yml"


def test_shapes_of_the_gemv_problem():
    task = load_task(TASK)
    assert [(c["m"], c["k"], c["l"]) for c in task.tests] == [
        (128, 256, 1), (128, 1536, 1), (128, 3072, 1), (256, 7168, 1), (256, 7168, 1), (2432, 4608, 2), (384, 7168, 2),
        (512, 512, 2), (512, 4096, 2), (512, 1536, 2),
    ]  # fmt: skip
    assert [(c["m"], c["k"], c["l"]) for c in task.benchmarks] == [(7168, 16384, 1), (4096, 7168, 8), (7168, 2048, 4)]
    assert {c["seed"] for c in (*task.tests, *task.benchmarks)} == {1111}
    assert (task.tolerances.rtol, task.tolerances.atol, task.tolerances.sum_rtol) == (1e-3, 1e-3, 0)


def test_speed_of_light_follows_from_the_useful_work():
    """The published bounds are max(bytes / bandwidth, flops / math) to 0.4 %: our byte count is theirs."""
    task = load_task(TASK)
    light = task.speed_of_light
    for case, published in zip(task.benchmarks, light.microseconds):
        bound = max(PROBLEM.useful_bytes(case) / light.peak_bytes_s, PROBLEM.flops(case) / light.peak_flop_s)
        assert bound * 1e6 == pytest.approx(published, rel=4e-3)
    # the public figures are given with three digits, and their mean as it was published
    assert geometric_mean(task.public_results.microseconds) == pytest.approx(
        task.public_results.geometric_mean, rel=1e-2
    )


def _broken(tmp_path: Path, change) -> Path:
    content = yaml.safe_load(TASK.read_text())
    change(content)
    path = tmp_path / "task.yml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.pop("tests"), "tests: Field required"),
        (lambda t: t.update(test=[]), "test: Extra inputs"),
        (lambda t: t["tests"][3].pop("k"), r"tests\[3\]: missing \['k'\]"),
        (lambda t: t["tests"][0].update(n=1), r"tests\[0\]: missing \[\], unknown \['n'\]"),
        (lambda t: t["tests"][0].update(m=0), "m is 0, must be at least 1"),
        (lambda t: t["tests"][0].update(m="many"), "tests.0.m: Input should be a valid integer"),
        (lambda t: t["tolerances"].update(rtol=-1), "tolerances.rtol"),
        (lambda t: t["speed_of_light"].update(microseconds=[1.0]), "has 1 entries, benchmarks has 3"),
        (lambda t: t.update(benchmarks=[]), "benchmarks: List should have at least 1 item"),
    ],
)
def test_a_bad_task_file_is_refused_with_the_place(tmp_path, change, message):
    with pytest.raises(TaskFileError, match=message) as caught:
        load_task(_broken(tmp_path, change))
    assert caught.value.exit_code == EXIT_BAD_TEST_FILE


@pytest.mark.parametrize("text,message", [("a: [1", "is not YAML"), ("- 1\n", "is not valid"), ("", "is not valid")])
def test_a_task_file_that_is_not_a_task(tmp_path, text, message):
    path = tmp_path / "task.yml"
    path.write_text(text)
    with pytest.raises(TaskFileError, match=message):
        load_task(path)
    with pytest.raises(TaskFileError, match="does not exist"):
        load_task(tmp_path / "none.yml")


def test_spec_lines_round_trip():
    case = {"m": 128, "k": 256, "l": 1, "seed": 1111}
    assert spec(case) == "m: 128; k: 256; l: 1; seed: 1111"
    assert parse_spec(spec(case), ["m", "k", "l"], "here") == case


@pytest.mark.parametrize(
    "line",
    [
        "m: 1; k: 2; l: 3",
        "m: 1; k: 2; l: 3; seed: x",
        "m=1",
        "m: 1; m: 2; k: 2; l: 3; seed: 4",
        "m: -1; k: 1; l: 1; seed: 1",
    ],
)
def test_bad_spec_lines_are_refused(line):
    with pytest.raises(TaskFileError, match="here"):
        parse_spec(line, ["m", "k", "l"], "here")


def test_an_unknown_problem_lists_the_known_ones():
    assert "nvfp4_gemv" in known_problems()
    with pytest.raises(HarnessError, match=r"unknown problem 'gemm4'; known problems: .*nvfp4_gemv"):
        get_problem("gemm4")


def test_seeds_mix_into_distinct_stable_seeds():
    assert mix_seed(1111, 1) == mix_seed(1111, 1)
    assert len({mix_seed(s, i) for s in range(20) for i in range(20)}) == 400
    assert mix_seed(1, 2) != mix_seed(2, 1)

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


GEMM_TESTS = [
    (128, 256, 256), (128, 1536, 7168), (128, 3072, 1536), (256, 7168, 256), (256, 7168, 2048), (2304, 4608, 7168),
    (384, 7168, 2304), (512, 512, 7168), (512, 4096, 512), (512, 1536, 7168),
]  # fmt: skip
DUAL_TESTS = [
    (1536, 512, 7168), (256, 512, 256), (1536, 512, 7168), (3072, 1024, 1536), (7168, 1024, 256), (7168, 2304, 2048),
    (4608, 384, 7168), (7168, 384, 2304), (512, 768, 7168), (4096, 768, 512),
]  # fmt: skip
GROUP_TESTS = [
    ([96, 128], [128, 256], [256, 512]),
    ([256, 72], [512, 384], [256, 256]),
    ([128, 128], [128, 256], [512, 256]),
    ([80, 128, 256], [384, 256, 128], [256, 512, 256]),
    ([64, 72, 96], [128, 384, 512], [512, 512, 256]),
    ([64, 256, 128], [768, 128, 256], [512, 256, 512]),
    ([128, 128, 64], [256, 512, 512], [768, 256, 768]),
    ([128] * 4, [128] * 4, [512, 256, 512, 256]),
    ([40, 56, 384, 512], [512, 384, 256, 128], [256] * 4),
    ([512, 384, 256, 128], [256] * 4, [512, 768, 512, 768]),
]
GEMM_BENCHMARKS = [(128, 7168, 16384), (128, 4096, 7168), (128, 7168, 2048)]
DUAL_BENCHMARKS = [(256, 4096, 7168), (512, 4096, 7168), (256, 3072, 4096), (512, 3072, 7168)]
GROUP_BENCHMARKS = [
    ([80, 176, 128, 72, 64, 248, 96, 160], [4096] * 8, [7168] * 8),
    ([40, 76, 168, 72, 164, 148, 196, 160], [7168] * 8, [2048] * 8),
    ([192, 320], [3072] * 2, [4096] * 2),
    ([128, 384], [4096] * 2, [1536] * 2),
]


@pytest.mark.parametrize(
    "name,tests,benchmarks,batch",
    [
        ("nvfp4_gemm", GEMM_TESTS, GEMM_BENCHMARKS, 50),
        ("nvfp4_dual_gemm", DUAL_TESTS, DUAL_BENCHMARKS, 50),
        ("nvfp4_group_gemm", GROUP_TESTS, GROUP_BENCHMARKS, 15),
    ],
)
def test_shapes_of_the_gemm_like_problems(name, tests, benchmarks, batch):
    problem = get_problem(name)
    task = load_task(problem.folder / "task.yml")
    assert [(c["m"], c["n"], c["k"]) for c in task.tests] == tests
    assert [(c["m"], c["n"], c["k"]) for c in task.benchmarks] == benchmarks
    for case in (*task.tests, *task.benchmarks):
        assert case["seed"] == 1111 and case.get("l", 1) == 1
        problem.validate(case)
    assert (task.tolerances.rtol, task.tolerances.atol, task.tolerances.sum_rtol) == (1e-3, 1e-3, 0)
    assert (task.limits.batch, task.limits.repeats, task.limits.seconds) == (batch, 200, 120)


@pytest.mark.parametrize("name", known_problems())
def test_speed_of_light_follows_from_the_useful_work(name):
    """The published bounds are max(bytes / bandwidth, flops / math) to 0.4 %: our byte count is theirs."""
    problem = get_problem(name)
    task = load_task(problem.folder / "task.yml")
    light = task.speed_of_light
    for case, published in zip(task.benchmarks, light.microseconds, strict=True):
        bound = max(problem.useful_bytes(case) / light.peak_bytes_s, problem.flops(case) / light.peak_flop_s)
        assert bound * 1e6 == pytest.approx(published, rel=4e-3)
    # the public figures are the best of each shape, and their mean as it was published
    published = task.public_results.geometric_mean
    assert geometric_mean(task.public_results.microseconds) == pytest.approx(published, rel=2e-2)


def _broken(tmp_path: Path, change, task: Path = TASK) -> Path:
    content = yaml.safe_load(task.read_text())
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
        (lambda t: t["tests"][0].update(m="many"), "tests.0.m: .*is 'many', must be an integer"),
        (lambda t: t["tolerances"].update(rtol=-1), "tolerances.rtol"),
        (lambda t: t["speed_of_light"].update(microseconds=[1.0]), "has 1 entries, benchmarks has 3"),
        (lambda t: t.update(benchmarks=[]), "benchmarks: List should have at least 1 item"),
    ],
)
def test_a_bad_task_file_is_refused_with_the_place(tmp_path, change, message):
    with pytest.raises(TaskFileError, match=message) as caught:
        load_task(_broken(tmp_path, change))
    assert caught.value.exit_code == EXIT_BAD_TEST_FILE


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t["tests"][1].update(m=7), r"tests\[1\]: m is 7, must be a list with one entry for each group"),
        (lambda t: t["tests"][1].update(m=[]), r"tests\[1\]: m is \[\], must be a list with one entry"),
        (lambda t: t["tests"][1].update(n=[128, 0]), r"n is \[128, 0\], must be at least 1"),
        (
            lambda t: t["tests"][1].update(k=[256]),
            r"lists of different lengths: {'m': 2, 'n': 2, 'k': 1}",
        ),
        (lambda t: t["benchmarks"][2].update(m=[128, "x"]), r"benchmarks.2.m: .*is \[128, 'x'\], must be an integer"),
        (lambda t: t["tests"][0].update(seed=[1]), r"tests\[0\]: seed is \[1\], must be an integer"),
        (lambda t: t.update(grouped=False), r"tests\[0\]: m is \[96, 128\], must be an integer"),
        (lambda t: t["limits"].update(batch=0), "limits.batch"),
    ],
)
def test_a_bad_grouped_task_file_is_refused_with_the_place(tmp_path, change, message):
    task = get_problem("nvfp4_group_gemm").folder / "task.yml"
    assert load_task(_broken(tmp_path, lambda t: None, task)).grouped
    with pytest.raises(TaskFileError, match=message):
        load_task(_broken(tmp_path, change, task))


@pytest.mark.parametrize("text,message", [("a: [1", "is not YAML"), ("- 1\n", "is not valid"), ("", "is not valid")])
def test_a_task_file_that_is_not_a_task(tmp_path, text, message):
    path = tmp_path / "task.yml"
    path.write_text(text)
    with pytest.raises(TaskFileError, match=message):
        load_task(path)
    with pytest.raises(TaskFileError, match="does not exist"):
        load_task(tmp_path / "none.yml")


def test_a_file_of_shapes_has_the_rest_from_its_problem(tmp_path):
    path, whole = tmp_path / "shapes.yml", load_task(TASK)
    for kind in ("tests", "benchmarks"):
        path.write_text(f"{kind}: [{{m: 384, k: 512, l: 2, seed: 3}}]\n")
        task = load_task(path, TASK)
        assert task.tests == task.benchmarks == [{"m": 384, "k": 512, "l": 2, "seed": 3}]
        assert (task.name, task.tolerances, task.limits) == (whole.name, whole.tolerances, whole.limits)
        assert task.speed_of_light is None and task.public_results is None
        with pytest.raises(TaskFileError, match="tolerances: Field required"):
            load_task(path)
    path.write_text("tests: [{m: 384, k: 512, seed: 3}]\nlimits: {repeats: 5}\n")
    with pytest.raises(TaskFileError, match=r"tests\[0\]: missing \['l'\]"):
        load_task(path, TASK)
    path.write_text("description: no shapes at all\n")
    with pytest.raises(TaskFileError, match="tests: Field required"):
        load_task(path, TASK)
    assert load_task(TASK, TASK) == whole


def test_spec_lines_round_trip():
    case = {"m": 128, "k": 256, "l": 1, "seed": 1111}
    assert spec(case) == "m: 128; k: 256; l: 1; seed: 1111"
    assert parse_spec(spec(case), ["m", "k", "l"], "here") == case


def test_spec_lines_with_lists_round_trip():
    case = {"m": [96, 128], "n": [128, 256], "k": [256, 512], "seed": 1111}
    assert spec(case) == "m: [96, 128]; n: [128, 256]; k: [256, 512]; seed: 1111"
    assert parse_spec(spec(case), ["m", "n", "k"], "here", grouped=True) == case


@pytest.mark.parametrize(
    "line",
    [
        "m: 1; n: [2]; k: [3]; seed: 4",
        "m: [1, 2; n: [2, 2]; k: [3, 3]; seed: 4",
        "m: [1, 2]; n: [2, 2]; k: [3]; seed: 4",
        "m: []; n: []; k: []; seed: 4",
        "m: [a]; n: [1]; k: [3]; seed: 4",
    ],
)
def test_bad_spec_lines_with_lists_are_refused(line):
    with pytest.raises(TaskFileError, match="here"):
        parse_spec(line, ["m", "n", "k"], "here", grouped=True)


@pytest.mark.parametrize(
    "line",
    [
        "m: [1]; k: 2; l: 3; seed: 4",
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

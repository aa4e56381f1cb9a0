"""What people submit: modules of the public evaluator, other names of problems, an older DSL, imports of Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from submission_files import HONEST, KERNEL, TINY

from cute_nvfp4.cli.eval import duration
from cute_nvfp4.harness import dsl_compat, provided
from cute_nvfp4.harness.evaluation import Evaluation, Options
from cute_nvfp4.harness.modes import Pace
from cute_nvfp4.harness.schema import Limits, load_task

ROOT = Path(provided.__file__).parents[2]


def judged(folder: Path, text: str, backend: str = "sim", **options):
    """The run of the smallest case of a submission beside ``kernel.py`` and ``honest.py``."""
    path = folder / "submission.py"
    path.write_text(text)
    (folder / "kernel.py").write_text(KERNEL.read_text())
    (folder / "honest.py").write_text(HONEST.read_text())
    options = {"problem": "nvfp4_gemv", "task_file": TINY, "case": 0, "submission": path, "backend": backend} | options
    return Evaluation(Options(**options)).run()


def test_utils_are_those_of_the_public_evaluator(tmp_path):
    run = judged(
        tmp_path,
        "from honest import gemv\nfrom task import TestSpec\n"
        "from utils import DeterministicContext, make_match_reference, set_seed, verbose_allclose\n\n"
        "check = make_match_reference(gemv, rtol=1e-3, atol=1e-3)\n\n"
        "def custom_kernel(data):\n    set_seed(1)\n    with DeterministicContext():\n        out = gemv(data)\n"
        "    assert check(data, out) == (True, ''), check(data, out)\n"
        "    good, lines = verbose_allclose(out, out + 1)\n    assert not good and len(lines) == 6\n    return out\n",
        "reference",
    )
    assert run.passed, run.cases[0].error


def test_utils_of_the_submission_come_first(tmp_path):
    (tmp_path / "utils.py").write_text("from honest import gemv as answer\n")
    text = "from utils import answer\n\ndef custom_kernel(data):\n    return answer(data)\n"
    assert judged(tmp_path, text, "reference").passed


def test_comparisons_of_utils():
    a = torch.tensor([1.0, float("nan"), float("inf")])
    assert provided.verbose_allclose(a, a.clone()) == (True, [])
    assert not provided.verbose_allclose(a, -a)[0] and not provided.verbose_allclose(a, a[:2])[0]
    assert provided.verbose_allequal(a[:1], a[:1])[0] and not provided.verbose_allequal(a, a)[0]
    assert provided.match_reference(None, [a, a], lambda data: [a, a])[0]
    assert not provided.match_reference(None, [a, -a], lambda data: [a, a])[0]
    assert provided.match_reference(None, a, lambda data: [a])[0]
    for output in ([], [a], [a, a, a], a):
        assert provided.match_reference(None, output, lambda data: [a, a]) == (
            False,
            f"got {len(output) if isinstance(output, list) else 1} outputs, expected 2",
        )


def test_a_problem_has_its_other_public_name():
    evaluation = Evaluation(Options("modal_nvfp4_dual_gemm", backend="reference"))
    assert evaluation.problem.name == "nvfp4_dual_gemm"


OLD = """import cutlass.cute as cute
import kernel
from cutlass import Float32

@cute.kernel
def older():
    fragment = cute.make_fragment(cute.make_layout(4), Float32)
    fragment.fill(0.0)
    cute.arch.fence_proxy(cute.arch.ProxyKind.async_shared, space=cute.arch.SharedSpace.shared_cta)

@cute.jit
def launch():
    older().launch(grid=(1, 1, 1), block=(32, 1, 1))

def custom_kernel(data):
    cute.compile(launch)()
    return kernel.custom_kernel(data)
"""


def test_names_of_an_older_dsl_are_there_where_they_are_asked_for(tmp_path):
    without = judged(tmp_path, OLD).cases[0]
    assert without.verdict == "refused" and "--dsl-compat" in without.error, without.error
    run = judged(tmp_path, OLD, dsl_compat=True)
    assert run.passed, run.cases[0].error
    assert {note.partition(" is ")[0] for note in run.notes} == {
        "cutlass.cute.make_fragment", "cutlass.cute.arch.ProxyKind", "cutlass.cute.arch.SharedSpace",
    }  # fmt: skip
    assert all("--dsl-compat" in note for note in run.notes)


def test_every_name_has_something_that_stands_for_it():
    code = (
        "import importlib\nfrom cute_nvfp4.harness import dsl_compat\ndsl_compat.install()\n"
        "for full in dsl_compat.NAMES:\n    module, _, name = full.rpartition('.')\n"
        "    assert getattr(importlib.import_module(module), name) is not None\n"
        "import cutlass.utils\nassert cutlass.utils.SMEM_CAPACITY['sm_100'] > 200_000\n"
        "try:\n    cutlass.utils.nothing\nexcept AttributeError as error:\n    print(error, len(dsl_compat.USED))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "no attribute 'nothing'" in done.stdout and done.stdout.split()[-1] == str(len(dsl_compat.NAMES)), (
        done.stderr
    )


def test_a_stand_in_for_triton_runs_benchmarks_once_and_no_kernel():
    code = (
        "import sys\nfrom cute_nvfp4.harness import triton_stand_in\ntriton_stand_in.install()\n"
        "import triton, triton.language as tl\nfrom triton.testing import do_bench\ncalls = []\n"
        "do_bench(lambda: calls.append(1), warmup=5, rep=10)\n@triton.autotune([triton.Config({})], key=['n'])\n"
        "@triton.jit\ndef add(x, n, BLOCK: tl.constexpr):\n    tl.store(x, tl.load(x))\n"
        "try:\n    add[(triton.cdiv(7, 4),)](None, 7, BLOCK=4)\n"
        "except RuntimeError as error:\n    print(len(calls), error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("1 the kernel 'add' is Triton's, and is not run here"), done.stderr
    assert "has called its function once" in done.stderr


def test_tritons_benchmark_counts_work_in_the_simulated_gpu(tmp_path):
    pytest.importorskip("triton")
    text = (
        "import kernel\nfrom triton.testing import do_bench\n\n"
        "def custom_kernel(data):\n    assert do_bench(lambda: kernel.custom_kernel(data)) > 100\n    return data[-1]\n"
    )
    run = judged(tmp_path, text)
    assert run.passed, run.cases[0].error


def test_limits_grow_with_a_cases_work_and_with_the_machine():
    pace = Pace(Limits(timeout_seconds=180.0, cpu_flop_s=1e8), None)
    small, large = 10**9, 10**11
    assert pace.expected(small) is None and pace.limit(small) == 190.0 and pace.limit(large) == 1180.0
    pace.note(small, 40.0)  # a slow kernel, on a slow machine
    assert pace.expected(large) == pytest.approx(4000.0) and pace.limit(large) == pytest.approx(40_000.0)
    assert Pace(Limits(), 7.0).limit(large) == 7.0
    assert [duration(seconds) for seconds in (3, 45, 240)] == ["", ", about 45 s here", ", about 4 minutes here"]


@pytest.mark.parametrize("name", ["nvfp4_gemv", "nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm"])
def test_ranked_runs_leave_time_of_their_minute(name):
    limits = load_task(ROOT / "cute_nvfp4" / "harness" / "problems" / name / "task.yml").limits
    assert limits.ranked_seconds <= 40

"""Gated and grouped GEMMs on sm_120a, and quantized results: against float64, on problems of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import gated_gemm_problems, grouped_problems
from support.gated_gemm_problems import Gated, usual_alpha
from support.gemm_problems import Case
from support.grouped_problems import random_grouped

from cute_nvfp4 import simulating
from cute_nvfp4.formats import as_bytes
from cute_nvfp4.kernels.gemm.config import SM120_TILE_N
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.sim import adversarial

pytestmark = pytest.mark.sweep(8)
BASE = Case(m=200, n=136, k=544, alpha=usual_alpha(544), tile_n=64, store="direct")
WHOLE = replace(BASE, n=256, batch=2)
GATED = {
    "two": Gated(replace(BASE, batch=2)),
    "sliced": Gated(replace(BASE, out="sliced"), "gelu_tanh"),
    "swap": Gated(replace(BASE, swap=True, batch=2, out="columns"), "relu"),
    "narrow": Gated(replace(BASE, m=16, n=200, tile_n=16, swap=True, batch=2, out="columns")),
    "narrow rows": Gated(replace(BASE, n=40, tile_n=32), "gelu_tanh"),
    "halves": Gated(WHOLE, form="halves"),
    "interleaved": Gated(WHOLE, "gelu_erf", form="interleaved"),
    "interleaved swap": Gated(replace(WHOLE, swap=True), form="interleaved"),
    "mxfp4": Gated(replace(BASE, a_format="mxfp4", b_format="mxfp4", alpha=2.0**-11, workers=0)),
    "mxfp8": Gated(replace(BASE, a_format="mxfp8_e5m2", b_format="mxfp8", alpha=2.0**-17, swap=True)),
    "factors": Gated(replace(BASE, alpha_tensor=True, a_global=0.5, b_global=-1.5, batch=0, dtype="bfloat16")),
}


@pytest.fixture(autouse=True)
def architecture() -> Iterator[None]:
    with simulating("sm_120a"):
        yield


@pytest.mark.parametrize("name", GATED)
def test_gated(name: str) -> None:
    problem = gated_gemm_problems.make(GATED[name])
    problem.check(problem.run())


@pytest.mark.parametrize("m,n", [(140, 208), (1, 16), (130, 400)])
def test_quantized(m: int, n: int) -> None:
    """The bits of quantizing a float32 result; sums are exact here."""
    case = Case(m=m, n=n, k=544, batch=2, alpha=2.0**-8, tile_n=64, exact=True, out="new", store="direct")
    problem = gated_gemm_problems.make(Gated(case))
    right = quantize(problem.run(out_dtype=torch.float32), global_scale=0.37, backend="reference")
    found = problem.run(out_global_scale=0.37)
    assert as_bytes(found.data).equal(right.data) and as_bytes(found.blocked_scale()).equal(right.blocked_scale())


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("n", [16, 32, 48])
def test_quantized_by_the_chosen_plan(m: int, n: int) -> None:
    """A tile as narrow as N would give each thread less than a block."""
    case = Case(m=m, n=n, k=544, alpha=2.0**-8, exact=True, out="new", workers=0)
    problem = gated_gemm_problems.make(Gated(case))
    right = quantize(problem.run(out_dtype=torch.float32), global_scale=0.37, backend="reference")
    found = problem.run(out_global_scale=0.37)
    assert right.data.unique().numel() > 4
    assert as_bytes(found.data).equal(right.data) and as_bytes(found.blocked_scale()).equal(right.blocked_scale())


def both_architectures(run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What sm_100a gives, and what sm_120a gives, as bits."""
    found = []
    for arch in ("sm_100a", "sm_120a"):
        with simulating(arch) as runs:
            found.append(run().contiguous().view(torch.uint8).clone())
        assert runs[-1].kernel.arch == arch
    return found


@pytest.mark.parametrize("gate, swap", [("silu", False), ("gelu_tanh", True)])
def test_gated_has_the_bits_of_sm_100a(gate: str, swap: bool) -> None:
    """On data whose every sum has few bits, before the gate and after it."""
    case = replace(BASE, alpha=2.0**-8, exact=True, workers=0, swap=swap, out="new", dtype="float32")
    problem = gated_gemm_problems.make(Gated(case, gate))
    assert torch.equal(*both_architectures(problem.run))


def test_quantized_results_have_the_bits_of_sm_100a() -> None:
    case = replace(BASE, n=144, alpha=2.0**-8, exact=True, workers=0, out="new")
    problem = gated_gemm_problems.make(Gated(case))
    for part in (lambda x: x.data, lambda x: x.blocked_scale()):
        assert torch.equal(*both_architectures(lambda part=part: part(problem.run(out_global_scale=0.37))))


@pytest.mark.parametrize("contiguous", [False, True])
def test_grouped_has_the_bits_of_sm_100a(contiguous: bool) -> None:
    sizes = ((20, 136, 288), (0, 136, 288), (130, 136, 288))
    problem = grouped_problems.make(
        grouped_problems.Grouped(sizes, contiguous, workers=0, exact=True, dtype="float16", globals_=True)
    )

    assert torch.equal(*both_architectures(lambda: torch.cat(problem.run())))


def grouped(seed: int) -> grouped_problems.Grouped:
    """A list, a long list, or rows of groups dealt by offsets, in turn."""
    drawn = random_grouped(np.random.default_rng([5, seed]), max_groups=(8, 20, 12)[seed % 3], contiguous=seed % 3 == 2)
    return replace(drawn, pair=False, cluster=(1, 1), split_k=1, tile_n=SM120_TILE_N[seed % 4])


@pytest.mark.parametrize("seed", range(12))
def test_grouped(seed: int) -> None:
    problem = grouped_problems.make(grouped(seed))
    problem.check(problem.run())


@pytest.mark.slow
def test_schedules() -> None:
    problems = [gated_gemm_problems.make(GATED["two"]), grouped_problems.make(replace(grouped(1), maps="workspace"))]
    for problem in problems:
        problem.check(problem.run())
        for schedule in adversarial(2):
            with simulating(schedule=schedule):
                problem.check(problem.run())

"""gated_gemm() on full-range data: the compiled kernel against float64."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.gated_gemm_problems import GATES, TEN_SHAPES, Gated, Problem, fits, make, random_gated, usual_alpha
from support.gemm_problems import Case
from support.gemm_structures import structures

from cute_nvfp4 import (
    BlockScaledTensor,
    gated_gemm,
    interleave,
    quantize,
    simulating,
    to_blocked,
)
from cute_nvfp4.kernels.gemm.config import GATE_NAMES, GemmConfig
from cute_nvfp4.kernels.gemm.shared_plan import StagePlan
from cute_nvfp4.planning.gemm import GemmProblem, candidates, choose
from cute_nvfp4.reference import GATES as REFERENCE
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels("sm_100a", "sm_103a"), pytest.mark.sweep(8)]
ARCH = ARCHITECTURES["sm_100a"]
BASE = Case(m=200, n=136, k=544, alpha=usual_alpha(544), dtype="float32")
WHOLE = replace(BASE, n=256)
LONG = Case(m=300, n=136, k=2080, alpha=usual_alpha(2080), dtype="bfloat16", out="strided")
PAIR = {"pair": True, "cluster_m": 2}
STRUCTURES = {
    "64": Gated(replace(BASE, tile_n=64, batch=2)),
    "128 direct": Gated(replace(BASE, store="direct", out="sliced"), "gelu_tanh"),
    "192": Gated(replace(BASE, tile_n=192, dtype="bfloat16", workers=1), "gelu_erf"),
    "pair": Gated(replace(LONG, **PAIR, dtype="float16")),
    "cluster": Gated(replace(BASE, m=400, cluster_m=2, cluster_n=2, tile_n=64), "relu"),
    "pairs": Gated(replace(BASE, m=500, n=300, pair=True, cluster_m=4, cluster_n=2), "identity"),
    "split": Gated(replace(LONG, tile_n=64, split_k=4)),
    "pair split": Gated(replace(LONG, **PAIR, split_k=2)),
    "stream": Gated(replace(LONG, tile_n=64, scheduler="stream_k", workers=7)),
    "pair stream": Gated(replace(LONG, **PAIR, scheduler="stream_k", workers=3)),
    "swap": Gated(replace(BASE, swap=True, batch=2)),
    "swap columns": Gated(replace(BASE, swap=True, out="columns", tile_n=64)),
    "swap pair": Gated(replace(LONG, swap=True, **PAIR)),
    "swap cluster": Gated(replace(BASE, swap=True, m=400, n=300, cluster_m=2, cluster_n=2), "gelu_erf"),
    "swap split": Gated(replace(LONG, swap=True, tile_n=64, split_k=2, **PAIR)),
    "swap stream": Gated(replace(LONG, swap=True, scheduler="stream_k", workers=5)),
    "halves": Gated(replace(WHOLE, batch=2, tile_n=64), form="halves"),
    "halves swap": Gated(replace(WHOLE, batch=2, swap=True), form="halves"),
    "interleaved 64": Gated(replace(WHOLE, batch=2, tile_n=64), form="interleaved"),
    "interleaved pair": Gated(replace(WHOLE, m=300, **PAIR), form="interleaved"),
    "interleaved swap": Gated(replace(WHOLE, swap=True), form="interleaved"),
    "interleaved swap pair": Gated(replace(WHOLE, swap=True, batch=2, **PAIR), form="interleaved"),
    "mxfp4": Gated(replace(BASE, a_format="mxfp4", b_format="mxfp4", alpha=2.0**-11, workers=0)),
    "mxfp8": Gated(replace(BASE, a_format="mxfp8_e5m2", b_format="mxfp8", alpha=2.0**-17, swap=True)),
    "factors": Gated(replace(BASE, alpha_tensor=True, a_global=0.5, b_global=-1.5, batch=0)),
}


@pytest.mark.parametrize("shape", dict.fromkeys(TEN_SHAPES), ids=str)
def test_ten_shapes(shape: tuple[int, int, int]) -> None:
    """The plan that is chosen; some rows and some columns of the result are compared."""
    m, n, k = shape
    problem = make(Gated(Case(m, n, k, dtype="float16", alpha=usual_alpha(k), workers=0, seed=1111)))
    with simulating(checks=False):
        c = problem.run()
    generator = np.random.default_rng(m)
    problem.check(c, rows=generator.integers(0, m, 32))
    problem.check(c, columns=generator.integers(0, n, 16))


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    problem = make(STRUCTURES[name])
    problem.check(problem.run())


@pytest.mark.parametrize("gate", GATE_NAMES)
@pytest.mark.parametrize("swap", [False, True])
def test_gates_are_accurate(gate: str, swap: bool) -> None:
    """Sums are exact here, so that all that is off is the gate and two products; arguments from −80 to 80."""
    worst = {"silu": 4e-6, "gelu_tanh": 2e-5, "gelu_erf": 2e-5, "relu": 2.0**-23, "identity": 2.0**-23}[gate]
    for alpha in (2.0**-9, 2.0**-6):
        problem = make(Gated(Case(128, 256, 512, exact=True, alpha=alpha, swap=swap), gate))
        (x, _), (y, _) = problem.products()
        assert x.min() < -8 * alpha * 2**9 and x.max() > 8 * alpha * 2**9
        right = GATES[gate][0](x) * y
        c = problem.run().double()
        assert ((c - right).abs() <= worst * right.abs() + 2.0**-122 * y.abs()).all()


def test_gates_of_infinity_and_nan() -> None:
    for gate in GATE_NAMES:
        problem = make(Gated(replace(BASE, exact=True, m=64, n=64, alpha=float("inf")), gate))
        (x, _), (y, _) = make(Gated(replace(BASE, exact=True, m=64, n=64, alpha=1.0), gate)).products()
        c = problem.run()
        assert (c[(x > 0) & (y > 0)] == float("inf")).all() and (c[(x > 0) & (y < 0)] == -float("inf")).all()
        assert make(Gated(replace(BASE, m=64, n=64, alpha=float("nan")), gate)).run().isnan().all()


@functools.cache
def _drawn(count: int, seed: int) -> list[Gated]:
    generator = np.random.default_rng(seed)
    drawn = (random_gated(generator, structures()) for _ in range(100 * count))
    return list(itertools.islice((g for g in drawn if g is not None), count))


@pytest.mark.parametrize("index", range(8))
def test_random(index: int) -> None:
    problem = make(_drawn(8, 5)[index])
    problem.check(problem.run())


@pytest.mark.slow
@pytest.mark.parametrize("index", range(100))
def test_random_more(index: int) -> None:
    (gated,) = _drawn(1, 1000 + index)
    problem = make(gated)
    problem.check(problem.run())


EXACT = {
    name: replace(g, case=replace(g.case, exact=True, alpha=2.0**-9, m=min(g.case.m, 300)))
    for name, g in STRUCTURES.items()
}


def _under_schedules(name: str, count: int) -> None:
    problem = make(EXACT[name])
    first = problem.run().clone()
    problem.check(first)
    for schedule in adversarial(count, seed=len(name)):
        with simulating(schedule=schedule):
            c = problem.run()
        assert c.equal(first), f"{schedule} gives other bits"


@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("name", ["pair split", "swap pair", "interleaved swap pair", "stream"])
def test_schedules_do_not_matter(name: str) -> None:
    _under_schedules(name, 3)


@pytest.mark.slow
@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("name", EXACT)
def test_twenty_schedules_do_not_matter(name: str) -> None:
    _under_schedules(name, 20)


@pytest.mark.sim_only("reads counters")
@pytest.mark.parametrize("name", ["64", "pair", "swap pair", "interleaved pair"])
def test_a_is_read_once_for_both_products(name: str) -> None:
    """DRAM traffic of the modelled L2 within 5 % of the operands with their scales, and of the output."""
    case = replace(STRUCTURES[name].case, m=512, n=512, k=1024, batch=0, out="rows", dtype="float16", workers=8)
    problem = make(replace(STRUCTURES[name], case=case))
    with simulating(counters=True) as runs:
        problem.check(problem.run())
    result = runs[0].result
    operands = (problem.a, *problem.weights)
    least = sum(x.data.numel() + x.blocked_scale().numel() for x in operands)
    assert least <= result.l2.read_bytes <= 1.05 * least
    assert result.l2.written_bytes + result.l2.dirty_bytes == problem.out.numel() * 2
    loaded = sum(e.global_read for e in result.engines if e.engine == "tma")
    # every stage once, with one A for two B (or the other way round); scales of B go to both CTAs of a pair
    rows, columns = (case.n, case.m) if case.swap else (case.m, case.n)
    parts = StagePlan(choose_config(problem)).parts
    stage = sum(size / 2 if case.pair and name.startswith("SFB") else size for name, size in parts)
    assert [name[0] for name, _ in parts[:3]] == (["A", "A", "B"] if case.swap else ["A", "B", "B"])
    assert loaded == rows // 128 * (columns // case.tile_n) * (case.k // 256) * stage


def choose_config(problem: Problem) -> GemmConfig:
    """The case's configuration as it is compiled."""
    case, swap = problem.gated.case, problem.gated.case.swap
    return replace(case.tiling(), products=2, gate="silu", shared="b" if swap else "a")


def test_plans_of_gated_problems() -> None:
    """Every plan fits; both ways round are among them, and a quantized result has row-major ones only."""
    problem = GemmProblem(256, 4096, 7168, products=2, gate="silu")
    plans = candidates(problem, ARCH, 148)
    assert {plan.swap for plan in plans} == {False, True}
    assert all(plan.config.shared == ("b" if plan.swap else "a") and plan.config.products == 2 for plan in plans)
    assert {plan.config.tile_n for plan in plans} == {64, 128, 192}
    quantized = replace(problem, out="nvfp4")
    assert not any(plan.swap for plan in candidates(quantized, ARCH, 148))
    interleaved = replace(problem, interleaved=True)
    assert choose(interleaved, ARCH, 148).config.interleaved
    assert not any(p.config.tile_n == 192 and not p.swap for p in candidates(interleaved, ARCH, 148))
    assert all(fits(g) for g in STRUCTURES.values() if g.case.workers)


@pytest.mark.parametrize("batch", [0, 2])
def test_interleave(batch: int) -> None:
    problem = make(Gated(replace(WHOLE, batch=batch)))
    both = interleave(*problem.weights)
    values = both.dequantize(torch.float64).unflatten(-2, (-1, 2, 128))
    for i, b in enumerate(problem.weights):
        assert values[..., i, :, :].flatten(-3, -2).equal(b.dequantize(torch.float64))


def test_interleave_takes_equal_global_scales(device: torch.device) -> None:
    """In tensors of their own, as loading a checkpoint makes them, or in one that ``quantize`` was given for both."""
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).to(device)
    scale = torch.tensor(0.01, device=device)
    shared = [quantize(x, global_scale=scale, backend="reference") for _ in range(2)]
    own = [replace(b, global_scale=scale.clone()) for b in shared]
    for b1, b2 in (shared, own):
        both = interleave(b1, b2)
        assert both.global_scale.equal(scale) and both.dequantize().equal(shared[0].dequantize().repeat(2, 1))


def test_forms_give_equal_bits() -> None:
    """Two weights, their halves in one, and interleaved: one kernel's order of sums, so one result."""
    problem = make(Gated(replace(WHOLE, dtype="float32", out="new"), form="halves"))
    b1, b2 = (BlockScaledTensor(x.data.clone(), to_blocked(x.scale)) for x in problem.alone)
    options = {"alpha": problem.alpha, "out_dtype": torch.float32, "config": problem.gated.case.plan()}
    halves = problem.run()
    assert gated_gemm(problem.a, b1, b2, **options).equal(halves)
    assert gated_gemm(problem.a, interleave(b1, b2), interleaved=True, **options).equal(halves)


def test_reference_backend() -> None:
    for form in ("two", "halves", "interleaved"):
        problem = make(Gated(replace(WHOLE, batch=2), "gelu_erf", form))
        problem.check(problem.run(backend="reference", config=None))


def test_gates_have_one_list() -> None:
    assert set(GATES) == set(GATE_NAMES) == set(REFERENCE)
    assert str(GemmConfig(products=2, gate="silu")) != str(GemmConfig(products=2, gate="silu", shared="b"))

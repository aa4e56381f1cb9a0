"""Random products that an H200 computed, in the simulator: the same bits, or within 2⁻²⁰ of the products' magnitudes.

``tests/gpu/record_products.py`` makes the recording and checks all of it; some problems are enough here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.record_products import Recorded, record
from support.hopper_products import DTYPES, KINDS, Case, Problem, random_case

from cute_nvfp4 import simulating

PATH = Path(__file__).parents[1] / "data" / "h200_products.npz"


@cache
def recorded() -> Recorded:
    return Recorded(PATH)


def first(which: Callable[[Case], bool]) -> int:
    """The first problem of which this is true."""
    return next(seed for seed in range(200) if which(random_case(seed)))


def some() -> list[int]:
    """A problem of each kind, exact and not; and one with a drawn plan."""
    found: dict[object, int] = {}
    for seed in range(200):
        case = random_case(seed)
        found.setdefault((case.kind, case.exact) if case.tiling < 0 else case.tiling == 3, seed)
    return sorted(found.values())


@pytest.mark.parametrize("seed", some())
def test_as_the_gpu(seed: int) -> None:
    assert not recorded().check(seed).error


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_as_the_gpu() -> None:
    outcomes = [recorded().check(seed) for seed in range(len(recorded().problems))]
    assert not [outcome for outcome in outcomes if outcome.error]


def test_what_was_recorded() -> None:
    """A Hopper GPU, enough problems of every kind, and few enough bytes."""
    assert recorded().about["capability"] == [9, 0] and len(recorded().problems) >= 200
    cases = [random_case(seed) for seed in range(200)]
    assert {case.kind for case in cases} == set(KINDS) and {case.out for case in cases} == set(DTYPES)
    assert 80 <= sum(case.exact for case in cases) <= 160 and len({case.tiling for case in cases}) >= 6
    assert PATH.stat().st_size < 100_000


def test_what_differs_is_noticed(tmp_path: Path) -> None:
    """Of a recording of the simulator: another bit, another number, other data."""
    seeds = {exact: first(lambda c, exact=exact: c.exact == exact and c.m < 17) for exact in (True, False)}
    path = tmp_path / "dry.npz"
    record(path, max(seeds.values()) + 1, "cpu", set(seeds.values()))
    dry = Recorded(path)
    for seed in seeds.values():
        outcome = dry.check(seed)
        assert not outcome.error and outcome.same_ptx
    dry.problems[seeds[True]]["bits"] = "0"
    dry.kept[seeds[False]][5] += Problem(random_case(seeds[False]), "cpu").magnitudes()[5] * 2.0**-18
    assert dry.check(seeds[True]).error == "other bits"
    assert "of the products" in dry.check(seeds[False]).error
    dry.problems[seeds[True]]["inputs"] = "0"
    assert "other data" in dry.check(seeds[True]).error


@pytest.mark.parametrize("seed", [first(lambda c, kind=kind: c.exact and c.kind == kind) for kind in KINDS[1:]])
def test_exact_data_is_exact(seed: int) -> None:
    """The result of such data is the exact product, rounded once; of two products, rounded to float32 before."""
    problem = Problem(random_case(seed), "cpu")
    x = problem.x.double() if isinstance(problem.x, torch.Tensor) else problem.x.dequantize(torch.float64)
    products = [x @ w.dequantize(torch.float64).t() for w in problem.weights]
    exact = products[0] * problem.alpha if len(products) == 1 else products[0] * products[1] / 16
    exact = exact if problem.bias is None else exact + problem.bias.double()
    with simulating("sm_90a"):
        out = problem.run()
    assert out.equal(exact.float().to(DTYPES[problem.case.out]))

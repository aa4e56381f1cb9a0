"""gemm() on sm_120a: the compiled kernel on full-range data, against float64; the bits of sm_100a on exact data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import gemm_problems
from support.gemm_problems import FORMAT_PAIRS, Case, make
from support.gemm_structures import Pairs, random_case

from cute_nvfp4 import simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.kernels.gemm.config import SM120_TILE_N
from cute_nvfp4.sim import adversarial

pytestmark = pytest.mark.sweep(8)


@pytest.fixture(autouse=True)
def architecture() -> Iterator[None]:
    with simulating("sm_120a"):
        yield


AXES = {
    "tile_n": SM120_TILE_N, "scheduler": ("static", "stream_k"), "raster": ("m", "n"), "stages": (0, 2),
    "formats": FORMAT_PAIRS,
}  # fmt: skip


def structures() -> dict[tuple, Case]:
    """Every structure of the kernel, by its values of ``AXES``."""
    return {
        values: Case(**dict(zip(AXES, values[:-1])), a_format=values[-1][0], b_format=values[-1][1], store="direct")
        for values in itertools.product(*AXES.values())
    }


def run(case: Case) -> torch.Tensor:
    problem = make(case)
    c = problem.run()
    gemm_problems.check(problem, c)
    return c


DRAWN = {values: Pairs(1).complete(structure) for values, structure in structures().items()}


@pytest.mark.parametrize("formats", FORMAT_PAIRS, ids="*".join)
@pytest.mark.parametrize("stages", AXES["stages"])
@pytest.mark.parametrize("raster", AXES["raster"])
@pytest.mark.parametrize("scheduler", AXES["scheduler"])
@pytest.mark.parametrize("tile_n", SM120_TILE_N)
def test_structures(tile_n: int, scheduler: str, raster: str, stages: int, formats: tuple[str, str]) -> None:
    run(replace(DRAWN[tile_n, scheduler, raster, stages, formats], store="direct"))


@pytest.mark.parametrize("seed", range(8))
def test_random_problems(seed: int) -> None:
    run(replace(random_case(np.random.default_rng(seed), [*structures().values()], max_k=1024), store="direct"))


@pytest.mark.parametrize(
    "shape", [(1, 1, 32), (129, 127, 160), (300, 3, 288), (130, 264, 1312), (20, 200, 544)], ids=str
)
@pytest.mark.parametrize("swap", [False, True])
def test_sizes(shape: tuple[int, int, int], swap: bool) -> None:
    run(Case(*shape, swap=swap, out="rows" if not swap else "columns", store="direct"))


@pytest.mark.parametrize("a,b", FORMAT_PAIRS)
def test_bits_of_sm_100a(a: str, b: str) -> None:
    """On data whose every sum has few bits."""
    case = Case(200, 136, 1056, a_format=a, b_format=b, exact=True, workers=0)
    found = []
    for arch in ("sm_100a", "sm_120a"):
        with simulating(arch) as runs:
            found.append(make(case).run())
        assert runs[0].kernel.arch == arch
    assert torch.equal(*found)
    assert found[0].double().equal(make(case).expected[0])


@pytest.mark.slow
@pytest.mark.parametrize("tile_n", SM120_TILE_N)
def test_schedules(tile_n: int) -> None:
    """The same bits, and no hazard, however warps and copies are scheduled."""
    case = Case(200, 136, 1312, tile_n=tile_n, workers=1, store="direct", stages=2)
    usual = run(case)
    for schedule in adversarial(3):
        with simulating(schedule=schedule):
            assert torch.equal(run(case), usual)


@pytest.mark.parametrize("tile_n", SM120_TILE_N)
def test_banks_and_sectors(tile_n: int) -> None:
    """``ldmatrix`` and A's scales are read without bank conflicts; so are B's where a tile is as wide as an atom."""
    with simulating(counters=True, checks=False) as runs:
        run(Case(256, 256, 1024, tile_n=tile_n, store="direct"))
    shared = [x for x in runs[0].result.memory if x.space == "shared" and x.kind == "load"]
    assert sum(x.requests for x in shared) > 0
    # what scales of a narrow tile lie in: of the sixteen bytes of four rows of an atom 64 columns need eight
    most = {16: 2, 32: 4, 64: 2, 128: 1}[tile_n]
    for x in shared:
        of_b = x.instruction.startswith("ld.shared") and x.conflicts > 0
        assert x.passes == x.ideal_passes * (most if of_b else 1), x


@pytest.mark.parametrize("changes,message", [
    ({"pair": True, "cluster_m": 2}, r"pair: got True, expected False: CTAs of sm_120a share nothing"),
    ({"split_k": 2}, r"split_k: got 2, expected 1"),
    ({"tile_n": 256}, r"tile_n: got 256, expected one of 16, 32, 64, 128"),
    ({"stages": 5}, r"shared memory: got 5 stages of 36864 .* expected at most 101376: \d+ too many"),
])  # fmt: skip
def test_plans_of_tcgen05_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        make(replace(Case(store="direct"), **changes)).run()

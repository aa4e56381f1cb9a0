"""What a GEMM asks of memory, as the simulator counts it: each operand once from DRAM, and less of L2 by multicast."""

from __future__ import annotations

import pytest
from support import gemm_problems
from support.gemm_observed import observing
from support.gemm_problems import Case, make

from cute_nvfp4 import simulating
from cute_nvfp4.sim import Result

BENCHMARK_SHAPES = ((128, 7168, 16384), (128, 4096, 7168), (128, 7168, 2048))
SMALL = Case(256, 512, 1024, tile_n=128, workers=2, dtype="float16", alpha=2.0**-20)


def counted(case: Case, **options: object) -> Result:
    problem = make(case)
    with observing() as seen, simulating(counters=True, **options):
        c = problem.run()
    gemm_problems.check(problem, c)
    (result,) = seen.results
    return result


def least(m: int, n: int, k: int) -> int:
    """Bytes of NVFP4 operands with their scales, and of an fp16 output."""
    return (m + n) * (k // 2 + k // 16) + 2 * m * n


def dram(result: Result) -> int:
    """Bytes from and to DRAM, those still in L2 at the end among them."""
    return result.l2.read_bytes + result.l2.written_bytes + result.l2.dirty_bytes


def loaded(result: Result) -> int:
    """Bytes that TMA loads ask L2 for; a multicast asks once."""
    return sum(engine.global_read for engine in result.engines if engine.engine == "tma")


@pytest.mark.parametrize(
    "text", ["", "swap=True", "cluster_m=2,cluster_n=2", "pair=True,cluster_m=2,cluster_n=2,tile_n=256", "split_k=2"]
)
def test_every_byte_once_from_dram(text: str) -> None:
    case = Case.parse(f"{SMALL},{text}".strip(","))
    result = counted(case)
    minimum = least(case.m, case.n, case.k)
    assert minimum <= dram(result) <= 1.01 * minimum
    assert result.distinct_bytes["store"] == 2 * case.m * case.n


def test_multicast_is_counted_once() -> None:
    """Of 2 x 4 tiles each asks for its rows and its columns; two by two they share both."""
    each = SMALL.k // 2 + SMALL.k // 16
    alone = loaded(counted(SMALL))
    assert alone == (4 * SMALL.m + 2 * SMALL.n) * each
    shared = counted(Case.parse(f"{SMALL},cluster_m=2,cluster_n=2"))
    assert loaded(shared) == alone // 2
    # what arrives is the same: every CTA has all it needs
    assert sum(engine.shared_written for engine in shared.engines if engine.engine == "tma") == alone


@pytest.mark.slow
@pytest.mark.parametrize("shape", BENCHMARK_SHAPES, ids=str)
def test_benchmark_shapes(shape: tuple[int, int, int]) -> None:
    """With the plans that are chosen for them, within a thousandth of the least."""
    m, n, k = shape
    result = counted(Case(m, n, k, workers=0, dtype="float16", out="new", alpha=2.0**-24), checks=False)
    assert least(m, n, k) <= dram(result) <= 1.001 * least(m, n, k)
    assert result.l2.refetched_bytes == 0

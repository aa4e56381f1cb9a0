"""The pipeline graph of a GEMM: its counts against those of the hardware's rules, written down here again, and against
the arrivals of simulated runs."""

from __future__ import annotations

import pytest
from support.gemm_observed import Observed, observing
from support.gemm_problems import Case, check, make
from support.gemm_structures import config_of, structures

from cute_nvfp4.kernels.gemm import pipeline_graph as graph
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.pipeline_graph import (
    Arrivals,
    Edge,
    barrier_words,
    first_barriers,
)
from cute_nvfp4.kernels.gemm.sm100.memory_plan import Tcgen05SharedPlan, TensorPlan, pipelines

EPILOGUE_WARPS = 4
# one of each kind, with every ring gone round more than once
RUNS = (
    "m=300,n=136,k=1056,stages=2,workers=1",
    "m=500,n=264,k=1056,stages=3,workers=1,pair=True,cluster_m=2,acc_stages=1",
    "m=500,n=264,k=800,stages=2,workers=1,tile_n=64,cluster_m=2,cluster_n=2",
    "m=500,n=264,k=544,stages=2,workers=1,tile_n=64,cluster_m=4,cluster_n=2",
    "m=600,n=264,k=800,stages=2,workers=1,tile_n=128,cluster_m=4,cluster_n=2,pair=True",
    "m=300,n=136,k=1312,stages=2,workers=1,split_k=4",
    "m=500,n=136,k=1056,stages=2,workers=1,split_k=2,pair=True,cluster_m=2",
    "m=300,n=136,k=1312,stages=2,workers=2,scheduler=stream_k,tile_n=64",
)


def mmas_that_read(config: GemmConfig) -> int:
    """MMAs that read a stage of one CTA: by multicast those of its row of the cluster, and those of its column."""
    m, n = config.cluster[0] // config.ctas, config.cluster[1]
    return m + n - 1


def stage_bytes(config: GemmConfig) -> int:
    """Bytes that come for one MMA's stage. A row of a stage is 128 bytes; a scale is a byte; scales come for 128 rows
    (or columns) together; each CTA of a pair has its own rows of A, half of the columns of B, and all scales of B. Of
    elements of four bits among others of eight the padding does not come."""
    scales = config.tile_k // config.kind.block
    columns = -(-config.tile_n // 128) * 128
    eight = max(8 // fmt.elements_per_byte for fmt in config.formats) == 8
    row_a, row_b = (64 if eight and fmt.elements_per_byte == 2 else 128 for fmt in config.formats)
    each = 128 * row_a + 128 * scales + columns * scales
    return config.ctas * each + config.tile_n * row_b


def expected(config: GemmConfig) -> dict[str, tuple[int, int, int]]:
    """(arrivals of full, bytes of full, arrivals of empty) of each edge."""
    counts = {
        "operands": (1, stage_bytes(config), mmas_that_read(config)),
        "accumulators": (1, 0, EPILOGUE_WARPS * config.ctas),
    }
    if config.split_k > 1:
        others = config.split_k - 1
        counts["partials"] = (1, others * 128 * config.tile_n // config.split_k * 4, others * EPILOGUE_WARPS)
    return counts


def test_counts_of_every_structure() -> None:
    """Also: every count says what its terms are."""
    for case in structures():
        config = config_of(case)
        edges = {edge.name: edge for edge in pipelines(config)}
        assert {
            name: (edge.full.count, edge.full.tx_bytes, edge.empty.count) for name, edge in edges.items()
        } == expected(config)
        for edge in edges.values():
            for arrivals in (edge.full, edge.empty):
                assert sum(n for _, n in arrivals.terms) == arrivals.count and f"= {arrivals.count}" in str(arrivals)


def test_barriers_lie_one_after_the_other() -> None:
    for case in structures():
        config = config_of(case)
        stages = Tcgen05SharedPlan(config).stages
        depths = {"operands": stages, "accumulators": TensorPlan(config).acc_stages, "partials": 1}
        words = []
        for name, first in first_barriers(pipelines(config)).items():
            words += range(first, first + 2 * depths[name])
        assert words == list(range(barrier_words(pipelines(config))))


def simulated(case: Case) -> tuple[Observed, GemmConfig]:
    problem = make(case)
    with observing() as seen:
        check(problem, problem.run())
    return seen, config_of(case)


def ring(seen: Observed, cta: int, first: int, depth: int) -> tuple[set[int], int, int, int]:
    """(initial counts, phases, arrivals, bytes) of a ring of barriers together."""
    found = [seen.of(cta, first + i) for i in range(depth)]
    return {f[0] for f in found}, *(sum(f[i] for f in found) for i in (1, 2, 3))


@pytest.mark.parametrize("text", RUNS)
def test_arrivals_of_a_run(text: str) -> None:
    """Every barrier has the count of the graph, and gets so many arrivals and bytes in each phase; phases are as many
    as tiles and steps of K, and all that has been filled has been emptied when the kernel ends."""
    case = Case.parse(text)
    seen, config = simulated(case)
    first_of = first_barriers(pipelines(config))
    phases: dict[tuple[str, str, bool], list[int]] = {}
    for cta in range(seen.barriers.wave.count):
        for edge in pipelines(config):
            firsts = first_of[edge.name], first_of[edge.name] + edge.stages
            for which, arrivals, first in zip(("full", "empty"), (edge.full, edge.empty), firsts):
                counts, ended, arrived, tx_bytes = ring(seen, cta, first, edge.stages)
                assert counts == {arrivals.count}
                assert (arrived, tx_bytes) == (arrivals.count * ended, arrivals.tx_bytes * ended)
                phases.setdefault((edge.name, which, cta % config.ctas == 0), []).append(ended)
    tiles, low, high = work(case, config)
    for (name, which, leads), found in phases.items():
        if not leads and (name, which) in (("operands", "full"), ("accumulators", "empty")):
            # what lies in the odd CTA of a pair is in the even one's charge
            assert set(found) == {0}
        elif name == "operands":
            assert all(low <= x <= high for x in found)
        elif case.scheduler == "stream_k":
            # a tile cut in two is two accumulators
            assert tiles <= sum(found) <= tiles + case.workers - 1
        else:
            # nobody gives back the room for partial sums after the last tile
            assert set(found) == {tiles - ((name, which) == ("partials", "empty"))}


def work(case: Case, config: GemmConfig) -> tuple[int, int, int]:
    """(tiles, fewest and most steps of K) of each CTA, or of all workers together for stream-K."""
    (cm, cn), split = config.cluster, config.split_k
    tiles = -(-case.m // (128 * cm)) * -(-case.n // (case.tile_n * cn))
    steps = -(-case.k // config.tile_k)
    if case.scheduler == "stream_k":
        return tiles, tiles * steps // case.workers, -(-tiles * steps // case.workers)
    return tiles, steps // split * tiles, -(-steps // split) * tiles


@pytest.mark.parametrize("count,tx_bytes", [(0, 0), (1 << 20, 0), (1, 1 << 20)])
def test_counts_no_barrier_can_hold(count: int, tx_bytes: int) -> None:
    arrivals = Arrivals((("what", count),), tx_bytes)
    edge = Edge("operands", "load", "mma", 1, arrivals, Arrivals((("what", 1),)))
    with pytest.raises(ValueError, match=rf"full barrier of operands: got {count} \(what\) = {count}.*expected 1 to"):
        graph._check(edge)

"""The pipeline graph of the kernels with packed weights: its counts against those of the kernel's rules, written down
here again, and against the arrivals of simulated runs."""

from __future__ import annotations

import pytest
import torch
from support.gemm_observed import observing

from cute_nvfp4 import gemm, prepare_weight, quantize, simulating
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
from cute_nvfp4.kernels.gemm.packed.pipelines import stream_pipelines, wgmma_pipelines
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.pipeline_graph import Edge, barrier_words, first_barriers
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.schedules import EqualShares, OverlappedSums, SharedTiles
from cute_nvfp4.planning.packed import PackedPlan

SHARED = {"schedule": SharedTiles(split_k=2)}
TURNS = {"schedule": SharedTiles(split_k=2, k_groups=2)}
# (M, N, K), and plans whose rings go round more than once
RUNS = {
    "stream-K": ((24, 130, 640), PackedPlan(WgmmaConfig(tile_n=16, stages=2), 3)),
    "multicast": (
        (24, 300, 384),
        PackedPlan(WgmmaConfig(tile_n=16, schedule=EqualShares(cluster_rows=2), stages=2), 2),
    ),
    "turns": ((20, 130, 1536), PackedPlan(WgmmaConfig(tile_n=32, warpgroups=4, stages=4, **TURNS), 2)),
    "split": ((20, 130, 640), PackedPlan(WgmmaConfig(tile_n=64, stage_tiles=1, stages=3, **SHARED), 2)),
    "overlap": ((20, 130, 768), PackedPlan(WgmmaConfig(stage_tiles=1, stages=3, schedule=OverlappedSums()), 2)),
    "streaming": ((9, 130, 1024), PackedPlan(StreamConfig(columns=16, stages=4), 2)),
    "slabs": ((1, 70, 1024), PackedPlan(StreamConfig(slabs=4, warps_m=1, warps_k=8, stages=8), 3)),
}


def graph(plan: PackedPlan) -> tuple[Edge, ...]:
    return (stream_pipelines if plan.streams else wgmma_pipelines)(plan.config)


def expected(plan: PackedPlan) -> dict[str, tuple[int, int, int | None]]:
    """(arrivals of full, bytes of full, arrivals of empty) of each edge. A packed tile of 128 rows by 64 has 4608 bytes
    of codes and scales; a row of x, 128 bytes for each."""
    c = plan.config
    if plan.streams:
        each = c.slabs * 4608 // 8 + c.columns * 128
        return {"operands": (2, c.stage_tiles * each, 32 * c.warps_m)}
    rows = 64 * c.warpgroups // c.k_groups
    stage = c.stage_tiles * (rows * 4608 // 128 + c.tile_n * 128)
    readers = 2 * rows + (c.cluster_rows - 1) * rows // 16
    counts: dict[str, tuple[int, int, int | None]] = {"operands": (2, stage, readers)}
    if c.split_k > 1:
        # of an epilogue tile of at most sixteen columns, from each warpgroup of each other CTA with these columns
        columns = min(16, c.tile_n // (c.split_k * c.k_groups))
        counts["partials"] = (1, (c.split_k - 1) * rows * columns * 4, None)
    return counts


def test_counts_of_groups() -> None:
    """Rows of x come by ``cp.async``: an arrival of each lane, and no bytes that the barrier counts."""
    (edge,) = stream_pipelines(GroupedStreamConfig(slabs=4, warps_m=2, stage_tiles=2))
    assert (edge.full.count, edge.full.tx_bytes, edge.empty.count) == (33, 2 * 4 * 4608 // 8, 64)


@pytest.mark.parametrize("name", RUNS)
def test_counts(name: str) -> None:
    _, plan = RUNS[name]
    edges = {edge.name: edge for edge in graph(plan)}
    assert {
        name: (edge.full.count, edge.full.tx_bytes, None if edge.empty is None else edge.empty.count)
        for name, edge in edges.items()
    } == expected(plan)


@pytest.mark.sim_only("counts the arrivals of a run")
@pytest.mark.parametrize("name", RUNS)
def test_arrivals_of_a_run(name: str) -> None:
    """Every barrier has the count of the graph, and gets so many arrivals and bytes in each phase."""
    (m, n, k), plan = RUNS[name]
    weight = prepare_weight(quantize(torch.randn(n, k)))
    x = torch.randn(m, k).bfloat16()
    with simulating("sm_90a"), observing() as seen:
        gemm(x, weight, config=plan)
    edges, first_of = graph(plan), first_barriers(graph(plan))
    assert len(seen.barriers.offset_of) == barrier_words(edges)
    for edge in edges:
        for i, (which, arrivals) in enumerate(edge.arrivals.items()):
            ended = 0
            for cta in range(seen.barriers.wave.count):
                for stage in range(edge.stages):
                    count, phases, arrived, tx_bytes = seen.of(cta, first_of[edge.name] + i * edge.stages + stage)
                    assert count == arrivals.count and arrived == count * phases
                    # half of the columns of x come while sums travel
                    whole = name != "overlap" or edge.name != "operands"
                    most = arrivals.tx_bytes * phases
                    assert tx_bytes == most if whole else most / 2 <= tx_bytes <= most
                    ended += phases
            assert ended > (edge.stages * seen.barriers.wave.count if edge.name == "operands" else 0), which

"""grouped_gemm() and its contiguous form on full-range data: the compiled kernels against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from support import grouped_problems
from support.grouped_problems import Grouped, make, random_grouped

from cute_nvfp4 import BlockScaledTensor, grouped_gemm, quantize, simulating
from cute_nvfp4.grouped_rows import GroupedRows
from cute_nvfp4.sim import adversarial
from tests.simulator.blackwell.shapes import GROUP_SHAPES

pytestmark = [pytest.mark.kernels("sm_100a", "sm_103a"), pytest.mark.sweep(8)]
RAGGED = ((80, 128, 256), (129, 203, 544), (1, 1, 32), (300, 72, 1056), (5, 264, 96))
DEALT = tuple((m, 200, 544) for m in (80, 0, 130, 1, 300, 0))
PAIR = {"pair": True, "cluster": (2, 1)}


def run(grouped: Grouped) -> list[torch.Tensor]:
    problem = make(grouped)
    results = problem.run()
    problem.check(results)
    return results


@pytest.mark.parametrize("shape", GROUP_SHAPES, ids=lambda shape: "+".join("x".join(map(str, g)) for g in shape))
def test_ten_cases(shape: tuple) -> None:
    """The correctness cases of nvfp4_group_gemm, with the plans that are chosen for them."""
    sizes = tuple(tuple(group[:3]) for group in shape)
    run(Grouped(sizes, workers=0, dtype="float16", out="new", exact=False))


STRUCTURES = {
    "64": Grouped(RAGGED, tile_n=64, workers=2, out="sliced", dtype="bfloat16"),
    "128": Grouped(RAGGED, alphas="each", out="strided", globals_=True),
    "192 raster": Grouped(RAGGED, tile_n=192, raster="n", alphas="one", dtype="float16", exact=True),
    "256 swap": Grouped(RAGGED, tile_n=256, swap=True, workers=1, out="new"),
    "pair": Grouped(RAGGED, tile_n=192, **PAIR, out="sliced", alphas="number"),
    "pair swap": Grouped(RAGGED, tile_n=64, **PAIR, swap=True, workers=2, globals_=True, alphas="each"),
    "multicast": Grouped(RAGGED, tile_n=64, cluster=(2, 2), stages=2, acc_stages=1, workers=2),
    "pair multicast": Grouped(RAGGED, pair=True, cluster=(4, 2), swap=True, workers=2, dtype="bfloat16"),
    "split": Grouped(tuple((m, n, k + 512) for m, n, k in RAGGED), split_k=2, workers=2, tile_n=64),
    "one group": Grouped(((200, 136, 544),), workers=20),
    "empty groups": Grouped(((0, 8, 64), *RAGGED[:2], (7, 0, 32), RAGGED[2], (0, 0 + 1, 32)), alphas="each"),
    "mxfp4": Grouped(RAGGED, a_format="mxfp4", b_format="mxfp4"),
    "mxfp8": Grouped(RAGGED, a_format="mxfp8", b_format="mxfp8_e5m2", swap=True, **PAIR),
    "workspace": Grouped(RAGGED, maps="workspace", out="strided", alphas="each", globals_=True),
    "workspace pair swap": Grouped(RAGGED, maps="workspace", tile_n=64, **PAIR, swap=True, workers=2),
    "workspace multicast": Grouped(RAGGED, maps="workspace", tile_n=256, cluster=(2, 2), workers=2),
    "contiguous": Grouped(DEALT, True, before=2, after=7, alphas="each", globals_=True),
    "contiguous swap": Grouped(DEALT, True, tile_n=64, **PAIR, swap=True, dtype="bfloat16", alphas="one"),
    "contiguous multicast": Grouped(DEALT, True, cluster=(2, 2), tile_n=192, offsets="ints", workers=1),
    "contiguous mxfp8": Grouped(DEALT, True, tile_n=64, swap=True, a_format="mxfp8", b_format="mxfp8", out="sliced"),
    "contiguous split": Grouped(DEALT, True, tile_n=64, split_k=2, after=1),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    run(STRUCTURES[name])


def test_sixteen_groups_and_one_more() -> None:
    """The most whose maps are parameters; one more, and a kernel builds them."""
    sizes = tuple((1 + 7 * i % 40, 3 + 11 * i % 70, 32 * (1 + i % 9)) for i in range(17))
    for count in (16, 17):
        run(Grouped(sizes[:count], tile_n=64, workers=5))


@pytest.mark.parametrize("groups", [33, 64])
def test_many_groups(groups: int) -> None:
    """More than a window of the table, some of them empty, in every form."""
    sizes = tuple(((0, 3)[i % 7 > 0] + i % 7, 5 + i % 40, 32 * (1 + i % 3)) for i in range(groups))
    run(Grouped(sizes, tile_n=64, workers=3, alphas="each"))
    run(Grouped(tuple((m, 40, 96) for m, _, _ in sizes), True, tile_n=64, swap=True, workers=3, alphas="each"))


@pytest.mark.slow
def test_most_groups() -> None:
    """Every window of the table."""
    sizes = tuple((i % 3, 8, 32) for i in range(1024))
    run(Grouped(sizes, True, tile_n=64, swap=True, workers=4))
    run(Grouped(tuple((1 + m, n, k) for m, n, k in sizes), tile_n=64, workers=4))


def test_both_ways_of_maps_give_the_same_bits() -> None:
    grouped = Grouped(RAGGED, **PAIR, tile_n=64)
    few, many = run(grouped), run(replace(grouped, maps="workspace"))
    assert all(x.equal(y) for x, y in zip(few, many))


def test_contiguous_form_and_list_give_the_same_bits() -> None:
    problem = make(Grouped(DEALT, True, workers=0))
    results = problem.run()
    pairs = [None if x is None else (x.a, x.b) for x in problem.groups]
    for result, pair in zip(results, pairs):
        if pair is not None:
            a, b = (replace(x, scale=grouped_problems.blocked_scales(x.rowmajor_scale(), x.format)) for x in pair)
            (c,) = grouped_problems.grouped_gemm([(a, b)], out_dtype=torch.float32)
            assert c.equal(result)


@pytest.mark.parametrize("name", ["128", "contiguous"])
def test_reference_backend(name: str) -> None:
    problem = make(STRUCTURES[name])
    problem.check(problem.run(backend="reference"))


# --- offsets on the device


@pytest.mark.parametrize(
    "offsets,used,status",
    [
        ((0, 100, 60, 200, 200), (0, 100, 100, 200, 200), 3),
        ((0, 100, 160, 900, 950), (0, 100, 160, 300, 300), 4),
        ((-5, 100, 160, 170, 300), (0, 100, 160, 170, 300), 1),
        ((310, 5, 400, 7, 9), (300, 300, 300, 300, 300), 1),
        ((10, 10, 10, 10, 10), (10, 10, 10, 10, 10), 0),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_bad_offsets_are_clamped_and_reported(offsets: tuple, used: tuple, status: int, swap: bool) -> None:
    """Nothing out of bounds is read or written, and the word says which offset was the first."""
    sizes = tuple((y - x, 72, 96) for x, y in pairwise(used))
    problem = make(Grouped(sizes, True, before=used[0], after=300 - used[-1], tile_n=64, swap=swap))
    rows = GroupedRows(
        problem.rows.data, problem.rows.scale, torch.tensor(offsets, dtype=torch.int32, device=problem.rows.data.device)
    )
    for backend in ("auto", "reference"):
        bad = replace(problem, rows=rows)
        out = bad.out.fill_(math.nan)
        plan = None if backend == "reference" else bad.grouped.plan()
        grouped_problems.grouped_gemm_contiguous(
            rows, bad.stack, out=out, status=bad.status, config=plan, backend=backend
        )
        assert bad.status.item() == status
        bad.status.zero_()
        replace(bad, rows=problem.rows).check([out[x:y] for x, y in pairwise(used)])


def test_too_few_scales_are_reported() -> None:
    """Those that are not there are zeros."""
    problem = make(Grouped(((130, 72, 96), (5, 72, 96)), True, tile_n=64))
    rows = GroupedRows(problem.rows.data, problem.rows.scale[: 2 * problem.rows.atom_bytes], problem.rows.offsets)
    bad = replace(problem, rows=rows)
    for backend in ("auto", "reference"):
        first, second = bad.run(backend)
        assert bad.status.item() == -1
        grouped_problems.gemm_problems.check(problem.groups[0], first)
        assert (second == 0).all()


def test_scales_of_groups() -> None:
    """``GroupedRows.of`` puts each group's scales at atoms of its own, padded with zeros, whatever the offsets."""
    generator = np.random.default_rng(3)
    for _ in range(20):
        groups = int(generator.integers(1, 9))
        edges = [int(generator.integers(3))]
        for _ in range(groups):
            edges.append(edges[-1] + int(generator.integers(4) and generator.integers(300)))
        total = max(edges[-1] + int(generator.integers(3)), 1)
        whole = grouped_problems.gemm_problems.make(grouped_problems.gemm_problems.Case(total, 8, 96, batch=0)).a
        rows = GroupedRows.of(whole, torch.tensor(edges, dtype=torch.int32, device=whole.data.device))
        scale, atom = whole.rowmajor_scale()[0], 0
        for x, y in pairwise(edges):
            if y > x:
                assert rows.matrix(x, y, atom).rowmajor_scale()[0].equal(scale[x:y])
            atom += -(-(y - x) // 128)
        assert atom <= rows.atoms
        assert int((rows.scale != 0).sum()) == int((scale[edges[0] : edges[-1]] != 0).sum())


# --- random problems


@pytest.mark.parametrize("seed", range(6))
def test_random(seed: int) -> None:
    run(random_grouped(np.random.default_rng([17, seed]), max_groups=12))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_more(seed: int) -> None:
    run(random_grouped(np.random.default_rng([18, seed])))


# --- schedules and traffic


def _under_schedules(name: str, count: int) -> None:
    problem = make(replace(STRUCTURES[name], exact=True))
    first = [x.clone() for x in problem.run()]
    problem.check(first)
    for schedule in adversarial(count, seed=len(name)):
        with simulating(schedule=schedule):
            results = problem.run()
        assert all(x.equal(y) for x, y in zip(results, first)), f"{schedule} gives other bits"


@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("name", ["pair swap", "workspace", "contiguous swap"])
def test_schedules_do_not_matter(name: str) -> None:
    _under_schedules(name, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("name", STRUCTURES)
def test_twenty_schedules_do_not_matter(name: str) -> None:
    _under_schedules(name, 20)


BENCHMARK = tuple((m, 512, 1024) for m in (80, 176, 128, 72, 64, 248, 96, 160))
"""The groups of the first benchmark case, with an eighth of its N and a seventh of its K."""


@pytest.mark.sim_only("reads counters")
@pytest.mark.parametrize("maps", ["", "workspace", "contiguous"])
def test_traffic_is_near_the_minimum(maps: str) -> None:
    """DRAM traffic of the modelled L2 within 5 % of every operand, scale and result byte once."""
    kind = {"contiguous": True} if maps == "contiguous" else {"maps": maps}
    problem = make(Grouped(BENCHMARK, tile_n=64, **PAIR, swap=True, workers=10, dtype="float16", exact=True, **kind))
    with simulating(counters=True) as runs:
        problem.check(problem.run())
    results = [run.result for run in runs]
    assert len(results) == (2 if maps == "workspace" else 1)
    least = sum(m * k * 9 // 16 + n * k * 9 // 16 for m, n, k in BENCHMARK)
    written = sum(2 * m * n for m, n, _ in BENCHMARK)
    assert least <= results[-1].l2.read_bytes <= 1.05 * least
    assert sum(x.l2.written_bytes + x.l2.dirty_bytes for x in results) <= 1.05 * written


def test_where_global_scales_are() -> None:
    """One for all groups, neighbours in memory, or apart: the same plan never serves two of them."""
    sizes = ((3, 8), (0, 8), (5, 8))
    row = torch.tensor([0.5, 2.0, 3.0, 0.25, 7.0])
    ways = {
        "neighbours, but for the empty group": [row[1], row[4], row[2]],
        "neighbours of the empty group": [row[1], row[2], row[3]],
        "apart": [row[0].clone(), row[1].clone(), row[2].clone()],
        "one": [row[2]] * 3,
        "not of all": [None, row[1], row[3]],
        "backwards": [row[3], row[2], row[1]],
    }
    alpha = torch.tensor([1.5, 9.0, 2.5])
    with simulating("sm_100a"):
        for _ in range(2):
            for left in ways.values():
                groups = [
                    (None if m == 0 else scaled(m, a), scaled(n, b))
                    for (m, n), a, b in zip(sizes, left, [row[0], row[0], row[1]])
                ]
                options = {"alpha": alpha, "out_dtype": torch.float32}
                got = grouped_gemm(groups, **options, backend="sim")
                for x, y in zip(got, grouped_gemm(groups, **options, backend="reference")):
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def scaled(rows: int, global_scale: torch.Tensor | None) -> BlockScaledTensor:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    plain = quantize(x.abs(), global_scale=None, backend="reference")
    return BlockScaledTensor(plain.data, plain.scale, global_scale)

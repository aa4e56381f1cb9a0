"""Simple tcgen05 kernels, from Python through PTX to numbers, against an exact reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from blackwell import programs, shapes
from blackwell.cases import Case, forty
from blackwell.tile import Tile

from cute_nvfp4.sim import Schedule, adversarial

QUAD_TILE = Tile(m=256, pair=True, cluster=(2, 2))
WIDE_TILE = Tile(n=256, stages=2)
SMALL = [
    ("gemm", (128, 128, 256)),
    ("gemm", (128, 256, 1280)),  # more steps than stages
    ("gemm", (72, 136, 512)),  # one tile and a bit, tails in both
    ("gemm", (200, 264, 288)),  # K ends inside an MMA
    ("gemm", (130, 128, 256, 2)),
    ("dual", (128, 128, 256)),
    ("dual", (136, 200, 1056)),
    ("group", ((96, 128, 256), (128, 256, 512))),
    ("group", ((40, 136, 256), (56, 72, 1312), (136, 128, 64))),
]
PAIR = [
    (programs.PAIR_TILE, (256, 128, 256), 1),
    (programs.PAIR_TILE, (200, 136, 1312), 2),
    (programs.PAIR_TILE, (600, 264, 512), 2),  # several tiles a cluster: both accumulators, twice
    (QUAD_TILE, (256, 256, 512), 1),
    (QUAD_TILE, (300, 600, 1312, 2), 2),
]
SCHEDULES = adversarial(6)


def simulate(case: Case, **options) -> None:
    run, check = case.prepare()
    run(**options)
    check()


@pytest.mark.sweep
@pytest.mark.parametrize("data", ["public", "full"])
@pytest.mark.parametrize("problem,shape", SMALL, ids=str)
def test_small(problem: str, shape: tuple, data: str) -> None:
    simulate(Case(problem, shape, data), checks=True)


@pytest.mark.parametrize("tile,shape,clusters", PAIR, ids=str)
def test_pairs(tile: Tile, shape: tuple, clusters: int) -> None:
    """Two CTAs an MMA, in clusters of 2×1 and 2×2."""
    product = shapes.make("gemm", shape, "full")
    programs.run_pair(product, tile, clusters, checks=True)
    shapes.check(product)


def test_wide_tile() -> None:
    """N of 256, and accumulator and scales together in all of 512 columns."""
    product = shapes.make("gemm", (128, 328, 800), "full")
    programs.run_gemm(product, WIDE_TILE, checks=True)
    shapes.check(product)


def test_one_cta_serves_every_group() -> None:
    """Descriptors of one CTA, rewritten for each problem."""
    sizes = ((64, 72, 256), (200, 136, 96), (8, 8, 32))
    products = [shapes.make("group", s, "full", i) for i, s in enumerate(sizes)]
    programs.run_group(products, ctas=1, checks=True)
    for product in products:
        shapes.check(product)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("run", [programs.run_gemm, programs.run_pair], ids=["gemm", "pair"])
def test_schedules(run: Callable, schedule: Schedule) -> None:
    """Engines eager, lazy and random. Sums of public data are exact in fp32, so that there is one right answer."""
    product = shapes.make("gemm", (136, 136, 1312))
    run(product, schedule=schedule)
    exact = product.a.values(torch.float64)[0] @ product.bs[0].values(torch.float64)[0].T
    assert torch.equal(product.c[0], exact.to(torch.float16))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_of_groups(schedule: Schedule) -> None:
    products = [shapes.make("group", s, "full", i) for i, s in enumerate(((64, 72, 1312), (136, 136, 96)))]
    programs.run_group(products, ctas=2, schedule=schedule)
    for product in products:
        shapes.check(product)


@pytest.mark.parametrize("case", forty("full"), ids=str)
@pytest.mark.slow
def test_forty(case: Case) -> None:
    simulate(case, checks=True)


@pytest.mark.parametrize("case", [c for c in forty("full") if c.problem == "gemm"], ids=str)
@pytest.mark.slow
def test_ten_on_pairs(case: Case) -> None:
    simulate(Case(case.problem, case.shape, case.data, "pair"), checks=True)


@pytest.mark.parametrize(
    "kernel,instructions",
    [
        (
            lambda: programs.compile_gemm(programs.GEMM_TILE),
            (
                "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
                "tcgen05.cp.cta_group::1.32x128b.warpx4",
                "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes",
            ),
        ),
        (
            lambda: programs.compile_pair(QUAD_TILE),
            (
                "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16",
                "tcgen05.cp.cta_group::2.32x128b.warpx4",
                "mbarrier::complete_tx::bytes.multicast::cluster",
                "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group",
                "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster",
            ),
        ),
        (
            lambda: programs.compile_group(programs.GEMM_TILE),
            (
                "tensormap.replace.tile.global_address.shared::cta",
                "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu",
                "fence.proxy.tensormap::generic.acquire.gpu",
            ),
        ),
    ],
    ids=["gemm", "pair", "group"],
)
def test_the_kernels_use_what_they_are_to_test(kernel, instructions) -> None:
    for instruction in instructions:
        assert instruction in kernel().ptx


def test_the_judge_sees_one_wrong_element() -> None:
    """A right answer passes; one element off by three units of fp16, or not written, does not."""
    product = shapes.make("gemm", (40, 24, 512), "full")
    exact = product.a.values(torch.float64)[0] @ product.bs[0].values(torch.float64)[0].T
    product.c[0] = exact.to(torch.float16)
    assert shapes.check(product) <= 1
    at = divmod(int(exact.abs().argmax()), 24)
    product.c[(0, *at)] *= 1 + 3 * 2.0**-10
    with pytest.raises(AssertionError, match="1 of 960 elements are wrong"):
        shapes.check(product)
    product.c[(0, *at)] = torch.nan
    with pytest.raises(AssertionError, match="not written"):
        shapes.check(product)


def test_full_data_has_every_code() -> None:
    product = shapes.make("gemm", (256, 256, 2048), "full")
    for matrix in (product.a, product.bs[0]):
        assert len(matrix.data.unique()) == 256
        assert matrix.scale.unique().tolist() == list(range(127))
    padded = shapes.make("gemm", (130, 8, 256), "full")
    assert int((padded.a.blocked == 0x7F).sum()) == 126 * 16 and not (padded.a.scale == 0x7F).any()

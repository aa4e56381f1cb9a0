"""A computed global scale in one launch, where each cluster finds the largest magnitude on its own, and in two."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Uint32
from support.mutants import (
    BOTH,
    FIRST,
    LAST,
    Change,
    Mutant,
    Source,
    at,
    become,
    drop,
    is_noticed,
    outcome,
    parameters,
    plan_anew,
)
from support.quantize_problems import DTYPES, SWEEP, TILE_PAIRS, differences, rules

from cute_nvfp4 import simulating
from cute_nvfp4.kernels.arith import mod
from cute_nvfp4.kernels.quantize import amax
from cute_nvfp4.planning import quantize as planning
from cute_nvfp4.ptx.cluster import remote_address, store_remote
from cute_nvfp4.quantization.hadamard import Hadamard
from cute_nvfp4.quantization.rules import resolve_format, resolve_rule
from cute_nvfp4.target import architecture

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned")]
CLUSTERS = (1, 2, 4, 8)
TILE_RULES = [rule for format, rule in TILE_PAIRS if format == "nvfp4"]
ROTATED = {"hadamard": Hadamard.from_seed(1)}


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """CTAs of the clusters that compute the global scale; 0 for two launches."""
    monkeypatch.setattr(planning, "_best_cluster", lambda *_: request.param)
    plan_anew(monkeypatch)
    return request.param


def of_clusters(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cluster", sizes, indirect=True)


def random(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all sizes; some blocks are zeros, and some have NaN or infinity."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows + k))
    x *= torch.logspace(-4, 2, rows)[torch.randperm(rows, generator=torch.Generator().manual_seed(k)), None]
    blocks = x.view(-1, 16)
    blocks[1::7] = 0.0
    for i, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        blocks[i + 2 :: 11, 5 * i] = value
    return x.to(dtype)


def check(x: torch.Tensor, cluster: int, rule: str = "max", **options: object) -> None:
    """As many launches as expected give the bits of the reference."""
    with simulating() as runs:
        assert differences(x, "nvfp4", rule, global_scale="auto", **options) == []
    assert [run.name for run in runs] in ([], ["quantize"] if cluster else ["amax", "quantize"])


@SWEEP
@of_clusters(0, *CLUSTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", rules("nvfp4"))
@pytest.mark.parametrize("rows,k,layout", [(19, 16 * 37, "blocked"), (33, 16 * 3, "rowmajor")])
def test_rows(arch: str, rows: int, k: int, layout: str, rule: str, dtype: torch.dtype, cluster: int) -> None:
    """Rows and blocks that a work tile has too many of."""
    check(random(rows, k, dtype), cluster, rule, scale_layout=layout)


@SWEEP
@of_clusters(0, 1, 8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", TILE_RULES)
def test_tiles(arch: str, rule: str, dtype: torch.dtype, cluster: int) -> None:
    """Clusters with CTAs that have no work tile, which must come to the barrier as well."""
    check(random(19, 16 * 37, dtype), cluster, rule, block_2d=True)


@SWEEP
@of_clusters(0, 1, 8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, ROTATED, {"block_2d": True}, ROTATED | {"seed": 3}], ids=str)
def test_transposed(arch: str, options: dict, dtype: torch.dtype, cluster: int) -> None:
    """x is read where it lies, its rows of memory aligned to 16 bytes and to four."""
    for rows in (24, 138):
        check(random(rows, 16 * 5, dtype).t().contiguous().t(), cluster, **options)


@SWEEP
@of_clusters(0, 1, 8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [ROTATED, {"seed": 3}, ROTATED | {"block_2d": True}], ids=str)
@pytest.mark.parametrize("rule", ["max", "four_six_mse"])
def test_rotated_and_stochastic(arch: str, rule: str, options: dict, dtype: torch.dtype, cluster: int) -> None:
    check(random(7, 16 * 37, dtype), cluster, rule, **options)


@SWEEP
@of_clusters(0, 1, 8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_batches(arch: str, dtype: torch.dtype, cluster: int) -> None:
    x = random(24, 256, dtype)
    for view in (x[::2, :208], x[:, 2:130], x.reshape(3, 8, 256), x.reshape(8, 3, 256)[:, :2]):
        check(view, cluster)


@SWEEP
@of_clusters(0, 1, 8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), -float("inf")], ids=str)
def test_the_largest_is_anywhere(arch: str, value: float, dtype: torch.dtype, cluster: int) -> None:
    """In any chunk: of the first and of later warps, CTAs and rounds. NaN and infinity do not count; zeros only."""
    for rows, k, places in (
        (40, 48, ((0, 0), (7, 31), (31, 47), (32, 1), (39, 47))),
        (2, 4800, ((0, 2047), (1, 4799))),
    ):
        for row, column in places:
            x = torch.zeros(rows, k, dtype=dtype)
            x[rows - 1, 5] = 0.5 if value else 0.0
            x[row, column] = value
            check(x, cluster)


def chosen(rows: int, k: int, **options: object) -> planning.QuantizePlan:
    nvfp4 = resolve_format("nvfp4")
    problem = planning.QuantizeProblem(nvfp4, resolve_rule("max", nvfp4), rows, k, global_scale="computed", **options)
    return planning.choose(problem, architecture("sm_90a"), 132)


@pytest.mark.sim_only("runs no kernel")
def test_plans() -> None:
    """Small tensors take one launch, large ones two; a cluster pays where one CTA would read for long."""
    assert chosen(1, 64).config.cluster == 1
    step = chosen(16, 4096)
    assert (step.amax, step.config.global_scale, step.config.cluster, step.ctas) == (None, "computed", 8, 64)
    for rows, options in ((4096, {}), (64, {"batch": 128}), (4096, {"transposed": True})):
        plan = chosen(rows, 4096, **options)
        assert (plan.amax is not None, plan.config.global_scale, plan.chunks) == (True, "amax", None)
    assert chosen(1, 64, tile=True).ctas == 1 and dataclasses.replace(step.config, cluster=1).chunk_bytes == 4096


@pytest.mark.sim_only("runs no kernel")
@pytest.mark.parametrize("tile,transposed", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("rows,k", [(1, 16), (7, 48), (300, 4096), (5000, 528)])
def test_grids_are_whole_clusters(rows: int, k: int, tile: bool, transposed: bool) -> None:
    nvfp4 = resolve_format("nvfp4")
    for size in CLUSTERS:
        problem = planning.QuantizeProblem(
            nvfp4, resolve_rule("max", nvfp4), rows, k, global_scale="computed", tile=tile, transposed=transposed
        )
        plan = planning.choose(problem, architecture("sm_90a"), 132, size)
        assert plan.ctas % size == 0
        # copies for the first work tile start before anybody asks whether there is one
        assert tile or transposed or plan.ctas <= plan.walk.count


def half_remote_address(address: object, rank: object) -> object:
    return remote_address(address, rank | 1)


def store_remote_without_one(address: object, word: object) -> None:
    """CTA 3 says that its largest magnitude is zero."""
    cta, _, _ = cute.arch.block_idx()
    store_remote(address, cutlass.select_(mod(cta, 8) == 3, Uint32(0), word))


def mutant(name: str, change: Change, noticed: str, archs: tuple[str, ...] = BOTH) -> Mutant:
    return Mutant(name, change, archs=archs, noticed=noticed)


MUTANTS = (
    mutant("no barrier after the maxima", at("barrier.cluster", drop(), slice(-2, None)), "Race"),
    mutant("a CTA that has not started", at("barrier.cluster", drop(), slice(0, 2)), "Race"),
    mutant("nothing released", at("barrier.cluster.arrive", become("arrive", "arrive.relaxed"), LAST), "Race"),
    mutant("half of the CTAs get no maximum", Source(amax, "remote_address", half_remote_address), ""),
    mutant("the maximum of a CTA is lost", Source(amax, "store_remote", store_remote_without_one), "wrong"),
    mutant("a warp's maximum", at("redux.sync.max", become("max", "min"), FIRST), "wrong"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.sweep(2)
@of_clusters(8)
@pytest.mark.parametrize("mutant,arch", parameters(MUTANTS))
def test_mutant_is_noticed(mutant: Mutant, arch: str, cluster: int) -> None:
    x = random(16, 1024, torch.bfloat16)
    # in the chunk of the second warp of CTA 3
    x[13, 100] = 300

    def found(change: Change | None) -> str:
        return outcome(change, lambda: not differences(x, "nvfp4", "max", global_scale="auto"), arch)

    assert found(None) == ""
    assert is_noticed(found(mutant.change), mutant)

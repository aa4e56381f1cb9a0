"""The model of times on sm_120a: published figures only, how near it comes to published times, what it prefers."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cute_nvfp4.planning import sm120_rates
from cute_nvfp4.planning.gemm import GemmProblem, candidates, choose, predict_plan
from cute_nvfp4.planning.packed_groups import PackedGroups, choose_groups, predict
from cute_nvfp4.planning.packed_model import COSTS
from cute_nvfp4.planning.rates import Figure
from cute_nvfp4.planning.sm120_rates import PARTS
from cute_nvfp4.target import ARCHITECTURES

ARCH = ARCHITECTURES["sm_120a"]
SMS = {part.name: part.sm_count for part in PARTS}


def test_every_figure_says_where_it_comes_from() -> None:
    figures = [x for x in vars(sm120_rates).values() if isinstance(x, Figure)]
    figures += [getattr(part, field.name) for part in PARTS for field in fields(part) if field.name not in _PLAIN]
    for figure in figures:
        assert figure.basis in ("peak", "fitted", "assumed") and len(figure.source) > 15 and figure > 0
    assert sum(figure.basis == "fitted" for figure in figures) == 2


_PLAIN = ("name", "sm_count")


@pytest.mark.parametrize("part, m, n, k, format, published, error", [
    ("RTX PRO 6000", 8192, 8192, 8192, "nvfp4", 1629, 0.01),  # fitted
    ("RTX PRO 6000", 8192, 8192, 8192, "mxfp4", 1615, 0.02),
    ("RTX PRO 6000", 8192, 8192, 8192, "mxfp8", 802, 0.04),
    ("GB10", 4096, 14336, 4096, "nvfp4", 356, 0.01),  # fitted
])  # fmt: skip
def test_errors_against_published_times(
    part: str, m: int, n: int, k: int, format: str, published: float, error: float
) -> None:
    """The bounds that benchmarks/records/sm120.md states, in TFLOPS."""
    problem = GemmProblem(m, n, k, a_format=format, b_format=format)
    us = predict_plan(choose(problem, ARCH, SMS[part]), problem, SMS[part]).us
    assert 2e-6 * m * n * k / us == pytest.approx(published, rel=error)


@pytest.mark.parametrize("part", SMS)
@pytest.mark.parametrize("m, tile_n", [(1, 16), (16, 16), (17, 32), (32, 32)])
def test_few_rows_are_columns_of_narrow_tiles(part: str, m: int, tile_n: int) -> None:
    """An eighth, or a quarter, of the multiplications of a tile with 128 rows of the few."""
    problem = GemmProblem(m, 7168, 16384)
    plan = choose(problem, ARCH, SMS[part])
    assert plan.swap and plan.config.tile_n == tile_n
    wide = min(predict_plan(x, problem, SMS[part]).us for x in candidates(problem, ARCH, SMS[part]) if not x.swap)
    assert predict_plan(plan, problem, SMS[part]).us < wide


def test_a_plan_of_groups_is_that_of_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's multiprocessors reach the model; those of an RTX PRO 6000 multiply at twice the rate."""
    problem, counts, costs = PackedGroups(sizes=((201, 4096, 4096),) * 4), set(), COSTS["sm120"]
    monkeypatch.setitem(COSTS, "sm120", lambda *args: counts.add(args[2]) or costs(*args))
    plan = choose_groups(problem, ARCH, SMS["RTX PRO 6000"])
    assert counts == {SMS["RTX PRO 6000"]} != {ARCH.sm_count}
    assert predict(plan, problem, SMS["RTX PRO 6000"]) < predict(plan, problem, ARCH.sm_count)

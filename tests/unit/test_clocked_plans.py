"""The package's table of plans that the clock decided: every entry can run, and is what ``choose`` gives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cute_nvfp4.kernels.gemm.grouped_config import can_implement_grouped
from cute_nvfp4.kernels.gemm.limits import can_implement
from cute_nvfp4.planning import clocked, gemm, grouped
from cute_nvfp4.planning.gemm_problem import GemmProblem, Plan, can_distribute
from cute_nvfp4.planning.grouped import GroupedProblem
from cute_nvfp4.planning.rates import SM_COUNT
from cute_nvfp4.target import ARCHITECTURES

ARCH = ARCHITECTURES[clocked.ARCH]
ENTRIES = list(clocked.entries().values())


def chosen(entry: clocked.Clocked, **changed: object) -> tuple[GemmProblem | GroupedProblem, Plan]:
    if entry.grouped:
        problem = GroupedProblem(sizes=entry.sizes, **changed)
        return problem, grouped.choose_grouped(problem, ARCH, SM_COUNT)
    ((m, n, k),) = entry.sizes
    gate = "silu" if entry.products == 2 else ""
    problem = GemmProblem(m, n, k, products=entry.products, gate=gate, **changed)
    return problem, gemm.choose(problem, ARCH, SM_COUNT)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.products} {e.sizes[0]} of {len(e.sizes)}")
def test_an_entry_is_chosen_and_can_run(entry, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_NVFP4_GEMM_TABLE", str(tmp_path / "none.json"))
    assert entry.modelled is True and re.fullmatch("[0-9a-f]{8}", entry.clock) and 0 < entry.us <= entry.replaced_us
    _, plan = chosen(entry)
    assert plan.swap == entry.swap and plan.config.tiling == entry.tiling
    least = min(k for _, _, k in entry.sizes)
    refused = can_implement_grouped(plan.config) if entry.grouped else can_implement(plan.config)
    assert not refused and not can_distribute(plan, least)
    assert 1 <= plan.workers * plan.config.cluster_size <= SM_COUNT


def test_the_contest_is_in_the_table_and_others_are_not():
    assert clocked.lookup(GemmProblem(128, 7168, 2048), ((128, 7168, 2048),), ARCH, SM_COUNT, grouped=False)
    lists = [entry for entry in ENTRIES if entry.grouped]
    assert len(lists) == 4
    problem, sizes = GroupedProblem(sizes=lists[0].sizes), lists[0].sizes
    assert clocked.lookup(problem, sizes, ARCH, SM_COUNT, grouped=True) is lists[0]
    for other in ({"a_format": "mxfp4", "b_format": "mxfp4"}, {"out": "float32"}, {"vector": False}):
        assert clocked.lookup(replace(problem, **other), sizes, ARCH, SM_COUNT, grouped=True) is None
    assert clocked.lookup(problem, sizes, ARCH, SM_COUNT - 1, grouped=True) is None
    assert clocked.lookup(problem, sizes, ARCHITECTURES["sm_103a"], SM_COUNT, grouped=True) is None
    assert clocked.lookup(problem, sizes[:1], ARCH, SM_COUNT, grouped=True) is None


def test_the_user_s_table_comes_first(monkeypatch):
    entry = next(e for e in ENTRIES if not e.grouped and e.products == 1)
    problem, plan = chosen(entry)
    mine = Plan(plan.config, plan.swap, 1)
    monkeypatch.setattr(gemm.gemm_table, "lookup", lambda *given: mine)
    gemm._choose.cache_clear()
    try:
        assert gemm.choose(problem, ARCH, SM_COUNT) is mine
    finally:
        gemm._choose.cache_clear()

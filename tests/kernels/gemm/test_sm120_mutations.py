"""Broken kernels of sm_120a: each is noticed, by a wrong result or by a check."""

from __future__ import annotations

import pytest
from support import gemm_problems
from support.gemm_problems import Case, make
from support.mutants import FIRST, LAST, at, drop, instead, offset, operand, outcome

CASE = Case(200, 136, 1312, tile_n=128, workers=1, store="direct", stages=2)
STREAM = Case(200, 136, 2080, tile_n=64, workers=5, store="direct", scheduler="stream_k")
MUTANTS = {
    "a full stage not waited for": (CASE, at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
    "a stage not given back": (CASE, at("mbarrier.arrive.shared", drop()), "Deadlock"),
    "scales of other rows": (CASE, at("mma.sync", operand(5, "{{0, 0}}"), LAST), "wrong"),
    "scales of other columns": (CASE, at("mma.sync", operand(7, "{{0, 0}}"), LAST), "wrong"),
    "other rows of B": (CASE, at("ldmatrix", offset(512), LAST), "wrong"),
    "two columns that change places": (CASE, at("selp.f32", instead("mov.b32 {0}, {1};"), LAST), "wrong"),
    "flags not waited for": (STREAM, at("ld.acquire.gpu", instead("mov.b32 {0}, 1;")), "Race"),
    "sums not announced": (STREAM, at("st.release.gpu", drop(), FIRST), "Deadlock"),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str) -> None:
    case, change, noticed = MUTANTS[name]
    problem = make(case)

    def right() -> bool:
        return not gemm_problems.wrong(problem, problem.run()).any()

    assert outcome(change, right, "sm_120a") == noticed

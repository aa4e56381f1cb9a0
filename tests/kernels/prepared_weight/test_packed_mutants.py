"""Mutants of the WGMMA kernel with a prepared weight: each is noticed."""

from __future__ import annotations

import pytest
from support.mutants import LAST, at, drop, instead, outcome
from test_packed_gemm import CUT, HELPED, SHARED, TAKEN, Problem

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("hopper"), pytest.mark.sim_only("changes PTX")]

MEETING, GONE = "DivergentBarrier", "MbarrierMisuse"
MUTANTS = (
    ("a step dropped", at("wgmma.mma_async", drop(), LAST), "wrong"),
    ("a scale of the other row", at("mul.rn.bf16x2", instead("mul.rn.bf16x2 {0}, {1}, {1};"), LAST), "wrong"),
    ("stages not waited for", at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
    ("flags not waited for", at("ld.acquire.gpu", instead("mov.b32 {0}, 1;")), "Race"),
    ("accumulators not waited for", at("wgmma.wait_group", drop(), LAST), "Race"),
    ("registers not given away", at("setmaxnreg.dec", drop()), "Deadlock"),
    # one warpgroup starts, and waits for the sums of another
    ("more registers than it gets", at("setmaxnreg.dec", instead("setmaxnreg.dec.sync.aligned.u32 40;")), MEETING),
)


@pytest.mark.parametrize("name, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name, change, noticed) -> None:
    problem = Problem(CUT)
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") == noticed


SHARED_MUTANTS = (
    ("barriers of the cluster not waited for", at("barrier.cluster.wait", drop()), "Race"),
    # they come when the CTA has gone
    ("sums not waited for", at("mbarrier.try_wait.parity.acquire.cluster", instead("setp.eq.b32 {0}, 0, 0;")), GONE),
    ("a sum not sent", at("st.async", drop(), LAST), "Deadlock"),
    ("bytes not announced", at("mbarrier.arrive.expect_tx", drop(), LAST), "Deadlock"),
)


@pytest.mark.parametrize("name, change, noticed", SHARED_MUTANTS, ids=[m[0] for m in SHARED_MUTANTS])
def test_mutants_of_shared_sums_are_noticed(name, change, noticed) -> None:
    problem = Problem(SHARED)
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") == noticed


@pytest.mark.parametrize("which", [slice(-2, -1), LAST], ids=["stages still read", "sums not there"])
def test_warpgroups_that_do_not_meet_are_noticed(which: slice) -> None:
    problem = Problem(TAKEN)
    assert outcome(at("bar.sync", drop(), which), lambda: problem.right(problem.run()), "sm_90a") == "Race"


HELPED_MUTANTS = (
    ("flags of helpers not waited for", at("ld.acquire.gpu", instead("mov.b32 {0}, 1;")), "Race"),
    ("a flag not raised", at("st.release.gpu", drop()), "Deadlock"),
)


@pytest.mark.parametrize("name, change, noticed", HELPED_MUTANTS, ids=[m[0] for m in HELPED_MUTANTS])
def test_mutants_of_helpers_are_noticed(name, change, noticed) -> None:
    problem = Problem(HELPED)
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") == noticed

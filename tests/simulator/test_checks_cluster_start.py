"""Shared memory of a CTA that may not have started: each kernel with its twin in order."""

from __future__ import annotations

import pytest
from ptx_lab import wait
from test_checks import CLUSTER, PEER, go

from cute_nvfp4.sim import Hazard, Schedule

MEET, RELAXED = "barrier.cluster.arrive; barrier.cluster.wait;", "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
SCHEDULES = (Schedule(), Schedule(warps="late"), Schedule(1, warps="random"))
BARRIER = "@%q1 mbarrier.init.shared.b64 [bar], 32; fence.mbarrier_init.release.cluster; FIRST mov.u32 %r20, bar;"
PEER_BARRIER = "xor.b32 %r13, %r19, 1; mapa.shared::cluster.u32 %r14, %r20, %r13;"


def found(body: str, strict: bool = False, schedule: Schedule | None = None, block: int = 32) -> str:
    """The message of the hazard; "" for none."""
    try:
        go(body, block=block, strict=strict, schedule=schedule or Schedule(), **CLUSTER)
    except Hazard as error:
        return f"{type(error).__name__}: {error}"
    return ""


TOUCHES = {
    "store": "st.shared::cluster.b32 [%r14], %r1;",
    "atomic": "red.relaxed.cluster.shared::cluster.add.u32 [%r14], 1;",
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("touch", ["store", "atomic"])
def test_a_cta_that_may_not_have_started(touch: str, strict: bool, schedule: Schedule) -> None:
    """The shared memory of the other CTA is touched first, and the cluster meets at the end only."""
    start = {"store": "", "atomic": "st.shared.b32 [%r7], 0;"}[touch]
    body = f"{start} {{}} {PEER} {TOUCHES[touch]} {MEET}"
    assert not found(body.format(MEET), strict, schedule)
    if touch == "store":
        assert not found(body.format(RELAXED), strict, schedule)
    said = found(body.format(""), strict, schedule)
    assert said.startswith("Race: ") and "may not have started" in said and "[access-before-start]" in said


@pytest.mark.parametrize("arrive", ["", ".relaxed.cluster"])
def test_an_arrival_at_another_cta(arrive: str) -> None:
    body = BARRIER + PEER_BARRIER
    body += f"mbarrier.arrive{arrive}.shared::cluster.b64 _, [%r14];" + wait("%r20", "0") + MEET
    assert not found(body.replace("FIRST", MEET)) and not found(body.replace("FIRST", RELAXED))
    assert "[access-before-start]" in found(body.replace("FIRST", ""))


def test_one_warp_may_wait_for_all() -> None:
    """Warp 1 learns from warp 0, at a barrier of the CTA."""
    body = "barrier.cluster.arrive.relaxed; @%q2 barrier.cluster.wait; {} @%q2 bra E;" + PEER + TOUCHES["store"]
    body += "E: @!%q2 barrier.cluster.wait; barrier.cluster.arrive; barrier.cluster.wait;"
    assert not found(body.format("bar.sync 0;"), block=64)
    assert "[access-before-start]" in found(body.format(""), block=64)


def test_news_of_the_other_cta_will_do() -> None:
    """CTA 1 has met, and arrives at CTA 0's mbarrier; CTA 0 may answer."""
    body = BARRIER + "setp.eq.u32 %q4, %r19, 0;" + PEER_BARRIER + "@%q4 bra A;"
    body += "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r14]; bra E;"
    body += "A:" + wait("%r20", "0") + PEER + TOUCHES["store"] + f"E: {MEET}"
    one = "setp.eq.u32 %q5, %r19, 1; barrier.cluster.arrive.relaxed; @%q5 barrier.cluster.wait;"
    body = body.replace("FIRST", one).replace(f"E: {MEET}", f"E: @!%q5 barrier.cluster.wait; {MEET}")
    assert not found(body)
    assert "[access-before-start]" in found(body.replace("A:" + wait("%r20", "0"), "A:"))


def test_bulk_copies_and_commits() -> None:
    """A multicast commit arrives at the other CTA too."""
    commit = "mov.b16 %h1, 3; @%q1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster"
    body = BARRIER.replace("32;", "2;") + commit + ".b64 [%r20], %h1;" + wait("%r20", "0") + MEET
    assert not found(body.replace("FIRST", MEET))
    assert "[access-before-start]" in found(body.replace("FIRST", ""))

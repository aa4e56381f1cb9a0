"""CTAs and warps that wait for one another through memory: semaphores, turnstiles, flags of a cluster."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import Deadlock, DivergentBarrier, ResidencyError, Schedule, adversarial

BEGIN = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; setp.ne.u32 %q1, %r1, 0; @%q1 bra MEET;"
"""Thread 0 goes on to wait; the others meet it at a barrier."""

ACQUIRE = "ld.global.acquire.gpu.b32 %r3, [%p0];"
WAITS = {
    "rotated": f"W: {ACQUIRE} setp.ne.u32 %q2, %r3, %r2; @%q2 bra W;",
    # a compiler that keeps the value in a register over the loop's head
    "while": f"mov.b32 %r3, -1; W: setp.eq.u32 %q2, %r3, %r2; @%q2 bra MEET; {ACQUIRE} bra W;",
    "nanosleep": f"W: {ACQUIRE} setp.eq.u32 %q2, %r3, %r2; @%q2 bra MEET; nanosleep.u32 100; bra W;",
    "volatile": "W: ld.volatile.global.b32 %r3, [%p0]; setp.ne.u32 %q2, %r3, %r2; @%q2 bra W; fence.acq_rel.gpu;",
    "atomic": "W: atom.global.add.u32 %r3, [%p0], 0; setp.ne.u32 %q2, %r3, %r2; @%q2 bra W; fence.acq_rel.gpu;",
    # the counter is carried around the loop: it cannot be seen that the loop only polls
    "backoff": f"""mov.b32 %r8, 8; W: {ACQUIRE} setp.eq.u32 %q2, %r3, %r2; @%q2 bra MEET; nanosleep.u32 %r8;
        add.s32 %r8, %r8, %r8; bra W;""",
}
RELEASE = "bar.sync 0; @%q1 bra END; add.s32 %r7, %r2, 1; st.global.release.gpu.b32 [%p0], %r7; END:"
WORK = """ld.global.b32 %r4, [%p0+4]; mov.b32 %r9, 0; L: mad.lo.s32 %r4, %r4, 3, %r2; add.s32 %r9, %r9, 1;
    setp.lt.u32 %q3, %r9, 5; @%q3 bra L; bar.sync 0; @!%q1 st.global.b32 [%p0+4], %r4;"""
"""What depends on the order: every CTA in its turn makes another number of the one before."""


def turns(ctas: int) -> int:
    """The number that ``WORK`` comes to."""
    value = 0
    for cta in range(ctas):
        for _ in range(5):
            value = (value * 3 + cta) & 0xFFFFFFFF
    return value


@pytest.mark.parametrize("wait,checks", [(w, c) for w in WAITS for c in (False, True) if (w, c) != ("backoff", True)])
def test_ctas_take_turns(wait: str, checks: bool) -> None:
    """The thread that waits for its CTA's turn leaves its warp at a barrier, with whole warps of CTAs that have had
    theirs."""
    out = np.zeros(2, "u4")
    text = module(f"{BEGIN} {WAITS[wait]} MEET: bar.sync 0; {WORK} {RELEASE}", 1)
    launch_kernel(text, [out], grid=(9, 1, 1), block=(128, 1, 1), checks=checks, step_limit=40_000)
    assert out.tolist() == [9, turns(9)]


@pytest.mark.parametrize("schedule", adversarial(6)[1:], ids=str)
def test_turns_under_other_schedules(schedule: Schedule) -> None:
    out = np.zeros(2, "u4")
    text = module(f"{BEGIN} {WAITS['rotated']} MEET: bar.sync 0; {WORK} {RELEASE}", 1)
    launch_kernel(text, [out], grid=(4, 1, 1), block=(64, 1, 1), schedule=schedule, checks=True)
    assert out.tolist() == [4, turns(4)]


@pytest.mark.parametrize("order", ["up", "down"])
def test_turnstile_of_many_ctas(order: str) -> None:
    """As serial split-K: a ticket says whose turn it is, the last one first as well."""
    out = np.zeros(2, "u4")
    turn = "" if order == "up" else "mov.u32 %r6, %nctaid.x; sub.s32 %r2, %r6, %r2; sub.s32 %r2, %r2, 1;"
    begin = BEGIN.replace("setp", f"{turn} setp", 1)
    text = module(f"{begin} {WAITS['rotated']} MEET: bar.sync 0; {WORK} {RELEASE}", 1)
    launch_kernel(text, [out], grid=(120, 1, 1), block=(96, 1, 1), step_limit=20_000)
    assert out.tolist() == [120, turns(120)]


def test_a_lock_is_taken_by_one_at_a_time() -> None:
    out = np.zeros(2, "u4")
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %q1, %r1, 0; @%q1 bra MEET;
    W: atom.acquire.gpu.global.cas.b32 %r3, [%p0], 0, 1; setp.ne.u32 %q2, %r3, 0; @%q2 bra W; MEET: bar.sync 0;
    setp.ne.u32 %q2, %r1, 40; @!%q2 ld.global.b32 %r4, [%p0+4]; add.s32 %r4, %r4, 1;
    @!%q2 st.global.b32 [%p0+4], %r4; bar.sync 0; @!%q1 st.release.gpu.global.b32 [%p0], 0;"""
    launch_kernel(module(body, 1), [out], grid=(30, 1, 1), block=(64, 1, 1), checks=True, step_limit=20_000)
    assert out.tolist() == [0, 30]


def test_a_lock_that_the_whole_cta_asks_for() -> None:
    """As compilers that give every thread the scalar's value: thread 0 asks, shared memory tells the others."""
    out = np.zeros(2, "u4")
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %q1, %r1, 0; mov.b32 %r3, 0;
    W: @!%q1 atom.acquire.gpu.global.cas.b32 %r3, [%p0], 0, 1; @!%q1 st.shared.b32 [cell], %r3; bar.sync 0;
    ld.shared.b32 %r5, [cell]; bar.sync 0; setp.ne.u32 %q2, %r5, 0; @%q2 bra W;
    ld.global.b32 %r4, [%p0+4]; add.s32 %r4, %r4, 1; bar.sync 0; @!%q1 st.global.b32 [%p0+4], %r4;
    @!%q1 st.release.gpu.global.b32 [%p0], 0;"""
    text = module(body, 1, ".shared .align 4 .b8 cell[4];")
    launch_kernel(text, [out], grid=(8, 1, 1), block=(64, 1, 1), step_limit=40_000)
    assert out.tolist() == [0, 8]


CLUSTER = """mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; setp.ne.u32 %q1, %r1, 0; @!%q1 st.shared.b32 [flag], 0;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%q1 bra MEET; setp.eq.u32 %q2, %r2, 0; @%q2 bra MEET;
    W: ld.acquire.cluster.shared::cta.b32 %r3, [flag]; setp.eq.u32 %q2, %r3, 0; @%q2 bra W; MEET: bar.sync 0;
    @%q1 bra LAST; add.s32 %r4, %r2, 1; setp.ge.u32 %q2, %r4, 4; @%q2 bra LAST; mov.u32 %r5, flag;
    mapa.shared::cluster.u32 %r5, %r5, %r4; st.release.cluster.shared::cluster.b32 [%r5], 7;
    LAST: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld.shared.b32 %r6, [flag];
    mov.u32 %r7, %ctaid.x; mad.wide.u32 %rd1, %r7, 4, %p0; @!%q1 st.global.b32 [%rd1], %r6;"""


@pytest.mark.parametrize("checks", [False, True])
def test_a_flag_goes_round_a_cluster(checks: bool) -> None:
    out = np.zeros(8, "u4")
    text = module(CLUSTER, 1, ".shared .align 4 .b8 flag[4];")
    options = {"grid": (8, 1, 1), "block": (64, 1, 1), "cluster": (4, 1, 1), "step_limit": 2000}
    launch_kernel(text, [out], checks=checks, **options)
    assert out.tolist() == [0, 7, 7, 7] * 2


def test_a_polling_warp_does_not_hide_that_an_mbarrier_has_opened() -> None:
    """Warp 0 polls a flag in a loop that counts, warp 1 sets it when its bulk copy has come."""
    source, out = np.arange(4, dtype="u4"), np.zeros(4, "u4")
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %q1, %r1, 0; @!%q1 mbarrier.init.shared.b64 [bar], 1;
    @!%q1 fence.proxy.async; bar.sync 0; setp.ge.u32 %q2, %r1, 32; @%q2 bra COPY; mov.b32 %r8, 0;
    W: ld.acquire.gpu.global.b32 %r3, [%p1]; add.s32 %r8, %r8, 1; setp.eq.u32 %q3, %r3, 0; @%q3 bra W; bra END;
    COPY: setp.ne.u32 %q4, %r1, 32; @%q4 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [data], [%p0], 16, [bar];
    WAIT: mbarrier.try_wait.parity.shared.b64 %q5, [bar], 0; @!%q5 bra WAIT; ld.shared.b32 %r4, [data+8];
    @!%q4 st.release.gpu.global.b32 [%p1], %r4; END:"""
    text = module(body, 2, ".shared .align 16 .b8 data[16]; .shared .align 8 .b64 bar;")
    launch_kernel(text, [source, out], block=(64, 1, 1))
    assert out[0] == 2


def test_who_polls_one_flag_after_another_waits() -> None:
    """Warp 0 polls flags 0 and 1, which warp 1 raises when its copy has come: the copy need not wait for long because
    a warp polls, which is parked."""
    source, out = np.arange(4, dtype="u4"), np.zeros(4, "u4")
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %q1, %r1, 0; @!%q1 mbarrier.init.shared.b64 [bar], 1;
    @!%q1 fence.proxy.async; bar.sync 0; setp.ge.u32 %q2, %r1, 32; @%q2 bra COPY; mov.b32 %r8, 0;
    NEXT: mul.wide.u32 %p2, %r8, 4; add.s64 %p2, %p1, %p2;
    W: ld.acquire.gpu.global.b32 %r3, [%p2]; setp.eq.u32 %q3, %r3, 0; @%q3 bra W;
    add.s32 %r8, %r8, 1; setp.lt.u32 %q3, %r8, 2; @%q3 bra NEXT; bra END;
    COPY: setp.ne.u32 %q4, %r1, 32; @%q4 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [data], [%p0], 16, [bar];
    WAIT: mbarrier.try_wait.parity.shared.b64 %q5, [bar], 0; @!%q5 bra WAIT; ld.shared.b32 %r4, [data+8];
    @!%q4 st.release.gpu.global.b32 [%p1], %r4; @!%q4 st.release.gpu.global.b32 [%p1+4], %r4; END:"""
    text = module(body, 2, ".shared .align 16 .b8 data[16]; .shared .align 8 .b64 bar;")
    launch_kernel(text, [source, out], block=(64, 1, 1), schedule=Schedule(tma="lazy"), step_limit=100)
    assert out.tolist() == [2, 2, 0, 0]


def test_nobody_comes() -> None:
    """What is said when a loop polls for ever: of a deadlock, not of lanes that went another way."""
    text = module(f"{BEGIN} {WAITS['rotated']} MEET: bar.sync 0;", 1)
    with pytest.raises(Deadlock, match="memory that another thread writes") as error:
        launch_kernel(text, [np.zeros(2, "u4")], grid=(2, 1, 1), block=(64, 1, 1))
    assert "ld.global.acquire.gpu.b32" in str(error.value) and "CTA (1, 0, 0), warp 0" in str(error.value)
    # CTA 200 is waited for by those before it, and there is no room for it
    late = module(f"{BEGIN} sub.s32 %r2, 199, %r2; {WAITS['rotated']} MEET: bar.sync 0; {RELEASE}", 1)
    with pytest.raises(ResidencyError, match="must be resident together"):
        launch_kernel(late, [np.zeros(2, "u4")], grid=(200, 1, 1), block=(64, 1, 1), smem=200_000)


def test_lanes_that_never_meet() -> None:
    body = "mov.u32 %r1, %laneid; setp.lt.u32 %q1, %r1, 9; @%q1 bra A; bar.sync 1; bra END; A: bar.sync 2; END:"
    with pytest.raises(DivergentBarrier):
        launch_kernel(module(body, 0), [])

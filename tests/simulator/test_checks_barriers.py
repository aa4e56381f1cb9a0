"""What the checks say of mbarriers: their bytes, their end, waits that give up; and of proxies."""

from __future__ import annotations

import pytest
from ptx_lab import wait
from test_checks import CLUSTER, COPY, INIT, LOADED, finds, go

from cute_nvfp4.sim import CopiesInFlight, MbarrierMisuse, MissingProxyFence, Race, Schedule
from cute_nvfp4.sim.frontend.model import Instruction, clipped
from cute_nvfp4.sim.host.module import Launch

HERE = "the mbarrier at shared address 0x800 of CTA (0, 0, 0)"
END = "bar.sync 1; @%q1 mbarrier.inval.shared.b64 [bar]; bar.sync 2;"


@pytest.mark.parametrize(
    "access,verb",
    [
        ("@%q1 st.shared.b32 [bar], 0;", "overwritten"),
        ("@%q1 st.shared.b8 [bar+7], 0;", "overwritten"),
        ("@%q1 st.shared.v4.b32 [bar], {0, 0, 0, 0};", "overwritten"),
        ("@%q1 red.shared.add.u32 [bar+4], 1;", "overwritten"),
        ("@%q1 ld.shared.b64 %rd3, [bar];", "read"),
        ("cp.async.ca.shared.global [bar], [%p0], 4; cp.async.wait_all;", "overwritten"),
        (COPY.replace("[cell]", "[bar]"), "overwritten"),
    ],
)
def test_only_mbarrier_instructions_touch_an_mbarrier(access: str, verb: str) -> None:
    init = "@%q1 mbarrier.init.shared.b64 [bar+16], 1;" + INIT.format(1, "fence.mbarrier_init.release.cluster;")
    access = access.replace("[bar], 64", "[bar+16], 64").replace("64, [bar]", "64, [bar+16]")
    with pytest.raises(MbarrierMisuse) as error:
        go(init + access)
    assert HERE in str(error.value) and verb in str(error.value) and "(PTX line" in str(error.value)
    go(init + access.replace("[bar]", "[bar+32]").replace("[bar+7]", "[bar+8]").replace("[bar+4]", "[bar+8]")) if (
        "ld" not in access and "red" not in access
    ) else None


def test_the_bytes_are_free_after_inval() -> None:
    body = INIT.format(32, "") + "mbarrier.arrive.shared.b64 _, [bar];" + wait("%r5", "0")
    body += END + "st.shared.b64 [bar], 0;"
    finds(MbarrierMisuse, body, "@%q1 mbarrier.inval.shared.b64 [bar];", HERE, "overwritten")


def test_inval_comes_after_all_arrivals() -> None:
    body = INIT.format(64, "") + "mbarrier.arrive.shared.b64 _, [bar];" + wait("%r5", "0") + END
    body = body.replace("@%q1 mbarrier.inval", "setp.eq.u32 %q4, %r1, 32; @%q4 mbarrier.inval")
    go(body, block=64)
    finds(MbarrierMisuse, body.replace("bar.sync 1;", ""), wait("%r5", "0"), "an arrival of CTA", block=64)


def test_an_mbarrier_that_is_initialised_again() -> None:
    """The second life has phases of its own: its first wait tells nothing of the first life, and all of the second."""
    half = "@%q2 bra A{0}; {1} bra E{0}; A{0}: st.shared.b32 [%r7], %r1; mbarrier.arrive.shared.b64 _, [bar]; E{0}:"
    see = wait("%r5", "0") + "ld.shared.b32 %r12, [%r11];"
    lives = INIT.format(32, "") + half.format(0, see) + END + INIT.format(32, "") + half.format(1, see)
    go(lives, block=64)
    last = lives.rindex(wait("%r5", "0")) if wait("%r5", "0") in lives else -1
    assert last > 0
    with pytest.raises(Race):
        go(lives[:last] + lives[last:].replace(wait("%r5", "0"), ""), block=64)


def test_a_remote_arrival_at_a_cta_that_does_not_wait() -> None:
    """Found whether the arrival comes before the exit or after it."""
    start = """@%q1 mbarrier.init.shared.b64 [bar], 32; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed; barrier.cluster.wait; setp.eq.u32 %q4, %r19, 1; @%q4 bra LAST;"""
    give = """xor.b32 %r13, %r19, 1; mapa.shared::cluster.u32 %r14, %r5, %r13;
    mbarrier.arrive.shared::cluster.b64 _, [%r14]; exit;"""
    spin = "mov.u32 %r13, 0; S: add.u32 %r13, %r13, 1; setp.lt.u32 %q5, %r13, 100; @%q5 bra S;"
    for slow in ("", spin):
        go(start + slow + give + "LAST:" + wait("%r5", "0"), **CLUSTER)
        with pytest.raises((CopiesInFlight, MbarrierMisuse)):
            go(start + slow + give + "LAST:", **CLUSTER)


def test_a_multicast_commit_to_a_cta_that_does_not_wait() -> None:
    """As the tail waits of producers: without them a CTA may exit before its peer's commit arrives."""
    start = """@%q1 mbarrier.init.shared.b64 [bar], 2; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;"""
    commit = "mov.b16 %h1, 3; SPIN @%q1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster"
    commit += ".multicast::cluster.b64 [bar], %h1;"
    spin = "mov.u32 %r13, 0; setp.eq.u32 %q4, %r19, 1; @%q4 bra T; S: add.u32 %r13, %r13, 1; setp.lt.u32 %q5, %r13, 99;"
    for slow in ("", spin + "@%q5 bra S; T:"):
        body = start + commit.replace("SPIN", slow) + "WAIT"
        for schedule in (Schedule(), Schedule(tensor="lazy"), Schedule(tensor="eager"), Schedule(1, warps="random")):
            go(body.replace("WAIT", wait("%r5", "0")), schedule=schedule, **CLUSTER)
            with pytest.raises((CopiesInFlight, MbarrierMisuse), match=r"tcgen05\.commit|has exited"):
                go(body.replace("WAIT", ""), schedule=schedule, **CLUSTER)


def test_a_phase_knows_nothing_of_arrivals_after_its_end() -> None:
    """Three warps arrive together where two are expected: the third counts in the next phase, and is not waited for."""
    body = "st.shared.b32 [%r7], %r1; bar.warp.sync -1; and.b32 %r13, %r1, 31;"
    body += "setp.eq.u32 %q4, %r13, 0; @%q4 mbarrier.arrive.shared.b64 _, [bar];" + wait("%r5", "0")
    body += "ld.shared.b32 %r12, [cell]; ld.shared.b32 %r12, [cell+128]; ld.shared.b32 %r12, [cell+256];"
    go(INIT.format(3, "") + body, block=96)
    for schedule in (Schedule(), Schedule(1, warps="random"), Schedule(2, warps="random")):
        with pytest.raises(Race):
            go(INIT.format(2, "") + body, block=96, schedule=schedule)


def test_a_wait_that_gives_up_is_no_deadlock() -> None:
    """try_wait may say no although the phase is over; whoever asks again is not caught in a loop."""
    body = """@%q1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; @%q1 mbarrier.arrive.shared.b64 _, [bar];
    mov.u32 %r20, 0;
    L: mbarrier.try_wait.parity.shared.b64 %q4, [bar], 0; @!%q4 bra L;
    add.u32 %r20, %r20, 1; setp.lt.u32 %q5, %r20, 3000; @%q5 bra L;"""
    go(body, schedule=Schedule(warps="random"))


# proxies

STORE = "@%q1 cp.async.bulk.global.shared::cta.bulk_group [%p0+1024], [cell], 128; cp.async.bulk.commit_group;"
STORE += "cp.async.bulk.wait_group.read 0;"


def test_atomics_are_made_visible_to_the_asynchronous_proxy() -> None:
    body = "st.shared.b32 [%r7], 0; fence.proxy.async; red.shared.add.u32 [%r7], 1; fence.proxy.async.shared::cta;"
    body += "bar.sync 0;" + STORE
    finds(MissingProxyFence, body, "fence.proxy.async.shared::cta;", "red.shared.add.u32", "asynchronous proxy")
    go(body.replace("fence.proxy.async; ", ""))


SPACES = {"": "both", ".shared::cta": "shared", ".shared::cluster": "shared", ".global": "global"}
FROM_GLOBAL = INIT.format(1, "fence.mbarrier_init.release.cluster;") + "st.global.b32 [%rd2], %r1; FENCE bar.sync 1;"
FROM_GLOBAL += COPY + wait("%r5", "0")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("written", SPACES)
@pytest.mark.parametrize("also", ["", "fence.proxy.async.shared::cta;", "fence.proxy.async.global;"])
def test_a_proxy_fence_is_for_its_space(also: str, written: str, strict: bool) -> None:
    """What is read of shared or of global memory; ``also`` is executed before the bytes are written."""
    fence = f"fence.proxy.async{written};"
    kernels = {"shared": f"{also} st.shared.b32 [%r7], %r1; {fence} bar.sync 0; {STORE}"}
    kernels["global"] = also + FROM_GLOBAL.replace("FENCE", fence)
    for space, body in kernels.items():
        if SPACES[written] in ("both", space):
            go(body, strict=strict)
        else:
            with pytest.raises(MissingProxyFence, match=r"fence\.proxy\.async"):
                go(body, strict=strict)


def test_atomics_after_a_bulk_copy_need_no_proxy_fence() -> None:
    """The wait for its mbarrier makes what the asynchronous proxy has written visible (PTX ISA, "Async proxy")."""
    body = LOADED + wait("%r5", "0") + "and.b32 %r13, %r6, 60; add.s32 %r13, %r4, %r13; red.shared.add.u32 [%r13], 1;"
    finds((Race), body, wait("%r5", "0"), "red.shared")


def test_names_and_instructions_are_cut_in_messages() -> None:
    launch = Launch("kernel_" + 200 * "x", (1, 1, 1), (32, 1, 1), ())
    assert launch.title == clipped(launch.kernel) and len(launch.title) == 60 and launch.title.endswith("x…")
    registers = ", ".join(f"%r{j}" for j in range(64))
    i = Instruction("tcgen05.ld.sync", (), None, f"tcgen05.ld.sync {{{registers}}}, [%r70]", 7, "kernel.py:3")
    assert i.where() == "`tcgen05.ld.sync {%r0, %r1, …, %r63}, [%r70]` (PTX line 7, kernel.py:3)"
    assert len(Instruction("x", (), None, 300 * "y", 1).where()) < 200

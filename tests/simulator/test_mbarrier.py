"""mbarrier, clusters and distributed shared memory, in hand-written PTX under several schedules."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module, wait

from cute_nvfp4.errors import OperandError
from cute_nvfp4.sim import Deadlock, LaunchError, MbarrierMisuse, OutOfBounds, ResidencyError, Schedule, adversarial

SCHEDULES = adversarial(8, seed=5)
BARRIER = ".shared .align 8 .b64 bar[4]; .shared .align 16 .b8 cell[128];"
THREAD = "mov.u32 %r1, %tid.x; mov.u32 %r20, bar; mov.u32 %r21, cell; and.b32 %r9, %r1, 31; shl.b32 %r8, %r9, 2;"


RING = (
    THREAD
    + """
    setp.ne.u32 %q1, %r1, 0; @%q1 bra READY;
    mbarrier.init.shared::cta.b64 [bar], 32; mbarrier.init.shared::cta.b64 [bar+8], 32;
    READY: bar.sync 0;
    mov.b32 %r6, 0; mov.b32 %r7, 0; add.s32 %r5, %r21, %r8; add.s32 %r22, %r20, 8;
    setp.ge.u32 %q1, %r1, 32; @%q1 bra CONSUME;
    P: and.b32 %r10, %r6, 1; xor.b32 %r11, %r10, 1;"""
    + wait("%r22", "%r11")
    + """ add.s32 %r12, %r6, %r9; st.shared.b32 [%r5], %r12;
    mbarrier.arrive.shared::cta.b64 _, [%r20]; add.s32 %r6, %r6, 1; setp.lt.u32 %q2, %r6, 10; @%q2 bra P; bra END;
    CONSUME: and.b32 %r10, %r6, 1;"""
    + wait("%r20", "%r10")
    + """ xor.b32 %r13, %r8, 4; add.s32 %r13, %r21, %r13; ld.shared.b32 %r12, [%r13]; add.s32 %r7, %r7, %r12;
    mbarrier.arrive.shared::cta.b64 _, [%r22]; add.s32 %r6, %r6, 1; setp.lt.u32 %q2, %r6, 10; @%q2 bra CONSUME;
    mad.wide.u32 %rd1, %r9, 4, %p0; st.global.b32 [%rd1], %r7; END:"""
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_full_and_empty_barriers_carry_a_ring_of_one(schedule: Schedule) -> None:
    out = np.zeros(32, "u4")
    launch_kernel(module(RING, 1, BARRIER), [out], block=(64, 1, 1), schedule=schedule)
    assert out.tolist() == [sum(i + (t ^ 1) for i in range(10)) for t in range(32)]


def test_a_warp_that_comes_late_misses_a_phase_of_the_other_parity() -> None:
    """Warp 0 waits for the phase before the first: it is over, until warp 1 has ended the first."""
    body = (
        THREAD
        + """setp.eq.u32 %q1, %r1, 0; @%q1 mbarrier.init.shared.b64 [bar], 32; bar.sync 0;
    setp.ge.u32 %q2, %r1, 32; @%q2 bra OTHER; mov.b32 %r2, 1;"""
        + wait("%r20", "%r2")
        + "bra END; OTHER: mbarrier.arrive.shared.b64 _, [bar]; END:"
    )
    for schedule in adversarial(6)[:5]:
        launch_kernel(module(body, 0, BARRIER), [], block=(64, 1, 1), schedule=schedule)
    with pytest.raises(Deadlock, match=r"waits at `mbarrier\.try_wait"):
        launch_kernel(module(body, 0, BARRIER), [], block=(64, 1, 1), schedule=Schedule(warps="late"))


def test_a_missing_arrival_is_a_deadlock_with_a_picture() -> None:
    lost = RING.replace("mbarrier.arrive.shared::cta.b64 _, [%r22];", "", 1)
    with pytest.raises(Deadlock) as error:
        launch_kernel(module(lost, 1, BARRIER), [np.zeros(32, "u4")], block=(64, 1, 1))
    text = str(error.value)
    assert "CTA (0, 0, 0), warp 0 waits at `mbarrier.try_wait" in text
    assert "the end of phase 0 of mbarrier at shared address 0x408" in text and "0 of 32 arrivals" in text
    assert "the end of phase 1 of mbarrier at shared address 0x400" in text


@pytest.mark.parametrize(
    "change, message",
    [
        (("mbarrier.init.shared::cta.b64 [bar+8], 32;", ""), "holds no mbarrier"),
        (
            ("b64 _, [%r20];", "b64 _, [%r20], 33;"),
            "too many arrivals at mbarrier at shared address 0x400 of .* expects 32",
        ),
        (("[bar], 32;", "[bar], 0;"), "with a count of 0"),
        (("[bar], 32;", "[bar+4], 32;"), "aligned to 8 bytes"),
        (("END:", "END: mbarrier.inval.shared::cta.b64 [bar+16];"), "holds no mbarrier"),
    ],
)
def test_misuse_is_named(change: tuple[str, str], message: str) -> None:
    assert change[0] in RING
    with pytest.raises(MbarrierMisuse, match=message):
        launch_kernel(module(RING.replace(*change, 1), 1, BARRIER), [np.zeros(32, "u4")], block=(64, 1, 1))


def test_an_mbarrier_that_is_initialised_again_can_be_gone_past() -> None:
    """Without checks, or where the class is allowed: it begins anew."""
    twice = module(RING.replace("[bar], 32;", "[bar], 32; mbarrier.init.shared::cta.b64 [bar], 32;", 1), 1, BARRIER)
    once, expected = module(RING, 1, BARRIER), np.zeros(32, "u4")
    launch_kernel(once, [expected], block=(64, 1, 1))
    with pytest.raises(MbarrierMisuse, match=r"initialised again .* without mbarrier.inval before \[mbarrier-again\]"):
        launch_kernel(twice, [np.zeros(32, "u4")], block=(64, 1, 1), checks=True)
    for options in ({"checks": False}, {"checks": True, "allow": ("mbarrier-again",)}):
        out = np.zeros(32, "u4")
        launch_kernel(twice, [out], block=(64, 1, 1), **options)
        assert (out == expected).all() and out.any()


def test_state_tokens_and_pending_counts() -> None:
    """arrive returns the state before it; test_wait of that state holds once the phase is over."""
    out = np.zeros(8, "u4")
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %q1, %r1, 0; @%q1 bra END;
    mbarrier.init.shared.b64 [bar], 3;
    mbarrier.arrive.shared.b64 %rd1, [bar]; mbarrier.test_wait.shared.b64 %q2, [bar], %rd1;
    mbarrier.pending_count.b64 %r2, %rd1;
    mbarrier.arrive.shared.b64 %rd2, [bar], 2; mbarrier.pending_count.b64 %r3, %rd2;
    mbarrier.test_wait.shared.b64 %q3, [bar], %rd1; mbarrier.test_wait.parity.shared.b64 %q4, [bar], 1;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16; mbarrier.arrive.shared.b64 _, [bar], 3;
    mbarrier.test_wait.parity.shared.b64 %q5, [bar], 1;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 16; mbarrier.test_wait.parity.shared.b64 %q6, [bar], 1;
    """
    for j in range(2, 7):
        body += f"selp.b32 %r{10 + j}, 1, 0, %q{j}; st.global.b32 [%p0+{4 * (j - 2)}], %r{10 + j};"
    body += "st.global.b32 [%p0+20], %r2; st.global.b32 [%p0+24], %r3; END:"
    launch_kernel(module(body, 1, BARRIER), [out])
    assert out.tolist() == [0, 1, 0, 0, 1, 3, 2, 0]


CLUSTER = """mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %cluster_nctarank;
    mov.u32 %r20, cell; shl.b32 %r8, %r1, 2; add.s32 %r5, %r20, %r8;
    mov.u32 %r4, %ctaid.x; mad.lo.s32 %r6, %r4, 100, %r1; st.shared.b32 [%r5], %r6;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    add.s32 %r9, %r2, 1; rem.u32 %r9, %r9, %r3; mapa.shared::cluster.u32 %r10, %r5, %r9;
    ld.shared::cluster.b32 %r11, [%r10]; getctarank.shared::cluster.u32 %r12, %r10; mad.lo.s32 %r11, %r12, 100000, %r11;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r13, %ntid.x; mad.lo.s32 %r14, %r4, %r13, %r1; mad.wide.u32 %rd1, %r14, 4, %p0;
    st.global.b32 [%rd1], %r11;"""
EVERYBODY = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
CELL = ".shared .align 16 .b8 cell[256];"


@pytest.mark.parametrize("schedule", SCHEDULES[:3] + SCHEDULES[-2:], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_distributed_shared_memory(size: int, schedule: Schedule) -> None:
    out = np.zeros(16 * 64, "u4")
    launch_kernel(
        module(CLUSTER, 1, CELL), [out], grid=(16, 1, 1), block=(64, 1, 1), cluster=(size, 1, 1), schedule=schedule
    )
    for cta in range(16):
        peer = cta // size * size + (cta + 1) % size
        want = [peer % size * 100000 + peer * 100 + t for t in range(64)]
        assert out[cta * 64 : cta * 64 + 64].tolist() == want


def test_clusters_of_two_dimensions_number_ranks_x_first() -> None:
    out = np.zeros((4, 4, 6), "u4")
    read = "".join(
        f"mov.u32 %r{10 + j}, {name}; st.global.b32 [%rd1+{4 * j}], %r{10 + j};"
        for j, name in enumerate(
            [
                "%cluster_ctarank",
                "%cluster_ctaid.x",
                "%cluster_ctaid.y",
                "%clusterid.x",
                "%clusterid.y",
                "%nclusterid.y",
            ]
        )
    )
    body = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.s32 %r3, %r2, 4, %r1; mad.wide.u32 %rd1, %r3, 24,
    %p0;"""
    launch_kernel(module(body + read, 1), [out], grid=(4, 4, 1), block=(1, 1, 1), cluster=(2, 2, 1))
    for y in range(4):
        for x in range(4):
            assert out[y, x].tolist() == [x % 2 + 2 * (y % 2), x % 2, y % 2, x // 2, y // 2, 2]


def test_remote_arrivals_and_their_limits() -> None:
    """Every CTA of a cluster arrives at the mbarrier of rank 0, which alone may wait for it."""
    body = """mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, bar; mapa.shared::cluster.u32 %r3, %r2, 0;
    setp.ne.u32 %q1, %r1, 0; @%q1 bra READY; mbarrier.init.shared.b64 [%r2], 128; READY:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3]; @%q1 bra END;"""
    body += wait("%r2", "0") + "st.global.b32 [%p0], 7; END:" + EVERYBODY
    out = np.zeros(1, "u4")
    options = {"grid": (4, 1, 1), "block": (32, 1, 1), "cluster": (4, 1, 1)}
    launch_kernel(module(body, 1, BARRIER), [out], **options)
    assert out[0] == 7
    remote = "arrive.release.cluster.shared::"
    local = body.replace(remote + "cluster", remote + "cta")
    with pytest.raises(MbarrierMisuse, match="belongs to another CTA"):
        launch_kernel(module(local, 1, BARRIER), [out], **options)
    early = body.replace("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", "")
    with pytest.raises(MbarrierMisuse, match="has exited"):
        late = early.replace("@%q1 bra END;", "@%q1 bra END; mov.b32 %r9, 0;").replace("128", "200")
        late = late.replace("mbarrier.arrive", "@%q1 bra GO; exit; GO: bar.sync 0; bar.sync 0; mbarrier.arrive", 1)
        launch_kernel(module(late, 1, BARRIER), [out], **options)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (("mapa.shared::cluster.u32 %r10, %r5, %r9", "mapa.shared::cluster.u32 %r10, %r5, 5"), OutOfBounds, "rank 5"),
        (("ld.shared::cluster.b32", "ld.shared.b32"), OutOfBounds, r"use \.shared::cluster"),
        (("barrier.cluster.wait.acquire.aligned;", ""), Deadlock, "arrives again before it has waited"),
        (("barrier.cluster.arrive.aligned;", ""), Deadlock, "waits without having arrived"),
        (("barrier.cluster.arrive.aligned;", "@%q1 bar.sync 1, 128; barrier.cluster.arrive.aligned;"), Deadlock,
         "for the cluster barrier, phase 1: 64 live thread"),
    ],
)  # fmt: skip
def test_cluster_misuse(change: tuple[str, str], error: type, message: str) -> None:
    body = "mov.u32 %r1, %ctaid.x; setp.eq.u32 %q1, %r1, 3;" + CLUSTER.replace(*change, 1)
    with pytest.raises(error, match=message):
        launch_kernel(
            module(body, 1, CELL),
            [np.zeros(256, "u4")],
            grid=(4, 1, 1),
            block=(64, 1, 1),
            cluster=(2, 1, 1),
            checks=False,
        )


def test_a_cooperative_launch_must_fit() -> None:
    from cute_nvfp4.sim import GlobalMemory, Launch, Program, run

    program = Program.parse(module("bar.sync 0;", 0))
    with pytest.raises(ResidencyError, match="149 CTAs, but 148 SMs hold 148"):
        launch = Launch("kernel", (149, 1, 1), (1024, 1, 1), (), dynamic_smem=200_000, cooperative=True)
        run(program, launch, GlobalMemory())
    with pytest.raises(LaunchError, match="compiled for clusters of"):
        text = module("bar.sync 0;", 0).replace("{\n", ".reqnctapercluster 2, 1, 1\n{\n", 1)
        run(Program.parse(text), Launch("kernel", (2, 1, 1), (32, 1, 1), ()), GlobalMemory())


def test_schedules_read_what_they_write() -> None:
    for schedule in adversarial(20, seed=3):
        assert Schedule.parse(str(schedule)) == schedule
    assert len({str(s) for s in adversarial(20)}) == 20
    assert Schedule.parse("seed=-3").seed == -3
    for wrong in ("tma", "seed=--3", "seed=-", "seed=\u00b2"):
        with pytest.raises(OperandError, match="name=value"):
            Schedule.parse(wrong)
    with pytest.raises(OperandError, match="schedule tma: got soon, expected batch or eager"):
        Schedule.parse("tma=soon")


SPIN = """ld.global.b32 %r2, [%p0+4]; mov.u32 %r1, %tid.x; setp.eq.u32 %q1, %r1, 0;
    @%q1 atom.acq_rel.gpu.global.add.u32 %r3, [%p0], 1; L: ld.acquire.gpu.global.b32 %r3, [%p0];
    setp.lt.u32 %q2, %r3, %r2; @%q2 bra L;"""


def test_a_grid_barrier_needs_every_cta_resident() -> None:
    """CTAs that wait for one another through global memory: 148 of this size are resident, 149 are not."""
    options = {"block": (32, 1, 1), "smem": 200_000}
    launch_kernel(module(SPIN, 1), [np.array([0, 148], "u4")], grid=(148, 1, 1), **options)
    with pytest.raises(ResidencyError, match="1 CTAs have not started"):
        launch_kernel(module(SPIN, 1), [np.array([0, 149], "u4")], grid=(149, 1, 1), **options)


def test_an_endless_loop_ends_soon() -> None:
    with pytest.raises(Deadlock, match="repeats a loop that changes nothing"):
        launch_kernel(module(SPIN, 1), [np.array([0, 3], "u4")], grid=(2, 1, 1), block=(32, 1, 1))


def test_too_much_memory_is_refused() -> None:
    text = module("st.local.b32 [stack], %r1;", 0, ".local .align 4 .b8 stack[400000];")
    with pytest.raises(LaunchError, match="GiB for their shared, local and tensor memory"):
        from cute_nvfp4.sim import GlobalMemory, Launch, Program, run

        run(Program.parse(text), Launch("kernel", (148, 1, 1), (1024, 1, 1), (), cooperative=True), GlobalMemory())

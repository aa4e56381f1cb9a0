"""Hazards found whatever the schedule: every kernel here comes with its twin that is in order."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module, wait

from cute_nvfp4.sim import CopiesInFlight, Hazard, MissingProxyFence, Race, Schedule, UninitializedRead

MEMORY = ".shared .align 16 .b8 cell[1024]; .shared .align 8 .b64 bar[4]; .shared .align 16 .b8 other[1024];"
THREAD = """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; shr.u32 %r3, %r1, 5; mov.u32 %r4, cell; mov.u32 %r5, bar;
    mov.u32 %r18, other; mov.u32 %r19, %cluster_ctarank;
    shl.b32 %r6, %r1, 2; add.s32 %r7, %r4, %r6; xor.b32 %r8, %r6, 4; add.s32 %r9, %r4, %r8;
    xor.b32 %r10, %r6, 128; add.s32 %r11, %r4, %r10; setp.eq.u32 %q1, %r1, 0; setp.lt.u32 %q2, %r1, 32;
    mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %p0, %rd1; mov.u32 %r17, %ctaid.x; setp.eq.u32 %q3, %r17, 0;
"""
OUT = "st.global.b32 [%rd2], %r12;"
INIT = "@%q1 mbarrier.init.shared.b64 [bar], {}; {} bar.sync 0;"
ROOM = np.zeros(4096, np.uint32)


def go(body: str, block: int = 32, **options) -> None:
    options.setdefault("schedule", Schedule())
    launch_kernel(module(THREAD + body, 1, MEMORY), [ROOM.copy()], block=(block, 1, 1), checks=True, **options)


def finds(kind: type[Hazard], body: str, drop: str, *words: str, put: str = "", **options) -> None:
    """``body`` is in order; without ``drop`` the hazard is found, and its message has ``words``."""
    assert drop in body
    go(body, **options)
    with pytest.raises(kind) as error:
        go(body.replace(drop, put), **options)
    text = str(error.value)
    assert type(error.value) is kind, text
    for word in ("kernel: ", *words):
        assert word in text, text


def test_lanes_of_a_warp_meet_at_bar_warp_sync() -> None:
    body = "st.shared.b32 [%r7], %r1; bar.warp.sync -1; ld.shared.b32 %r12, [%r9];" + OUT
    words = ("byte 4 of the shared memory (address 0x404) of CTA (0, 0, 0)", "lane 0", "lane 1", "bar.warp.sync")
    finds(Race, body, "bar.warp.sync -1;", "PTX line", *words)
    go("st.shared.b32 [%r7], %r1; ld.shared.b32 %r12, [%r7];" + OUT)


@pytest.mark.parametrize("drop", ["bar.sync 0;", "bar.sync 1;", "bar.sync 2;"])
def test_warps_meet_at_barriers(drop: str) -> None:
    """Write, read by the other warp, write again; the second bar.sync 1 orders the read before that."""
    body = "st.shared.b32 [%r7], %r1; bar.sync 0; ld.shared.b32 %r12, [%r11]; bar.sync 1; st.shared.b32 [%r7], %r12;"
    body += "bar.sync 2; ld.shared.b32 %r12, [%r11];" + OUT
    finds(Race, body, drop, "a barrier", block=64)


def test_reads_of_a_tensor_before_its_first_write_are_remembered() -> None:
    """CTAs read a word twice before one of them adds to it: in order where the reads are atomic."""
    read = "ld.relaxed.gpu.global.b32 %r12, [%p0]; "
    body = f"{read} bar.sync 0; {read} @%q1 red.relaxed.gpu.global.add.u32 [%p0], 1;"
    go(body, grid=(3, 1, 1))
    with pytest.raises(Race, match="is read by another cluster"):
        go(body.replace("ld.relaxed.gpu", "ld"), grid=(3, 1, 1))


def test_a_barrier_that_other_warps_use_orders_nothing() -> None:
    """Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2; warp 2 reads what warp 0 wrote."""
    body = (
        """@%q2 st.shared.b32 [%r7], %r1; shr.u32 %r13, %r1, 6; add.u32 %r13, %r13, 1; bar.sync 0; bar.sync %r13, 64;
    and.b32 %r14, %r6, 127; add.s32 %r14, %r4, %r14; ld.shared.b32 %r12, [%r14];"""
        + OUT
    )
    finds(Race, body, "bar.sync 0;", block=128)


def test_arrivals_at_a_barrier_release_only() -> None:
    """Warp 0 arrives and goes on; it must not read what warp 1 wrote before the barrier."""
    body = (
        """st.shared.b32 [%r7], %r1; @%q2 bra A; bar.sync 1, 64; ld.shared.b32 %r12, [%r11]; bra E;
    A: bar.arrive 1, 64; mov.b32 %r12, 0; E:"""
        + OUT
    )
    go(body, block=64)
    with pytest.raises(Race):
        go(body.replace("mov.b32 %r12, 0;", "ld.shared.b32 %r12, [%r11];"), block=64)


@pytest.mark.parametrize("drop,put", [("mbarrier.arrive.shared", "mbarrier.arrive.relaxed.cta.shared"), ("WAIT", "")])
def test_mbarriers_release_and_acquire(drop: str, put: str) -> None:
    body = (
        INIT.format(32, "")
        + """@%q2 bra A; WAIT ld.shared.b32 %r12, [%r11]; bra E;
    A: st.shared.b32 [%r7], %r1; mbarrier.arrive.shared.b64 _, [bar]; mov.b32 %r12, 0; E:"""
        + OUT
    )
    waits = wait("%r5", "0")
    go(body.replace("WAIT", waits), block=64)
    with pytest.raises((Race, UninitializedRead)):
        go(body.replace(drop, put).replace("WAIT", waits), block=64, schedule=Schedule(seed=1))


@pytest.mark.parametrize("drop", ["fence.acq_rel.cta;", "fence.acquire.sync_restrict::shared::cluster.cluster;"])
def test_fences_order_relaxed_mbarrier_operations(drop: str) -> None:
    waits = wait("%r5", "0").replace("parity", "parity.relaxed.cta")
    body = (
        INIT.format(32, "")
        + f"""@%q2 bra A; {waits} fence.acquire.sync_restrict::shared::cluster.cluster;
    ld.shared.b32 %r12, [%r11]; bra E;
    A: st.shared.b32 [%r7], %r1; fence.acq_rel.cta; mbarrier.arrive.relaxed.cta.shared.b64 _, [bar]; mov.b32 %r12, 0;
    E:"""
        + OUT
    )
    finds(Race, body, drop, block=64)


def test_an_mbarrier_is_initialised_before_it_is_used() -> None:
    body = INIT.format(64, "") + "mbarrier.arrive.shared.b64 _, [bar];" + wait("%r5", "0")
    finds(Race, body, "bar.sync 0;", "mbarrier.init", "nothing orders", block=64)


def test_memory_that_nobody_wrote() -> None:
    body = "st.shared.b32 [%r7], %r1; bar.warp.sync -1; ld.shared.b32 %r12, [%r9];" + OUT
    finds(UninitializedRead, body, "[%r9]", "nobody has written", put="[%r9+512]")
    go("st.shared.b32 [%r7], %r1; red.shared.add.u32 [%r7], %r1;")
    with pytest.raises(UninitializedRead):
        go("red.shared.add.u32 [%r7], %r1;")


def test_one_instruction_that_stores_two_values_in_one_place() -> None:
    finds(Race, "st.shared.b32 [%r4], 7;", "7;", "executes the same instruction", put="%r1;")
    finds(Race, "st.global.b32 [%p0], 7;", "7;", "tensor 't0'", put="%r1;")


def test_narrow_stores_beside_each_other() -> None:
    """Bytes of one unit that different warps write are different places."""
    body = """add.s32 %r13, %r4, %r1; cvt.u16.u32 %h1, %r1; st.shared.b8 [%r13], %h1; bar.sync 0;
    shl.b32 %r14, %r2, 4; add.s32 %r14, %r4, %r14; @%q1 ld.shared.v4.b32 {%r12, %r15, %r16, %r17}, [%r4];"""
    finds(Race, body, "bar.sync 0;", block=64)
    go(body.replace("bar.sync 0;", "bar.sync 0; st.shared.b8 [%r13], %h1; bar.sync 1;"), block=64)


# asynchronous copies

COPY = """@%q1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;
    @%q1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [cell], [%p0], 64, [bar];"""
LOADED = INIT.format(1, "fence.mbarrier_init.release.cluster;") + COPY
SMALL = "and.b32 %r13, %r6, 60; add.s32 %r13, %r4, %r13;"


def test_a_bulk_load_is_waited_for() -> None:
    body = LOADED + "WAIT" + SMALL + "ld.shared.b32 %r12, [%r13]; ACQUIRE" + OUT
    go(body.replace("WAIT", wait("%r5", "0")).replace("ACQUIRE", ""))
    with pytest.raises(Race, match="ends with a phase of the mbarrier at shared address 0x800"):
        go(body.replace("WAIT", "").replace("ACQUIRE", wait("%r5", "0")))


def test_a_bulk_load_over_what_is_still_read() -> None:
    body = LOADED + wait("%r5", "0") + SMALL + "ld.shared.b32 %r12, [%r13]; bar.sync 1;" + COPY + wait("%r5", "1") + OUT
    finds(Race, body, "bar.sync 1;", "is read by", "and written by", block=64)


def test_two_loads_of_one_phase_into_one_place() -> None:
    two = COPY.replace("64;", "128;", 1) + COPY.split(";", 1)[1].replace("[cell]", "[cell+64]")
    body = INIT.format(1, "fence.mbarrier_init.release.cluster;") + two + wait("%r5", "0")
    finds(Race, body, "[cell+64]", put="[cell+48]")


def test_the_barrier_of_a_copy_is_fenced() -> None:
    body = LOADED + wait("%r5", "0")
    words = ("mbarrier.init", "fence.mbarrier_init")
    # A fence that no thread comes to: the rules that are read off the code are content with it.
    never = "@!%q2 fence.mbarrier_init.release.cluster;"
    finds(MissingProxyFence, body, "fence.mbarrier_init.release.cluster;", *words, put=never)
    go(body.replace("fence.mbarrier_init.release.cluster;", "fence.proxy.async;"))


STORED = """st.shared.b32 [%r7], %r1; fence.proxy.async.shared::cta; bar.sync 0;
    @%q1 cp.async.bulk.global.shared::cta.bulk_group [%p0], [cell], 128; cp.async.bulk.commit_group;"""


def test_a_bulk_store_sees_stores_through_a_proxy_fence() -> None:
    body = STORED + "cp.async.bulk.wait_group.read 0;"
    finds(MissingProxyFence, body, "fence.proxy.async.shared::cta;", "st.shared", "asynchronous proxy")
    finds(Race, body, "bar.sync 0;")
    go(body.replace("bar.sync 0;", "").replace("fence.proxy.async.shared::cta;", "bar.sync 0; fence.proxy.async;"))
    with pytest.raises(MissingProxyFence):
        # The fence comes before the store.
        go(
            body.replace(
                "st.shared.b32 [%r7], %r1; fence.proxy.async.shared::cta;",
                "fence.proxy.async; st.shared.b32 [%r7], %r1;",
            )
        )


def test_a_bulk_store_has_read_before_its_source_changes() -> None:
    body = STORED + "cp.async.bulk.wait_group.read 0; bar.sync 1; st.shared.b32 [%r7], %r12;"
    body = "mov.b32 %r12, 0;" + body.replace("128;", "256;")
    finds(Race, body, "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group.read", put="", block=64)
    finds(Race, body, "bar.sync 1;", block=64)
    two = body.replace(
        "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 1;"
    )
    go(two, block=64)
    with pytest.raises(Race):
        go(body.replace("wait_group.read 0", "wait_group.read 1"), block=64)


def test_a_cta_waits_for_its_bulk_stores() -> None:
    body = STORED + "cp.async.bulk.wait_group.read 0;"
    finds(CopiesInFlight, body, "cp.async.bulk.wait_group.read 0;", "exits while a bulk copy")


def test_a_cta_waits_for_its_loads() -> None:
    finds(CopiesInFlight, LOADED + wait("%r5", "0"), wait("%r5", "0"), "bytes of an asynchronous copy")


def test_global_memory_written_by_a_bulk_store() -> None:
    """wait_group.read is not enough before the result is read."""
    body = STORED + "cp.async.bulk.wait_group 0; @%q1 ld.global.b32 %r12, [%p0];"
    finds(Race, body, "wait_group 0", put="wait_group.read 0")


def test_cp_async_groups() -> None:
    body = """and.b32 %r13, %r6, 124; cvt.u64.u32 %rd3, %r13; add.s64 %rd3, %p0, %rd3;
    cp.async.ca.shared.global [%r7], [%rd3], 4; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
    ld.shared.b32 %r12, [%r11];"""
    finds(Race, body, "cp.async.wait_group 0;", "cp.async.wait_group", block=64)
    finds(Race, body, "cp.async.commit_group;", block=64)
    finds(Race, body, "bar.sync 0;", block=64)
    go(body.replace("cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"), block=64)


def test_copied_data_need_no_proxy_fence() -> None:
    """What cp.async has copied, and what a bulk copy has, may be stored by a bulk copy at once."""
    body = """cvt.u64.u32 %rd3, %r6; add.s64 %rd3, %p0, %rd3; cp.async.ca.shared.global [%r7], [%rd3], 4;
    cp.async.wait_all; bar.sync 0; @%q1 cp.async.bulk.global.shared::cta.bulk_group [%p0+1024], [cell], 128;
    @%q1 cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"""
    finds(Race, body, "cp.async.wait_all;")


def test_cp_async_arrives_at_an_mbarrier() -> None:
    copy = """and.b32 %r13, %r6, 124; cvt.u64.u32 %rd3, %r13; add.s64 %rd3, %p0, %rd3;
    cp.async.ca.shared.global [%r7], [%rd3], 4; cp.async.mbarrier.arrive.noinc.shared.b64 [bar];"""
    body = INIT.format(64, "") + copy + wait("%r5", "0") + "ld.shared.b32 %r12, [%r11];"
    go(body, block=64)
    with pytest.raises(Race):
        go(
            body.replace("cp.async.mbarrier.arrive.noinc", "mbarrier.arrive").replace(".b64 [bar];", ".b64 _, [bar];"),
            block=64,
        )


# clusters

CLUSTER = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
PEER = "xor.b32 %r13, %r19, 1; mapa.shared::cluster.u32 %r14, %r7, %r13;"


def test_distributed_shared_memory() -> None:
    body = (
        PEER
        + """st.shared.b32 [%r7], %r1; barrier.cluster.arrive; barrier.cluster.wait;
    ld.shared::cluster.b32 %r12, [%r14]; barrier.cluster.arrive; barrier.cluster.wait;"""
    )
    go(body, **CLUSTER)
    with pytest.raises(Race, match="cluster barrier"):
        go(body.replace("barrier.cluster.arrive;", "barrier.cluster.arrive.relaxed;", 1), **CLUSTER)
    with pytest.raises(CopiesInFlight, match="may still access byte 0 of its shared memory"):
        go(body[: body.rindex("barrier.cluster.arrive")], **CLUSTER)


def test_remote_arrivals_are_waited_for() -> None:
    body = (
        "@%q1 mbarrier.init.shared.b64 [bar], 32; fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed;"
        "barrier.cluster.wait; xor.b32 %r13, %r19, 1; mapa.shared::cluster.u32 %r14, %r5, %r13;"
        "mbarrier.arrive.shared::cluster.b64 _, [%r14];"
    )
    go(body + wait("%r5", "0"), **CLUSTER)
    with pytest.raises(CopiesInFlight, match="an arrival of CTA"):
        go(body, **CLUSTER)
    with pytest.raises(Race, match=r"mbarrier\.init"):
        never = "@!%q2 fence.mbarrier_init.release.cluster;"
        go(body.replace("fence.mbarrier_init.release.cluster;", never) + wait("%r5", "0"), **CLUSTER)


# global memory

GRID = {"grid": (2, 1, 1)}


def test_ctas_that_write_one_place() -> None:
    body = "shl.b32 %r13, %r17, 7; cvt.u64.u32 %rd3, %r13; add.s64 %rd2, %rd2, %rd3; st.global.b32 [%rd2], %r17;"
    finds(Race, body, "add.s64 %rd2, %rd2, %rd3;", "tensor 't0'", "same instruction", **GRID)
    finds(Race, body, "add.s64 %rd2, %rd2, %rd3;", "another cluster", warps_per_wave=1, **GRID)


def test_a_tensor_that_one_cta_reads_and_another_writes() -> None:
    """The reads come first in this run, and in another wave."""
    body = "@%q3 ld.global.b32 %r12, [%rd2]; @!%q3 st.global.b32 [%rd2+128], %r1;"
    finds(Race, body, "+128", "is read by another cluster", **GRID)
    finds(Race, body, "+128", "is read by another cluster", warps_per_wave=1, **GRID)


FLAG = """@!%q3 bra B; st.global.b32 [%rd2], 5; bar.warp.sync -1; @%q1 {release} bra E;
    B: {acquire} setp.eq.u32 %q4, %r13, 0; @%q4 bra B; bar.warp.sync -1; ld.global.b32 %r12, [%rd2]; E:"""


@pytest.mark.parametrize(
    "release,acquire,good",
    [
        ("st.release.gpu.global.b32 [%p0+512], 1;", "ld.acquire.gpu.global.b32 %r13, [%p0+512];", True),
        ("st.relaxed.gpu.global.b32 [%p0+512], 1;", "ld.acquire.gpu.global.b32 %r13, [%p0+512];", False),
        ("st.release.gpu.global.b32 [%p0+512], 1;", "ld.relaxed.gpu.global.b32 %r13, [%p0+512];", False),
        ("red.release.gpu.global.add.u32 [%p0+512], 1;", "ld.acquire.gpu.global.b32 %r13, [%p0+512];", True),
        ("red.global.add.u32 [%p0+512], 1;", "ld.acquire.gpu.global.b32 %r13, [%p0+512];", False),
        (
            "fence.acq_rel.gpu; @%q1 st.relaxed.gpu.global.b32 [%p0+512], 1;",
            "ld.relaxed.gpu.global.b32 %r13, [%p0+512]; fence.acq_rel.gpu;",
            True,
        ),
        (
            "membar.gl; @%q1 st.volatile.global.b32 [%p0+512], 1;",
            "ld.volatile.global.b32 %r13, [%p0+512]; membar.gl;",
            True,
        ),
        ("st.volatile.global.b32 [%p0+512], 1;", "ld.volatile.global.b32 %r13, [%p0+512]; membar.gl;", False),
    ],
)
def test_flags_between_ctas(release: str, acquire: str, good: bool) -> None:
    body = FLAG.format(release=release, acquire=acquire)
    if good:
        go(body, **GRID)
        return
    with pytest.raises(Race, match="another cluster"):
        go(body, **GRID)


def test_the_last_cta_sums_up() -> None:
    """Every CTA stores its part, fences, counts; the last one reads all parts: two CTAs a wave."""
    body = """shl.b32 %r13, %r17, 7; cvt.u64.u32 %rd3, %r13; add.s64 %rd4, %rd2, %rd3; st.global.b32 [%rd4], %r17;
    bar.sync 0; @%q1 fence.acq_rel.gpu; @%q1 atom.global.add.u32 %r14, [%p0+8192], 1; @%q1 st.shared.b32 [cell], %r14;
    @%q1 fence.acq_rel.gpu; bar.sync 0; ld.shared.b32 %r14, [cell]; setp.ne.u32 %q4, %r14, 5; @%q4 bra E;
    ld.global.b32 %r12, [%rd2]; ld.global.b32 %r13, [%rd2+512]; E:"""
    options = {"grid": (6, 1, 1), "block": 64, "warps_per_wave": 4}
    go(body.replace("shl.b32 %r13, %r17, 7", "shl.b32 %r13, %r17, 8"), **options)
    with pytest.raises(Race, match="another cluster"):
        go(body.replace("@%q1 fence.acq_rel.gpu;", "").replace("%r17, 7", "%r17, 8"), **options)


# tensor memory

TENSOR = """tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32; bar.sync 0; ld.shared.b32 %r13, [cell];
    and.b32 %r14, %r3, 3; shl.b32 %r14, %r14, 21; add.s32 %r13, %r13, %r14;"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r15, 32;"


def test_tensor_memory_stores_are_waited_for() -> None:
    body = (
        TENSOR
        + """tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {%r1}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r12}, [%r13]; tcgen05.wait::ld.sync.aligned; mov.b32 %r15, %r13;"""
        + FREE
    )
    finds(Race, body, "tcgen05.wait::st.sync.aligned;", "tensor memory of CTA (0, 0, 0), lanes 0..15, column 0")


def test_tensor_fences_order_relaxed_mbarrier_operations() -> None:
    """They order accesses to tensor memory, and not those to shared memory."""
    waits = wait("%r5", "0").replace("parity", "parity.relaxed.cta")
    body = (
        INIT.format(128, "")
        + f"""setp.ne.u32 %q4, %r3, 0; @%q4 bra J;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [other], 32; J: bar.sync 0; ld.shared.b32 %r15, [other];
    shl.b32 %r14, %r3, 21; add.s32 %r13, %r15, %r14; st.shared.b32 [%r7], %r1;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {{%r1}}; tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync; mbarrier.arrive.relaxed.cta.shared.b64 _, [bar]; {waits}
    tcgen05.fence::after_thread_sync; PEEK @%q4 bra E;"""
        + FREE
        + "E: bar.sync 1;"
    )
    for drop in ("tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"):
        finds(Race, body.replace("PEEK", ""), drop, "tensor memory", block=128)
    with pytest.raises(Race, match="of the shared memory"):
        go(body.replace("PEEK", "ld.shared.b32 %r12, [%r11];"), block=128)


def test_tensor_memory_is_freed_when_nobody_uses_it() -> None:
    body = (
        """setp.ne.u32 %q4, %r3, 0; @%q4 bra J; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32;
    J: bar.sync 0; ld.shared.b32 %r15, [cell]; shl.b32 %r14, %r3, 21; add.s32 %r13, %r15, %r14;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {%r1}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r12}, [%r13]; tcgen05.wait::ld.sync.aligned;
    bar.sync 1; @%q4 bra E;"""
        + FREE
        + "E:"
    )
    finds(Race, body, "bar.sync 1;", block=128)

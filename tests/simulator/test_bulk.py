"""Bulk copies, their groups, cp.async, st.async and red.async, on hand-written PTX."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module
from tma_lab import aligned

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim.errors import Deadlock, MbarrierMisuse, Misaligned, OutOfBounds, UnsupportedInstruction
from cute_nvfp4.sim.isa.atomic import update
from cute_nvfp4.sim.machine import schedule

SMEM = ".shared .align 128 .b8 sm[1024]; .shared .align 8 .b64 bar;"
INIT = """
mov.u32 %r0, sm; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; setp.ne.u32 %q0, %r2, 0;
@%q0 bra I; mbarrier.init.shared.b64 [%r1], 1; I: fence.mbarrier_init.release.cluster; bar.sync 0;
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %q1, [%r1], 0; @!%q1 bra W;"
SCHEDULES = ["", "tma=eager,store=eager,copy=eager", "tma=lazy,store=lazy,copy=lazy", "seed=1,tma=random,copy=random"]


def schedules(test):
    return pytest.mark.parametrize("how", [schedule.Schedule.parse(t) for t in SCHEDULES], ids=str)(test)


def noise(count: int, seed: int = 0) -> np.ndarray:
    return aligned(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes())


@schedules
def test_load_and_store(how):
    """Global to shared, counted by an mbarrier, and back in a bulk group."""
    source, out = noise(1024), aligned(bytes(1024))
    body = f"""{INIT}
    @%q0 bra W;
    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 528;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0+16], [%p0+32], 512, [%r1];
    mov.u64 %rd6, 0;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r0+640], [%p0], 16, [%r1], %rd6;
    {WAIT}
    @%q0 bra E;
    cp.async.bulk.prefetch.L2.global [%p0], 64;
    cp.async.bulk.global.shared::cta.bulk_group [%p1+256], [%r0], 672;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;
    E:
    """
    launch_kernel(module(body, 2, SMEM), [source, out], block=(64, 1, 1), schedule=how)
    want = np.zeros(1024, np.uint8)
    want[256 + 16 : 256 + 528] = source[32 : 32 + 512]
    want[256 + 640 : 256 + 656] = source[:16]
    np.testing.assert_array_equal(out, want)


def test_a_group_is_waited_for():
    """With wait_group 1 the older of two groups is complete, and under a lazy engine the other is not."""
    flag = aligned(np.zeros(64, np.uint32).tobytes())
    body = """
    mov.u32 %r0, sm; mov.u32 %r2, %tid.x; setp.ne.u32 %q0, %r2, 0; mov.u32 %r3, 7; st.shared.b32 [%r0], %r3;
    fence.proxy.async; @%q0 bra E;
    cp.async.bulk.global.shared::cta.bulk_group [%p0], [%r0], 16; cp.async.bulk.commit_group;
    cp.async.bulk.global.shared::cta.bulk_group [%p0+16], [%r0], 16; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 1;
    ld.global.b32 %r4, [%p0]; st.global.b32 [%p0+64], %r4; ld.global.b32 %r4, [%p0+16]; st.global.b32 [%p0+68], %r4;
    E:
    """
    launch_kernel(module(body, 1, SMEM), [flag], schedule=schedule.Schedule(store="lazy"))
    assert flag.view("u4")[[16, 17]].tolist() == [7, 0]
    assert flag.view("u4")[[0, 4]].tolist() == [7, 7]


def test_unelected_store_happens_once():
    """The DSL issues bulk stores from all lanes of a warp; a reduction shows that there is one."""
    total = aligned(np.zeros(4, np.uint32).tobytes())
    body = """
    mov.u32 %r0, sm; mov.u32 %r3, 5; st.shared.b32 [%r0], %r3; fence.proxy.async; bar.warp.sync -1;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%p0], [%r0], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    launch_kernel(module(body, 1, SMEM), [total])
    assert total.view("u4").tolist() == [5, 0, 0, 0]


def test_byte_mask():
    source, out = noise(64), aligned(bytes(64))
    body = """
    mov.u32 %r0, sm; mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 1; cvt.u64.u32 %rd1, %r3; add.s64 %rd1, %rd1, %p0;
    ld.global.b16 %h0, [%rd1]; add.u32 %r4, %r0, %r3; st.shared.b16 [%r4], %h0; fence.proxy.async; bar.warp.sync -1;
    setp.ne.u32 %q0, %r2, 0; @%q0 bra E; mov.b16 %h1, 0x8005; mov.u64 %rd2, 0;
    cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.cp_mask [%p1], [%r0], 64, %rd2, %h1;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:
    """
    launch_kernel(module(body, 2, SMEM), [source, out])
    keep = np.tile([1, 0, 1] + [0] * 12 + [1], 4).astype(bool)
    np.testing.assert_array_equal(out, np.where(keep, source, 0))


@schedules
def test_multicast_and_shared_to_shared(how):
    """CTA 0 sends a row to CTAs 1 and 3; each CTA then sends its row to the next one."""
    source, out = noise(64), aligned(bytes(64 * 8))
    body = f"""{INIT}
    mov.u32 %r5, %cluster_ctarank; mov.u32 %r6, bar2; @%q0 bra J; mbarrier.init.shared.b64 [%r6], 1;
    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r6], 64;
    and.b32 %r7, %r5, 1; setp.eq.u32 %q2, %r7, 0; @%q2 bra J;
    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 64;
    J: fence.mbarrier_init.release.cluster; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%q0 bra K; setp.ne.u32 %q3, %r5, 0; @%q3 bra K; mov.b16 %h0, 0xA;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%p0], 64, [%r1], %h0;
    K: and.b32 %r7, %r5, 1; setp.eq.u32 %q2, %r7, 0; @%q2 bra N;
    {WAIT}
    N: @%q0 bra S; add.u32 %r8, %r5, 1; and.b32 %r8, %r8, 3;
    mapa.shared::cluster.u32 %r9, %r0, %r8; mapa.shared::cluster.u32 %r10, %r6, %r8;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9+128], [%r0], 64, [%r10];
    S: V: mbarrier.try_wait.parity.shared.b64 %q1, [%r6], 0; @!%q1 bra V;
    shl.b32 %r11, %r5, 7; cvt.u64.u32 %rd1, %r11; add.s64 %rd1, %rd1, %p1; shl.b32 %r12, %r2, 1; cvt.u64.u32 %rd2, %r12;
    add.s64 %rd1, %rd1, %rd2; add.u32 %r13, %r0, %r12;
    ld.shared.b16 %h1, [%r13]; st.global.b16 [%rd1], %h1; ld.shared.b16 %h1, [%r13+128]; st.global.b16 [%rd1+64], %h1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    text = module(body, 2, SMEM + " .shared .align 8 .b64 bar2;")
    launch_kernel(text, [source, out], grid=(4, 1, 1), cluster=(4, 1, 1), schedule=how)
    zero = np.zeros(64, np.uint8)
    rows = [(zero, source), (source, zero), (zero, source), (source, zero)]
    np.testing.assert_array_equal(out.reshape(4, 2, 64), np.array(rows))


@schedules
def test_st_async_and_red_async(how):
    """Each lane of CTA 1 stores two words and adds one in CTA 0, which waits for 32 * 12 bytes."""
    out = aligned(np.zeros(96, np.uint32).tobytes())
    body = f"""{INIT}
    mov.u32 %r5, %cluster_ctarank; setp.ne.u32 %q2, %r5, 0; @%q2 bra J; @%q0 bra J;
    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 384;
    J: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @!%q2 bra R; mov.u32 %r6, 0; mapa.shared::cluster.u32 %r7, %r0, %r6; mapa.shared::cluster.u32 %r8, %r1, %r6;
    shl.b32 %r9, %r2, 3; add.u32 %r10, %r7, %r9; add.u32 %r11, %r2, 100;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r10], {{%r2, %r11}}, [%r8];
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r7+512], %r2, [%r8];
    bra E;
    R: {WAIT}
    shl.b32 %r9, %r2, 3; add.u32 %r10, %r0, %r9; ld.shared.v2.b32 {{%r12, %r13}}, [%r10]; ld.shared.b32 %r14, [%r0+512];
    cvt.u64.u32 %rd1, %r9; add.s64 %rd1, %rd1, %p0; st.global.v2.b32 [%rd1], {{%r12, %r13}};
    st.global.b32 [%p0+256], %r14;
    E: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    launch_kernel(module(body, 1, SMEM), [out], grid=(2, 1, 1), cluster=(2, 1, 1), schedule=how)
    words = out.view("u4")
    assert words[:64].reshape(32, 2).tolist() == [[j, j + 100] for j in range(32)]
    assert words[64] == sum(range(32))


def test_reduction_in_shared_memory():
    rng = np.random.default_rng(3)
    source = aligned(rng.integers(0, 2**32, 32, dtype=np.uint32).tobytes())
    for op, t in (("add", "u32"), ("min", "s32"), ("max", "u32"), ("inc", "u32"), ("xor", "b32"), ("add", "u64")):
        out = aligned(bytes(64))
        body = f"""{INIT}
        shl.b32 %r3, %r2, 2; cvt.u64.u32 %rd1, %r3; add.s64 %rd1, %rd1, %p0; ld.global.b32 %r4, [%rd1];
        add.u32 %r5, %r0, %r3; st.shared.b32 [%r5], %r4; fence.proxy.async; bar.sync 0; @%q0 bra W;
        mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 64;
        cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{t}
          [%r0+64], [%r0], 64, [%r1];
        {WAIT}
        setp.gt.u32 %q2, %r2, 15; @%q2 bra E; ld.shared.b32 %r4, [%r5+64]; sub.s64 %rd1, %rd1, %p0;
        add.s64 %rd1, %rd1, %p1; st.global.b32 [%rd1], %r4;
        E:
        """
        launch_kernel(module(body, 2, SMEM), [source, out])
        raw = "u8" if t[1:] == "64" else "u4"
        words = source.view(raw)
        half = len(words) // 2
        want = update(op, t)(words[half:].copy(), words[:half].copy())
        np.testing.assert_array_equal(out.view(raw), want)


@schedules
def test_cp_async_groups(how):
    """The first of two groups has arrived after wait_group 1, all have after wait_all; a lazy engine shows the rest."""
    source, out = noise(1024), aligned(np.zeros(96, np.uint32).tobytes())
    body = """
    mov.u32 %r0, sm; mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 2; cvt.u64.u32 %rd1, %r3; add.s64 %rd2, %rd1, %p0;
    add.u32 %r5, %r0, %r3;
    cp.async.ca.shared.global [%r5], [%rd2], 4; cp.async.commit_group;
    mov.u32 %r6, 2; cp.async.ca.shared.global [%r5+128], [%rd2+128], 4, %r6; cp.async.commit_group;
    cp.async.wait_group 1; ld.shared.b32 %r7, [%r5]; ld.shared.b32 %r8, [%r5+128];
    cp.async.ca.shared.global [%r5+256], [%rd2+256], 4; cp.async.wait_all; ld.shared.b32 %r9, [%r5+256];
    add.s64 %rd3, %rd1, %p1; st.global.b32 [%rd3], %r7; st.global.b32 [%rd3+128], %r8; st.global.b32 [%rd3+256], %r9;
    """
    launch_kernel(module(body, 2, SMEM), [source, out], schedule=how)
    words = source.view("u4")[:96].reshape(3, 32)
    got = out.view("u4").reshape(3, 32)
    assert (got[0] == words[0]).all() and (got[2] == words[2]).all()
    if how.copy == "lazy":
        assert not got[1].any()
    if how.copy == "eager":
        assert (got[1] == words[1] & 0xFFFF).all()


@schedules
@pytest.mark.parametrize("suffix", ["", ".noinc"])
def test_cp_async_arrives(how, suffix):
    source, out = noise(128), aligned(np.zeros(32, np.uint32).tobytes())
    count = 32 if suffix else 1
    arrive = "" if suffix else "@!%q0 mbarrier.arrive.shared.b64 %rd5, [%r1];"
    body = f"""{INIT.replace("[%r1], 1;", f"[%r1], {count};")}
    shl.b32 %r3, %r2, 2; cvt.u64.u32 %rd1, %r3; add.s64 %rd2, %rd1, %p0; add.u32 %r5, %r0, %r3;
    cp.async.ca.shared.global [%r5], [%rd2], 4; cp.async.mbarrier.arrive{suffix}.shared.b64 [%r1]; {arrive}
    {WAIT}
    xor.b32 %r6, %r5, 4; ld.shared.b32 %r7, [%r6]; add.s64 %rd3, %rd1, %p1; st.global.b32 [%rd3], %r7;
    """
    launch_kernel(module(body, 2, SMEM), [source, out], schedule=how, checks=True)
    assert out.view("u4").tolist() == source.view("u4")[np.arange(32) ^ 1].tolist()


TX = "mbarrier::complete_tx::bytes"
LOAD = f"mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 32; cp.async.bulk.shared::cta.global.{TX}"


@pytest.mark.parametrize(
    ("hazard", "text", "code"),
    [
        (Misaligned, "size 0x18 is not a multiple of 16", f"{LOAD} [%r0], [%p0], 24, [%r1];"),
        (Misaligned, "destination 0x408 in shared memory", f"{LOAD} [%r0+8], [%p0], 32, [%r1];"),
        (Misaligned, "is not a multiple of 16", f"{LOAD} [%r0], [%p0+8], 32, [%r1];"),
        (OutOfBounds, "past the end of tensor 't0'", f"{LOAD} [%r0], [%p0+80], 32, [%r1];"),
        (OutOfBounds, "of shared memory, which has", f"{LOAD} [%r0+1024], [%p0], 32, [%r1];"),
        (MbarrierMisuse, "holds no mbarrier", f"{LOAD} [%r0], [%p0], 32, [%r0];"),
        (Deadlock, "16 bytes still to come", f"{LOAD} [%r0], [%p0], 16, [%r1]; {WAIT}"),
        (OutOfBounds, "multicast to CTAs 0b0010 of a cluster of 1", "mov.b16 %h0, 2; "
         f"cp.async.bulk.shared::cluster.global.{TX}.multicast::cluster [%r0], [%p0], 16, [%r1], %h0;"),
        (UnsupportedInstruction, "does not exist here",
         "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%p0], [%r0], 16;"),
        (UnsupportedInstruction, "from .global to .global", "cp.async.bulk.global.global.bulk_group [%p0], [%p0], 16;"),
        (UnsupportedInstruction, "ignore_oob",
         f"cp.async.bulk.shared::cta.global.{TX}.ignore_oob [%r0], [%p0], 16, [%r1];"),
    ],
)  # fmt: skip
def test_hazards(hazard, text, code):
    """Each error says what is wrong, and names the instruction."""
    with pytest.raises(SimError) as caught:
        launch_kernel(module(f"{INIT} @%q0 bra E; {code} E:", 1, SMEM), [noise(96)])
    assert isinstance(caught.value, hazard) and text in str(caught.value)
    assert "cp." in str(caught.value) or "mbarrier" in str(caught.value)

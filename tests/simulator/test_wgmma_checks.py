"""Hazards of wgmma: a kernel that is in order, and the same with one step left out or added.

One warpgroup adds three products: A from registers by B from stage 0, A from shared memory by B from stage 1, and the
negated A from registers by what has come to stage 0 in the meantime.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import BrokenRule, CopiesInFlight, MissingProxyFence, Race, Schedule, UninitializedRead
from cute_nvfp4.sim.errors import DivergentBarrier, InvalidLanes
from cute_nvfp4.sim.machine.schedule import adversarial

MEMORY = """.shared .align 1024 .b8 a[2048]; .shared .align 1024 .b8 b[512]; .shared .align 8 .b64 full[2];
  .reg .b32 %t, %a<4>, %x<4>, %bar, %stage; .reg .f32 %acc<4>; .reg .b64 %da, %db0, %db1;"""
# 8 x 16 bytes are a core matrix; 128 bytes to the next along K, 256 to the next along M or N
FIELDS = hex(128 >> 4 << 16 | 256 >> 4 << 32)
ACC = "{%acc0, %acc1, %acc2, %acc3}"
MMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
FIRST = f"{MMA} {ACC}, {{%a0, %a1, %a2, %a3}}, %db0, %q4, 1, 1, 0;"
SECOND = f"{MMA} {ACC}, %da, %db1, %q5, 1, 1, 0, 0;"
THIRD = f"{MMA} {ACC}, {{%a0, %a1, %a2, %a3}}, %db0, %q5, 1, 1, 0;"
COMMIT, WAIT_1, WAIT_0 = (
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 1;",
    "wgmma.wait_group.sync.aligned 0;",
)
FENCE = "wgmma.fence.sync.aligned;"
PROXY = "fence.proxy.async.shared::cta;"


def load(tile: int, stage: int) -> str:
    return f"""add.u32 %bar, full, {8 * stage}; add.u32 %stage, b, {256 * stage}; add.s64 %rd2, %p1, {256 * tile};
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%stage], [%rd2], 256, [%bar];"""


def wait(stage: int, parity: int) -> str:
    label = f"W{stage}{parity}"
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %q3, [full+{8 * stage}], {parity}; @!%q3 bra {label};"


STORE_A = "st.shared.v4.b32 [%r1], {%x0, %x1, %x2, %x3};"
SECOND_FENCE = FENCE + " "
NEGATE = " ".join(f"xor.b32 %a{j}, %a{j}, 0x80008000;" for j in range(4))
BODY = f"""
    mov.u32 %t, %tid.x; setp.eq.u32 %q0, %t, 0; setp.ne.u32 %q4, %t, %t; setp.eq.u32 %q5, %t, %t;
    @!%q0 bra S; mbarrier.init.shared.b64 [full], 1; mbarrier.init.shared.b64 [full+8], 1;
    fence.mbarrier_init.release.cluster; {load(0, 0)} {load(1, 1)}
    S: mad.wide.u32 %rd0, %t, 16, %p0; ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%rd0];
    ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%rd0+2048];
    shl.b32 %r0, %t, 4; add.u32 %r1, a, %r0; {STORE_A}
    {PROXY} bar.sync 0;
    shr.u32 %r2, %r1, 4;
    mov.u32 %r3, a; shr.u32 %r3, %r3, 4; cvt.u64.u32 %da, %r3; or.b64 %da, %da, {FIELDS};
    mov.u32 %r3, b; shr.u32 %r3, %r3, 4; cvt.u64.u32 %db0, %r3; or.b64 %db0, %db0, {FIELDS}; add.s64 %db1, %db0, 16;
    {wait(0, 0)} {FENCE} {FIRST} {COMMIT}
    {wait(1, 0)} {SECOND} {COMMIT} {WAIT_1}
    {NEGATE} bar.sync 1;
    @!%q0 bra N; {load(2, 0)}
    N: {wait(0, 1)} {SECOND_FENCE} {THIRD} {COMMIT} {WAIT_0}
    mad.wide.u32 %rd1, %t, 16, %p2; st.global.v4.f32 [%rd1], {ACC};
"""
HOW = [Schedule(), *adversarial(3)]


def go(body: str, how: Schedule | None = None, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """(what the kernel has stored, what it should), (64, 8)."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(-4, 5, (2, 64, 16)).astype("f2"), rng.integers(-4, 5, (3, 8, 16)).astype("f2")
    t = np.arange(128)
    # registers 2 q + h of lane 4 r + c: row r + 8 h, columns 8 q + 2 c and the next
    pairs = a[0].reshape(4, 2, 8, 2, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    cores = a[1].reshape(8, 8, 2, 8).transpose(0, 2, 1, 3)
    images = [np.concatenate([np.ascontiguousarray(x).view("u1").ravel() for x in (pairs, cores)])]
    images.append(np.ascontiguousarray(b.reshape(3, 8, 2, 8).transpose(0, 2, 1, 3)).view("u1").ravel())
    out = np.zeros((block, 4), "f4")
    launch_kernel(
        module(body, 3, MEMORY).replace("sm_100a", "sm_90a"),
        [*images, out],
        block=(block, 1, 1),
        checks=True,
        schedule=how or HOW[0],
    )
    a, b = a.astype("f4"), b.astype("f4")
    found = np.zeros((64, 8), "f4")
    for j in range(4):
        found[16 * (t // 32) + t % 32 // 4 + 8 * (j // 2), 2 * (t % 4) + j % 2] = out[:128, j]
    return found, a[0] @ (b[0] - b[2]).T + a[1] @ b[1].T


@pytest.mark.parametrize("how", HOW, ids=range(len(HOW)))
def test_the_kernel_in_order(how) -> None:
    found, want = go(BODY, how)
    np.testing.assert_array_equal(found, want)


def test_rows_of_a_that_nobody_has_written_may_be_read_for_a_product_that_nobody_stores() -> None:
    """Of A in shared memory rows 32 to 63 are missing: a hazard only where their products are stored."""
    some = "setp.lt.u32 %q1, %t, 64; @%q1 "
    body = BODY.replace(STORE_A, some + STORE_A)
    found, want = go(body.replace("st.global.v4.f32 [%rd1]", "@%q1 st.global.v4.f32 [%rd1]"))
    np.testing.assert_array_equal(found[:32], want[:32])
    with pytest.raises(UninitializedRead, match=r"nobody has written it;\n  its value decides"):
        go(body)


def test_two_warpgroups_in_order() -> None:
    body = BODY.replace("mad.wide.u32 %rd0, %t", "and.b32 %r9, %t, 127; mad.wide.u32 %rd0, %r9")
    found, want = go(body.replace("shl.b32 %r0, %t", "shl.b32 %r0, %r9"), block=256)
    np.testing.assert_array_equal(found, want)


ORDERED = f"{STORE_A}\n    {PROXY} bar.sync 0;"
REFILL = f"{WAIT_1}\n    {NEGATE} bar.sync 1;"
LEAVE = f"{THIRD} {COMMIT} {WAIT_0}"
X = THIRD.replace("%a0, %a1, %a2, %a3", "%x0, %x1, %x2, %x3") + FIRST.replace("%acc", "%x")


@pytest.mark.parametrize(
    ("hazard", "text", "drop", "put"),
    [
        (Race, "%acc0, which is part of the accumulator", WAIT_0, ""),
        (Race, "%acc0, which is part of the accumulator", f"{COMMIT} {WAIT_0}", WAIT_0),
        (Race, "%acc1, which is part of the accumulator", WAIT_1, "mov.f32 %acc1, 0f00000000;" + WAIT_1),
        (Race, "%a0, which is part of the fragment of A", WAIT_1, ""),
        (Race, "%a2, which is part of the fragment of A", FIRST, FIRST + "xor.b32 %r9, %a2, 1;"),
        (Race, "%x0 as its accumulator", FENCE, FENCE + X),
        (BrokenRule, "no wgmma.fence comes before it", f"{FENCE} {FIRST}", FIRST),
        (BrokenRule, "%a0, which `xor.b32 %a0, %a0, 0x80008000`", SECOND_FENCE + " ", ""),
        (MissingProxyFence, "[proxy-fence]", PROXY, ""),
        (Race, "[race]", ORDERED, f"bar.sync 0; {STORE_A} {PROXY}"),
        # a stage that a product still reads is filled again, by a copy and by a store
        (Race, "[race]", REFILL, "bar.sync 1;"),
        (Race, "[race]", f"{COMMIT} {WAIT_1}", f"{COMMIT} st.shared.b32 [%r1], %t; {WAIT_1}"),
        (Race, "[race]", wait(1, 0), ""),
        (CopiesInFlight, "wgmma.wait_group are missing after it", LEAVE, f"{WAIT_0} {THIRD} {COMMIT} exit;"),
        (InvalidLanes, "thread (7, 0, 0)", FIRST, "setp.ne.u32 %q6, %t, 7; @%q6 " + FIRST),
        (InvalidLanes, "different values of matrix descriptor", FIRST, FIRST.replace("%db0", "%rd0")),
        (InvalidLanes, "different values of scale-d", FIRST, FIRST.replace("%q4", "%q0")),
        (DivergentBarrier, "lanes", FIRST, "setp.gt.u32 %q6, %t, 95; @%q6 bra E; " + FIRST),
    ],
)  # fmt: skip
def test_one_step_left_out(hazard, text: str, drop: str, put: str) -> None:
    assert drop in BODY
    body = BODY.replace(drop, put, 1)
    with pytest.raises(hazard) as error:
        go(body + "E: bar.sync 3;" if "bra E" in body else body)
    assert text in str(error.value) and "PTX line" in str(error.value)


def test_a_group_is_waited_for_in_its_order() -> None:
    """wait_group 1 is over for all groups but the last: registers of the ones before it are free."""
    body = BODY.replace(WAIT_1, WAIT_1 + "xor.b32 %r9, %a2, 1;")
    found, want = go(body)
    np.testing.assert_array_equal(found, want)
    with pytest.raises(Race, match="register-in-flight"):
        go(body.replace(WAIT_1, "wgmma.wait_group.sync.aligned 2;"))


def test_counters() -> None:
    """An operation is one of a warpgroup; A and B in shared memory are read once each."""
    text = module(BODY, 3, MEMORY).replace("sm_100a", "sm_90a")
    buffers = [np.zeros(size, "u1") for size in (4096, 768, 2048)]
    result = launch_kernel(text, buffers, block=(128, 1, 1), counters=True)
    (work,) = (m for m in result.mma if m.kind == "wgmma f16")
    assert (work.operations, work.multiply_adds) == (3, 3 * 64 * 8 * 16)
    engines = [e for e in result.engines if "wgmma" in e.instruction]
    assert [(e.operations, e.shared_read) for e in engines] == [(1, 256), (1, 2048 + 256), (1, 256)]


FILL = """mbarrier.arrive.expect_tx.shared.b64 _, [full], 2048;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [c], [%p0], 2048, [full];"""
LOADED = "mad.wide.u32 %rd0, %t, 16, %p0; ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%rd0];"


def from_shared(after: str = "") -> str:
    """The kernel with A from shared memory through registers; one thread fills it again when a product of the whole
    warpgroup is over. ``after`` comes behind that product."""
    body = BODY.replace(LOADED, "mad.wide.u32 %rd0, %t, 16, %p0; shl.b32 %r8, %t, 4; add.u32 %r8, %r8, c;")
    for tile in (0, 2):
        body = body.replace(load(tile, 0), FILL + load(tile, 0))
    body = body.replace("[full], 1;", "[full], 2;").replace(REFILL, f"{WAIT_1} {NEGATE}")
    return body.replace(f"{FENCE} {FIRST}", f"ld.shared.v4.b32 {{%a0, %a1, %a2, %a3}}, [%r8]; {FENCE} {FIRST} {after}")


def test_what_a_product_came_from_has_been_read(monkeypatch) -> None:
    """The end of a wgmma is the end of the loads of all warps that its registers came from, and of no others."""
    monkeypatch.setattr(sys.modules[__name__], "MEMORY", MEMORY + ".shared .align 16 .b8 c[2048];")
    found, want = go(from_shared())
    np.testing.assert_array_equal(found, want)
    with pytest.raises(Race, match=r"read by .*ld.shared.b32 %r9(.|\n)*written by .*cp.async.bulk"):
        go(from_shared("ld.shared.b32 %r9, [%r8];"))
    # nor does it order what they have written
    with pytest.raises(Race, match=r"written by .*st.shared(.|\n)*written again by .*cp.async.bulk"):
        stores = "setp.gt.u32 %q6, %t, 31; @%q6 st.shared.b32 [%r8], %t; fence.proxy.async;"
        go(from_shared().replace(FENCE, stores + FENCE, 1))

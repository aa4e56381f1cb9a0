"""Whole PTX kernels: allocate, copy scales, multiply, commit, wait, load, free; one CTA and pairs, every schedule."""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.sim.errors import OutOfBounds, TensorMemoryError, UnsupportedInstruction
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.machine.schedule import Schedule
from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError
from tests.simulator import tcgen05_lab as lab
from tests.simulator.ptx_lab import launch_kernel, module, wait
from tests.simulator.test_tcgen05_mma import block_bits, idesc_bits
from tests.simulator.test_tcgen05_scaled import scale_values

IMAGE = 32 * 1024
"""Bytes of shared memory that the kernels fill from global memory: A at 0, B at 16 KiB, scales at 24 KiB."""
B_AT, SFA_AT, SFB_AT = 16 * 1024, 24 * 1024, 26 * 1024
DECLARED = ".extern .shared .align 1024 .b8 smem[]; .reg .b32 %v<40>; .reg .b64 %d<20>;"
SCHEDULES = [
    Schedule(),
    Schedule(tensor="lazy"),
    Schedule(tensor="eager"),
    Schedule(seed=3, warps="random", tensor="random"),
]


def kernel(work: str, columns: int, pair: bool) -> str:
    """Fills shared memory with the image of its CTA, lets one thread do ``work``, stores 64 columns of every lane.

    The mbarrier is at smem + 32 KiB, the address of the allocation after it.
    """
    group = "cta_group::2" if pair else "cta_group::1"
    meet = "barrier.cluster.arrive; barrier.cluster.wait;" if pair else "bar.sync 0;"
    leader = "@%q2 bra ISSUED;" if pair else ""
    commit = f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster"
    commit += ".multicast::cluster.b64 [%r11], %h1;" if pair else ".b64 [%r11];"
    return f"""
    mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.u32 %r2, %ctaid.x; mov.u32 %r10, smem;
    add.s32 %r11, %r10, {IMAGE}; add.s32 %r12, %r11, 16; mov.b16 %h1, 3;
    setp.ne.b32 %q0, %r1, 0; setp.ne.b32 %q1, %r0, 0;
    mov.u32 %r13, %cluster_ctarank; setp.ne.b32 %q2, %r13, 0;
    mad.wide.u32 %rd0, %r2, {IMAGE}, %p0;
    shl.b32 %r14, %r0, 4;
    FILL: cvt.u64.u32 %rd1, %r14; add.s64 %rd2, %rd0, %rd1; add.s32 %r15, %r10, %r14;
    ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd2]; st.shared.v4.b32 [%r15], {{%v0, %v1, %v2, %v3}};
    add.s32 %r14, %r14, 2048; setp.lt.u32 %q3, %r14, {IMAGE}; @%q3 bra FILL;
    @%q1 bra READY; mbarrier.init.shared::cta.b64 [%r11], 1; fence.mbarrier_init.release.cluster;
    READY: fence.proxy.async.shared::cta;
    @%q0 bra ALLOCATED;
    tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%r12], {columns};
    tcgen05.relinquish_alloc_permit.{group}.sync.aligned;
    ALLOCATED: tcgen05.fence::before_thread_sync; {meet} tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r3, [%r12];
    @%q1 bra ISSUED; {leader}
    {work}
    {commit}
    ISSUED: {wait("%r11", "0")}
    tcgen05.fence::after_thread_sync;
    shl.b32 %r4, %r1, 21; add.s32 %r5, %r3, %r4; mov.u32 %r6, 0;
    mul.lo.s32 %r7, %r2, 128; add.s32 %r7, %r7, %r0; mad.wide.u32 %rd3, %r7, 256, %p1;
    READ: tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{", ".join(f"%v{j}" for j in range(32))}}}, [%r5];
    tcgen05.wait::ld.sync.aligned;
    {"".join(f"st.global.b32 [%rd3+{4 * j}], %v{j};" for j in range(32))}
    add.s32 %r5, %r5, 32; add.s64 %rd3, %rd3, 128; add.s32 %r6, %r6, 1; setp.lt.u32 %q3, %r6, 2; @%q3 bra READ;
    {meet}
    @%q0 bra FREED; tcgen05.dealloc.{group}.sync.aligned.b32 %r3, {columns};
    FREED:
    """


def mma(opcode: str, a: int, b: int, idesc: int, steps: int, scales: str = "") -> str:
    """``steps`` instructions 32 bytes of K apart; the first overwrites D."""
    lines = []
    for k in range(steps):
        lines.append(f"mov.b64 %d0, {a + 2 * k:#x}; mov.b64 %d1, {b + 2 * k:#x}; mov.b32 %r20, {idesc:#x};")
        lines.append(f"mov.pred %q4, {int(k > 0)};" if k < 2 else "")
        lines.append(f"{opcode} [%r3], %d0, %d1, %r20, {scales}%q4;")
    return "\n".join(lines)


def launch(work: str, images: np.ndarray, columns: int, pair: bool = False, **options) -> np.ndarray:
    """(CTAs, 128, 64) words of tensor memory after ``work``; ``images`` (CTAs, bytes) are in shared memory before."""
    ctas = len(images)
    out = np.zeros((ctas, 128, 64), "u4")
    text = module(kernel(work, columns, pair), 2, DECLARED).replace("sm_100a", options.pop("target", "sm_100a"))
    cluster = (2, 1, 1) if pair else (1, 1, 1)
    grid = (ctas, 1, 1)
    launch_kernel(text, [images, out], grid=grid, block=(128, 1, 1), smem=IMAGE + 32, cluster=cluster, **options)
    return out


def place(image: np.ndarray, at: int, code: np.ndarray, t: str, layout: str = "128B") -> int:
    lbo, sbo, _ = lab.place_k_major(image, SHARED_BASE + at, lab.row_bytes(code, t), layout)
    return lab.encode(SHARED_BASE + at, layout, lbo, sbo)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_four_k_steps_of_three_ctas(schedule):
    rng = np.random.default_rng(0)
    images, exact = np.zeros((3, IMAGE), "u1"), []
    for image in images:
        a, b = lab.codes(rng, "f16", (128, 64)), lab.codes(rng, "f16", (64, 64))
        da, db = place(image, 0, a, "f16"), place(image, B_AT, b, "f16")
        exact.append(lab.values(a, "f16") @ lab.values(b, "f16").T)
    work = mma("tcgen05.mma.cta_group::1.kind::f16", da, db, idesc_bits("f16", "f16", "f16", 128, 64), 4)
    assert (launch(work, images, 64, schedule=schedule).view("f4") == np.array(exact)).all()


def test_a_zero_column_mask_of_zero_masks_nothing():
    rng, image = np.random.default_rng(0), np.zeros((1, IMAGE), "u1")
    a, b = lab.codes(rng, "f16", (128, 16)), lab.codes(rng, "f16", (64, 16))
    da, db = place(image[0], 0, a, "f16", "32B"), place(image[0], B_AT, b, "f16", "32B")
    work = mma("tcgen05.mma.ws.cta_group::1.kind::f16", da, db, idesc_bits("f16", "f16", "f16", 128, 64), 1)
    exact = lab.values(a, "f16") @ lab.values(b, "f16").T
    for mask in ("%q4;", "%q4, 0;"):
        assert (launch(work[: -len("%q4;")] + mask, image, 64)[0].view("f4") == exact).all()
    with pytest.raises(UnsupportedInstruction, match="zero-column mask other than the constant 0"):
        launch(work[: -len("%q4;")] + "%q4, 1;", image, 64)


def atom(codes: np.ndarray) -> np.ndarray:
    """(rows, 4) scales to the bytes of 128-row atoms: row m of an atom at 16 * (m % 32) + 4 * (m // 32)."""
    out = np.zeros((-(-len(codes) // 128), 512), "u1")
    for m, row in enumerate(codes):
        at = 16 * (m % 32) + 4 * (m % 128 // 32)
        out[m // 128, at : at + 4] = row
    return out.reshape(-1)


def scaled_operands(seed: int, m: int, n: int):
    rng = np.random.default_rng(seed)
    a, b = lab.codes(rng, "e2m1x2", (m, 64)), lab.codes(rng, "e2m1x2", (n, 64))
    # powers of two keep all sums exact
    fa, fb = (rng.choice(np.array([0x30, 0x38, 0x40, 0x48], "u1"), (r, 4)) for r in (m, n))
    left, right = (lab.values(x, "e2m1x2") * np.repeat(scale_values(f, "ue4m3"), 16, 1) for x, f in ((a, fa), (b, fb)))
    return a, b, fa, fb, left @ right.T


COPY = "add.s32 %r21, %r3, {column}; mov.b64 %d2, {desc:#x}; tcgen05.cp.{group}.{form} [%r21], %d2;"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_scales_by_copy(schedule):
    image = np.zeros((1, IMAGE), "u1")
    a, b, fa, fb, exact = scaled_operands(1, 128, 64)
    da, db = place(image[0], 0, a, "e2m1x2", "32B"), place(image[0], B_AT, b, "e2m1x2", "64B")
    image[0, SFA_AT : SFA_AT + 512], image[0, SFB_AT : SFB_AT + 512] = atom(fa), atom(fb)
    copies = "".join(
        COPY.format(
            column=c, desc=lab.encode(SHARED_BASE + at, "none", 128, 128), group="cta_group::1", form="32x128b.warpx4"
        )
        for c, at in ((64, SFA_AT), (68, SFB_AT))
    )
    bits = block_bits("mxf4nvf4", "e2m1x2", "e2m1x2", 128, 64, "ue4m3")
    opcode = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.collector::a::discard"
    work = copies + mma(opcode, da, db, bits, 1, "[%r3+64], [%r3+68], ")
    assert (launch(work, image, 128, schedule=schedule)[0].view("f4") == exact).all()


def test_a_copy_takes_no_address_as_leading_dimension():
    desc = lab.encode(SHARED_BASE + SFA_AT, "none", SHARED_BASE, 128, absolute=True)
    copy = COPY.format(column=64, desc=desc, group="cta_group::1", form="32x128b.warpx4")
    with pytest.raises(UnsupportedInstruction, match=r"tcgen05\.cp.*address as leading dimension"):
        launch(copy, np.zeros((1, IMAGE), "u1"), 128)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("m", [128, 256])
def test_pairs(m, schedule):
    """M = 256: a row a lane; M = 128: columns folded, scales of B in halves (64x128b.warpx2::01_23)."""
    n, own = (64, 128) if m == 256 else (128, 64)
    images = np.zeros((4, IMAGE), "u1")
    exact = []
    for first in (0, 2):
        a, b, fa, fb, product = scaled_operands(first, m, n)
        exact.append(product)
        for j in (0, 1):
            image = images[first + j]
            da = place(image, 0, a[own * j : own * j + own], "e2m1x2")
            db = place(image, B_AT, b[n // 2 * j : n // 2 * (j + 1)], "e2m1x2")
            image[SFA_AT : SFA_AT + 512] = atom(fa[own * j : own * j + own])
            if m == 256:
                image[SFB_AT : SFB_AT + 512] = atom(fb)
            else:
                # 64 rows of 16 bytes: 32 for each half of N
                image[SFB_AT : SFB_AT + 512], image[SFB_AT + 512 : SFB_AT + 1024] = atom(fb[:64]), atom(fb[64:])
    form = "32x128b.warpx4" if m == 256 else "64x128b.warpx2::01_23"
    copies = "".join(
        COPY.format(column=c, desc=lab.encode(SHARED_BASE + at, "none", 128, 128), group="cta_group::2", form=f)
        for c, at, f in ((64, SFA_AT, "32x128b.warpx4"), (68, SFB_AT, form))
    )
    bits = block_bits("mxf4nvf4", "e2m1x2", "e2m1x2", m, n, "ue4m3")
    opcode = "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16"
    work = copies + mma(opcode, da, db, bits, 1, "[%r3+64], [%r3+68], ")
    got = launch(work, images, 128, pair=True, schedule=schedule).view("f4")
    for c in range(4):
        rows = exact[c // 2][own * (c % 2) : own * (c % 2) + own]
        want = rows if m == 256 else np.concatenate([rows[:, :64], rows[:, 64:]])
        assert (got[c] == want).all()


def bad(change) -> None:
    image, t = np.zeros((1, IMAGE), "u1"), "f16"
    a = lab.codes(np.random.default_rng(0), t, (128, 16))
    da, db = place(image[0], 0, a, t, "32B"), place(image[0], B_AT, a[:64], t, "32B")
    given = {"a": da, "b": db, "idesc": idesc_bits("f16", "f16", "f16", 128, 64), "columns": 64} | change(da)
    columns = given.pop("columns")
    launch(mma("tcgen05.mma.cta_group::1.kind::f16", **given, steps=1), image, columns)


@pytest.mark.parametrize(
    "change,error,why",
    [
        (lambda d: {"a": d & ~(1 << 46)}, DescriptorError, "must be 001"),
        (lambda d: {"a": d & ~(7 << 61) | 1 << 61}, DescriptorError, "32B atomicity|128B_BASE32B"),
        (lambda d: {"idesc": idesc_bits("f16", "f16", "f16", 96, 64)}, DescriptorError, "M = 96"),
        (lambda d: {"columns": 32}, TensorMemoryError, "column 32 .* is not allocated"),
    ],
)
def test_errors_name_the_instruction(change, error, why):
    with pytest.raises(error, match=why) as caught:
        bad(change)
    assert "tcgen05.mma" in str(caught.value) and "PTX line" in str(caught.value)


def test_k_96_needs_sm_103a():
    image = np.zeros((1, IMAGE), "u1")
    desc = lab.encode(SHARED_BASE, "128B", SHARED_BASE, 1024, absolute=True)
    bits = block_bits("mxf4nvf4", "e2m1x2", "e2m1x2", 128, 64, "ue4m3") | 1 << 31
    opcode = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16"
    work = mma(opcode, desc, desc, bits, 1, "[%r3+64], [%r3+80], ")
    with pytest.raises(DescriptorError, match="K = 96 needs sm_103a, this is sm_100a"):
        launch(work, image, 128)
    assert not launch(work, image, 128, target="sm_103a", checks=False).any()


def test_operand_outside_shared_memory():
    with pytest.raises(OutOfBounds, match=r"tcgen05.mma.*of shared memory"):
        bad(lambda d: {"a": d + (30 * 1024 >> 4)})

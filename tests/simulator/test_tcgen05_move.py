"""Tensor memory from PTX: allocation and its misuse, loads and stores of every shape, copies, shifts."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_nvfp4.sim.errors import Deadlock, InvalidLanes, TensorMemoryError, UnsupportedInstruction
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.tcgen05 import transfers
from cute_nvfp4.sim.tcgen05.descriptor import decode, encode
from cute_nvfp4.sim.tcgen05.layouts import movement
from tests.simulator import tcgen05_lab as lab
from tests.simulator.ptx_lab import launch_kernel, module

HEAD = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; and.b32 %r2, %r0, 31;
setp.ne.b32 %q0, %r1, 0; @%q0 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {columns};
ALLOCATED: bar.sync 0;
ld.shared.b32 %r3, [slot]; shl.b32 %r4, %r1, 21; add.s32 %r3, %r3, %r4;
"""
TAIL = """
bar.sync 0; @%q0 bra FREED; ld.shared.b32 %r5, [slot];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, {columns};
FREED:
"""
DECLARED = ".shared .align 16 .b32 slot; .reg .b32 %v<260>;"
PER_NUM = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}

# CuTe's copy traits: (thread, value bit) to bit of a (columns, 16 or 32 lanes) box whose rows are 32 * columns bits,
# for .x1 and .x2; shapes and strides as in Copy_Traits<SM100_TMEM_LOAD_...>.
TRAITS = {
    ("32x32b", 1): (32, ((32,), (32,)), ((32,), (1,))),
    ("32x32b", 2): (64, ((32,), (64,)), ((64,), (1,))),
    ("16x64b", 1): (64, ((2, 2, 8), (32,)), ((512, 32, 64), (1,))),
    ("16x64b", 2): (128, ((2, 2, 8), (32, 2)), ((1024, 32, 128), (1, 64))),
    ("16x128b", 1): (128, ((4, 8), (32, 2)), ((32, 128), (1, 1024))),
    ("16x128b", 2): (256, ((4, 8), (32, 2, 2)), ((32, 256), (1, 2048, 128))),
    ("16x256b", 1): (256, ((4, 8), (64, 2)), ((64, 256), (1, 2048))),
    ("16x256b", 2): (512, ((4, 8), (64, 2, 2)), ((64, 512), (1, 4096, 256))),
    ("16x32bx2", 1): (64, ((16, 2), (32,)), ((64, 32), (1,))),
    ("16x32bx2", 2): (128, ((16, 2), (64,)), ((128, 64), (1,))),
}


def strided(index: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """CuTe's layout function: the first mode is the fastest."""
    total = 0
    for extent, step in zip(shape, stride):
        total += index % extent * step
        index //= extent
    return total


@pytest.mark.parametrize("shape,num", TRAITS)
def test_fragments_are_those_of_cute(shape, num):
    row_bits, (threads, bits), (thread_stride, bit_stride) = TRAITS[shape, num]
    table = movement(shape, num)
    for t in range(32):
        for r in range(table.registers):
            at = strided(t, threads, thread_stride) + strided(32 * r, bits, bit_stride)
            split = num if table.high[t] else 0
            assert (table.lane[t, r], table.column[t, r] + split) == (at // row_bits, at % row_bits // 32)


@pytest.mark.parametrize("shape", PER_NUM)
def test_longer_fragments_repeat_along_the_columns(shape):
    wide = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}[shape]
    one = movement(shape, 1)
    for num in (4, 16, 32):
        many = movement(shape, num)
        assert many.registers == num * one.registers
        for j in range(num):
            part = slice(j * one.registers, (j + 1) * one.registers)
            assert (many.lane[:, part] == one.lane).all()
            assert (many.column[:, part] == one.column + j * wide).all()


def names(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%v{first + j}" for j in range(count)) + "}"


def run(body: str, outputs: list[np.ndarray], columns: int = 64, **options):
    """``body`` between allocation and deallocation, each load and store waited for."""
    body = re.sub(r"(tcgen05\.(ld|st)\.[^;]*;)", r"\1 tcgen05.wait::\2.sync.aligned;", body)
    text = module((HEAD + body + TAIL).replace("{columns}", str(columns)), len(outputs), DECLARED)
    return launch_kernel(text, outputs, block=(128, 1, 1), **options)


def dump(count: int, first: int = 0) -> str:
    """Stores registers v.. of each thread to p0[thread][register]."""
    lines = [f"mad.wide.u32 %rd1, %r0, {4 * count}, %p0;"]
    return "\n".join(lines + [f"st.global.b32 [%rd1+{4 * j}], %v{first + j};" for j in range(count)])


def fill(count: int) -> str:
    """Register j of thread t holds t * 256 + j."""
    return "shl.b32 %r6, %r0, 8;" + "".join(f"add.s32 %v{j}, %r6, {j};" for j in range(count))


@pytest.mark.parametrize("shape", PER_NUM)
@pytest.mark.parametrize("num", [1, 2, 8])
@pytest.mark.parametrize("lane", [0, 16])
def test_stores_and_loads(shape, num, lane):
    """Written with one shape, read back with .32x32b; and the other way round."""
    if shape == "32x32b" and lane:
        pytest.skip("needs all lanes of a quarter")
    count, columns = num * PER_NUM[shape], 64
    split = ", 24" if shape == "16x32bx2" else ""
    addr = f"add.s32 %r7, %r3, {lane << 16};"
    table = movement(shape, num)
    column = table.column + np.where(table.high, 24, 0)[:, None]
    out = np.zeros((128, columns), "u4")
    zero = "".join(f"mov.b32 %v{100 + j}, 0;" for j in range(columns))
    clear = f"{zero} tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r3], {names(columns, 100)};"
    store = f"tcgen05.st.sync.aligned.{shape}.x{num}.b32 [%r7]{split}, {names(count)}; tcgen05.wait::st.sync.aligned;"
    load = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {names(columns, 100)}, [%r3];"
    run(f"{addr} {fill(count)} {clear} {store} {load} {dump(columns, 100)}", [out])
    want = np.zeros_like(out)
    for t in range(128):
        for r in range(count):
            want[t // 32 * 32 + lane + table.lane[t % 32, r], column[t % 32, r]] = t * 256 + r
    assert (out == want).all()

    out = np.zeros((128, count), "u4")
    store = f"{fill(columns)} tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r3], {names(columns)};"
    load = f"tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {names(count, 100)}, [%r7]{split};"
    run(f"{addr} {store} {load} tcgen05.wait::ld.sync.aligned; {dump(count, 100)}", [out])
    for t in range(128):
        for r in range(count):
            assert out[t, r] == (t // 32 * 32 + lane + table.lane[t % 32, r]) * 256 + column[t % 32, r]


@pytest.mark.parametrize("shape", ["32x32b", "16x128b", "16x256b"])
def test_pack_and_unpack_halves(shape):
    """A packed register holds the low halves of two neighbouring columns."""
    count = 4 * PER_NUM[shape]
    table = movement(shape, 4)
    out = np.zeros((128, count), "u4")
    store = f"{fill(64)} tcgen05.st.sync.aligned.32x32b.x64.b32 [%r3], {names(64)};"
    load = f"tcgen05.ld.sync.aligned.{shape}.x4.pack::16b.b32 {names(count, 100)}, [%r3];"
    run(f"{store} {load} {dump(count, 100)}", [out])
    for t in range(128):
        for r in range(count):
            word = (t // 32 * 32 + table.lane[t % 32, r]) * 256 + 2 * table.column[t % 32, r]
            assert out[t, r] == (word & 0xFFFF) | ((word + 1) & 0xFFFF) << 16

    back = np.zeros((128, 8), "u4")
    store = "tcgen05.st.sync.aligned.32x32b.x4.unpack::16b.b32 [%r3], {%v0, %v1, %v2, %v3};"
    values = "".join(f"mad.lo.s32 %v{j}, %r0, 65537, {j << 16};" for j in range(4))
    run(f"{values} {store} tcgen05.ld.sync.aligned.32x32b.x8.b32 {names(8, 100)}, [%r3]; {dump(8, 100)}", [back])
    for t in range(128):
        assert back[t].tolist() == [x for j in range(4) for x in (t, t + j)]


@pytest.mark.parametrize("form,best", [("max.f32", max), ("min.abs.f32", lambda x: min(map(abs, x))), ("max.s32", max)])
def test_load_with_reduction(form, best):
    out, t = np.zeros((128, 5), "u4"), form[-3:]
    rng = np.random.default_rng(0)
    data = rng.integers(-100, 100, (128, 4)).astype("i4" if t == "s32" else "f4")
    load = "mad.wide.u32 %rd2, %r0, 16, %p1; ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%rd2];"
    body = "tcgen05.st.sync.aligned.32x32b.x4.b32 [%r3], {%v0, %v1, %v2, %v3};"
    body += f"tcgen05.ld.red.sync.aligned.32x32b.x4.{form} {names(4, 100)}, %v104, [%r3];"
    run(f"{load} {body} {dump(5, 100)}", [out, data])
    assert (out[:, :4] == data.view("u4")).all()
    assert out[:, 4].view(data.dtype).tolist() == [best(row.tolist()) for row in data]


LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 %v0, "
MISUSE = [
    ("the quarter of another warp", f"{LOAD}[%r3+{32 << 16}];", "may access lanes"),
    ("lane 16 with 32 lanes", f"{LOAD}[%r3+{16 << 16}];", "may access lanes"),
    ("a column that is not allocated", f"{LOAD}[%r3+64];", "column 64 .* is not allocated"),
    ("a column that does not exist", f"{LOAD}[%r3+512];", "column 512 .* does not exist"),
    ("a width that is no power of two", "tcgen05.alloc.cta_group::1.sync.aligned.b32 [slot], 96;", "power of two"),
    ("another CTA group", "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;", "cta_group::2"),
    (
        "allocation after the permit is given up",
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;",
        "after tcgen05.relinquish",
    ),
    ("a part of an allocation", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;", "not an allocation"),
    (
        "lanes that ask for different numbers of columns",
        "and.b32 %r8, %r2, 1; mad.lo.s32 %r8, %r8, 32, 32;"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], %r8;",
        "different numbers of columns",
    ),
    (
        "lanes that want the address at different places",
        "mov.u32 %r8, slot; add.s32 %r8, %r8, %r2; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r8], 32;",
        "different addresses",
    ),
    (
        "lanes that free different allocations",
        "add.s32 %r8, %r3, %r2; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64;",
        "different addresses",
    ),
    ("an odd lane to shift", "tcgen05.shift.cta_group::1.down [%r3+65536];", "multiple of 32"),
]


@pytest.mark.parametrize("body,why", [m[1:] for m in MISUSE], ids=[m[0] for m in MISUSE])
def test_misuse(body, why):
    with pytest.raises(TensorMemoryError, match=why):
        run(f"@%q0 bra SKIP; {body} SKIP:", [np.zeros(1, "u4")])


def test_use_after_dealloc_and_leak():
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64;"
    with pytest.raises(TensorMemoryError, match="has been deallocated"):
        run(f"@%q0 bra SKIP; {free} {LOAD}[%r3]; SKIP:", [np.zeros(1, "u4")])
    with pytest.raises(TensorMemoryError, match=r"ends without tcgen05.dealloc of columns 0\.\.31"):
        launch_kernel(module(HEAD.replace("{columns}", "32"), 0, DECLARED), [], block=(32, 1, 1), checks=False)


def test_part_of_a_warp_cannot_load():
    with pytest.raises(InvalidLanes):
        run(f"setp.gt.u32 %q1, %r2, 3; @%q1 {LOAD}[%r3];", [np.zeros(1, "u4")])


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.ld.sync.aligned.32x32b.x3.b32 %v0, [%r3];",
        "tcgen05.ld.sync.aligned.16x256b.x64.b32 %v0, [%r3];",
        "tcgen05.cp.cta_group::1.32x128b [%r3], %rd1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r3], %rd1, %rd2, [%r3], %r4, %q1;",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r3], %rd1, %rd2, %r4, [%r3], [%r3], %q1;",
        "tcgen05.unheard [%r3];",
    ],
)
def test_unknown_forms_are_refused_by_name(text):
    with pytest.raises(UnsupportedInstruction, match="tcgen05"):
        run(text, [np.zeros(1, "u4")])


def test_allocation_waits_until_columns_are_free():
    """Warp 0 takes everything and gives it back after warp 1 has asked for some."""
    body = """
    mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; setp.ne.b32 %q0, %r1, 0; @%q0 bra OTHER;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512;
    bar.warp.sync -1; ld.shared.b32 %r3, [slot]; bar.sync 0;
    mov.u32 %r9, 0; SPIN: add.s32 %r9, %r9, 1; setp.lt.u32 %q1, %r9, 50; @%q1 bra SPIN;
    FREE
    bra END;
    OTHER: bar.sync 0;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 64;
    bar.warp.sync -1; ld.shared.b32 %r3, [slot]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64;
    END:
    """
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;"
    launch_kernel(module(body.replace("FREE", free), 0, DECLARED), [], block=(64, 1, 1))
    with pytest.raises((Deadlock, TensorMemoryError), match=r"tensor memory|dealloc"):
        launch_kernel(module(body.replace("FREE", "bar.sync 1;"), 0, DECLARED), [], block=(64, 1, 1))


COPY_LANES = {
    ("128x256b", ""): lambda r: [r],
    ("128x128b", ""): lambda r: [r],
    ("4x256b", ""): lambda r: [32 * r],
    ("64x128b", "warpx2::02_13"): lambda r: [r, r + 64],
    ("64x128b", "warpx2::01_23"): lambda r: [r, r + 32] if r < 32 else [r + 32, r + 64],
    ("32x128b", "warpx4"): lambda r: [r, r + 32, r + 64, r + 96],
}


@pytest.mark.parametrize("form", COPY_LANES)
@pytest.mark.parametrize("group", [1, 2])
def test_copies(form, group):
    rows = int(form[0].split("x")[0])
    width = 32 if form[0].endswith("256b") else 16
    wave, rng = lab.machine(2, cluster=2), np.random.default_rng(0)
    data = rng.integers(0, 256, (2, rows, width)).astype("u1")
    start = SHARED_BASE + 2048
    for cta in (0, 1):
        lbo, sbo, _ = lab.place_k_major(wave.shared2d[cta], start, data[cta], "none")
    one = transfers.Copy(
        lab.instruction(), wave, np.array([0]), form=form, desc=decode(encode(start, "none", lbo, sbo)),
        start=np.array([start]), column=np.array([40]), lane=0, bits=0, cta_group=group,
    )  # fmt: skip
    one.run(wave)
    want = np.zeros_like(wave.tmem)
    for cta in range(group):
        for r in range(rows):
            for lane in COPY_LANES[form](r):
                want[cta, lane, 40 : 40 + width // 4] = data[cta, r].view("u4")
    assert (wave.tmem == want).all()


@pytest.mark.parametrize("bits", [4, 6])
def test_copies_that_spread_narrow_elements(bits):
    wave, t = lab.machine(), {4: "e2m1", 6: "e3m2"}[bits]
    code = lab.codes(np.random.default_rng(1), t, (128, 32))
    start = SHARED_BASE + 1024
    desc = decode(lab.place(wave, 0, start, code, t, "32B"))
    transfers.Copy(
        lab.instruction(), wave, np.array([0]), form=("128x256b", ""), desc=desc, start=np.array([start]),
        column=np.array([8]), lane=0, bits=bits, cta_group=1,
    ).run(wave)  # fmt: skip
    got = np.ascontiguousarray(wave.tmem[0, :, 8:16]).view("u1")
    assert (got == code << (2 if bits == 4 else 1)).all()


def test_shift_moves_rows_of_one_quarter():
    wave = lab.machine()
    wave.tmem[:] = np.arange(128 * 512, dtype="u4").reshape(1, 128, 512)
    before = wave.tmem.copy()
    transfers.Shift(
        lab.instruction(), wave, np.array([0]), lane=np.array([32]), column=np.array([16]), cta_group=1
    ).run(wave)
    want = before.copy()
    for lane in range(32, 63):
        want[0, lane, 16:24] = before[0, lane + 1, 16:24]
    assert (wave.tmem == want).all()

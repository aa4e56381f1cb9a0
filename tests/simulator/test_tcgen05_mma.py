"""tcgen05.mma: every kind, major-ness, layout, M and CTA group against exact products."""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.sim.machine.engine import fuse
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.tcgen05 import Mma, MmaRuns
from cute_nvfp4.sim.tcgen05 import instruction as idesc
from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError, decode, start_of
from cute_nvfp4.sim.tcgen05.mma import Spec
from tests.simulator import tcgen05_lab as lab

A_AT, B_AT = SHARED_BASE + 4096, SHARED_BASE + 100 * 1024
KINDS = [
    ("f16", "f16"),
    ("f16", "bf16"),
    ("tf32", "tf32"),
    ("f8f6f4", "e4m3"),
    ("f8f6f4", "e5m2"),
    ("f8f6f4", "e2m3"),
    ("f8f6f4", "e3m2"),
    ("f8f6f4", "e2m1"),
    ("i8", "u8"),
    ("i8", "s8"),
]


def idesc_bits(kind, ta, tb, m, n, d=1, a_mn=0, b_mn=0, negate=(0, 0), saturate=0):
    code = {v: k for k, v in idesc.INPUTS[kind].items()}
    fields = saturate << 3 | d << 4 | code[ta] << 7 | code[tb] << 10 | negate[0] << 13 | negate[1] << 14
    return fields | a_mn << 15 | b_mn << 16 | n // 8 << 17 | m // 16 << 24


def block_bits(kind, ta, tb, m, n, scale, ids=(0, 0)):
    code = {v: k for k, v in idesc.INPUTS[kind].items()}
    fields = ids[1] << 4 | code[ta] << 7 | code[tb] << 10 | n // 8 << 17 | (scale == "ue8m0") << 23
    return fields | m // 16 << 24 | ids[0] << 29


def issue(wave, spec, a, b, d=0, enable=False, ctas=(0,), **more):
    """One ``Mma`` of every CTA in ``ctas`` with the same operands."""
    k = len(ctas)
    rows = {"a": a, "b": b, "d": d, **{n: more.pop(n) for n in ("sfa", "sfb") if n in more}}
    arrays = {n: np.full(k, v, np.int64) for n, v in rows.items()}
    return Mma(lab.instruction(), wave, np.array(ctas), spec, enable=np.full(k, enable), **arrays, **more)


def dense(wave, kind, ta, tb, m, n, *, layouts=("128B", "128B"), mn=(0, 0), group=1, seed=0, d=1, **bits):
    """Places random operands; returns (spec, descriptors, exact product)."""
    rng = np.random.default_rng(seed)
    decoded = idesc.decode(idesc_bits(kind, ta, tb, m, n, d, *mn, **bits), kind, 0, group, False)
    a = lab.codes(rng, ta, (m, decoded.k))
    b = lab.codes(rng, tb, (n, decoded.k))
    for j in range(group):
        da = lab.place(wave, j, A_AT, a[j * m // group : (j + 1) * m // group], ta, layouts[0], mn[0])
        db = lab.place(wave, j, B_AT, b[j * n // group : (j + 1) * n // group], tb, layouts[1], mn[1])
    spec = Spec(decoded, group, False, decode(da), decode(db))
    exact = lab.values(a, ta) @ lab.values(b, tb).T
    return spec, (da, db), exact


def starts(descriptors):
    return [int(start_of(np.array([x], np.uint64))[0]) for x in descriptors]


@pytest.mark.parametrize("kind,t", KINDS)
@pytest.mark.parametrize("layout", ["none", "32B", "64B", "128B"])
def test_k_major(kind, t, layout):
    wave = lab.machine()
    spec, desc, exact = dense(wave, kind, t, t, 128, 32, layouts=(layout, layout), d=2 if kind == "i8" else 1)
    issue(wave, spec, *starts(desc), d=64).run(wave)
    got = wave.tmem[0, :, 64:96]
    assert (got.view("i4" if kind == "i8" else "f4") == exact).all()
    assert not wave.tmem[0, :, :64].any() and not wave.tmem[0, :, 96:].any()


@pytest.mark.parametrize(
    "kind,t", [("f16", "f16"), ("f16", "bf16"), ("f8f6f4", "e4m3"), ("i8", "s8"), ("tf32", "tf32")]
)
@pytest.mark.parametrize("layout", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("mn", [(1, 0), (0, 1), (1, 1)])
def test_mn_major(kind, t, layout, mn):
    if kind == "tf32" and layout != "128B":
        pytest.skip("tf32 has one MN-major layout")
    wave = lab.machine()
    layouts = tuple("128B_BASE32B" if kind == "tf32" and x else layout for x in mn)
    spec, desc, exact = dense(wave, kind, t, t, 128, 64, layouts=layouts, mn=mn, d=2 if kind == "i8" else 1)
    issue(wave, spec, *starts(desc)).run(wave)
    assert (wave.tmem[0, :, :64].view("i4" if kind == "i8" else "f4") == exact).all()


def test_mixed_types_and_negation():
    wave = lab.machine()
    spec, desc, exact = dense(wave, "f8f6f4", "e2m1", "e5m2", 128, 16, negate=(1, 0))
    issue(wave, spec, *starts(desc)).run(wave)
    assert (wave.tmem[0, :, :16].view("f4") == -exact).all()


@pytest.mark.parametrize("lane", [0, 16])
def test_m64_uses_half_of_each_quarter(lane):
    wave = lab.machine()
    spec, desc, exact = dense(wave, "f16", "f16", "f16", 64, 24)
    spec = Spec(spec.idesc, 1, False, spec.a, spec.b, lane)
    issue(wave, spec, *starts(desc)).run(wave)
    for row in range(64):
        assert (wave.tmem[0, 32 * (row // 16) + row % 16 + lane, :24].view("f4") == exact[row]).all()
    assert np.count_nonzero(wave.tmem[0].any(axis=1)) <= 64


@pytest.mark.parametrize("mn", [(0, 0), (1, 1)])
def test_m256_of_two_ctas(mn):
    wave = lab.machine(4, cluster=2)
    spec, desc, exact = dense(wave, "f16", "bf16", "bf16", 256, 128, group=2, mn=mn)
    issue(wave, spec, *starts(desc)).run(wave)
    for cta in (0, 1):
        assert (wave.tmem[cta, :, :128].view("f4") == exact[128 * cta : 128 * cta + 128]).all()
    assert not wave.tmem[2:].any()


def test_m128_of_two_ctas_folds_the_columns():
    wave = lab.machine(2, cluster=2)
    spec, desc, exact = dense(wave, "f16", "f16", "f16", 128, 64, group=2)
    issue(wave, spec, *starts(desc), ctas=(1,)).run(wave)
    for cta in (0, 1):
        rows = exact[64 * cta : 64 * cta + 64]
        assert (wave.tmem[cta, :64, :32].view("f4") == rows[:, :32]).all()
        assert (wave.tmem[cta, 64:, :32].view("f4") == rows[:, 32:]).all()
        assert not wave.tmem[cta, :, 32:].any()


@pytest.mark.parametrize("m", [32, 64, 128])
def test_weight_stationary(m):
    wave = lab.machine()
    rng = np.random.default_rng(m)
    a, b = lab.codes(rng, "f16", (m, 16)), lab.codes(rng, "f16", (64, 16))
    da, db = lab.place(wave, 0, A_AT, a, "f16", "32B"), lab.place(wave, 0, B_AT, b, "f16", "128B")
    decoded = idesc.decode(idesc_bits("f16", "f16", "f16", m, 64), "f16", 0, 1, True)
    issue(wave, Spec(decoded, 1, True, decode(da), decode(db)), *starts((da, db))).run(wave)
    exact, fold = lab.values(a, "f16") @ lab.values(b, "f16").T, 128 // m
    for j in range(fold):
        got = wave.tmem[0, m * j : m * j + m, : 64 // fold].view("f4")
        assert (got == exact[:, j * 64 // fold : (j + 1) * 64 // fold]).all()


def test_accumulate_scale_and_disabled_lanes():
    wave = lab.machine()
    spec, desc, exact = dense(wave, "f16", "f16", "f16", 128, 16)
    before = np.arange(128 * 16).reshape(128, 16).astype("f4")
    wave.tmem[0, :, :16] = before.view("u4")
    off = (0xF, 0, 0x80000000, 0)
    masked = Spec(spec.idesc, 1, False, spec.a, spec.b, 0, off)
    issue(wave, masked, *starts(desc), enable=True, scale_d=3).run(wave)
    want = (exact + before / 8).astype("f4")
    for lane in [*range(4), 95]:
        want[lane] = before[lane]
    assert (wave.tmem[0, :, :16].view("f4") == want).all()


def test_f16_accumulator_is_rounded_once_and_not_packed():
    wave = lab.machine()
    spec, desc, exact = dense(wave, "f16", "f16", "f16", 128, 16, d=0)
    before = (np.arange(2048).reshape(128, 16) / 7).astype("f2")
    wave.tmem[0, :, :16] = before.view("u2")
    issue(wave, spec, *starts(desc), enable=True).run(wave)
    want = (exact + before.astype("f8")).astype("f4").astype("f2")
    assert (wave.tmem[0, :, :16] == want.view("u2")).all()


@pytest.mark.parametrize("saturate", [0, 1])
def test_integer_overflow(saturate):
    wave = lab.machine()
    spec, desc, exact = dense(wave, "i8", "u8", "u8", 128, 16, d=2, saturate=saturate)
    wave.tmem[0, :, :16] = np.uint32(0x7FFFFF00)
    issue(wave, spec, *starts(desc), enable=True).run(wave)
    total = exact.astype("i8") + 0x7FFFFF00
    want = np.minimum(total, 0x7FFFFFFF) if saturate else (total & 0xFFFFFFFF).astype("u4").view("i4")
    assert (wave.tmem[0, :, :16].view("i4") == want).all()


@pytest.mark.parametrize("t", ["f16", "e4m3", "e2m1", "e3m2", "tf32"])
def test_a_from_tensor_memory(t):
    wave = lab.machine()
    kind = {"f16": "f16", "tf32": "tf32"}.get(t, "f8f6f4")
    spec, desc, exact = dense(wave, kind, t, t, 128, 16)
    a = lab.codes(np.random.default_rng(0), t, (128, spec.idesc.k))
    data = a << {"e2m1": 2, "e3m2": 1}.get(t, 0)
    wave.tmem[0, :, 200:208] = np.ascontiguousarray(data).view("u4").reshape(128, 8)
    tensor = Spec(spec.idesc, 1, False, None, spec.b)
    issue(wave, tensor, 200, starts(desc)[1]).run(wave)
    assert (wave.tmem[0, :, :16].view("f4") == exact).all()


def test_ashift_moves_rows_after_the_read():
    wave = lab.machine()
    spec, desc, exact = dense(wave, "f16", "f16", "f16", 128, 16)
    a = lab.codes(np.random.default_rng(0), "f16", (128, 16))
    words = np.ascontiguousarray(a).view("u4").reshape(128, 8)
    wave.tmem[0, :, 200:208] = words
    issue(wave, Spec(spec.idesc, 1, False, None, spec.b, 0, (), True), 200, starts(desc)[1]).run(wave)
    assert (wave.tmem[0, :, :16].view("f4") == exact).all()
    for lane in range(128):
        assert (wave.tmem[0, lane, 200:208] == words[lane if lane % 32 == 31 else lane + 1]).all()


def test_k_steps_fuse_into_the_same_numbers():
    """Four K steps inside a 128-byte row, two accumulators in turns, for three CTAs."""
    fused, plain = lab.machine(3), lab.machine(3)
    rng = np.random.default_rng(5)
    a, b = lab.codes(rng, "f16", (128, 64)), lab.codes(rng, "f16", (64, 64))
    decoded = idesc.decode(idesc_bits("f16", "f16", "f16", 128, 64), "f16", 0, 1, False)
    for wave in (fused, plain):
        for cta in range(3):
            da = lab.place(wave, cta, A_AT, a, "f16", "128B")
            db = lab.place(wave, cta, B_AT, b, "f16", "128B")
    spec, (sa, sb) = Spec(decoded, 1, False, decode(da), decode(db)), starts((da, db))

    def program(wave):
        return [
            issue(wave, spec, sa + 32 * k, sb + 32 * k, d=100 * other, enable=k > 0, ctas=(0, 1, 2))
            for k in range(4)
            for other in (0, 1)
        ]

    for one in program(plain):
        one.run(plain)
    runs = fuse(program(fused))
    assert len(runs) == 1 and isinstance(runs[0], MmaRuns) and [len(r) for r in runs[0].runs] == [4, 4]
    for one in runs:
        one.run(fused)
    exact = lab.values(a, "f16") @ lab.values(b, "f16").T
    for wave in (plain, fused):
        assert (wave.tmem[:, :, :64].view("f4") == exact).all()
        assert (wave.tmem[:, :, 100:164].view("f4") == exact).all()


@pytest.mark.parametrize("ta,tb", [("u8", "u8"), ("u8", "s8"), ("s8", "s8")])
def test_sums_of_long_integer_runs_are_exact(ta, tb):
    """K = 512 of the largest products, whose sums of u8 are odd and exceed 2 ** 24."""
    wave = lab.machine()
    largest = {"u8": 255, "s8": 128}
    a, b = np.full((128, 512), largest[ta], "u1"), np.full((16, 512), largest[tb], "u1")
    a[:, 0] = np.arange(128)
    decoded = idesc.decode(idesc_bits("i8", ta, tb, 128, 16, 2), "i8", 0, 1, False)
    descriptors = lab.place(wave, 0, A_AT, a, ta, "128B"), lab.place(wave, 0, B_AT, b, tb, "128B")
    spec, (sa, sb) = Spec(decoded, 1, False, *map(decode, descriptors)), starts(descriptors)
    steps = [(sa + k // 4 * 16384 + k % 4 * 32, sb + k // 4 * 2048 + k % 4 * 32) for k in range(16)]
    for one in fuse([issue(wave, spec, *at, enable=k > 0) for k, at in enumerate(steps)]):
        one.run(wave)
    assert (wave.tmem[0, :, :16].view("i4") == lab.values(a, ta) @ lab.values(b, tb).T).all()


def test_fusing_stops_at_what_matters():
    wave = lab.machine()
    spec, desc, _ = dense(wave, "f16", "f16", "f16", 128, 16)
    sa, sb = starts(desc)
    other = Spec(spec.idesc, 1, False, spec.a, spec.b, 0, (1, 0, 0, 0))
    half = Spec(idesc.decode(idesc_bits("f16", "f16", "f16", 128, 16, 0), "f16", 0, 1, False), 1, False, spec.a, spec.b)
    for second in [
        issue(wave, spec, sa, sb),  # overwrites
        issue(wave, other, sa, sb, enable=True),
        issue(wave, spec, sa, sb, enable=True, scale_d=1),
        issue(wave, spec, sa, sb, d=8, enable=True),  # overlaps
    ]:
        runs = fuse([issue(wave, spec, sa, sb), second])
        assert [len(r) for p in runs for r in p.runs] == [1, 1]
    runs = fuse([issue(wave, half, sa, sb), issue(wave, half, sa, sb, enable=True)])
    assert [len(r) for p in runs for r in p.runs] == [1, 1]


def test_footprints_cover_what_is_read_and_written():
    wave = lab.machine(2, cluster=2)
    spec, desc, _ = dense(wave, "f16", "f16", "f16", 128, 64, group=2, layouts=("128B", "64B"))
    prints = issue(wave, spec, *starts(desc), d=32, enable=True).footprints(wave)
    shared = [f for f in prints if f.space == "shared"]
    assert sorted((int(f.cta[0]), f.place.shape) for f in shared) == [
        (c, s) for c in (0, 1) for s in ((1, 64), (1, 128))
    ]
    # with the 128-byte swizzle the 32 bytes of K of eight rows are spread over the eight columns of an atom
    first = np.sort(shared[0].place[0])[:4] - A_AT
    assert first.tolist() == [0, 16, 128, 144]
    tensor = [(f.write, int(f.cta[0]), f.place.lanes, f.place.columns.tolist()) for f in prints if f.space == "tensor"]
    columns = [list(range(32, 64))]
    assert tensor == [(w, c, slice(0, 128), columns) for c in (0, 1) for w in (False, True)]


BAD = [
    ("f16", idesc_bits("f16", "f16", "f16", 128, 16) | 1 << 6, 0, "reserved"),
    ("f16", idesc_bits("f16", "f16", "f16", 96, 16), 0, "M = 96"),
    ("f16", idesc_bits("f16", "f16", "f16", 256, 16), 0, "M = 256"),
    ("f16", idesc_bits("f16", "f16", "f16", 128, 16, d=2), 0, "accumulator"),
    ("tf32", idesc_bits("tf32", "tf32", "tf32", 128, 16, d=0), 0, "accumulator"),
    ("f16", 1 << 4 | 5 << 7 | 2 << 17 | 8 << 24, 0, "type codes"),
    ("i8", idesc_bits("i8", "u8", "u8", 128, 16, 2, negate=(1, 0)), 0, "negated"),
    ("f8f6f4", idesc_bits("f8f6f4", "e2m1", "e4m3", 128, 16, a_mn=1), 0, "K-major only"),
    ("mxf4nvf4", block_bits("mxf4nvf4", "e2m1x2", "e2m1x2", 128, 64, "ue4m3"), 32, "UE4M3"),
    ("mxf4", block_bits("mxf4", "e2m1x2", "e2m1x2", 128, 64, "ue8m0", (1, 0)), 32, "multiples of 2"),
    ("mxf4", block_bits("mxf4", "e2m1x2", "e2m1x2", 64, 64, "ue8m0"), 32, "M = 64"),
]


@pytest.mark.parametrize("kind,bits,block,why", BAD)
def test_bad_instruction_descriptors(kind, bits, block, why):
    with pytest.raises(DescriptorError, match=why):
        idesc.decode(bits, kind, block, 1, False)


@pytest.mark.parametrize("desc,why", [(0, "001"), (1 << 46 | 3 << 61, "swizzling"), (1 << 46 | 1 << 53, "60-53")])
def test_bad_matrix_descriptors(desc, why):
    with pytest.raises(DescriptorError, match=why):
        decode(desc)

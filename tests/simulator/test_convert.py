"""cvt in all its forms, against ml_dtypes, rationals and Python's integers."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from exact import bits, rounded, values
from ptx_lab import apply, edges, float_edges

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CODES = np.arange(256, dtype="u2")
MODES = ("rn", "rz", "rm", "rp")


@pytest.mark.parametrize("d", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("s", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integers(d: str, s: str) -> None:
    target = np.dtype(f"{'i' if d[0] == 's' else 'u'}{int(d[1:]) // 8}")
    a = edges(int(s[1:]), s[0] == "s", seed=1)
    plain, clamped = apply(f"cvt.{d}.{s} %x, %a; cvt.sat.{d}.{s} %y, %a;", [a], [target.str] * 2)
    assert np.array_equal(plain, a.astype(target))
    info = np.iinfo(target)
    assert clamped.tolist() == [max(info.min, min(info.max, v)) for v in a.tolist()]


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("d", ["u8", "s16", "u32", "s32", "u64", "s64"])
def test_float_to_integer(mode: str, d: str) -> None:
    a = np.concatenate(
        [float_edges("f4", 200, 1), (2.0 ** np.arange(-2, 66)).astype("f4"), np.linspace(-300, 300, 101).astype("f4")]
    )
    target = np.dtype(f"{'i' if d[0] == 's' else 'u'}{int(d[1:]) // 8}")
    (got,) = apply(f"cvt.{mode}.{d}.f32 %x, %a;", [a], [target.str])
    fn = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    info = np.iinfo(target)
    for v, g in zip(a.tolist(), got.tolist()):
        if math.isnan(v):
            assert int(d[1:]) == 64 or g == 0
        elif math.isinf(v):
            assert g == (info.max if v > 0 else info.min)
        else:
            assert g == max(info.min, min(info.max, fn(v))), v


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("s", ["u32", "s32", "u64", "s64"])
def test_integer_to_float(mode: str, s: str) -> None:
    a = edges(int(s[1:]), s[0] == "s", seed=1)
    x, y = apply(f"cvt.{mode}.f32.{s} %x, %a; cvt.{mode}.f16.{s} %y, %a;", [a], ["u4", "u2"])
    for name, got in (("f32", x), ("f16", y)):
        assert got.tolist() == [bits(rounded(Fraction(v), name, mode) if v else 0.0, name) for v in a.tolist()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("d,s", [("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f64")])
def test_narrowing(mode: str, d: str, s: str) -> None:
    a = float_edges("f4" if s == "f32" else "f8", 400, 1)
    if s == "f64":
        a = np.concatenate([a, float_edges("f4", 300, 2).astype("f8") * (1 + 2.0**-30)])
    (got,) = apply(f"cvt.{mode}.{d}.{s} %x, %a;", [a], ["u4" if d == "f32" else "u2"])
    for v, g in zip(a.tolist(), got.tolist()):
        want = v if v == 0 or not math.isfinite(v) else rounded(Fraction(v), d, mode)
        if not (s == "f64" and math.isnan(v)):
            assert g == bits(want, d), (v, hex(g))


def test_widening_is_exact() -> None:
    h = np.arange(65536, dtype="u2")
    x, y, z = apply("cvt.f32.f16 %x, %a; cvt.f32.bf16 %y, %a; cvt.f64.f16 %z, %a;", [h], ["f4", "f4", "f8"])
    ok = ~np.isnan(h.view("f2"))
    assert np.array_equal(x[ok], h.view("f2").astype("f4")[ok]) and np.isnan(x[~ok]).all()
    assert np.array_equal(z[ok], h.view("f2").astype("f8")[ok])
    want = h.view(ml_dtypes.bfloat16).astype("f4")
    assert np.array_equal(y, want, equal_nan=True)


def test_float_to_integral_float() -> None:
    a = float_edges("f4", 300, 1)
    for mode, fn in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        (got,) = apply(f"cvt.{mode}.f32.f32 %x, %a;", [a], ["f4"])
        assert np.array_equal(got, fn(a), equal_nan=True)


@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_pairs_put_the_first_source_high(t: str, mode: str) -> None:
    a, b = float_edges("f4", 300, 1), float_edges("f4", 300, 2)
    x, y = apply(f"cvt.{mode}.{t}x2.f32 %x, %a, %b; cvt.{mode}.relu.{t}x2.f32 %y, %a, %b;", [a, b], ["u4", "u4"])

    def one(v, relu):
        v = 0.0 if relu and v <= 0 else v
        return bits(v if v == 0 or not math.isfinite(v) else rounded(Fraction(v), t, mode), t)

    assert x.tolist() == [one(p, False) << 16 | one(q, False) for p, q in zip(a.tolist(), b.tolist())]
    assert y.tolist() == [one(p, True) << 16 | one(q, True) for p, q in zip(a.tolist(), b.tolist())]


@pytest.mark.parametrize("t,dtype", [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_decoding_fp8(t: str, dtype) -> None:
    a = (CODES << np.uint16(8) | CODES[::-1]).astype("u2")
    (got,) = apply(f"cvt.rn.f16x2.{t}x2 %x, %a;", [a], ["u4"])
    halves = got.view("f2").reshape(-1, 2).astype("f4")
    table = np.arange(256, dtype="u1").view(dtype).astype("f4")
    assert np.array_equal(halves[:, 1], table, equal_nan=True)
    assert np.array_equal(halves[:, 0], table[::-1], equal_nan=True)


def test_decoding_e2m1_takes_the_low_nibble_low() -> None:
    code = "{ .reg .b8 q; cvt.u8.u16 q, %a; cvt.rn.f16x2.e2m1x2 %x, q; }"
    (got,) = apply(code, [CODES], ["u4"])
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table += [-v for v in table]
    halves = got.view("f2").reshape(-1, 2)
    assert halves[:, 0].tolist() == [table[c & 15] for c in range(256)]
    assert halves[:, 1].tolist() == [table[c >> 4] for c in range(256)]
    assert np.signbit(halves[8, 0]) and np.signbit(halves[128, 1])


@pytest.mark.parametrize(
    "t,dtype,top", [("e4m3", ml_dtypes.float8_e4m3fn, 448), ("e5m2", ml_dtypes.float8_e5m2, 57344)]
)
def test_encoding_fp8(t: str, dtype, top: float) -> None:
    every = np.arange(256, dtype="u1").view(dtype).astype("f4")
    every = np.sort(every[np.isfinite(every)])
    middle = (every[1:] + every[:-1]) / 2
    a = np.concatenate(
        [
            every,
            middle,
            np.nextafter(middle, np.float32(9e9)),
            np.nextafter(middle, np.float32(-9e9)),
            float_edges("f4"),
        ]
    )
    (got,) = apply(f"cvt.rn.satfinite.{t}x2.f32 %x, %a, 0f3F800000;", [a], ["u2"])
    clipped = np.clip(a, -top, top)
    want = clipped.astype(dtype).view("u1")
    want = np.where(np.isnan(a), 0x7F, want)
    assert (got >> np.uint16(8)).tolist() == want.tolist()
    assert set((got & np.uint16(255)).tolist()) == {int(np.float32(1).astype(dtype).view("u1"))}


@pytest.mark.parametrize("t,dtype", [("e2m3", ml_dtypes.float6_e2m3fn), ("e3m2", ml_dtypes.float6_e3m2fn)])
def test_six_bits(t: str, dtype) -> None:
    """A code has the low six bits of a byte; there is no NaN and no infinity."""
    table = np.arange(64, dtype="u1").view(dtype).astype("f4")
    a = (CODES[:64] << np.uint16(8) | CODES[:64][::-1] | np.uint16(0x40C0)).astype("u2")
    (got,) = apply(f"cvt.rn.f16x2.{t}x2 %x, %a;", [a], ["u4"])
    halves = got.view("f2").reshape(-1, 2).astype("f4")
    assert np.array_equal(halves[:, 1], table) and np.array_equal(halves[:, 0], table[::-1])
    grid = np.sort(table)
    middle = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(middle, np.float32(s * 99)) for s in (1, -1)]
    x = np.concatenate([grid, middle, *near, float_edges("f4"), [np.nan, np.inf, -np.inf]]).astype("f4")
    (got,) = apply(f"cvt.rn.satfinite.{t}x2.f32 %x, %a, 0f40000000;", [x], ["u2"])
    want = np.clip(x, grid[0], grid[-1]).astype(dtype).view("u1")
    assert (got >> np.uint16(8)).tolist() == np.where(np.isnan(x), 31, want).tolist()
    assert set((got & np.uint16(255)).tolist()) == {int(np.float32(2).astype(dtype).view("u1"))}


def test_encoding_e2m1_rounds_to_even_and_saturates() -> None:
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")
    middle = (grid[1:] + grid[:-1]) / 2
    a = np.concatenate(
        [grid, middle, np.nextafter(middle, np.float32(99)), np.nextafter(middle, np.float32(0)), [7, np.inf, 1e-30]]
    )
    a = np.concatenate([a, -a]).astype("f4")
    code = "{ .reg .b8 q; cvt.rn.satfinite.e2m1x2.f32 q, %a, 0f40000000; cvt.u16.u8 %x, q; }"
    (got,) = apply(code, [a], ["u2"])
    want = np.clip(a, -6, 6).astype(ml_dtypes.float4_e2m1fn).view("u1")
    assert (got >> np.uint16(4)).tolist() == want.tolist()
    assert set((got & np.uint16(15)).tolist()) == {4}


def test_ue8m0() -> None:
    a = np.concatenate(
        [np.float32(2.0) ** np.arange(-126, 128), [0.0, 3.0, 1.0000001, 3e38, 2.0**-149, np.nan]]
    ).astype("f4")
    code = "cvt.rp.satfinite.ue8m0x2.f32 %x, %a, %a; cvt.rz.satfinite.ue8m0x2.f32 %y, %a, %a;"
    code += "cvt.rn.bf16x2.ue8m0x2 %z, %y;"
    up, down, back = apply(code, [a], ["u2", "u2", "u4"])
    for v, u, d, z in zip(
        a.tolist(), (up & np.uint16(255)).tolist(), (down >> np.uint16(8)).tolist(), (back >> np.uint32(16)).tolist()
    ):
        if math.isnan(v):
            assert (u, d, z) == (255, 255, 0x7FFF)
            continue
        exponent = math.log2(v) if v else -200
        assert u == max(0, min(254, math.ceil(exponent) + 127)) and d == max(0, min(254, math.floor(exponent) + 127))
        assert values(np.array([z], "u2"), "bf16")[0] == 2.0 ** (d - 127)


def test_ue8m0_of_bf16() -> None:
    """The same codes as from f32."""
    a = np.arange(0, 1 << 16, 37, dtype="u4")
    pair = a << np.uint32(16) | a[::-1]
    for mode in ("rz", "rp"):
        code = (
            f"cvt.{mode}.ue8m0x2.bf16x2 %x, %a; mov.b32 {{%h1, %h2}}, %a; cvt.f32.bf16 %r1, %h1; cvt.f32.bf16 %r2, %h2;"
        )
        got, want = apply(f"{code} cvt.{mode}.ue8m0x2.f32 %y, %r2, %r1;", [pair], ["u2", "u2"])
        assert got.tolist() == want.tolist()


def test_tf32() -> None:
    a = float_edges("f4", 300, 1)
    (got,) = apply("cvt.rna.tf32.f32 %x, %a;", [a], ["u4"])
    for v, g in zip(a.view("u4").tolist(), got.tolist()):
        exponent, nan = v >> 23 & 255, (v & 0x7FFFFFFF) > 0x7F800000
        if nan:
            assert g == v & 0xFFFFE000
        elif exponent == 255:
            assert g == v
        else:
            assert g == (v + 0x1000) & 0xFFFFE000

"""Floating-point arithmetic against rationals rounded once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from exact import bits, divide, fma, values
from ptx_lab import apply, float_edges

from cute_nvfp4.sim import UnsupportedInstruction

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

RAW = {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}
DTYPE = {"f16": "f2", "f32": "f4", "f64": "f8"}


def samples(name: str, seed: int, count: int = 300) -> np.ndarray:
    """Raw bits of edge values."""
    if name == "bf16":
        return (float_edges("f4", count, seed).view("u4") >> np.uint32(16)).astype("u2")
    return float_edges(DTYPE[name], count, seed).view(RAW[name])


def hard_fma_cases(name: str) -> list[np.ndarray]:
    """Sums that lie just beside a tie of the format, where rounding twice goes wrong."""
    precision = {"f16": 11, "bf16": 8, "f32": 24}[name]
    one, half_ulp, tiny = 1.0, 2.0**-precision, 2.0 ** -(24 if name == "f16" else 100)
    # (1 + 2^-k)^2 = 1 + 2^(1-k) + 2^-2k: a product whose low part sits just past a tie, or far below it.
    rows = [(half_ulp, one, one), (half_ulp, one + 2 * half_ulp, one), (tiny, tiny if name != "f16" else one, one)]
    rows += [(-half_ulp, one + 2 * half_ulp, one + 2 * half_ulp), (half_ulp, one - half_ulp, one + 2 * half_ulp)]
    rows += [(one + 2 * half_ulp, one + 2 * half_ulp, s * half_ulp) for s in (1, -1, 0.5)]
    rows += [(a, b, s * c) for a, b, c in rows for s in (1.0, -1.0)]
    columns = list(zip(*rows))
    if name == "bf16":
        return [(np.array(c, "f4").view("u4") >> np.uint32(16)).astype("u2") for c in columns]
    return [np.array(c, DTYPE[name]).view(RAW[name]) for c in columns]


def check(got: np.ndarray, want: list[float], name: str, inputs) -> None:
    expected = np.array([bits(w, name) for w in want], RAW[name])
    bad = np.flatnonzero(got != expected)
    if len(bad):
        i = bad[0]
        args = [x[i] for x in inputs]
        raise AssertionError(f"{len(bad)} wrong, first for {args}: got {int(got[i]):#x}, want {int(expected[i]):#x}")


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_fma(name: str) -> None:
    raw = [samples(name, s) for s in (1, 2, 3)]
    if name != "f64":
        raw = [np.concatenate([a, b]) for a, b in zip(raw, hard_fma_cases(name))]
    (got,) = apply(f"fma.rn.{name} %x, %a, %b, %c;", raw, [RAW[name]])
    inputs = [values(r, name) for r in raw]
    want = [fma(a, b, c, name) for a, b, c in zip(*inputs)]
    if name == "f64":
        got = without_nans(got, want)
    check(got, want, name, inputs)


def without_nans(got: np.ndarray, want: list[float]) -> np.ndarray:
    """Raw f64 with the canonical NaN where a NaN is right: which one it is, test_observed.py says."""
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got.view("f8")), nan)
    return np.where(nan, np.uint64(bits(math.nan, "f64")), got)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_rounding_modes(mode: str) -> None:
    raw = [samples("f64", s, 200) for s in (1, 2, 3)]
    tiny = np.array([1.5e-308, -3e-310, 1.7e308, -1.7e308, 1 + 2.0**-52, 0.0, -0.0, 1.0, -1.0]).view("u8")
    pairs = [np.repeat(tiny, 9), np.tile(tiny, 9), np.roll(np.tile(tiny, 9), 4)]
    raw = [np.concatenate([r, p]) for r, p in zip(raw, pairs)]
    code = f"fma.{mode}.f64 %x, %a, %b, %c; add.{mode}.f64 %y, %a, %b; sub.{mode}.f64 %z, %a, %b; "
    x, y, z, w = apply(code + f"mul.{mode}.f64 %w, %a, %b;", raw, ["u8"] * 4)
    ins = [values(r, "f64") for r in raw]
    sign = lambda a, b: math.copysign(1, a) * math.copysign(1, b)  # noqa: E731
    for got, want in (
        (x, [fma(a, b, c, "f64", mode) for a, b, c in zip(*ins)]),
        (y, [fma(a, 1.0, b, "f64", mode) for a, b, _ in zip(*ins)]),
        (z, [fma(a, 1.0, -b, "f64", mode) for a, b, _ in zip(*ins)]),
        (w, [fma(a, b, math.copysign(0.0, sign(a, b)), "f64", mode) for a, b, _ in zip(*ins)]),
    ):
        check(without_nans(got, want), want, "f64", ins)


def test_fma_f16_rounds_once_for_all_exponent_gaps() -> None:
    rng = np.random.default_rng(7)
    a, b, c = (
        rng.integers(0, 0x7C00, 4000, dtype="u2") | rng.integers(0, 2, 4000, dtype="u2") << np.uint16(15)
        for _ in range(3)
    )
    (got,) = apply("fma.rn.f16 %x, %a, %b, %c;", [a, b, c], ["u2"])
    inputs = [values(r, "f16") for r in (a, b, c)]
    check(got, [fma(x, y, z, "f16") for x, y, z in zip(*inputs)], "f16", inputs)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f32_rounding_modes(mode: str) -> None:
    raw = [samples("f32", s) for s in (1, 2, 3)]
    code = f"fma.{mode}.f32 %x, %a, %b, %c; add.{mode}.f32 %y, %a, %b; mul.{mode}.f32 %z, %a, %b;"
    code += f"div.{mode}.f32 %w, %a, %b;"
    x, y, z, w = apply(code, raw, ["u4"] * 4)
    ins = [values(r, "f32") for r in raw]
    check(x, [fma(a, b, c, "f32", mode) for a, b, c in zip(*ins)], "f32", ins)
    check(y, [fma(a, 1.0, b, "f32", mode) for a, b, _ in zip(*ins)], "f32", ins)
    zero = lambda a, b: -0.0 if math.copysign(1, a) * math.copysign(1, b) < 0 else 0.0  # noqa: E731
    check(
        z,
        [
            zero(a, b) if a * b == 0 and 0 in (a, b) and a - a == b - b == 0 else fma(a, b, zero(a, b), "f32", mode)
            for a, b, _ in zip(*ins)
        ],
        "f32",
        ins,
    )
    check(w, [divide(a, b, "f32", mode) for a, b, _ in zip(*ins)], "f32", ins)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_packed_halves(name: str) -> None:
    raw = [samples(name, s, 301)[:600] for s in (1, 2, 3)]
    pairs = [r.view("u4") for r in raw]
    code = f"fma.rn.{name}x2 %x, %a, %b, %c; add.rn.{name}x2 %y, %a, %b; mul.rn.{name}x2 %z, %a, %b;"
    code += f"sub.rn.{name}x2 %w, %a, %b;"
    x, y, z, w = (r.view("u2") for r in apply(code, pairs, ["u4"] * 4))
    ins = [values(r, name) for r in raw]
    check(x, [fma(a, b, c, name) for a, b, c in zip(*ins)], name, ins)
    check(y, [fma(a, 1.0, b, name) for a, b, _ in zip(*ins)], name, ins)
    zero = lambda a, b: -0.0 if math.copysign(1, a) * math.copysign(1, b) < 0 else 0.0  # noqa: E731
    check(z, [fma(a, b, zero(a, b), name) for a, b, _ in zip(*ins)], name, ins)
    check(w, [fma(a, 1.0, -b, name) for a, b, _ in zip(*ins)], name, ins)


def test_f32x2() -> None:
    raw = [samples("f32", s, 301)[:600] for s in (1, 2, 3)]
    (x,) = apply("fma.rn.f32x2 %x, %a, %b, %c;", [r.view("u8") for r in raw], ["u8"])
    ins = [values(r, "f32") for r in raw]
    check(x.view("u4"), [fma(a, b, c, "f32") for a, b, c in zip(*ins)], "f32", ins)


def test_ftz_and_sat() -> None:
    raw = [samples("f32", s) for s in (1, 2)]
    x, y = apply("mul.rn.ftz.f32 %x, %a, %b; add.sat.f32 %y, %a, %b;", raw, ["u4", "u4"])
    a, b = (
        np.where(np.abs(r.view("f4")) < 2.0**-126, np.copysign(0, r.view("f4")), r.view("f4")).astype("f4") for r in raw
    )
    p = a * b
    p = np.where(np.abs(p) < np.float32(2.0**-126), np.copysign(np.float32(0), p), p)
    assert np.array_equal(x[~np.isnan(p)], p.view("u4")[~np.isnan(p)])
    s = raw[0].view("f4") + raw[1].view("f4")
    assert np.array_equal(y.view("f4"), np.where(np.isnan(s), 0, np.clip(s, 0, 1)).astype("f4"))


def test_min_max_and_nan() -> None:
    raw = [samples("f32", s) for s in (1, 2, 3)]
    code = "min.f32 %x, %a, %b; max.f32 %y, %a, %b; max.NaN.f32 %z, %a, %b, %c; min.ftz.f32 %w, %a, %b;"
    x, y, z, _ = (r.view("f4").tolist() for r in apply(code, raw, ["u4"] * 4))

    def pick(p, q, sign):
        if math.isnan(p) or math.isnan(q):
            return q if math.isnan(p) else p
        key = lambda v: (v, math.copysign(1, v))  # noqa: E731
        return (max if sign > 0 else min)(p, q, key=key)

    for a, b, c, lo, hi, three in zip(*(r.view("f4").tolist() for r in raw), x, y, z):
        for got, want in ((lo, pick(a, b, -1)), (hi, pick(a, b, 1))):
            assert bits(got, "f32") == bits(want, "f32")
        want = math.nan if any(map(math.isnan, (a, b, c))) else pick(pick(a, b, 1), c, 1)
        assert bits(three, "f32") == bits(want, "f32")


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_sqrt_and_rcp(mode: str) -> None:
    raw = samples("f32", 5)
    root, inverse = apply(f"sqrt.{mode}.f32 %x, %a; rcp.{mode}.f32 %y, %a;", [raw], ["u4", "u4"])
    ins = values(raw, "f32")
    check(inverse, [divide(1.0, a, "f32", mode) for a in ins], "f32", [ins])
    for a, got in zip(ins, root.view("f4").tolist()):
        if math.isnan(a) or a < 0:
            assert math.isnan(got)
        elif a in (0.0, math.inf):
            assert bits(got, "f32") == bits(a, "f32")
        else:
            # scaled integer square root: 24 bits and a remainder decide the rounding
            m, e = math.frexp(a)
            m, e = (m, e) if e % 2 == 0 else (m / 2, e + 1)
            scaled = int(m * 2**48)
            floor = math.isqrt(scaled)
            exact, nearest = floor * floor == scaled, floor + (scaled - floor * floor > floor)
            q = {"rn": nearest, "rz": floor, "rm": floor, "rp": floor + (not exact)}[mode]
            assert got == math.ldexp(q, e // 2 - 24)


def test_approximations_are_close() -> None:
    a = np.random.default_rng(1).uniform(0.01, 20, 300).astype("f4")
    code = "ex2.approx.ftz.f32 %x, %a; lg2.approx.f32 %y, %a; rsqrt.approx.f32 %z, %a; tanh.approx.f32 %w, %a;"
    x, y, z, w = apply(code, [a], ["f4"] * 4)
    wide = a.astype("f8")
    for got, want in ((x, 2**wide), (y, np.log2(wide)), (z, wide**-0.5), (w, np.tanh(wide))):
        assert np.allclose(got, want, rtol=1e-6, atol=1e-7)
    x, y, z, w = apply(
        "sin.approx.f32 %x, %a; cos.approx.f32 %y, %a; rcp.approx.ftz.f32 %z, %a; div.full.f32 %w, %a, %b;",
        [a, a[::-1].copy()],
        ["f4"] * 4,
    )
    for got, want in ((x, np.sin(wide)), (y, np.cos(wide)), (z, 1 / wide), (w, wide / wide[::-1])):
        assert np.allclose(got, want, rtol=1e-6, atol=1e-7)


def test_half_approximations_of_subnormals() -> None:
    """ex2 of bf16 flushes its results (the PTX ISA's table of corner cases); f16 and tanh keep subnormals."""
    table = {
        **{0xFF80: 0, 0x8001: 0x3F80, 0x8000: 0x3F80, 0: 0x3F80, 0x7F: 0x3F80, 0x7F80: 0x7F80, 0x7FC0: 0x7FFF},
        **{0xC2FC: 0x80, 0xC2FD: 0, 0xC2FE: 0, 0xC305: 0},  # -126, -126.5, -127, -133
    }
    given, want = (np.array(list(x), "u2") for x in (table, table.values()))
    twice = [np.repeat(x, 2).view("u4") for x in (given, want)]
    assert apply("ex2.approx.ftz.bf16 %x, %a;", [given], ["u2"])[0].tolist() == want.tolist()
    assert apply("ex2.approx.ftz.bf16x2 %x, %a;", twice[:1], ["u4"])[0].tolist() == twice[1].tolist()
    powers = apply("ex2.approx.f16 %x, %a;", [np.arange(-24, -13, dtype="f2")], ["f2"])[0]
    assert powers.tolist() == [2.0**e for e in range(-24, -13)]
    tiny = np.array([1, 0x8001, 0x7F, 0x807F], "u2")
    x, y = apply("tanh.approx.bf16 %x, %a; tanh.approx.f16 %y, %a;", [tiny], ["u2"] * 2)
    assert x.tolist() == y.tolist() == tiny.tolist()


@pytest.mark.parametrize("form", ["ex2.approx.bf16", "ex2.approx.ftz.f16", "tanh.approx.ftz.bf16"])
def test_half_approximations_that_do_not_exist(form: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=r"\.ftz"):
        apply(f"{form} %x, %a;", [np.zeros(1, "u2")], ["u2"])


@pytest.mark.parametrize("name", ["lt", "geu", "eq", "neu", "num", "nan"])
def test_float_comparisons(name: str) -> None:
    a, b = (float_edges("f4", 300, s) for s in (1, 2))
    b[::3] = a[::3]
    (got,) = apply(f"setp.{name}.f32 %q1, %a, %b; selp.b32 %x, 1, 0, %q1;", [a, b], ["u4"])
    nan = np.isnan(a) | np.isnan(b)
    want = {"lt": (a < b), "geu": (a >= b) | nan, "eq": a == b, "neu": (a != b) | nan, "num": ~nan, "nan": nan}[name]
    assert got.astype(bool).tolist() == want.tolist()

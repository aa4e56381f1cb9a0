"""Integer, logic and bit instructions against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import apply, edges

M32, M64 = 2**32 - 1, 2**64 - 1


def wrap(value: int, dtype) -> int:
    bits = np.dtype(dtype).itemsize * 8
    value &= (1 << bits) - 1
    return value - (1 << bits) if np.dtype(dtype).kind == "i" and value >> (bits - 1) else value


def trunc_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


BINARY = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: a * b >> w,
    "div": lambda a, b, w: trunc_div(a, b),
    "rem": lambda a, b, w: a - b * trunc_div(a, b),
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, kind: str) -> None:
    width, signed = int(kind[1:]), kind[0] == "s"
    a, b = edges(width, signed, seed=1), edges(width, signed, seed=2)
    if name in ("div", "rem"):
        b = np.where(b == 0, b.dtype.type(7), b)
    (got,) = apply(f"{name}.{kind} %x, %a, %b;", [a, b], [a.dtype.str])
    want = [wrap(BINARY[name](x, y, width), a.dtype) for x, y in zip(a.tolist(), b.tolist())]
    assert got.tolist() == want


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_mul_wide_and_mad(kind: str) -> None:
    width, signed = int(kind[1:]), kind[0] == "s"
    a, b, c = edges(width, signed, seed=1), edges(width, signed, seed=2), edges(2 * width, signed, seed=3)
    (got,) = apply(f"mad.wide.{kind} %x, %a, %b, %c;", [a, b, c], [c.dtype.str])
    assert got.tolist() == [wrap(x * y + z, c.dtype) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())]
    (got,) = apply(f"mul.wide.{kind} %x, %a, %b;", [a, b], [c.dtype.str])
    assert got.tolist() == [x * y for x, y in zip(a.tolist(), b.tolist())]


@pytest.mark.parametrize("mode", ["lo", "hi"])
@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_mad(mode: str, kind: str) -> None:
    width, signed = int(kind[1:]), kind[0] == "s"
    a, b, c = (edges(width, signed, seed=s) for s in (1, 2, 3))
    (got,) = apply(f"mad.{mode}.{kind} %x, %a, %b, %c;", [a, b, c], [a.dtype.str])
    shift = width if mode == "hi" else 0
    assert got.tolist() == [wrap((x * y >> shift) + z, a.dtype) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())]


def test_saturating_add() -> None:
    a, b = edges(32, True, seed=1), edges(32, True, seed=2)
    add, sub = apply("add.sat.s32 %x, %a, %b; sub.sat.s32 %y, %a, %b;", [a, b], ["i4", "i4"])
    clamp = lambda v: max(-(2**31), min(2**31 - 1, v))  # noqa: E731
    assert add.tolist() == [clamp(x + y) for x, y in zip(a.tolist(), b.tolist())]
    assert sub.tolist() == [clamp(x - y) for x, y in zip(a.tolist(), b.tolist())]


def test_carry_chain_makes_wide_sums() -> None:
    a, b, c, d = (edges(32, False, seed=s) for s in (1, 2, 3, 4))
    code = "add.cc.u32 %x, %a, %c; addc.u32 %y, %b, %d; sub.cc.u32 %z, %a, %c; subc.u32 %w, %b, %d;"
    lo, hi, slo, shi = apply(code, [a, b, c, d], ["u4"] * 4)
    for i in range(len(a)):
        x, y = int(b[i]) << 32 | int(a[i]), int(d[i]) << 32 | int(c[i])
        assert int(hi[i]) << 32 | int(lo[i]) == (x + y) & M64
        assert int(shi[i]) << 32 | int(slo[i]) == (x - y) & M64


def test_neg_abs_sad() -> None:
    a, b, c = (edges(32, True, seed=s) for s in (1, 2, 3))
    neg, absolute, sad = apply("neg.s32 %x, %a; abs.s32 %y, %a; sad.s32 %z, %a, %b, %c;", [a, b, c], ["i4"] * 3)
    assert neg.tolist() == [wrap(-x, "i4") for x in a.tolist()]
    assert absolute.tolist() == [wrap(abs(x), "i4") for x in a.tolist()]
    assert sad.tolist() == [wrap(z + abs(x - y), "i4") for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())]


def test_dp4a_and_dp2a() -> None:
    a, b, c = (edges(32, False, seed=s) for s in (1, 2, 3))
    code = "dp4a.s32.u32 %x, %a, %b, %c; dp4a.u32.s32 %y, %a, %b, %c; dp2a.hi.s32.s32 %z, %a, %b, %c;"
    x, y, z = apply(code, [a, b, c], ["u4"] * 3)
    byte = lambda v, i, s: (v >> 8 * i & 255) - (256 if s and v >> 8 * i & 128 else 0)  # noqa: E731
    half = lambda v, i: (v >> 16 * i & 65535) - (65536 if v >> 16 * i & 32768 else 0)  # noqa: E731
    for p, q, r, gx, gy, gz in zip(*(v.tolist() for v in (a, b, c, x, y, z))):
        assert gx == (r + sum(byte(p, i, True) * byte(q, i, False) for i in range(4))) & M32
        assert gy == (r + sum(byte(p, i, False) * byte(q, i, True) for i in range(4))) & M32
        assert gz == (r + sum(half(p, i) * byte(q, 2 + i, True) for i in range(2))) & M32


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_shifts(kind: str) -> None:
    width, signed = int(kind[1:]), kind[0] == "s"
    a = edges(width, signed, seed=1)
    n = (np.arange(len(a)) % 70).astype("u4")
    n[-3:] = [2**31, 2**32 - 1, 256]
    left, right = apply(f"shl.b{width} %x, %a, %b; shr.{kind} %y, %a, %b;", [a, n], [a.dtype.str] * 2)
    assert left.tolist() == [wrap(x << s, a.dtype) if s < width else 0 for x, s in zip(a.tolist(), n.tolist())]
    assert right.tolist() == [x >> min(s, 64) for x, s in zip(a.tolist(), n.tolist())]


def test_funnel_shift() -> None:
    a, b = edges(32, False, seed=1), edges(32, False, seed=2)
    n = (np.arange(len(a)) % 70).astype("u4")
    code = (
        "shf.l.wrap.b32 %x, %a, %b, %c; shf.r.wrap.b32 %y, %a, %b, %c;"
        "shf.l.clamp.b32 %z, %a, %b, %c; shf.r.clamp.b32 %w, %a, %b, %c;"
    )
    got = apply(code, [a, b, n], ["u4"] * 4)
    for p, q, s, *out in zip(*(v.tolist() for v in (a, b, n, *got))):
        both, w, c = q << 32 | p, s & 31, min(s, 32)
        assert out == [both << w >> 32 & M32, both >> w & M32, both << c >> 32 & M32, both >> c & M32]


@pytest.mark.parametrize("table", [0x00, 0xFF, 0x80, 0x96, 0xE8, 0xCA, 0x01, 0xC8, 0x6A])
def test_lop3(table: int) -> None:
    a, b, c = (edges(32, False, seed=s) for s in (1, 2, 3))
    (got,) = apply(f"lop3.b32 %x, %a, %b, %c, {table:#x};", [a, b, c], ["u4"])
    for x, y, z, g in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist()):
        assert g == sum((table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1) << i for i in range(32))


@pytest.mark.parametrize("width", [32, 64])
def test_bit_counts(width: int) -> None:
    a = edges(width, False, seed=1)
    pop, clz, rev = apply(
        f"popc.b{width} %x, %a; clz.b{width} %y, %a; brev.b{width} %z, %a;", [a], ["u4", "u4", a.dtype.str]
    )
    assert pop.tolist() == [bin(x).count("1") for x in a.tolist()]
    assert clz.tolist() == [width - x.bit_length() for x in a.tolist()]
    assert rev.tolist() == [int(f"{x:0{width}b}"[::-1], 2) for x in a.tolist()]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    width, signed = int(kind[1:]), kind[0] == "s"
    rng = np.random.default_rng(3)
    a, c = edges(width, signed, seed=1), edges(width, False, seed=4)
    start, size = rng.integers(0, 70, len(a)).astype("u4"), rng.integers(0, 70, len(a)).astype("u4")
    got, ins = apply(
        f"bfe.{kind} %x, %a, %b, %c; bfi.b{width} %y, %a, %d, %b, %c;", [a, start, size, c], [a.dtype.str, c.dtype.str]
    )
    for x, p, n, y, g, h in zip(*(v.tolist() for v in (a, start, size, c, got, ins))):
        bits = x & ((1 << width) - 1)
        sign = (bits >> min(p + n - 1, width - 1) & 1) if signed and n else 0
        field = sum((bits >> (p + i) & 1 if i < n and p + i < width else sign) << i for i in range(width))
        assert g == wrap(field, a.dtype), (x, p, n)
        want = y
        for i in range(min(n, width - p) if p < width else 0):
            want = (want & ~(1 << (p + i))) | ((bits >> i & 1) << (p + i))
        assert h == want, (x, y, p, n)


@pytest.mark.parametrize("mode", ["", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"])
def test_prmt(mode: str) -> None:
    a, b, c = (edges(32, False, seed=s) for s in (1, 2, 3))
    (got,) = apply(f"prmt.b32{mode} %x, %a, %b, %c;", [a, b, c], ["u4"])
    # rows of the tables of the ISA, result bytes 3..0 for selector 0..3
    tables = {
        ".f4e": ["3210", "4321", "5432", "6543"],
        ".b4e": ["5670", "6701", "7012", "0123"],
        ".rc8": ["0000", "1111", "2222", "3333"],
        ".ecl": ["3210", "3211", "3222", "3333"],
        ".ecr": ["0000", "1110", "2210", "3210"],
        ".rc16": ["1010", "3232", "1010", "3232"],
    }
    for x, y, z, g in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist()):
        source = (y << 32 | x).to_bytes(8, "little")
        out = 0
        for i in range(4):
            if mode:
                byte = source[int(tables[mode][z & 3][3 - i])]
            else:
                nibble = z >> 4 * i & 15
                byte = source[nibble & 7]
                byte = (255 if byte & 128 else 0) if nibble & 8 else byte
            out |= byte << 8 * i
        assert g == out


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_setp_selp(name: str, kind: str) -> None:
    import operator

    a, b = (edges(int(kind[1:]), kind[0] == "s", seed=s) for s in (1, 2))
    b[::3] = a[::3]
    (got,) = apply(f"setp.{name}.{kind} %q1, %a, %b; selp.b32 %x, 1, 0, %q1;", [a, b], ["u4"])
    assert got.tolist() == [int(getattr(operator, name)(x, y)) for x, y in zip(a.tolist(), b.tolist())]


def test_setp_with_two_results_and_a_condition() -> None:
    a, b = edges(32, True, seed=1), edges(32, True, seed=2)
    code = (
        "setp.lt.s32 %q3, %b, 5; setp.gt.and.s32 %q1|%q2, %a, %b, !%q3;"
        "selp.b32 %x, 1, 0, %q1; selp.b32 %y, 1, 0, %q2; slct.s32.s32 %z, %a, %b, %b;"
    )
    p, q, z = apply(code, [a, b], ["u4", "u4", "i4"])
    assert p.tolist() == [int(x > y and y >= 5) for x, y in zip(a.tolist(), b.tolist())]
    assert q.tolist() == [int(x <= y and y >= 5) for x, y in zip(a.tolist(), b.tolist())]
    assert z.tolist() == [x if y >= 0 else y for x, y in zip(a.tolist(), b.tolist())]


def test_vector_moves_and_sinks() -> None:
    a = edges(64, False, seed=1)
    code = (
        "{ .reg .b32 lo; .reg .b16 u; mov.b64 {lo, _}, %a; mov.b32 {_, u}, lo; mov.b64 %x, {lo, lo}; mov.b16 %y, u; }"
    )
    x, y = apply(code, [a], ["u8", "u2"])
    assert x.tolist() == [(v & M32) << 32 | (v & M32) for v in a.tolist()]
    assert y.tolist() == [v >> 16 & 0xFFFF for v in a.tolist()]

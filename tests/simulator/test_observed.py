"""What the PTX ISA leaves open or says in half a sentence, with values that an H200 gave: which NaN comes out, what is
tiny for .ftz, the sign of exact zeros, subnormals in atomics."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from exact import FORMATS
from ptx_lab import apply, launch_kernel, module

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_NAN = 0x7FFFFFFF
_INVALID = 0xFFF8000000000000
_S1, _S3, _Q5, _Q7 = 0x7FF0000000000001, 0xFFF0000000000003, 0x7FF8000000000005, 0xFFF8000000000007
_ONE = 0x3FF0000000000000
_INF, _MINUS_INF = 0x7FF0000000000000, 0xFFF0000000000000

#: instruction, its operands, the result: raw bits; "f64 <- f32" where types differ
WITNESSES = (
    # a NaN operand of f64 is quieted and keeps sign and payload; of add, sub and mul the second operand's wins
    *(("add.rn.f64", a, r) for a, r in (((_S1, _ONE), _S1 | 1 << 51), ((_ONE, _S3), _S3 | 1 << 51))),
    *(("add.rn.f64", a, r) for a, r in (((_Q5, _Q7), _Q7), ((_Q7, _S1), _S1 | 1 << 51))),
    ("sub.rn.f64", (_ONE, _S3), _S3 | 1 << 51),
    ("sub.rz.f64", (_Q5, _Q7), _Q7),
    ("mul.rp.f64", (_Q5, _Q7), _Q7),
    ("fma.rn.f64", (0x3415A484E7642554, 0x7FF8000000000000, _S1), 0x7FF8000000000000),
    ("fma.rn.f64", (_S1, _ONE, 0xFFF0000000000001), 0xFFF8000000000001),
    ("fma.rm.f64", (_Q5, _Q7, _S1), _Q7),
    ("div.rn.f64", (_Q5, _Q7), _Q5),
    ("sqrt.rn.f64", (_S3,), _S3 | 1 << 51),
    ("rcp.rn.f64", (_S1,), _S1 | 1 << 51),
    ("neg.f64", (_S3,), _S3 | 1 << 51),
    ("abs.f64", (_Q7,), _Q7),
    ("min.f64", (_Q5, _Q7), _Q7),
    ("max.f64", (_S1, _ONE), _ONE),
    # the NaN of an invalid operation on f64
    ("add.rn.f64", (_INF, _MINUS_INF), _INVALID),
    ("mul.rn.f64", (0, _INF), _INVALID),
    ("div.rn.f64", (0, 0), _INVALID),
    ("sqrt.rn.f64", (0xBFF4000000000000,), _INVALID),
    # elsewhere NaNs are canonical
    ("neg.f32", (0x7F800001,), _NAN),
    ("abs.ftz.f32", (0xFFD23456,), _NAN),
    *((f"{form}.{t}", (a,), 0x7FFF) for form in ("neg", "abs") for t, a in (("f16", 0xFC01), ("bf16", 0x7F81))),
    ("neg.f16x2", (0xC733FE00,), 0x47337FFF),
    ("abs.bf16x2", (0xFF81418B,), 0x7FFF418B),
    # conversions
    *((f"cvt.{mode}.tf32.f32", (a,), 0x7FFFE000) for mode in ("rn", "rz", "rn.relu") for a in (0xFF800001, 0x7FBD937D)),
    *(("cvt.rna.tf32.f32", (a,), r) for a, r in ((0xFF800001, 0xFF800000), (0x7FBD937D, 0x7FBD8000))),
    ("cvt.f32.bf16", (0xFF81,), 0xFF810000),
    ("cvt.ftz.f32.bf16", (0xFF81,), _NAN),
    ("cvt.rn.f32.f64", (0x7FF123456789ABCD,), 0x7FC91A2B),
    ("cvt.rm.f32.f64", (_S3,), 0xFFC00000),
    ("cvt.rz.f16.f64", (0x7FF123456789ABCD,), 0x7E48),
    ("cvt.rn.bf16.f64", (0x7FF123456789ABCD,), 0x7FC9),
    *((f"cvt.{mode}.f32.f32", (0xFF800001,), _NAN) for mode in ("rni", "rzi", "rmi", "rpi", "ftz")),
    ("cvt.f32.f32", (0xFF800003,), 0xFF800003),
    ("cvt.ftz.f64.f32", (0xFF800003,), 0x7FFFFFFFE0000000),
    ("cvt.rzi.s32.f64", (_S1,), 0x80000000),
    ("cvt.rzi.u32.f64", (_Q7,), 0x80000000),
    ("cvt.rzi.u64.f32", (0x7F800001,), 1 << 63),
    ("cvt.rni.s32.f32", (0x7F800001,), 0),
    # .ftz: tiny is what stays below 2**-126 when it is rounded with unbounded exponent
    ("mul.rn.ftz.f32", (0x80800000, 0x3F7FFFFF), 0x80000000),
    ("mul.rn.f32", (0x80800000, 0x3F7FFFFF), 0x80800000),
    ("fma.rn.ftz.f32", (0xB2F7F392, 0x8AD44E, 0x800000), 0),
    ("div.rp.ftz.f32", (0x1E55DC71, 0x5D55DC72), 0),
    ("rcp.rp.ftz.f32", (0x7E800001,), 0),
    ("cvt.rn.ftz.f32.f64", (0x380FFFFFE8000000,), 0),
    ("cvt.rn.ftz.f32.f64", (0x380FFFFFF0000000,), 0x800000),
    ("cvt.rp.ftz.f32.f64", (0x380FFFFFE0000000,), 0),
    ("cvt.rp.ftz.f32.f64", (0x380FFFFFE4000000,), 0x800000),
    ("mul.rn.ftz.f16", (0x32A0, 0x0CD4), 0),
    ("fma.rn.ftz.f16", (0x32A0, 0x0CD4, 0x8000), 0),
    # an exact zero of both signs is -0 when rounded down
    ("add.rm.f32", (0x807FFFFF, 0x7FFFFF), 0x80000000),
    ("add.rm.f32", (0, 0), 0),
    ("sub.rm.f32", (1, 1), 0x80000000),
    ("fma.rm.f32", (0, 0x807FFFFF, 0), 0x80000000),
    ("add.rm.ftz.f32", (0, 0x807FFFFF), 0x80000000),
    # div.approx by more than 2**126
    ("div.approx.f32", (0x3F800000, 0x7F7FFFFF), 0),
    ("div.approx.f32", (0xBFC00000, 0x7E800001), 0x80000000),
    ("div.approx.ftz.f32", (0x7F800000, 0x7F000000), _NAN),
    ("div.approx.f32", (0x3F800000, 0x7E800000), 0x800000),
    ("div.full.f32", (0x3F800000, 0x7F000000), 0x400000),
)
_SIZE = {"f16": 2, "bf16": 2, "f64": 8, "s64": 8, "u64": 8}


@pytest.mark.parametrize("name, operands, result", WITNESSES, ids=lambda v: v if isinstance(v, str) else "")
def test_witness(name: str, operands: tuple[int, ...], result: int) -> None:
    words = name.split(".")
    source, target = words[-1], words[-2] if words[0] == "cvt" else words[-1]
    given = [np.array([a], f"u{_SIZE.get(source, 4)}") for a in operands]
    code = f"{name} %x, {', '.join(f'%{r}' for r in 'abc'[: len(operands)])};"
    (got,) = apply(code, given, [f"u{_SIZE.get(target, 4)}"])
    assert hex(int(got[0])) == hex(result)


@pytest.mark.parametrize("mode", ("rn", "rz", "rm", "rp"))
def test_tiny_by_rationals(mode: str) -> None:
    """Products around 2**-126, rounded to 24 bits of unbounded exponent by hand."""
    rng = np.random.default_rng(3)
    a = (rng.integers(0, 1 << 23, 600).astype("u4") | np.uint32(0x3F000000)).view("f4")
    b = (np.float32(2.0**-126) / a).view("u4") + rng.integers(-2, 3, 600).astype("i4").view("u4")
    a = np.where(rng.integers(0, 2, 600) > 0, a, -a)
    flushed, plain = apply(
        f"mul.{mode}.ftz.f32 %x, %a, %b; mul.{mode}.f32 %y, %a, %b;", [a.view("u4"), b], ["u4", "u4"]
    )
    edge = 0
    for x, y, got, kept in zip(a.tolist(), b.view("f4").tolist(), flushed.tolist(), plain.tolist()):
        exact = abs(Fraction(x) * Fraction(y)) * 2**126
        away = {"rz": False, "rm": x < 0, "rp": x > 0}.get(mode)
        limit = 1 - Fraction(1, 2 ** FORMATS["f32"][0])
        nearest = (1 + limit) / 2
        tiny = exact < (nearest if mode == "rn" else 1) if not away else exact <= limit
        assert got == (kept & 0x80000000 if tiny else kept), (x, y)
        edge += tiny and kept & 0x7FFFFFFF == 0x800000
    assert bool(edge) == (mode != "rz")


ATOMICS = (
    # f32: subnormals are flushed in global memory only
    *(("f32", "global", m, a, r) for m, a, r in ((0, 1, 0), (0x80000000, 0x807FFFFF, 0x80000000), (1, 0x80000000, 0))),
    ("f32", "global", 0x80800001, 0x800000, 0x80000000),
    ("f32", "shared", 2, 0x80800000, 0x807FFFFE),
    ("f32", "shared", 0x80800001, 0x800000, 0x80000001),
    *(("f32", space, 0xFF800001, 0x3F800000, _NAN) for space in ("global", "shared")),
    # f64: global memory takes a NaN as it is, the operand's first; shared memory quiets it, its own first
    ("f64", "global", _ONE, _S1, _S1),
    ("f64", "global", _S1, _ONE, _S1),
    ("f64", "global", _Q5, _S3, _S3),
    ("f64", "shared", _ONE, _S1, _S1 | 1 << 51),
    ("f64", "shared", _Q5, _S3, _Q5),
    *(("f64", space, _INF, _MINUS_INF, _INVALID) for space in ("global", "shared")),
)


@pytest.mark.parametrize("form", ("red", "atom", "generic"))
@pytest.mark.parametrize("t, space, memory, operand, result", ATOMICS)
def test_atomic_sums(t: str, space: str, memory: int, operand: int, result: int, form: str) -> None:
    size = _SIZE.get(t, 4)
    word = np.array([memory], f"u{size}"), np.array([operand], f"u{size}")
    at = "[%p0]" if space == "global" else "[s]"
    body = f"ld.global.b{8 * size} v, [%p0]; ld.global.b{8 * size} w, [%p1]; mov.u32 %r1, %tid.x;"
    body += f"setp.ne.u32 %q1, %r1, 0; @%q1 exit; st.shared.b{8 * size} [s], v;"
    if form == "generic":
        body += "mov.u64 %rd1, %p0;" if at == "[%p0]" else "mov.u64 %rd1, s; cvta.shared.u64 %rd1, %rd1;"
        body += f"atom.add.{t} v, [%rd1], w;"
    else:
        body += f"{form}.{space}.add.{t} {'v, ' if form == 'atom' else ''}{at}, w;"
    body += f"ld.shared.b{8 * size} v, [s]; st.global.b{8 * size} [%p1], v;"
    declared = f".reg .b{8 * size} v, w; .shared .align 8 .b8 s[8];"
    launch_kernel(module(body, 2, declared), list(word))
    assert hex(int(word[0 if space == "global" else 1][0])) == hex(result)


@pytest.mark.parametrize("op", ("min", "max"))
@pytest.mark.parametrize("t", ("f16", "bf16", "f16x2", "bf16x2"))
@pytest.mark.parametrize("count", (2, 4, 8))
def test_vectors_of_extrema(op: str, t: str, count: int) -> None:
    """One NaN loses, two give 0x7fff, and -0 is less than +0."""
    if t.endswith("x2") and count == 8:
        pytest.skip("no such form")
    one, nan = (0x3C00, 0x7E01) if t.startswith("f16") else (0x3F80, 0x7FC1)
    memory = np.resize(np.array([one, 0x8000, nan, nan, 0], "u2"), 16)
    operand = np.resize(np.array([nan, 0x0000, nan, one, 0x8000], "u2"), 16)
    zero = 0x8000 if op == "min" else 0
    want = np.resize(np.array([one, zero, 0x7FFF, one, zero], "u2"), 16)
    size = 4 if t.endswith("x2") else 2
    halves = count * size // 2
    regs = ", ".join(f"v{j}" for j in range(count))
    body = "".join(f"ld.global.b{8 * size} v{j}, [%p1+{j * size}];" for j in range(count))
    body += "mov.u32 %r1, %tid.x; setp.ne.u32 %q1, %r1, 0; @%q1 exit;"
    body += f"red.global.{op}.noftz.v{count}.{t} [%p0], {{{regs}}};"
    before = memory.copy()
    launch_kernel(module(body, 2, f".reg .b{8 * size} {regs};"), [memory, operand])
    assert memory[:halves].tolist() == want[:halves].tolist()
    assert memory[halves:].tolist() == before[halves:].tolist()


def test_ignored_source() -> None:
    """cp.async writes zeros where ignore-src holds, and does not read."""
    source, out = np.arange(1, 65, dtype="u4"), np.zeros(64, "u4")
    body = "mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; setp.eq.u32 %q1, %r2, 1; mov.u32 %r3, s;"
    body += "mad.lo.u32 %r4, %r1, 8, %r3; mad.wide.u32 %rd1, %r1, 8, %p0; @%q1 mov.u64 %rd1, 16;"
    body += "cp.async.ca.shared.global [%r4], [%rd1], 8, %q1; cp.async.wait_all;"
    body += "ld.shared.b64 %rd2, [%r4]; mad.wide.u32 %rd3, %r1, 8, %p1; st.global.b64 [%rd3], %rd2;"
    launch_kernel(module(body, 2, ".shared .align 16 .b8 s[256];"), [source, out])
    want = source.reshape(32, 2) * (np.arange(32)[:, None] % 2 == 0)
    assert np.array_equal(out.reshape(32, 2), want)


def test_isspacep_of_a_peer() -> None:
    """shared::cta is the own CTA's part of the cluster's shared memory."""
    out = np.zeros(4, "u4")
    body = "mov.u32 %r1, %cluster_ctarank; mov.u64 %rd1, s; cvta.shared.u64 %rd1, %rd1;"
    for target in (0, 1):
        body += f"mapa.u64 %rd2, %rd1, {target}; isspacep.shared::cta %q1, %rd2; isspacep.shared::cluster %q2, %rd2;"
        body += "isspacep.shared %q3, %rd2; selp.u32 %r2, 1, 0, %q1; selp.u32 %r3, 2, 0, %q2; selp.u32 %r4, 4, 0, %q3;"
        body += "or.b32 %r2, %r2, %r3; or.b32 %r2, %r2, %r4; mad.wide.u32 %rd3, %r1, 8, %p0;"
        body += f"st.global.b32 [%rd3+{4 * target}], %r2;"
    launch_kernel(module(body, 1, ".shared .align 8 .b8 s[8];"), [out], grid=(2, 1, 1), cluster=(2, 1, 1))
    assert out.tolist() == [7, 2, 2, 7]

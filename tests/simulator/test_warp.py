"""Shuffles, votes, matches, reductions across lanes, and lanes that meet again before them."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import apply, edges, launch_kernel, module

from cute_nvfp4.sim import DivergentBarrier, InvalidLanes

FULL = "0xffffffff"


def lanes_of(a: np.ndarray) -> np.ndarray:
    return a[: len(a) // 32 * 32].reshape(-1, 32)


def source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The pseudocode of the ISA for shfl.sync."""
    bval, cval, segmask = b & 31, c & 31, c >> 8 & 31
    most = (lane & segmask) | (cval & ~segmask & 31)
    least = lane & segmask
    j, ok = {
        "up": (lane - bval, lane - bval >= most),
        "down": (lane + bval, lane + bval <= most),
        "bfly": (lane ^ bval, (lane ^ bval) <= most),
        "idx": (least | (bval & ~segmask & 31), (least | (bval & ~segmask & 31)) <= most),
    }[mode]
    return (j, True) if ok else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode: str) -> None:
    rng = np.random.default_rng(5)
    a = edges(32, False, 24 + 256 - 32, 1)[:256]
    b = rng.integers(0, 40, 256).astype("u4")
    c = rng.choice([0, 31, 0x1F, 0x181F, 0x1C00, 0x101F, 7], 256).astype("u4")
    if mode == "up":
        c &= np.uint32(0x1F00)
    code = f"shfl.sync.{mode}.b32 %x|%q1, %a, %b, %c, {FULL}; selp.b32 %y, 1, 0, %q1;"
    x, y = apply(code, [a, b, c], ["u4", "u4"])
    for warp in range(8):
        at = slice(32 * warp, 32 * warp + 32)
        for lane, (p, q, v, ok) in enumerate(zip(b[at].tolist(), c[at].tolist(), x[at].tolist(), y[at].tolist())):
            j, inside = source(mode, lane, p, q)
            assert bool(ok) == inside
            assert v == a[at][j if 0 <= j < 32 else lane]


def test_votes_and_activemask() -> None:
    a = np.random.default_rng(1).integers(0, 4, 256).astype("u4")
    a[:32], a[32:64] = 1, 0
    code = f"""setp.ne.b32 %q1, %a, 0; vote.sync.ballot.b32 %x, %q1, {FULL}; vote.sync.all.pred %q2, %q1, {FULL};
    vote.sync.any.pred %q3, %q1, {FULL}; vote.sync.uni.pred %q4, %q1, {FULL}; activemask.b32 %z;
    selp.b32 %r5, 1, 0, %q2; selp.b32 %r6, 2, 0, %q3; selp.b32 %r7, 4, 0, %q4; or.b32 %y, %r5, %r6; or.b32 %y, %y,
    %r7;"""
    x, y, z = apply(code, [a], ["u4"] * 3)
    for w, row in enumerate(lanes_of(a)):
        p = row != 0
        assert x[32 * w] == sum(1 << i for i in range(32) if p[i])
        assert y[32 * w] == (1 if p.all() else 0) + (2 if p.any() else 0) + (4 if p.all() or not p.any() else 0)
    assert set(z.tolist()) == {0xFFFFFFFF}


def test_match_and_redux_and_elect() -> None:
    a = np.random.default_rng(2).integers(0, 5, 256).astype("u4")
    a[:32] = 3
    code = (
        f"match.any.sync.b32 %x, %a, {FULL}; match.all.sync.b32 %y|%q1, %a, {FULL}; redux.sync.add.s32 %z, %a, {FULL};"
    )
    code += f"elect.sync %r9|%q2, {FULL}; selp.b32 %w, 1, 0, %q2;"
    x, y, z, w = apply(code, [a], ["u4"] * 4)
    for k, row in enumerate(lanes_of(a)):
        at = slice(32 * k, 32 * k + 32)
        assert x[at].tolist() == [sum(1 << i for i in range(32) if row[i] == v) for v in row]
        assert set(y[at].tolist()) == {0xFFFFFFFF if (row == row[0]).all() else 0}
        assert set(z[at].tolist()) == {row.sum()}
        assert w[at].tolist() == [1] + [0] * 31


@pytest.mark.parametrize(
    "op,fn",
    [("min.s32", np.min), ("max.s32", np.max), ("or.b32", np.bitwise_or.reduce), ("xor.b32", np.bitwise_xor.reduce)],
)
def test_redux(op: str, fn) -> None:
    a = edges(32, True, 248, 3)
    (x,) = apply(f"redux.sync.{op} %x, %a, {FULL};", [a], ["i4"])
    assert x.reshape(-1, 32)[:, 0].tolist() == [int(fn(r)) for r in lanes_of(a)]


def test_redux_f32_with_nan() -> None:
    a = np.random.default_rng(3).standard_normal(64).astype("f4")
    a[40] = np.nan
    x, y = apply(f"redux.sync.max.NaN.f32 %x, %a, {FULL}; redux.sync.min.abs.f32 %y, %a, {FULL};", [a], ["f4", "f4"])
    assert x[0] == a[:32].max() and np.isnan(x[40]) and y[0] == np.abs(a[:32]).min()
    assert y[40] == np.nanmin(np.abs(a[32:]))


def test_lanes_meet_again_before_a_shuffle() -> None:
    a = np.arange(64, dtype="u4")
    code = f"""and.b32 %r9, %a, 1; setp.eq.b32 %q1, %r9, 0; @%q1 bra EVEN; mul.lo.u32 %r10, %a, 3; bra JOIN;
    EVEN: mul.lo.u32 %r10, %a, 5; JOIN: shfl.sync.bfly.b32 %x, %r10, 1, 31, {FULL};"""
    (x,) = apply(code, [a], ["u4"])
    assert x.tolist() == [(v ^ 1) * (3 if (v ^ 1) & 1 else 5) for v in range(64)]


def test_lanes_that_never_meet_are_reported() -> None:
    body = f"""mov.u32 %r1, %tid.x; setp.lt.u32 %q1, %r1, 16; @%q1 bra LOW; shfl.sync.idx.b32 %r2, %r1, 0, 31, {FULL};
    bra END; LOW: shfl.sync.idx.b32 %r2, %r1, 1, 31, {FULL}; END:"""
    with pytest.raises(DivergentBarrier, match=r"waits \(16 lane\(s\) of it\) for other lanes of the warp at `shfl"):
        launch_kernel(module(body, 0), [])


def test_halves_of_a_warp_with_their_own_masks() -> None:
    body = """mov.u32 %r1, %tid.x; setp.lt.u32 %q1, %r1, 16; @%q1 bra LOW; redux.sync.add.u32 %r2, %r1, 0xffff0000;
    bra END; LOW: redux.sync.add.u32 %r2, %r1, 0xffff; END: mad.wide.u32 %rd1, %r1, 4, %p0; st.global.b32 [%rd1],
    %r2;"""
    out = np.zeros(32, "u4")
    launch_kernel(module(body, 1), [out])
    assert out.tolist() == [sum(range(16))] * 16 + [sum(range(16, 32))] * 16


def test_a_lane_outside_its_own_mask_is_an_error() -> None:
    with pytest.raises(InvalidLanes, match=r"thread \(16, 0, 0\).*not in its own member mask"):
        launch_kernel(module("mov.u32 %r1, %tid.x; redux.sync.add.u32 %r2, %r1, 0xffff;", 0), [])

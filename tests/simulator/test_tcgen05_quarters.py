"""Which lanes of tensor memory a warp reaches: its own quarter, however the address names it."""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.sim.errors import TensorMemoryError
from tests.simulator.test_tcgen05_move import LOAD, dump, fill, names, run


def _address(change: str) -> str:
    """%r7 is the allocation's base changed by ``change``, which may use the lane %r2 and the warp %r1."""
    return f"ld.shared.b32 %r7, [slot]; {change}"


@pytest.mark.parametrize(
    "change",
    [
        "",
        "shl.b32 %r8, %r2, 16; add.s32 %r7, %r7, %r8;",
        "shl.b32 %r8, %r0, 16; add.s32 %r7, %r7, %r8;",
    ],
    ids=["lane 0 in all warps", "thread t of a warp names lane t", "thread t of the CTA names lane t"],
)
def test_a_warp_reaches_its_own_quarter(change):
    """Thread t finds what a store to the full address put into lane t, and the other way round."""
    full, short = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {%v0, %v1};", names(2, 10)
    out = np.zeros((128, 2), "u4")
    run(
        f"{_address(change)} {fill(2)} {full} tcgen05.ld.sync.aligned.32x32b.x2.b32 {short}, [%r7]; {dump(2, 10)}",
        [out],
    )
    assert out.tolist() == [[256 * t, 256 * t + 1] for t in range(128)]
    out[:] = 0
    body = f"{fill(2)} {full.replace('%r3', '%r7')} tcgen05.ld.sync.aligned.32x32b.x2.b32 {short}, [%r3];"
    run(f"{_address(change)} {body} {dump(2, 10)}", [out])
    assert out.tolist() == [[256 * t, 256 * t + 1] for t in range(128)]


def test_lane_16_of_the_own_quarter_without_its_number():
    out = np.zeros((128, 1), "u4")
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%v0};"
    load = f"tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {{%v1}}, [%r7+{16 << 16}], 0;"
    run(f"{_address('')} {fill(1)} {store} {load} {dump(1, 1)}", [out])
    assert out[:, 0].tolist() == [256 * (t // 32 * 32 + 16 + t % 16) for t in range(128)]


@pytest.mark.parametrize(
    "change",
    ["add.s32 %r7, %r7, %r2;", "shl.b32 %r8, %r2, 21; add.s32 %r7, %r7, %r8;"],
    ids=["columns differ", "quarters differ"],
)
def test_lanes_of_a_warp_must_agree(change):
    with pytest.raises(TensorMemoryError, match="different addresses"):
        run(f"{_address(change)} @%q0 bra SKIP; {LOAD}[%r7]; SKIP:", [np.zeros(1, "u4")])


def test_a_warp_cannot_name_the_quarter_of_another():
    """Warp 1 with lane 64 in the address."""
    with pytest.raises(TensorMemoryError, match=r"may access lanes 32\.\.63 only"):
        change = f"setp.ne.u32 %q1, %r1, 1; @%q1 bra SKIP; add.s32 %r7, %r7, {64 << 16}; {LOAD}[%r7]; SKIP:"
        run(_address(change), [np.zeros(1, "u4")])

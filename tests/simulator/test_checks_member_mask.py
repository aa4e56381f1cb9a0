"""The member mask of ``bar.warp.sync``: who executes is in it, and who is not in it has not met the others."""

from __future__ import annotations

import pytest
from ptx_lab import launch_kernel, module
from test_checks import OUT, ROOM, go

from cute_nvfp4.sim import InvalidLanes, Race

HALF = "st.shared.b32 [%r7], %r1; {} ld.shared.b32 %r12, [%r9];" + OUT
"""Each lane reads what its neighbour has stored."""
LOW = "setp.lt.u32 %q4, %r2, 16; @%q4 {}"


@pytest.mark.parametrize("strict", [False, True])
def test_a_lane_that_is_not_in_its_mask(strict: bool) -> None:
    """0xFFFF by 32 lanes, and 1 by all; the lower half alone may. It is no affair of the checks."""
    for good in ("bar.warp.sync -1;", "bar.warp.sync 0xffffffff;", LOW.format("bar.warp.sync 0xffff;")):
        go(good, strict=strict)
    for mask in ("0xffff", "1", "0x7fffffff"):
        with pytest.raises(InvalidLanes, match="is not in its own member mask"):
            go(f"bar.warp.sync {mask};", strict=strict)
        with pytest.raises(InvalidLanes):
            launch_kernel(module(f"bar.warp.sync {mask};", 1), [ROOM.copy()])


def test_masks_that_differ() -> None:
    """Two halves that each name themselves, by one instruction; and lanes that name others which name somebody else."""
    halves = "setp.lt.u32 %q4, %r2, 16; selp.b32 %r13, {}, {}, %q4; bar.warp.sync %r13;"
    go(halves.format("0xffff", "0xffff0000"))
    with pytest.raises(InvalidLanes, match="another member mask"):
        go(halves.format("-1", "0xffff0000"))


def test_lanes_that_have_not_met() -> None:
    """Neighbours meet in halves; a lane of one half has not met the other one."""
    go(HALF.format("bar.warp.sync -1;"))
    halves = "setp.lt.u32 %q4, %r2, 16; selp.b32 %r13, 0xffff, 0xffff0000, %q4; bar.warp.sync %r13;"
    go(HALF.format(halves))
    across = HALF.replace("[%r9]", "[%r13]").replace("{}", "{} xor.b32 %r13, %r7, 64;")
    go(across.format("bar.warp.sync -1;"))
    with pytest.raises(Race, match="race-in-warp"):
        go(across.format(halves))
    with pytest.raises(Race, match="race-in-warp"):
        go(HALF.format(LOW.format("bar.warp.sync 0xffff;")))


def test_lanes_that_have_exited_need_not_be_named() -> None:
    go(LOW.format("bra A; exit; A: ") + HALF.format("bar.warp.sync 0xffff;"))

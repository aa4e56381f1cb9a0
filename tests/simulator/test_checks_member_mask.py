"""The member mask of ``bar.warp.sync``: who executes is in it, and who is not in it has not met the others."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ptx_lab import launch_kernel, module
from test_checks import OUT, ROOM, go

from cute_nvfp4.sim import InvalidLanes, Race
from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.lane_sets import LaneSets
from cute_nvfp4.sim.checks.shadow import Actor, Shadow

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


READ, WRITE = "{} ld.{}.b32 %r12, [{}];", "@%q1 st.{}.b32 [{}], %r1;"
PLACES = [("shared", "%r4"), ("shared", "%r13"), ("global", "%p0"), ("global", "%rd3")]
"""One word, at an address that is the same in all lanes, or is computed from the lane."""
PAIR = "setp.lt.u32 %q4, %r2, 2; and.b32 %r14, %r2, 64; add.u32 %r13, %r4, %r14; mad.wide.u32 %rd3, %r14, 4, %p0;"


@pytest.mark.parametrize("space,at", PLACES)
def test_a_word_that_several_lanes_have_read(space: str, at: str) -> None:
    """Lanes 0 and 1 meet, and lane 0 stores what they have read, or all have."""
    body = PAIR + "@%q1 st.shared.b32 [cell], 7; bar.warp.sync -1;"
    body += READ.format("{}", space, at) + "@%q4 bar.warp.sync 3;" + WRITE.format(space, at)
    go(body.format("@%q4"))
    for some in ("", "setp.ne.u32 %q5, %r2, 1; @%q5"):
        with pytest.raises(Race, match="race-in-warp"):
            go(body.format(some))


@pytest.mark.parametrize("drop", [0, 1])
@pytest.mark.parametrize("between", ["", "@%q5 ld.shared.b32 %r12, [cell];"])
def test_lanes_that_have_met_one_after_the_other(between: str, drop: int) -> None:
    """Lane 0 reads and meets lane 1, which meets lane 2, which stores; lanes 1 and 2 may have read too, in between."""
    body = "@%q1 st.shared.b32 [cell], 7; bar.warp.sync -1; @%q1 ld.shared.b32 %r12, [cell];"
    body += "setp.lt.u32 %q4, %r2, 2; setp.eq.u32 %q5, %r2, 1; setp.eq.or.u32 %q5, %r2, 2, %q5;"
    body += f"{{}} {between} {{}} setp.eq.u32 %q4, %r2, 2; @%q4 st.shared.b32 [cell], 5;"
    syncs = ["@%q4 bar.warp.sync 3;", "@%q5 bar.warp.sync 6;"]
    go(body.format(*syncs))
    syncs[drop] = ""
    with pytest.raises(Race, match="race-in-warp"):
        go(body.format(*syncs))


def test_random_meetings_of_some_lanes() -> None:
    """The shadow against clocks of single lanes, and every access ever made: both find the first race of a history."""
    for seed in range(200):
        rng = random.Random(seed)
        reports: list[tuple] = []
        clocks = Clocks(1, 1, 1, ("thread",), lane_sets=LaneSets())
        shadow = Shadow(2, lambda *one, to=reports: to.append(one))
        known, now, history = np.zeros((4, 4), int), 0, []
        warp = zero = np.zeros(1, int)
        for _ in range(40):
            lanes = rng.sample(range(4), rng.randint(1, 4))
            if rng.random() < 0.5:
                now += 1
                clocks.meet_some(0, np.isin(np.arange(32), lanes))
                known[lanes] = known[lanes].max(axis=0)
                known[np.ix_(lanes, lanes)] = now
                continue
            write, place = rng.random() < 0.35, rng.randrange(2)
            lanes = lanes[:1] if write else lanes
            raced = any(
                (write or wrote) and place == there and a != b and known[b, a] < when
                for wrote, there, others, when in history
                for a in others
                for b in lanes
            )
            history.append((write, place, lanes, now + 1))
            lane = np.array([lanes])
            if rng.random() < 0.5:
                lane = clocks.lane_sets.of(np.isin(np.arange(32), lanes)[None])
            epoch = ep.pack(1, zero, clocks.now[0], lane)
            who = Actor(clocks, None, epoch, zero, warp, zero, lane=lane, distinct=False)
            shadow.access(np.full(lane.shape, place), who, write, flag=not write)
            assert bool(reports) == raced
            if raced:
                break

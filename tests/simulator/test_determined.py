"""Which launches do the same under every schedule (``sim.equivalence``): each in order, with twins that are not."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from ptx_lab import wait
from support.gemm_problems import Case, make
from test_checks import INIT, go

from cute_nvfp4 import quantize, simulating
from cute_nvfp4.sim import Deadlock, Race, Schedule, adversarial, holding_back
from cute_nvfp4.sim.equivalence import FIRST, Determined, schedules
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.wave import Group, Wave

TOGETHER, LATE = Schedule(), Schedule(warps="late")
START = "@%q1 mbarrier.init.shared.b64 [bar+8], 32;" + INIT.format(32, "mov.u32 %r20, bar; add.u32 %r21, %r20, 8;")
ARRIVE = "mbarrier.arrive.shared.b64 _, [bar];"
FREE = "mbarrier.arrive.shared.b64 _, [bar+8];"


def doubts(body: str, schedule: Schedule = TOGETHER, block: int = 64, **options) -> str:
    """Why another schedule might do something else, of a launch that goes well under this one."""
    causes = Determined()
    go(body, block=block, schedule=schedule, others=[causes], **options)
    return "\n".join(sorted(causes.doubts))


def ring(rounds: int = 3, ask: bool = True) -> str:
    """Warp 0 takes what warp 1 gives, through one place; without ``ask`` nobody asks whether it is free."""
    take = "".join(wait("%r20", str(n & 1)) + FREE for n in range(rounds))
    before = "bar.sync 3, 32; bar.sync 4, 32; bar.sync 3, 32; bar.sync 4, 32;"
    give = "".join((wait("%r21", str(1 - (n & 1))) if ask else before) + ARRIVE for n in range(rounds))
    return f"{START} @%q2 bra TAKE; bra GIVE; TAKE: {take} bra END; GIVE: {give} END:"


def test_a_ring() -> None:
    for schedule in adversarial(7):
        assert not doubts(ring(), schedule)


def test_a_ring_that_nobody_asks_for_a_free_place_hangs_if_the_taker_is_late() -> None:
    """Nobody sees that unless the giver is slow: so it is here, at random."""
    assert "may end a phase before a warp has seen the last" in doubts(ring(2, ask=False), Schedule(warps="random"))
    with pytest.raises(Deadlock):
        doubts(ring(2, ask=False))


def test_a_warp_held_back_shows_it() -> None:
    """Only if the taker is the one; a ring in order goes round whoever is late."""
    taker, giver = holding_back(2)
    for schedule in (taker, giver):
        assert not doubts(ring(), schedule)
    with pytest.raises(Deadlock):
        doubts(ring(2, ask=False), taker)
    assert doubts(ring(2, ask=False), giver)


class Waits(Listener):
    """The most steps for which a group without warp 0 has waited for its turn."""

    most = 0

    def listeners(self, wave: Wave) -> list[Listener]:
        return [self]

    def block(self, g: Group, index: int) -> None:
        if 0 not in g.warps:
            self.most = max(self.most, g.wave.steps - g.age)


def test_warps_that_part_from_the_one_held_back_are_not_overdue() -> None:
    """Every 4096 steps the held warp has a turn. At the second it joins the other in a loop, and they part again."""
    waits = Waits()
    loop = "LOOP: add.u32 %r12, %r12, 1; setp.lt.u32 %q4, %r12, 9000; @%q4 bra LOOP;"
    go("mov.u32 %r12, 0;" + loop, block=64, schedule=holding_back(2)[0], others=[waits])
    assert waits.most < 8


def test_the_first_phase_must_be_known_to_have_ended() -> None:
    """Who asks for the second phase alone sees that of the same parity before the first, if it is early."""
    body = f"{START} @%q2 bra TAKE; {ARRIVE} {wait('%r20', '0')} {ARRIVE} bra END; TAKE: {wait('%r20', '1')} END:"
    assert doubts(body) and doubts(body, LATE)
    body = body.replace("TAKE:", "TAKE:" + wait("%r20", "0")).replace(
        ARRIVE + " bra", wait("%r21", "0") + ARRIVE + " bra"
    )
    assert not doubts(body.replace("TAKE:" + wait("%r20", "0"), "TAKE:" + wait("%r20", "0") + FREE))


def test_an_arrival_counts_in_no_other_phase() -> None:
    """Each warp arrives twice at a barrier for both: the second time after it has waited."""
    body = INIT.format(64, "mov.u32 %r20, bar;") + ARRIVE + wait("%r20", "0") + ARRIVE + wait("%r20", "1")
    assert not doubts(body)
    half = (
        START.replace("[bar], 32", "[bar], 64") + ARRIVE + "@%q2 bra A; bra B; A:" + ARRIVE + "B: @%q2 bra C;" + ARRIVE
    )
    assert "may arrive before the phase before has ended" in doubts(half + "C:")


def test_named_barriers() -> None:
    give, take = "bar.arrive 1, 64; {} bar.arrive 1, 64;", "bar.sync 1, 64; {} bar.sync 1, 64;"
    body = "@%q2 bra TAKE; " + give + " bra END; TAKE: " + take + " END:"
    assert not doubts(body.format("bar.sync 2, 64;", "bar.sync 2, 64;"))
    assert "may arrive before the barrier has opened" in doubts(body.format("", ""), LATE, allow=("barrier-phase",))


def test_atomics_decide_where_they_are_executed() -> None:
    body = "setp.eq.u32 %q4, %r1, {}; @!%q4 bra END; atom.global.add.u32 %r12, [%p0], 1; END:"
    assert "atom.global" in doubts(body.format(3)) and not doubts(body.format(99))


SET = "mov.b32 %r21, 1; st.release.gpu.global.b32 [%p0], %r21;"
CLEAR = "mov.b32 %r21, 0; st.release.gpu.global.b32 [%p0], %r21;"
PEEK = "ld.acquire.gpu.global.b32 %r22, [%p0]; setp.ne.b32 %q5, %r22, 0; @%q5 bra D{0};"
POLL = "L{0}: ld.acquire.gpu.global.b32 %r20, [%p0]; setp.eq.b32 %q4, %r20, 0; @%q4 bra L{0}; D{0}:"
FLAGS = "setp.ne.u32 %q6, %r2, 0; setp.eq.u32 %q7, %r3, 0; @%q6 bra END; @%q7 bra GIVE; {} bra END; GIVE: {} END:"
"""One lane of each warp, the first of which gives."""
WHILE = "bar.warp.sync 1;" * 40
BACK = "ld.acquire.gpu.global.b32 %r23, [%p0+4]; setp.eq.b32 %q8, %r23, 0; @%q8 bra B;"


@pytest.mark.parametrize("peek", ["", PEEK.format(0)])
def test_a_flag(peek: str) -> None:
    """Set by one, asked for and cleared by the other; with a second one that says so, again."""
    take = peek + POLL.format(0) + CLEAR
    for schedule in adversarial(7):
        assert not doubts(FLAGS.format(take, SET), schedule)
    told = CLEAR + SET.replace("[%p0]", "[%p0+4]")
    assert not doubts(FLAGS.format(take.replace(CLEAR, told) + POLL.format(1), SET + "B:" + BACK + SET))


@pytest.mark.parametrize(
    ("take", "give", "why"),
    [
        (POLL.format(0), SET + WHILE + CLEAR, "may come before a warp has seen the flag"),
        (POLL.format(0) + CLEAR + POLL.format(1), SET + WHILE + SET, "may come before the write before"),
        (POLL.format(0) + SET, SET, "is so"),
        (POLL.format(0) + "st.global.b32 [%rd2], %r20;", SET, "is executed"),
        (PEEK.format(0) + "st.global.b32 [%rd2], %r2;" + POLL.format(0), SET, "is executed"),
        (POLL.format(0).replace("eq.b32", "lt.u32").replace("20, 0;", "20, 1;"), SET, "is executed"),
        (POLL.format(0), SET.replace("release.gpu", "relaxed.gpu"), "is executed"),
    ],
    ids=["cleared early", "set again early", "set twice", "used", "peek and work", "compared otherwise", "relaxed"],
)
def test_flags_that_the_schedule_decides(take: str, give: str, why: str) -> None:
    """Some of them hang under other schedules."""
    said = []
    for schedule in adversarial(7):
        with suppress(Deadlock):
            said.append(doubts(FLAGS.format(take, give), schedule))
    assert said and all(why in one for one in said)


@pytest.mark.parametrize("by", ["mbarrier", "flag"])
def test_one_lane_waits_for_all(by: str) -> None:
    """Warp 0 reads what warp 1 has stored. The lanes that do not wait must meet the one that does: what it knows counts
    for them, so that nobody sees the race if it has not had to wait."""
    tell, ask = {"mbarrier": (ARRIVE, wait("%r20", "0")), "flag": ("bar.warp.sync -1;" + SET, POLL.format(0))}[by]
    body = START + "@%q2 bra TAKE; st.shared.b32 [%r7], %r1;" + tell + "bra END; TAKE: setp.ne.u32 %q6, %r2, 0;"
    body += "@%q6 bra ALL;" + ask + "ALL: bar.warp.sync -1; ld.shared.b32 %r12, [%r11];"
    body += "st.global.b32 [%rd2+1024], %r12; END:"
    for schedule in adversarial(7):
        assert not doubts(body, schedule)
    apart = body.replace("ALL: bar.warp.sync -1;", "ALL:")
    assert "need not come before these" in doubts(apart)
    with pytest.raises(Race):
        doubts(apart, LATE)


def test_lanes_that_wait_for_the_same_at_different_times_are_one() -> None:
    """Half of a warp may come late to each of two phases that all wait for."""
    body = INIT.format(32, "mov.u32 %r20, bar;") + "setp.lt.u32 %q6, %r2, 16;"
    for n in "01":
        body += f"{ARRIVE} @%q6 bra S{n}; ld.global.b32 %r13, [%rd2]; S{n}: "
        body += wait("%r20", n) + "st.global.b32 [%rd2], %r2;"
    for schedule in adversarial(7):
        assert not doubts(body, schedule, block=32)


def test_the_first_schedules_are_three_of_all() -> None:
    assert len(schedules(20)) == 20 and set(map(str, schedules(20))) == set(map(str, adversarial(20)))
    assert schedules(20)[0] == adversarial(20)[FIRST[0]] and schedules(1) == adversarial(1)


def test_a_call_of_an_operation() -> None:
    """A product is proved, the largest of many values, found by atomics, is not (records/long_run.md)."""
    proved, in_doubt = Determined(), Determined()
    with simulating("sm_120a", others=[proved]):
        make(Case(200, 136, 512, store="direct")).run()
    assert not proved.doubts
    with simulating("sm_90a", others=[in_doubt]):
        quantize(torch.randn(4096, 64), global_scale="auto")
    assert any("red.relaxed.gpu.global.max" in doubt for doubt in in_doubt.doubts)

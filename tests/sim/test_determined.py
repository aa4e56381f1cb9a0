"""Which launches do the same under every schedule (``determined``): each in order, with twins that are not."""

from __future__ import annotations

import pytest
from determined import FIRST, Determined, schedules
from ptx_lab import wait
from test_checks import INIT, go

from cute_nvfp4.sim import Deadlock, Schedule, adversarial, holding_back

TOGETHER, LATE = Schedule(), Schedule(warps="late")
START = "@%q1 mbarrier.init.shared.b64 [bar+8], 32;" + INIT.format(32, "mov.u32 %r20, bar; add.u32 %r21, %r20, 8;")
ARRIVE = "mbarrier.arrive.shared.b64 _, [bar];"
FREE = "mbarrier.arrive.shared.b64 _, [bar+8];"


def doubts(body: str, schedule: Schedule = TOGETHER, block: int = 64) -> str:
    """Why another schedule might do something else, of a launch that goes well under this one."""
    causes = Determined()
    go(body, block=block, schedule=schedule, others=[causes])
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
    assert "may arrive before the barrier has opened" in doubts(body.format("", ""), LATE)


def test_atomics_decide_where_they_are_executed() -> None:
    body = "setp.eq.u32 %q4, %r1, {}; @!%q4 bra END; atom.global.add.u32 %r12, [%p0], 1; END:"
    assert "atom.global" in doubts(body.format(3)) and not doubts(body.format(99))


def test_the_first_schedules_are_three_of_all() -> None:
    assert len(schedules(20)) == 20 and set(map(str, schedules(20))) == set(map(str, adversarial(20)))
    assert schedules(20)[0] == adversarial(20)[FIRST[0]] and schedules(1) == adversarial(1)

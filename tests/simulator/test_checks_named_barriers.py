"""Who takes part in a phase of a named barrier: kernels that name the wrong number, and their twins in order."""

from __future__ import annotations

import pytest
from ptx_lab import launch_kernel, module, wait
from test_checks import MEMORY, ROOM, THREAD, go
from test_checks_findings import result

from cute_nvfp4.sim import Deadlock, Hazard, Schedule

SCHEDULES = (Schedule(), Schedule(warps="late"), Schedule(1, warps="random"))
LAST_WORD = "st.shared.b32 [%r7], %r1; {} @%q1 ld.shared.b32 %r12, [cell+508]; @%q1 st.global.b32 [%rd2], %r12;"
"""Thread 0 reads what the last of 128 threads has stored."""
PAIR = "shr.u32 %r13, %r1, 6; setp.eq.u32 %q4, %r13, 0;"
"""%q4: threads of warps 0 and 1."""


def found(body: str, block: int = 128, strict: bool = False, schedule: Schedule | None = None) -> str:
    """The message of the hazard; "" for none."""
    try:
        go(body, block=block, strict=strict, schedule=schedule or Schedule())
    except Hazard as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sync", ["bar.sync 1, {};", "barrier.cta.sync.aligned 1, {};"])
def test_a_warp_less_than_come(sync: str, strict: bool, schedule: Schedule) -> None:
    assert not found(LAST_WORD.format(sync.format(128)), strict=strict, schedule=schedule)
    said = found(LAST_WORD.format(sync.format(96)), strict=strict, schedule=schedule)
    assert "[barrier-phase]" in said and "barrier 1: CTA (0, 0, 0), warp" in said


def test_counts_that_differ() -> None:
    """128 by two warps and 32 by the others, in one phase."""
    body = PAIR + "@%q4 bra A; bar.sync 1, {}; bra E; A: bar.sync 1, 128; E:"
    assert not found(body.format(128))
    said = found(body.format(96))
    assert "[barrier-count]" in said and "comes for" in said and "barrier 1" in said
    assert "BarrierMisuse" in found(body.format(32))
    register = PAIR + "selp.u32 %r14, 128, {}, %q4; bar.sync 1, %r14;"
    assert not found(register.format(128)) and "[barrier-count]" in found(register.format(64))


def test_all_threads_are_as_many_as_there_are() -> None:
    """No number is that of the CTA."""
    body = PAIR + "@%q4 bra A; bar.sync 1; bra E; A: bar.sync 1, {}; E:"
    assert not found(body.format(128)) and "[barrier-count]" in found(body.format(64))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_pairs_at_one_barrier(schedule: Schedule) -> None:
    """Each pair of warps meets at a barrier for 64 threads: at its own, or at one after the other has."""
    own = PAIR + "add.u32 %r13, %r13, 1; bar.sync %r13, 64;"
    assert not found(own, schedule=schedule)
    assert "[barrier-phase]" in found("bar.sync 1, 64;", schedule=schedule)
    turns = PAIR + "@%q4 bar.sync 1, 64; {} @!%q4 bar.sync 1, 64;"
    assert not found(turns.format("bar.sync 2, 128;"), schedule=schedule)
    assert "[barrier-phase]" in found(turns.format(""), schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_an_arrival_too_many(schedule: Schedule) -> None:
    body = PAIR.replace(", 6;", ", 5;") + "@%q4 bra A; bar.sync 1, 64; {0} bra E; A: bar.arrive 1, 64; {1} E:"
    assert not found(body.format("", ""), 64, schedule=schedule)
    assert "[barrier-phase]" in found(body.format("", "bar.arrive 1, 64;"), 64, schedule=schedule)
    # after the other warp has told that its wait is over, it may arrive again
    again = "bar.sync 2, 64; bar.arrive 1, 64;"
    assert not found(body.format("bar.sync 2, 64; bar.sync 1, 64;", again), 64, schedule=schedule)
    assert "[barrier-phase]" in found(body.format("bar.sync 1, 64;", "bar.arrive 1, 64;"), 64, schedule=schedule)


def test_an_arrival_that_nobody_waits_for_is_a_warning() -> None:
    body = PAIR.replace(", 6;", ", 5;") + "bar.sync 2, 64; @%q4 bar.arrive 1, 64;"
    assert [f.rule for f in result(body, 64).findings] == ["unfinished-barrier"]


def test_reductions_are_not_mixed_with_other_forms() -> None:
    body = PAIR + "@%q4 bra A; bar.sync 1, 128; bra E; A: {} E:"
    assert not found(body.format("bar.sync 1, 128;"))
    assert "[barrier-count]" in found(body.format("bar.red.popc.u32 %r14, 1, 128, %q4;"))


def test_the_end_of_a_phase_is_told_by_a_chain() -> None:
    """Warp 0 arrives, warp 1 waits and tells warp 2, which tells warp 0 by an mbarrier: it may come again."""
    start = "@%q1 mbarrier.init.shared.b64 [bar], 32; bar.sync 0; mov.u32 %r20, bar; setp.eq.u32 %q4, %r3, 1;"
    body = start + "@%q2 bra A; @%q4 bra B; bar.sync 2, 64; {} bra E; B: bar.sync 1, 64; bar.sync 2, 64;"
    body += "bar.sync 1, 64; bra E; A: bar.arrive 1, 64; {} bar.arrive 1, 64; E:"
    told = body.format("mbarrier.arrive.shared.b64 _, [bar];", wait("%r20", "0"))
    assert not found(told, 96)
    assert "[barrier-phase]" in found(told.replace(wait("%r20", "0"), ""), 96)


def test_a_phase_ends_with_its_last_arrival() -> None:
    """Without checks the fourth warp is in the next phase, alone; two arrivals end one for which nobody waits."""
    alone = PAIR.replace(", 6;", ", 5;") + "@%q4 bra A; bar.sync 2, 64; bar.sync 1, 64; bra E;"
    alone += "A: bar.arrive 1, 64; bar.arrive 1, 64; bar.sync 2, 64; E:"
    for body, block in (("bar.sync 1, 96;", 128), (alone, 64)):
        with pytest.raises(Deadlock, match="32 thread"):
            launch_kernel(module(THREAD + body, 1, MEMORY), [ROOM.copy()], block=(block, 1, 1))

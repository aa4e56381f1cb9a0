"""A value that a shuffle has carried was read before: that orders the read before the store that depends on it."""

from __future__ import annotations

import pytest
from test_checks import OUT, finds, go

from cute_nvfp4.sim import Race, Schedule

FILL = "st.shared.b32 [%r7], %r1; bar.warp.sync -1; setp.eq.u32 %q4, %r2, 0;"
LOAD = "ld.shared.b32 %r12, [%r9];"
"""Each lane reads the word of its neighbour, which that lane then writes."""
SUM = "".join(f"shfl.sync.bfly.b32 %r13, %r12, {d}, 31, -1; add.u32 %r12, %r12, %r13;" for d in (16, 8, 4, 2, 1))
STORE = "st.shared.b32 [%r7], %r12;"
HOW = (Schedule(), Schedule(seed=1, warps="random"))


def races(body: str, **options) -> None:
    with pytest.raises(Race, match=r"is read by .*\n.*written by .*[^$]*\[race-in-warp\]"):
        go(body, **options)


@pytest.mark.parametrize(
    "exchange",
    [
        SUM,
        "redux.sync.add.u32 %r12, %r12, -1;",
        "match.any.sync.b32 %r12, %r12, -1;",
        "setp.lt.u32 %q5, %r12, 9; vote.sync.ballot.b32 %r12, %q5, -1;",
        SUM + "setp.gt.u32 %q5, %r12, 5; mov.b32 %r12, 0; @%q5" + " ",
        "shfl.sync.bfly.b32 %r12, %r12, 1, 31, -1;",
    ],
)
def test_a_store_that_depends_on_the_reduction(exchange: str) -> None:
    for schedule in HOW:
        go(FILL + LOAD + exchange + STORE, schedule=schedule)
    races(FILL + LOAD + STORE)


@pytest.mark.parametrize(
    "body",
    [
        LOAD + SUM + STORE.replace("%r12", "7"),
        LOAD + SUM.replace("%r12, %r12, %r13", "%r15, %r12, %r13").replace("-1; add", "-1; add") + STORE,
        LOAD + "shfl.sync.bfly.b32 %r13, %r1, 16, 31, -1;" + STORE.replace("%r12", "%r13"),
        LOAD + "shfl.sync.bfly.b32 %r13, %r12, 2, 31, -1;" + STORE.replace("%r12", "%r13"),
        LOAD + SUM + "ld.shared.b32 %r14, [%r9];" + STORE,
        LOAD + SUM.replace("31, -1", "7199, -1").replace("%r12, 1,", "%r12, 2,") + STORE,
    ],
    ids=["constant", "own part only", "other value", "other lane", "another read", "other segment"],
)
def test_a_store_that_does_not(body: str) -> None:
    races(FILL + body)


def test_only_the_lanes_whose_values_have_come() -> None:
    """Lane 0 writes what all have read: it needs all their values."""
    read = FILL + "ld.shared.b32 %r12, [cell];"
    go(read + SUM + "@%q4 st.shared.b32 [cell], %r12;")
    races(read + SUM.partition("shfl.sync.bfly.b32 %r13, %r12, 1,")[0] + "@%q4 st.shared.b32 [cell], %r12;")


def test_a_value_of_the_turn_before_does_not_order_this_turn() -> None:
    """A loop that sends what it has read one turn earlier."""
    loop = "mov.b32 %r20, 0; L: ld.shared.b32 %r12, [%r9]; {} add.u32 %r20, %r20, 1; setp.lt.u32 %q5, %r20, 3; "
    keep = "mov.b32 %r14, %r15; mov.b32 %r15, %r12;"
    go(FILL + loop.format(SUM + STORE + "bar.warp.sync -1;") + "@%q5 bra L;")
    late = SUM.replace("%r12", "%r14") + STORE.replace("%r12", "%r14") + "bar.warp.sync -1;"
    races(FILL + "mov.b32 %r15, 0;" + loop.format(keep + late) + "@%q5 bra L;")


def test_a_shuffle_orders_no_writes() -> None:
    with pytest.raises(Race, match="race-in-warp"):
        go("st.shared.b32 [%r7], %r1;" + SUM.replace("%r12", "%r1") + "ld.shared.b32 %r12, [%r9];")
    with pytest.raises(Race, match="race-in-warp"):
        go("st.shared.b32 [%r7], %r1;" + SUM.replace("%r12", "%r1") + "st.shared.b32 [%r9], %r1;")


ROW = "shl.b32 %r14, %r2, 4; add.s32 %r14, %r14, %r4;"
PUT = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r14], {%r1, %r1, %r1, %r2};"
GET = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r14];"
OWN = "st.shared.v4.b32 [%r14], {%r1, %r1, %r1, %r1};"
MEET = "bar.warp.sync 0xffffffff;"


@pytest.mark.parametrize(
    "body",
    [PUT + MEET + "ld.shared.b32 %r12, [%r14];" + OUT, OWN + MEET + PUT, PUT + "bar.warp.sync -1;" + GET + MEET + OWN],
    ids=["stored and read", "written and stored", "loaded and written"],
)
def test_rows_of_matrices_are_of_no_lane(body: str) -> None:
    """Not of that which names the address: others have the values."""
    finds(Race, ROW + body, MEET, "matrix.sync", "bar.warp.sync")

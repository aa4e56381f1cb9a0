"""Traces: bars that do not overlap, arrows with two ends, and what they say of known kernels."""

from __future__ import annotations

import json
from collections import defaultdict
from xml.etree import ElementTree

import numpy as np
import pytest

from cute_nvfp4 import show
from cute_nvfp4.sim import Deadlock, Trace, adversarial
from tests.simulator.ptx_lab import launch_kernel, module
from tests.simulator.test_mbarrier import BARRIER, RING
from tests.simulator.test_sim_counters import BULK, MULTICAST, ROOM, aligned, tensor_kernel

SCHEDULES = adversarial(7, seed=11)


def traced(body: str, tensors, declarations: str, trace: Trace | None = None, **options) -> Trace:
    trace = Trace() if trace is None else trace
    launch_kernel(module(body, len(tensors), declarations), list(tensors), trace=trace, **options)
    return trace


def bulk(**options) -> Trace:
    return traced(BULK, [aligned(128), aligned(192), aligned(16)], ROOM, **options)


def ring(**options) -> Trace:
    return traced(RING, [np.zeros(32, "u4")], BARRIER, block=(64, 1, 1), **options)


def by_track(events: list[dict], phase: str) -> dict:
    out = defaultdict(list)
    for e in events:
        if e["ph"] == phase:
            out[e["pid"], e.get("tid")].append(e)
    return out


def check(trace: Trace) -> list[dict]:
    """The rules of the format, and that bars, arrows and curves agree."""
    events = json.loads(json.dumps(trace.json()))["traceEvents"]
    assert {e["ph"] for e in events} <= {"M", "X", "s", "f", "C"}
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    bars = by_track(events, "X")
    for track, mine in bars.items():
        assert track in names
        last = -1
        for e in mine:
            assert e["dur"] >= 1 and e["ts"] >= last and e["name"]
            last = e["ts"] + e["dur"]
    ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    for number, start in ends["s"].items():
        assert start["ts"] <= ends["f"][number]["ts"]
        for e in (start, ends["f"][number]):
            assert any(b["ts"] <= e["ts"] <= b["ts"] + b["dur"] for b in bars[e["pid"], e["tid"]])
    curves = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            curves[e["pid"], e["name"]].append(e)
    for curve in curves.values():
        steps = [e["ts"] for e in curve]
        assert steps == sorted(set(steps)) and curve[-1]["args"]["bytes"] == 0
        assert min(e["args"]["bytes"] for e in curve) >= 0
    return events


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kernel", [bulk, ring])
def test_every_schedule_gives_a_well_formed_trace(kernel, schedule) -> None:
    check(kernel(schedule=schedule))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_clusters(schedule) -> None:
    trace = traced(MULTICAST, [aligned(64)], ROOM, grid=(4, 1, 1), cluster=(2, 1, 1), schedule=schedule)
    check(trace)
    assert len({r.cta for r in trace.rows()}) == 4


def test_loads_are_in_flight_from_issue_to_completion() -> None:
    trace = bulk()
    rows = trace.rows()
    loads = [r for r in rows if r.track.startswith("TMA loads")]
    assert [r.track for r in loads] == ["TMA loads", "TMA loads 2"] and loads[0].begin == loads[1].begin
    assert [r.args["bytes"] for r in loads] == [512, 256]
    (wait,) = (r for r in rows if r.name == "wait mbarrier bar")
    assert wait.kind == "wait" and wait.track == "warp 0" and wait.end > max(r.end for r in loads)
    assert "phase 0, 1 of 1 arrivals, 768 bytes still to come" in wait.args["for"]
    stores = [r for r in rows if r.track.startswith("TMA stores")]
    assert [r.args["bytes"] for r in stores] == [768, 64]
    peak = max(e["args"]["bytes"] for e in check(trace) if e["name"] == "bytes in flight, TMA loads")
    assert peak == 768


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("pair", [False, True])
def test_the_tensor_core_works_in_order(pair: bool, schedule) -> None:
    trace = Trace()
    tensor_kernel(pair, trace=trace, schedule=schedule)
    check(trace)
    first = trace.rows()[0].cta
    mine = [r for r in trace.rows() if r.cta == first and r.kind == "engine"]
    assert {r.track for r in mine} == {"tensor core"}
    assert [r.name.split(".")[1] for r in mine] == ["mma"] * 4 + ["commit"]


def test_a_ring_waits_for_named_barriers() -> None:
    rows = ring().rows()
    waits = {(r.track, r.name) for r in rows if r.kind == "wait"}
    assert waits == {("warp 0", "wait mbarrier bar[1]"), ("warp 1", "wait mbarrier bar[0]")}
    assert sum(r.name == "wait mbarrier bar[1]" for r in rows) == 9
    assert any(r.name == "st.shared + mbarrier.arrive" for r in rows if r.track == "warp 0")


def test_warps_that_run_together_have_a_track_each() -> None:
    body = "mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %p0; ld.global.b32 %r2, [%rd1]; bar.sync 0;"
    trace = traced(body, [np.zeros(128, "u4")], "", block=(128, 1, 1), grid=(9, 1, 1))
    rows = trace.rows()
    assert {(r.cta, r.track) for r in rows} == {(f"CTA ({c}, 0, 0)", f"warp {w}") for c in range(2) for w in range(4)}
    assert trace.left_out == {"ctas": 7, "events": 0}
    check(trace)


def test_what_does_not_fit_is_said() -> None:
    trace = ring(trace=Trace(max_events=40))
    events = check(trace)
    assert trace.left_out["events"] > 0
    assert sum(e["ph"] != "M" for e in events) <= 40
    assert "logical steps" in trace.json()["otherData"]["clock"]


def test_launches_follow_each_other(tmp_path) -> None:
    trace = Trace()
    bulk(trace=trace)
    end = max(r.end for r in trace.rows())
    ring(trace=trace)
    assert min(r.begin for r in trace.rows() if r.track == "warp 1") >= end
    trace.write(tmp_path / "two.json")
    assert json.loads((tmp_path / "two.json").read_text())["traceEvents"] == check(trace)


def test_a_deadlock_can_be_seen() -> None:
    lost = RING.replace("mbarrier.arrive.shared::cta.b64 _, [%r22];", "", 1)
    trace = Trace()
    with pytest.raises(Deadlock):
        traced(lost, [np.zeros(32, "u4")], BARRIER, trace, block=(64, 1, 1))
    check(trace)
    stuck = [r for r in trace.rows() if r.kind == "wait"]
    assert max(r.end for r in stuck) == max(r.end for r in trace.rows())


def test_watching_changes_nothing() -> None:
    outs = []
    for options in ({}, {"trace": Trace(), "counters": True}):
        outs.append(np.zeros(32, "u4"))
        result = launch_kernel(module(RING, 1, BARRIER), [outs[-1]], block=(64, 1, 1), **options)
        outs[-1] = (outs[-1].tolist(), result.opcodes)
    assert outs[0] == outs[1]


def test_it_can_be_drawn() -> None:
    trace = bulk()
    picture = show(trace)
    boxes = ElementTree.fromstring(picture.svg).findall("{*}svg/{*}g/{*}rect")
    assert len(boxes) == len(trace.rows())
    assert [line.partition(":")[0].strip() for line in picture.words.splitlines()[1:3]] == ["warp 0", "TMA loads"]

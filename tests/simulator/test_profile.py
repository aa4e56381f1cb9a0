"""The profile of a launch: its sums are those of counters and clock, and it names what a kernel was made slow by."""

from __future__ import annotations

import csv
import io
import json

import pytest
from clock_lab import ADDRESS, BULK, CLUSTER, COPY, LOCAL, SHARED, SMEM, V4, kernel, needs_ptxas
from tma_lab import aligned

from cute_nvfp4.sim import GlobalMemory, Launch, Program, run
from cute_nvfp4.sim.profile import Profile, profile
from cute_nvfp4.sim.profile.facts import Facts
from cute_nvfp4.sim.profile.hot_spots import by_ptx, by_python
from cute_nvfp4.sim.profile.page import COLUMNS, written

LOOP = "mov.b32 %r9, 0; L: {} add.u32 %r9, %r9, 1; setp.lt.u32 %q0, %r9, 40; @%q0 bra L;"
FLOATS = ".reg .f32 %f<8>;"


def launched(
    body: str, grid: int = 4, threads: int = 256, clock: str | None = "h200", declarations: str = "", cluster: int = 1
) -> Facts:
    """A kernel of two tensors of 16 bytes a thread, run with its counters."""
    program = Program.parse(kernel(body, 2, declarations))
    memory, tensors = GlobalMemory(), [aligned(bytes(grid * threads * 16 * 32)) for _ in range(2)]
    for j, tensor in enumerate(tensors):
        memory.add(tensor, f"t{j}")
    (entry,) = program.kernels
    params = tuple(int(t.ctypes.data).to_bytes(8, "little") for t in tensors)
    launch = Launch(entry, (grid, 1, 1), (threads, 1, 1), params, (cluster, 1, 1))
    return Facts(program, launch, run(program, launch, memory, counters=True, clock=clock, checks=False))


def page(facts: Facts) -> Profile:
    return profile(facts.program, facts.launch, facts.result)


BODIES = {
    "copy": {"body": COPY, "grid": 300},
    "shared": {"body": SHARED, "declarations": SMEM},
    "bulk": {"body": BULK, "declarations": SMEM, "threads": 64},
    "cluster": {"body": CLUSTER, "declarations": SMEM, "threads": 64, "cluster": 2},
}


@needs_ptxas
@pytest.mark.parametrize("name", BODIES)
def test_costs_of_instructions_add_up_to_the_time_of_the_warps(name):
    """What the replay charges to instructions, against what its SMs have issued and how long its warps lived."""
    facts = launched(**BODIES[name])
    code, sms = facts.timing.code, facts.timing.sms
    assert sum(cost.issued for cost in code) == pytest.approx(sum(sm.weight * sm.issued for sm in sms))
    lived = sum(w.end - w.begin for w in facts.timing.warps)
    assert sum(sm.warp_cycles for sm in sms) == pytest.approx(lived)
    assert sum(cost.cycles for cost in code) + facts.start == pytest.approx(facts.warp_cycles)
    assert len({cost.address for cost in code}) == len(code) and min(cost.cycles for cost in code) >= 0
    assert sum(sm.weight for sm in sms) == pytest.approx(min(132, 4 if name != "copy" else 132))


@needs_ptxas
@pytest.mark.parametrize("name", BODIES)
def test_totals_of_the_page_are_those_of_the_counters(name):
    facts = launched(**BODIES[name])
    found, result = page(facts), facts.result
    for spots in (by_ptx(facts, None), by_python(facts, None)):
        assert sum(spot.executed for spot in spots) == result.instructions
        assert sum(spot.share for spot in spots) == pytest.approx(1 - facts.start / facts.warp_cycles)
        copied = [e for e in result.engines if e.engine != "copy"]
        moved = sum(m.bytes for m in result.memory) + sum(max(e.global_read, e.global_written) for e in copied)
        assert sum(spot.bytes for spot in spots) == moved
    stalls = [m.value for section, m in found.rows() if m.name.startswith("Stall ")]
    assert sum(stalls) == pytest.approx(found.value("Warp Cycles Per Issued Instruction"))
    assert found.value("Executed PTX Instructions") == result.instructions
    classes = [m.value for _, m in found.rows() if m.name.startswith("Executed PTX Instructions, ")]
    assert sum(classes) == result.instructions
    assert found.value("Issued Instructions") == pytest.approx(sum(c.issued for c in facts.timing.code))
    assert all((m.value is None) == (m.source == "not modelled") for _, m in found.rows())


@needs_ptxas
def test_a_copy_by_hand():
    """300 CTAs of 256 threads copy 16 bytes each: every figure that can be told without a machine."""
    found, threads = page(launched(COPY, grid=300)), 300 * 256
    want = {"Block Size": 256, "Grid Size": 300, "Threads": threads, "Global Load Requests": threads // 32}
    want |= {"Global Load Sectors": threads // 2, "Global Store Sectors": threads // 2, "Shared Requests": 0}
    want |= {"DRAM Bytes Read": 16 * threads, "DRAM Bytes Written": 16 * threads, "Block Limit Warps": 8}
    want |= {"Avg. Active Threads Per Warp": 32, "Theoretical Occupancy": 100, "L2 Hit Rate": 0.5 * 100}
    assert {name: found.value(name) for name in want} == pytest.approx(want)
    gigabytes = 32 * threads / found.value("Duration") / 1000
    assert found.value("Memory Throughput", "Memory Workload Analysis") == pytest.approx(gigabytes)
    assert found.value("Elapsed Cycles") / found.value("Duration") == pytest.approx(1980)
    assert (found.device, found.capability, found.clock) == ("simulated H200", "9.0", "h200")


def test_lanes_are_counted():
    """48 threads are a whole warp and a half; without the clock nothing of time is told."""
    found = page(launched(COPY, threads=48, clock=None))
    assert found.value("Avg. Active Threads Per Warp") == 24 and found.value("Duration") is None
    timed = ("us", "cycle", "inst/cycle", "Ghz", "Gbyte/s")
    assert all(m.value is None for _, m in found.rows() if m.unit in timed) and not found.clock
    assert not any(m.source == "modelled" for _, m in found.rows())
    assert all(s.microseconds is None for s in found.savings) and not any(s.modelled for s in found.ptx)
    assert any("nothing here is a time" in note for note in found.notes)
    json.loads(written([found], ".json"))


@needs_ptxas
def test_waits_at_mbarriers_tell_what_came_last():
    """A bulk copy's bytes, or the arrivals of threads; the time line calls both a wait at an mbarrier."""
    copied, arrived = launched(**BODIES["bulk"]), launched(LOCAL, threads=64, declarations=SMEM)
    ends = [{reason for cost in facts.timing.code for reason in cost.lost} for facts in (copied, arrived)]
    assert "mbarrier: copies" in ends[0] and "mbarrier" in ends[1] and "mbarrier: copies" not in ends[1]
    assert copied.timing.lost["mbarrier"] > 0 and "mbarrier: copies" not in copied.timing.lost
    assert page(copied).value("Stall mbarrier: copies") > 0 and page(copied).savings[0].where.startswith("PTX:")
    line = [spot.text for spot in by_ptx(copied) if spot.where == page(copied).savings[0].where]
    assert any("try_wait" in text for text in line)


@needs_ptxas
def test_a_slowed_instruction_becomes_the_hot_spot():
    """A loop of one kernel computes by a slow pipe, that of the other loads what it has just loaded from far away."""
    slow = "".join(f"ex2.approx.ftz.f32 %f{j}, %f{j};" for j in range(4))
    far = "ld.global.cg.b32 %r7, [%rd1]; cvt.u64.u32 %rd5, %r7; add.s64 %rd1, %rd1, %rd5;"
    end = "".join(f"add.f32 %f0, %f0, %f{j};" for j in range(1, 4))
    end += "cvt.rzi.u32.f32 %r8, %f0; add.u32 %r8, %r8, %r7; st.global.b32 [%rd2], %r8;"
    start = f"{ADDRESS} mov.b32 %r7, 0;" + "".join(f"mov.b32 %f{j}, %r{j + 1};" for j in range(4))
    first = {}
    for name, inner in (("slow", slow), ("far", far)):
        found = page(launched(f"{start} {LOOP.format(inner)} {end}", declarations=FLOATS))
        first[name] = found.ptx[0].text, max(found.ptx[0].reasons, key=found.ptx[0].reasons.get), found.savings[0]
    assert first["slow"][0].startswith("ex2") and "arithmetic" in first["slow"][2].what
    assert first["far"][0].startswith(("cvt.u64", "add.s64")) and first["far"][1] in ("l2", "dram", "memory")
    assert "latency" in first["far"][2].what and first["far"][2].where.startswith("PTX:")


@needs_ptxas
@pytest.mark.parametrize("stride", [4, 128])
def test_bank_conflicts_are_named_only_where_there_are_some(stride):
    """Every lane reads shared memory again and again: words in a row, or all of one bank."""
    read = "ld.shared.b32 %r7, [%r5]; and.b32 %r7, %r7, 4095; xor.b32 %r5, %r5, %r7;"
    init = f"{ADDRESS} mov.u32 %r5, sm; and.b32 %r6, %r1, 31; mul.lo.u32 %r6, %r6, {stride}; add.u32 %r5, %r5, %r6;"
    init += " mov.b32 %r8, 0; st.shared.b32 [%r5], %r8; bar.sync 0;"
    body = f"{init} {LOOP.format(read)} st.global.b32 [%rd2], %r7;"
    facts = launched(body, declarations=SMEM)
    assert facts.result.bank_conflicts == (0 if stride == 4 else 4 * 8 * 41 * 31)
    named = [s for s in page(facts).savings if s.what.startswith("bank conflicts")]
    assert bool(named) == (stride == 128)
    if named:
        (saving,) = named
        assert saving.where == by_ptx(facts)[0].where and saving.basis == "replay"
        assert 0 < saving.microseconds < facts.timing.cycles / facts.timing.cycles_per_us


@needs_ptxas
@pytest.mark.parametrize("shift", [2, 7])
def test_sectors_of_which_a_part_is_used(shift):
    """Lanes load 4 bytes: next to one another, or 128 bytes apart."""
    body = ADDRESS + f"mul.wide.u32 %rd5, %r4, {1 << shift}; add.s64 %rd1, %p0, %rd5;"
    body += "ld.global.b32 %r7, [%rd1]; st.global.b32 [%rd2], %r7;"
    found = page(launched(body, grid=400, clock="h200"))
    assert found.value("Global Load Bytes Per Sector") == (32 if shift == 2 else 4)
    assert any("sectors of which" in s.what for s in found.savings) == (shift == 7)
    counted = page(launched(body, grid=4, clock=None))
    assert any("13%" in s.advice or "12%" in s.advice for s in counted.savings) == (shift == 7)


@needs_ptxas
def test_few_ctas_are_told():
    few, many = page(launched(COPY, grid=4)), page(launched(COPY, grid=132 * 8))
    (bound,) = [s for s in few.savings if s.basis == "share"]
    assert "leave 128 of 132 SMs without work" in bound.advice and few.savings[-1] == bound
    assert not [s for s in many.savings if s.basis == "share"]


@needs_ptxas
def test_the_page_in_every_form():
    found = page(launched(COPY, grid=300))
    rows = list(csv.DictReader(io.StringIO(written([found, found], ".csv"))))
    assert tuple(rows[0]) == COLUMNS and {row["ID"] for row in rows} == {"0", "1"}
    (duration,) = [r for r in rows if r["Metric Name"] == "Duration" and r["ID"] == "1"]
    assert float(duration["Metric Value"]) == found.value("Duration")
    assert (duration["Section Name"], duration["Source"]) == ("GPU Speed Of Light Throughput", "modelled")
    (missing,) = [r for r in rows if r["Metric Name"] == "DRAM Frequency" and r["ID"] == "0"]
    assert (missing["Metric Value"], missing["Source"]) == ("", "not modelled")
    rules = [r for r in rows if r["Rule Type"] == "OPT" and r["ID"] == "0"]
    assert [r["Rule Name"] for r in rules] == [s.what for s in found.savings] and rules
    told = json.loads(written([found], ".json"))["profiles"][0]
    assert told["schema"] == 1 and told["sections"][0]["metrics"][5]["value"] == pytest.approx(
        found.value("Duration"), rel=1e-5
    )
    text = written([found], ".txt")
    for name in (s.name for s in found.sections):
        assert f"Section: {name}" in text
    assert f"{found.value('Duration'):.2f} modelled" in text and f"1. {found.savings[0].what}" in text
    assert V4.strip("{}").split(",")[0] in text


def _described(v: Profile) -> list[str]:
    return [m.name for _, m in v.rows()]


def test_names_are_those_of_the_details_page():
    """Sections, and some of their metrics, as tools that read the page look for them."""
    found = page(launched(COPY, clock=None))
    want = ("GPU Speed Of Light Throughput", "Compute Workload Analysis", "Memory Workload Analysis")
    want += ("Scheduler Statistics", "Warp State Statistics", "Instruction Statistics", "Launch Statistics")
    assert tuple(s.name for s in found.sections) == (*want, "Occupancy", "Source Counters")
    names = ("Compute (SM) Throughput", "L1/TEX Hit Rate", "Executed Ipc Elapsed", "No Eligible", "Waves Per SM")
    assert set(names) < set(_described(found))
    with pytest.raises(KeyError):
        found.value("Waves")

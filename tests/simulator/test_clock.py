"""The clock: machine code beside PTX, queues, replays of small kernels, and that every figure of a machine counts."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest
from clock_lab import TEXTS, clocked, h200, kernel, needs_ptxas, timing
from test_clock_memory import BOXES, DIRTY

from cute_nvfp4.sim import Program
from cute_nvfp4.sim.clock import tools
from cute_nvfp4.sim.clock.flags import Flags
from cute_nvfp4.sim.clock.last import largest, last
from cute_nvfp4.sim.clock.machine import clock_of, machine
from cute_nvfp4.sim.clock.matching import first_tries, machine_code
from cute_nvfp4.sim.clock.replay import Replay
from cute_nvfp4.sim.clock.sampling import ctas_per_sm, sample, with_raisers
from cute_nvfp4.sim.clock.sass import Placed, Slot, numbered, read
from cute_nvfp4.sim.clock.steps import stepper
from cute_nvfp4.sim.errors import ClockError
from cute_nvfp4.sim.machine.launch import Launch

WGMMA = tuple(name for name in machine("h200").figures if name.startswith("wgmma."))
LATENCIES = tuple(name for name in machine("h200").figures if name.startswith("latency."))
ALONE = ("sms", "dram.queue", "l2.bytes", "l2.together", "launch.undivided_bytes", "tma.interval", *DIRTY, *BOXES)
"""Figures with a test of their own."""
FIGURES = tuple(name for name in machine("h200").figures if name not in (*WGMMA, *LATENCIES, *ALONE))


def code_of(text: str):
    program = Program.parse(text)
    (name,) = program.kernels
    compiled = program.kernel(name)
    return machine_code(text, program.module.target, compiled.source, compiled.blocks), compiled


@needs_ptxas
@pytest.mark.parametrize("name", ["bulk", "shared", "imma"])
def test_line_numbers_change_no_machine_code(name, tmp_path):
    """ptxas makes the same instructions of the text with a ``.loc`` for each instruction and of the text as it was."""
    path, cubin = tmp_path / "k.ptx", tmp_path / "k.cubin"
    path.write_text(TEXTS[name])
    subprocess.run([tools.tool("ptxas"), "-arch=sm_90a", "-o", cubin, path], check=True)
    plain = tools.disassemble(cubin.read_bytes())
    code, compiled = code_of(TEXTS[name])
    assert code.opcodes == tuple(p.slot.opcode for p in read(plain, compiled.source.name))
    assert name == "bulk" or sum(map(len, code.blocks)) == len(code.opcodes)


@needs_ptxas
def test_machine_code_lies_in_the_block_it_comes_from():
    """Loads and stores of a kernel of three blocks are in the blocks of their PTX instructions."""
    body = """mov.u32 %r1, %tid.x; setp.gt.u32 %q0, %r1, 40; ld.global.b32 %r2, [%p0]; @%q0 bra B;
    bar.sync 1, 64; st.global.b32 [%p1], %r2; B: red.global.add.u32 [%p1+4], %r1;"""
    code, compiled = code_of(kernel(body, 2))
    sources = {s.base: (b, compiled.source.code[s.source].opcode) for b, code in enumerate(code.blocks) for s in code}
    assert sources["LDG"][1] == "ld.global.b32" and sources["STG"][1] == "st.global.b32"
    reduction = next(sources[base] for base in ("RED", "REDG") if base in sources)
    assert reduction[1] == "red.global.add.u32" and sources["LDG"][0] <= sources["STG"][0] <= reduction[0]
    assert sum(code.coverage) == len(code.opcodes) and code.coverage.slow == 0


@needs_ptxas
def test_predicated_code_is_issued_by_everyone():
    """ptxas makes predicated code of a short branch: its instructions are issued by warps that do not take it, too."""
    body = """mov.u32 %r1, %tid.x; setp.gt.u32 %q0, %r1, 31; ld.global.b32 %r2, [%p0]; @%q0 bra B;
    add.u32 %r2, %r2, 5; xor.b32 %r2, %r2, %r1; B: st.global.b32 [%p1], %r2;"""
    code, compiled = code_of(kernel(body, 2))
    middle = next(b.index for b in compiled.blocks if b.code and b.code[0][0].opcode == "add.u32")
    holder = code.holders[code.leads[middle]]
    assert holder < middle and not code.blocks[middle] and {"LDG", "STG"} <= {s.base for s in code.blocks[holder]}


@needs_ptxas
def test_the_slow_path_of_a_division_is_not_issued():
    body = "ld.global.f32 %f1, [%p0]; ld.global.f32 %f2, [%p0+4]; div.rn.f32 %f3, %f1, %f2; st.global.f32 [%p1], %f3;"
    code, _ = code_of(kernel(body, 2, ".reg .f32 %f<8>;"))
    assert code.coverage.slow > 20 and "RET" not in {s.base for slots in code.blocks for s in slots}
    assert sum(map(len, code.blocks)) + code.coverage.slow == len(code.opcodes)


def test_a_wait_is_tried_once():
    """ptxas puts the first try of a wait before its loop, and the loop behind the code."""
    names = ("xor.b32", "mbarrier.try_wait.parity.shared::cta.b64", "bra", "bra", "exit")
    code = [SimpleNamespace(base=name.split(".")[0], mods=tuple(name.split(".")[1:])) for name in names]
    listed = (
        (0, "LOP3", 0),
        (0, "SYNCS", 0),
        (0, "BRA", 0),
        (4, "EXIT", 1),
        (1, "SYNCS", 2),
        (2, "BRA", 2),
        (2, "BRA", 3),
    )
    opcodes = {"SYNCS": "SYNCS.PHASECHK.TRANS64.TRYWAIT"}
    placed = [
        Placed(Slot(base, opcodes.get(base, base), "", source, 1, 7, 7, ()), segment)
        for source, base, segment in listed
    ]
    found = first_tries(placed, SimpleNamespace(code=code))
    assert [p.slot.source for p in found] == [0, 1, 0, 4, 1, 2, 2]
    assert [p.slow for p in found] == [False] * 4 + [True] * 3
    assert first_tries(placed[:1] + placed[3:], SimpleNamespace(code=code)) == placed[:1] + placed[3:]


def test_each_instruction_gets_a_line():
    """Several instructions of one line, in scopes of their own, with labels and guards."""
    text = kernel("{ .reg .pred P; setp.ne.u32 P, %r1, 0; @P bra L; mov.u32 %r1, 5; L: } mov.u32 %r2, %r1;", 0)
    compiled = Program.parse(text).kernel("kernel").source
    lines = re.findall(r"\.loc 1 (\d+) 1\n(?:@\S+ )?([\w.:]+)", numbered(text, compiled))
    assert [(int(n), word) for n, word in lines] == [(k + 1, i.opcode) for k, i in enumerate(compiled.code)]


def test_control_codes():
    """Stall counts and scoreboards of an instruction of a real cubin (sm_90a): LDG releases the second one."""
    text = '\t.section\t.text.k,\n\t//## File "kernel.ptx", line 7\n'
    text += "        /*0010*/                   S2R R8, SR_TID.X ;   /* 0x0000000000087919 */\n"
    text += "                                                        /* 0x000e620000002100 */\n"
    (placed,) = read(text, "k")
    assert placed.slot == Slot("S2R", "S2R", "R8, SR_TID.X", 6, 1, 1, 7, (), address=16)


def test_unknown_machines_and_figures():
    with pytest.raises(ClockError, match="got 'gh300'"):
        machine("gh300")
    with pytest.raises(ClockError, match="sm_120a"):
        clock_of("sm_120a")
    with pytest.raises(ClockError, match=r"dram\.colour"):
        h200(dram__colour=3)
    assert clock_of("sm_90a") == "h200" and machine("h200").sms == 132


def test_every_figure_has_a_source():
    known = machine("h200")
    assert set(known.figures) == set(known.sources) and all(known.sources.values())


def test_the_last_of_many_ends_after_the_mean():
    """Ends of few replays say how far the last of many SMs is behind; of one SM, or of one replay, the mean ends."""
    assert (largest(1), round(largest(132), 2), last([[100.0], [103.0]], [66, 66])) == (0.0, 2.6, 103.0)
    assert last([[90.0, 110.0], [95.0, 105.0]], [1, 1]) == 100.0
    deviation = math.sqrt((2 * 10**2 + 2 * 5**2) / 2)
    assert last([[90.0, 110.0], [95.0, 105.0]], [66, 66]) == pytest.approx(100 + deviation * largest(66))


@needs_ptxas
def test_sms_end_together_where_memory_is_always_as_late():
    """The end of a launch lies behind that of a replay by what latencies differ, and by nothing else."""
    alike = {
        f"{at}__latency_{p}": 500 for at in ("dram", "l2") for p in (10, 50, 90, 99, 100)[: 5 if at == "dram" else 4]
    }
    for m, together in ((h200(**alike), True), (h200(), False)):
        assert (timing("near", m).cycles == clocked("near")._replayed(m)[1]) == together


@needs_ptxas
def test_copies_of_a_thread_are_issued_one_after_the_other():
    """Sixteen copies in a row: the last one is issued fifteen intervals after the first."""
    first, other = clocked("row").timing(h200(tma__interval=50)), clocked("row").timing(h200(tma__interval=150))
    assert other.cycles - first.cycles == pytest.approx(15 * 100, rel=0.2)


def test_raisers_are_replayed():
    """CTAs whose flags the replayed ones wait for come into the sample, and theirs; each SM still counts once."""
    launch = Launch("k", (264, 1, 1), (1024, 1, 1), ())
    taken = sample(launch, machine("h200"), 0, 32, 2)
    found = with_raisers(taken, launch, machine("h200"), {263: {40}, 40: {17}, 50: {60}})
    assert {p.number for p in found.places} == {0, 131, 40, 17} and {40, 17, 172} <= set(found.ctas.tolist())
    assert sum(p.weight for p in found.places) == pytest.approx(132)
    assert with_raisers(found, launch, machine("h200"), {263: {40}, 40: {17}}) is None


def test_a_like_store_stands_for_a_flag():
    """The flag of a CTA that is not replayed: the nearest replayed one that stores by the same instruction as often."""
    flags, expected = Flags(counted := Counter()), []
    for cta, instruction, replayed in ((3, 7, True), (90, 7, True), (50, 9, True), (80, 7, False)):
        expected.append(flags.raised([100 + cta], cta, instruction, replayed))
    (key,) = flags.looked([180], 5, True)
    assert flags.looked([180, 103], 6, False) == [] and flags.waits_for == {5: {80}, 6: {80, 3}}
    assert counted[key] == 0 and flags.settle() == 0
    assert counted[key] == 1 and [list(k) for k in expected] == [[], [key], [], []]


@needs_ptxas
@pytest.mark.parametrize(("name", "much"), [("local", True), ("copy", False)])
def test_much_shared_memory_has_l1_divided_anew(name, much):
    """110 KB of shared memory cost the launch ``launch.divide``, none nothing."""
    found, m = timing(name), h200()
    more = found.microseconds - found.launch_us - m.microseconds(found.cycles - m["launch.hidden"])
    assert more == pytest.approx(m.microseconds(m["launch.divide"]) if much else 0.0, abs=1e-9)


@needs_ptxas
def test_the_launch_is_a_figure_of_the_host():
    """A launch that was measured elsewhere comes to the time as it is, and the time says that it was given."""
    usual, other = timing("copy"), timing("copy", h200(launch__empty_us=9.0))
    assert other.microseconds - usual.microseconds == pytest.approx(9.0 - usual.launch_us)
    assert (other.launch_from, other.cycles) == ("given by the caller", usual.cycles)
    assert "given" not in usual.launch_from


def test_residency_and_places():
    """CTAs an SM holds; SMs with the most and with the fewest clusters stand for all."""
    assert [ctas_per_sm(*a) for a in ((128, 0, 32), (1024, 0, 32), (128, 100 << 10, 32), (256, 0, 255))] == [
        16,
        2,
        2,
        1,
    ]
    launch = Launch("k", (300, 1, 1), (128, 1, 1), (), (2, 1, 1))
    found = sample(launch, machine("h200"), 0, 32, 2)
    assert [(len(p.clusters), p.weight) for p in found.places] == [(3, 9), (3, 9), (2, 24), (2, 24)]
    assert sum(len(p.clusters) * p.weight for p in found.places) == 150
    assert found.places[0].clusters[1] == (132, 133)


def test_wgmma_figures():
    """m64n256k16 from shared memory holds a tensor core for 128 cycles; every figure of wgmma counts."""

    def steps(m):
        shapes = [f"HGMMA.64x{n}x16.F32.BF16" for n in (8, 256)]
        operands = ("R24, gdesc[UR8], R24", "R24, R4, gdesc[UR8], R24, gsb0")
        return [stepper(m)(Slot("HGMMA", s, o, 0, 1, 7, 7, ())) for s in shapes for o in operands]

    before = steps(h200())
    assert [round(s.interval) for s in before] == [18, 16, 128, 128]
    for name in WGMMA:
        assert steps(h200(**{name.replace(".", "__"): 3 * machine("h200")[name]})) != before, name


@pytest.mark.parametrize("name", LATENCIES)
def test_latencies_of_scoreboards(name):
    """Each is that of some instruction, and of no other."""
    bases = {"fp64": "DFMA", "xu": "MUFU", "lsu": "LDC", "REDUX": "REDUX", "SHFL": "SHFL", "uniform": "S2UR"}
    bases["other"] = "F2FP"
    other = h200(**{name.replace(".", "__"): 99.0})
    found = {base for base in bases.values() if stepper(other)(Slot(base, base, "", 0, 1, 2, 7, ())).latency == 99}
    assert found == {bases[name.removeprefix("latency.")]}


@needs_ptxas
@pytest.mark.sweep(21)
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_counts(name):
    """A changed figure changes the time of some kernel; and no other than a rate makes anything faster."""
    other = h200(**{name.replace(".", "__"): 3 * machine("h200")[name]})
    before, after = ({k: clocked(k).timing(m).microseconds for k in TEXTS} for m in (h200(), other))
    assert before != after


@needs_ptxas
@pytest.mark.parametrize("name", ["copy", "bulk", "cluster", "shared"])
def test_the_same_launch_takes_the_same_time(name):
    """Replayed again, and under another interleaving of the functional run."""
    first = timing(name)
    assert timing(name) == first
    assert name == "bulk" or timing(name, shift=64).cycles == first.cycles
    other = timing(name, schedule="seed=3,tma=lazy,copy=lazy,store=eager")
    assert other.cycles == pytest.approx(first.cycles, rel=0.1)


@needs_ptxas
def test_what_bounds_a_launch():
    """A cold copy waits for DRAM, a warm one takes less; the sampled SMs stand for all of the bytes."""
    cold, warm = timing("copy"), timing("copy", warm=True)
    assert warm.cycles < cold.cycles and cold.bound_by == "dram"
    moved = 2 * 600 * 256 * 16
    m = machine("h200")
    alone = moved / 2 / m["dram.bytes_per_cycle"] + moved / 2 / m["dram.written_bytes_per_cycle"]
    assert cold.bounds_us["dram"] == pytest.approx(m.microseconds(alone))
    assert cold.busy["dram"] * cold.cycles == pytest.approx(alone, rel=1e-6)
    assert cold.roofline_us > cold.launch_us


@needs_ptxas
def test_partial_stores_of_a_sector_are_joined():
    """Four stores of 4 bytes a thread: DRAM gets each sector once, L2 four times."""
    found, m = timing("parts"), machine("h200")
    written = 600 * 256 * 16 / m["dram.written_bytes_per_cycle"]
    assert found.busy["dram"] * found.cycles == pytest.approx(written, rel=1e-6)
    assert found.busy["l2"] * found.cycles == pytest.approx(4 * 600 * 256 * 16 / m["l2.bytes_per_cycle"], rel=1e-6)


@needs_ptxas
@pytest.mark.parametrize("schedule", ["", "seed=3,tma=lazy,copy=lazy,store=eager"])
def test_polling_costs_until_the_flag_is_raised(schedule):
    """A CTA that polls ends a look after the store of the flag, however often the functional run has looked."""
    clock = clocked("flag", schedule=schedule)
    found = clock.timing()
    raiser, poller = sorted(found.warps, key=lambda w: w.cta)
    assert raiser.end - raiser.begin > 50 * h200()["l2.latency_10"]
    assert -100 < poller.end - raiser.end < 4 * h200()["l2.latency_50"]
    (visits,) = [v for (cta, _), v in clock.recorder.visits.items() if cta == 1]
    again = [v for v in visits for _ in range(100 if clock.recorder.polls[v.block] == v.block else 1)]
    assert len(again) > 100 and Replay._looked_once(SimpleNamespace(recorder=clock.recorder), again) == visits


@needs_ptxas
def test_another_architecture_is_refused():
    """PTX for a B200 has no time on an H200."""
    from ptx_lab import launch_kernel, module

    with pytest.raises(ClockError, match="sm_100a"):
        launch_kernel(module("", 0), [], clock="h200")


@pytest.mark.sim_only("models a time")
@needs_ptxas
@pytest.mark.kernels("sm_90a")
def test_a_kernel_of_the_dsl_and_what_the_command_says_of_it():
    """GEMV on an H200: its time is modelled, every arrival has its instruction, and the command prints it."""
    import torch

    import cute_nvfp4
    from cute_nvfp4.cli.sim_report import _timing
    from cute_nvfp4.cli.sim_times import time_lines
    from cute_nvfp4.scale_layout import to_blocked

    def operand(rows: int) -> cute_nvfp4.BlockScaledTensor:
        scale = to_blocked(torch.full((1, rows, 32), 56, dtype=torch.uint8))
        return cute_nvfp4.BlockScaledTensor(torch.full((1, rows, 256), 0x22, dtype=torch.uint8), scale)

    with cute_nvfp4.simulating("sm_90a", clock="h200", checks=False) as runs:
        cute_nvfp4.gemv(operand(264), operand(1))
    found = runs[0].result.timing
    assert found.microseconds > found.roofline_us > found.launch_us
    assert found.coverage["events"] > 0.99 and 0.9 < found.coverage["code"] <= 1
    assert found.replayed_sms == 2 and abs(sum(found.lost.values()) - 0.5) < 0.5
    told = json.loads(json.dumps(_timing(found)))
    assert told["microseconds"] == found.microseconds and "waits" not in told
    assert [p["bound_by"] for p in told["phases"]] == [p.bound_by for p in found.phases()]
    assert told["gains"] == found.gains()
    lines = list(time_lines(SimpleNamespace(launches=[runs[0], runs[0]])))
    assert f"{found.microseconds:.2f} us modelled on H200" in lines[0]
    assert "a launch 3.10 us of both" in lines[1] and any("bound by: 0.0 to" in line for line in lines)
    assert f"2 launches, one after the other: {2 * found.microseconds:.2f} us modelled" in lines[-1]


@needs_ptxas
def test_time_line_and_what_would_gain():
    """Bars lie within the launch, waits within their warp; loads in a chain gain by the latency of memory, and not by
    barriers."""
    found = timing("copy")
    bars = [event for event in found.events(1, "launch") if event["ph"] == "X"]
    whole = {(e["pid"], e["tid"]): e for e in bars if e["name"] == "runs"}
    assert len(whole) == len(found.warps) and max(e["ts"] + e["dur"] for e in bars) <= found.microseconds
    for event in bars:
        warp = whole[event["pid"], event["tid"]]
        assert warp["ts"] - 1e-3 <= event["ts"] and event["ts"] + event["dur"] <= warp["ts"] + warp["dur"] + 1e-3
    phases = found.phases(5)
    assert [p.begin for p in phases[1:]] == [p.end for p in phases[:-1]] and phases[0].begin == 0
    assert phases[-1].end == pytest.approx(found.cycles / found.cycles_per_us, abs=1e-3)
    assert "dram" in {p.bound_by for p in phases} and all(0 < p.share <= 1 for p in phases)
    gains = timing("near").gains()
    assert gains["memory's latency halved"] > 0.05 and abs(gains["barriers at no cost"]) < 1e-9
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    far = timing("far")  # waits twice for its cluster, at the start and at the end
    assert far.gains()["barriers at no cost"] * far.cycles_per_us > 2 * h200()["cluster.barrier"]

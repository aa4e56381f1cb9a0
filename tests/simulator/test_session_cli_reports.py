"""What ``python -m cute_nvfp4 sim`` tells: counters, traces, JSON, schedules that fail, and errors with what to do."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support import forked
from typer.testing import CliRunner

from cute_nvfp4.cli import sim_schedules
from cute_nvfp4.cli.sim import EXIT_HAZARD, EXIT_NOT_MODELLED, app
from cute_nvfp4.cli.sim_counters import Row, _table, number, short_opcode

HEAD = """
import cutlass, cutlass.cute as cute, torch
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(a: cute.Tensor, b: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    memory = cute.arch.alloc_smem(cutlass.Int32, 1024)
"""
TAIL = """
@cute.jit
def host(a: cute.Tensor, b: cute.Tensor):
    kernel(a, b).launch(grid=(1, 1, 1), block=(32, 1, 1))

source, target = torch.ones(64, dtype=torch.int32, device="cuda"), torch.zeros(64, dtype=torch.int32, device="cuda")
for _ in range(REPEATS):
    host(from_dlpack(source), from_dlpack(target))
"""
COUNTED = """
    shared = cute.make_tensor(memory, cute.make_layout(1024))
    shared[i * 32] = a[i]
    cute.arch.sync_threads()
    b[i] = shared[i * 32]
"""
PLANTED = """
    shared = cute.make_tensor(memory, cute.make_layout(64))
    atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), cutlass.Int32, num_bits_per_copy=32)
    one = cute.make_layout(1)
    for half in cutlass.range_constexpr(2):
        at = i + 32 * half
        cute.copy(atom, cute.make_tensor(a.iterator + at, one), cute.make_tensor(memory + at, one))
        cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(1)
    b[(1 - shared[i + 32]) * 1000 + i] = 1
"""
DEADLOCK = """
    barrier = cute.arch.alloc_smem(cutlass.Int64, 1)
    if i == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.sync_threads()
    cute.arch.mbarrier_wait(barrier, 0)
    b[i] = a[i]
"""
UNKNOWN = """
    asm = "{.reg .b32 t; mov.b32 t, 1; vadd4.s32.s32.s32 t, t, t, t;}"
    llvm.inline_asm(None, [], asm, "", has_side_effects=True, is_align_stack=False,
                    asm_dialect=llvm.AsmDialect.AD_ATT)
    b[i] = a[i]
"""


@pytest.fixture
def program(tmp_path: Path):
    def write(body: str, repeats: int = 1) -> str:
        path = tmp_path / "program.py"
        path.write_text(HEAD + body + TAIL.replace("REPEATS", str(repeats)))
        return str(path)

    return write


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_counters_fit_the_terminal_and_name_source_lines(program, tmp_path) -> None:
    report = tmp_path / "r.json"
    result = invoke("-q", "--counters", "--json", str(report), program(COUNTED, repeats=2))
    assert result.exit_code == 0, result.stderr
    text = result.stderr
    lines = text[text.index("counted, not measured") :].splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("launch ") for line in lines) == 1 and "launch 0, 1 (2 alike)" in text
    # 32 lanes at a stride of 32 words meet in one bank: 32 passes where 1 would do, for the store and the load
    at = next(i for i, line in enumerate(lines) if "bank conflicts" in line)
    conflicts = [line.split() for line in lines[at + 2 : at + 4]]
    assert sorted(row[0] for row in conflicts) == ["program.py:12", "program.py:14"]
    assert [row[2:] for row in conflicts] == [["1", "32", "1", "31"]] * 2
    load = next(line.split() for line in lines if "program.py:12 ld.global" in line)
    assert load[2:] == ["1", "4", "4.0", "32.0"]
    assert "loads 128, stores 128" in text and "L2 model (" in text
    found = json.loads(report.read_text())
    assert found["schema"] == 1 and found["outcome"] == "ended" and found["error"] is None
    assert [entry["number"] for entry in found["launches"]] == [0, 1]
    keys = {"kernel", "warps", "opcodes", "classes", "memory", "distinct_bytes", "engines", "waits", "mma", "l2"}
    keys |= {"lines", "executed", "thread_instructions", "bank_conflicts"}
    assert set(found["launches"][0]["counters"]) == keys
    assert found["launches"][0]["counters"]["bank_conflicts"] == 62


def test_a_deadlock_leaves_its_trace_and_report(program, tmp_path) -> None:
    trace, report = tmp_path / "t.json", tmp_path / "r.json"
    result = invoke("--counters", "--trace", str(trace), "--json", str(report), program(DEADLOCK))
    assert result.exit_code == EXIT_HAZARD and "hazard: Deadlock" in result.stderr
    assert "nothing was counted" in result.stderr and "program.py:15" in result.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["ph"] for e in events} >= {"M", "X"}
    assert all({"name", "pid", "tid", "ts", "dur"} <= set(e) for e in events if e["ph"] == "X")
    found = json.loads(report.read_text())
    assert (found["status"], found["outcome"], found["failure"]["kind"]) == (EXIT_HAZARD, "hazard", "Deadlock")
    assert found["launches"][0]["counters"] is None and found["launches"][0]["warnings"] == []


@pytest.mark.parametrize("option", ["--trace", "--json"])
def test_a_file_that_cannot_be_written_is_told_before_the_run(option, tmp_path) -> None:
    path = tmp_path / "program.py"
    path.write_text("print('ran')\n")
    for where in (tmp_path / "no" / "x.json", tmp_path):
        result = invoke(option, str(where), str(path))
        assert result.exit_code == 2 and f"{option}: cannot write" in result.stderr and not result.stdout
    # the test for it leaves nothing behind, and nothing of an old file is lost
    old = tmp_path / "old.json"
    old.write_text("old")
    invoke("--trace", str(tmp_path / "new.json"), option, str(old), "--benchmarks", "full", str(path))
    assert old.read_text() != "old"


def test_a_schedule_that_fails_gives_a_command_that_repeats_it(program, tmp_path, capfd, monkeypatch) -> None:
    """The second copy is not waited for. Only the lazy schedule shows it, where the checks are off."""
    monkeypatch.setattr(sim_schedules, "subprocess", forked.SUBPROCESS)
    path, report = program(PLANTED), tmp_path / "r.json"
    result = invoke("--no-checks", "--schedules", "4", "--json", str(report), path)
    shown = capfd.readouterr().err + result.stderr
    assert result.exit_code == EXIT_HAZARD, shown
    found = json.loads(report.read_text())
    assert [s["outcome"] for s in found["schedules"]] == ["ended", "hazard"] and found["status"] == EXIT_HAZARD
    assert "tma=lazy" in found["schedules"][1]["schedule"] and "schedule 2 of 4" in shown
    (line,) = [s for s in shown.splitlines() if "repeat with:" in s]
    words = shlex.split(line.split("repeat with:")[1])
    again = forked.run(words, capture_output=True, text=True, timeout=120)
    assert again.returncode == EXIT_HAZARD
    message = found["schedules"][1]["failure"]["message"]
    assert message.split(": address")[0] in again.stderr and "program.py:19" in message


def test_an_instruction_that_is_not_modelled_says_what_to_do(program) -> None:
    result = invoke("--arch", "sm_90a", program(UNKNOWN))
    assert result.exit_code == EXIT_NOT_MODELLED
    assert "`vadd4.s32.s32.s32 t, t, t, t` (PTX line" in result.stderr and "program.py:" in result.stderr
    assert "no vadd4 is modelled; docs/reference/simulator.md" in result.stderr
    assert "Please report it" in result.stderr


def test_a_package_that_is_missing_is_named(tmp_path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import surely_not_installed.part\n")
    result = invoke(str(path))
    assert result.exit_code == 1 and "ModuleNotFoundError" in result.stderr
    assert "it needs the package surely_not_installed, which is not installed for" in result.stderr
    path.write_text("import json.surely_not_there\n")
    assert "needs the package" not in invoke(str(path)).stderr


def test_help_has_the_exit_statuses() -> None:
    text = invoke("--help").output
    for status in ("  2  ", " 70  ", "111  ", "112  ", "130  "):
        assert status in text


def test_numbers_and_opcodes_are_short() -> None:
    assert [number(v) for v in (7, 999_999, 1_000_000, 2_097_152, 999_600_000, 39.0, 2e12)] == [
        *("7", "999,999", "1M", "2.1M", "1G", "39.0", "2T")
    ]
    load = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%r1], x"
    assert short_opcode(load) == "bulk.tensor.2d global→shared"
    store = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%rd1, {%r1}], [%r2]"
    assert short_opcode(store) == "bulk.tensor.3d shared→global"
    assert short_opcode("tcgen05.mma.cta_group::2.kind::f16.collector::a::discard [%r8], x") == "tcgen05.mma.2cta.f16"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_keep_to_the_width(width) -> None:
    rows = [
        Row(f"a_long_name_of_a_file_{i}.py:{i}", "an.opcode" * 9 + " ×12", ("1,234", "999,999", "8")) for i in range(20)
    ]
    lines = list(_table("title", ("ops", "bytes", "per op"), rows, width))
    assert max(map(len, lines)) <= width and lines[-1].strip() == "… and 12 more"
    assert lines[2].startswith("    …") and ".py:0 " in lines[2] and "… ×12" in lines[2]


TWO_RACES = """
    shared = cute.make_tensor(memory, cute.make_layout(1024))
    shared[i] = a[i]
    b[i] = shared[i ^ 1]
    shared[i + 64] = a[i]
    b[i] = shared[(i ^ 1) + 64]
"""


def test_hazards_are_allowed_or_collected(program, tmp_path) -> None:
    report, path = tmp_path / "r.json", program(TWO_RACES)
    stops = invoke("-q", path)
    assert stops.exit_code == EXIT_HAZARD and "--allow race-in-warp goes on past it" in stops.stderr
    allowed = invoke("--allow", "race-in-warp", "--json", str(report), path)
    assert allowed.exit_code == 0 and "no hazard found" in allowed.stderr, allowed.stderr
    (line,) = [text for text in allowed.stderr.splitlines() if text.startswith("warning: ")]
    assert line.startswith("warning: race-in-warp at ld.shared.b32 (PTX line ") and line.endswith(", and 1 more")
    found = json.loads(report.read_text())
    assert [f["severity"] for f in found["findings"]] == ["warning", "warning"] and found["allow"] == ["race-in-warp"]
    assert {f["loc"].rpartition("/")[2] for f in found["findings"]} == {"program.py:13", "program.py:15"}
    collected = invoke("--continue", "--json", str(report), path)
    assert collected.exit_code == EXIT_HAZARD and "2 hazard(s): race-in-warp at ld.shared.b32" in collected.stderr
    found = json.loads(report.read_text())
    assert (found["outcome"], found["failure"]["kind"], len(found["findings"])) == ("hazard", "Race", 2)
    assert found["launches"][0]["instructions"] > 0
    unknown = invoke("--allow", "races", path)
    assert unknown.exit_code == 2 and "got 'races', expected one of race, race-in-warp" in unknown.stderr


ONE_LANE_SIGNALS = """
    shared = cute.make_tensor(memory, cute.make_layout(1024))
    barrier = cute.arch.alloc_smem(cutlass.Int64, 1)
    if i == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.sync_threads()
    shared[i] = a[i]
    if i == 0:
        cute.arch.mbarrier_arrive(barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    b[i] = shared[i]
"""


def test_strict_warns_of_what_is_passed_otherwise(program, tmp_path) -> None:
    report, path = tmp_path / "r.json", program(ONE_LANE_SIGNALS)
    plain = invoke("--json", str(report), path)
    assert plain.exit_code == 0 and not json.loads(report.read_text())["findings"], plain.stderr
    result = invoke("--strict", "--json", str(report), path)
    assert result.exit_code == 0 and "warning: lane-signal at mbarrier.arrive" in result.stderr, result.stderr
    found = json.loads(report.read_text())
    assert found["strict"] and [f["rule"] for f in found["findings"]] == ["lane-signal"]
    both = invoke("--strict", "--no-checks", path)
    assert both.exit_code == 2 and "it cannot go with --no-checks" in both.stderr

"""The runner of ``tests.long``: its order, its ledger, its shrinking, and workers that hang or die."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support import quantize_problems

from cute_nvfp4.errors import CuteNvfp4Error
from cute_nvfp4.formats import FORMATS as BLOCK_FORMATS
from tests.kernels.prepared_weight import test_packed_gemm as packed
from tests.long import fuzzing
from tests.long.__main__ import main
from tests.long.families import FAMILIES, packed_calls, rows
from tests.long.ledger import Ledger, Record
from tests.long.order import cheapest, mixed, streams
from tests.long.shrink import shrunk
from tests.long.summary import BEGIN, END, PAGE, summary, total, write
from tests.long.worker import Ended, Task, Worker, allow, perform

COMMON = {"seconds": 1800.0, "day": "2030-01-02", "commit": "c", "simulator": "s", "runs": 2}


def first(count: int, seed: int, only: list[str], ledger: Ledger | None = None) -> list[tuple[str, str, str]]:
    """(family, case, architecture) of the first pieces of work."""
    families = [FAMILIES[name] for name in only or FAMILIES]
    works = mixed(streams(families, ledger or Ledger(Path("none")), seed), seed)
    found = [work for work in itertools.islice(works, count) if work is not None]
    return [(work.stream.family.name, work.text, work.stream.arch) for work in found]


def test_the_order_is_random_and_reproducible() -> None:
    assert first(20, 1, []) == first(20, 1, []) != first(20, 2, [])
    assert {name for name, _, _ in first(5, 1, ["gemv"])} == {"gemv"}


@pytest.mark.parametrize("name", [family.name for family in FAMILIES.values() if family.draw is not None])
def test_random_cases_are_plain_data(name: str) -> None:
    family = FAMILIES[name]
    for _, text, _ in first(3, 3, [name]):
        assert family.text(family.parse(text)) == text


GATES = {"", "silu", "gelu_tanh", "gelu_erf", "relu", "identity"}
VALUES = {
    "quantize": {
        "format": set(quantize_problems.FORMATS), "operation": {"quantize", "rmsnorm", "silu_mul"},
        "rule": {rule for _, rule in quantize_problems.PAIRS}, "dtype": set(rows.DTYPES), "view": set(rows.VIEWS),
        "form": {"", "tile", "transposed"}, "rotation": {0, 2, 16}, "layout": {"blocked", "rowmajor"},
        "batch": {0, 1, 3}, "weight": {"x", "float32", ""}, "eps": {1e-6, 0.0, 3.0}, "edges": {False, True},
        "computed": {False, True}, "stochastic": {False, True}, "second": {False, True},
    },
    "dequantize": {"format": set(BLOCK_FORMATS), "dtype": set(rows.DTYPES), "layout": {"blocked", "rowmajor"}},
    "pack": {"format": {"nvfp4", "mxfp8", "mxfp8_e5m2"}, "two": {False, True}, "batch": {0, 1, 3}},
    "packed-call": {
        "format": set(BLOCK_FORMATS), "type": {"float16", "bfloat16"}, "result": set(rows.DTYPES), "gate": GATES,
        "bias": {"", *rows.DTYPES}, "quantized": {False, True},
    },
    "packed-groups": {
        "format": set(BLOCK_FORMATS), "listed": {False, True}, "more": {0, 1, 8}, "before": {0, 1, 2, 3}, "gate": GATES,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_random_cases_have_every_value(name: str) -> None:
    generator = np.random.default_rng(0)
    drawn = [FAMILIES[name].draw(generator, "sm_90a") for _ in range(800)]
    assert {field: {getattr(case, field) for case in drawn} for field in VALUES[name]} == VALUES[name]
    if name == "packed-groups":
        assert any(0 in case.sizes for case in drawn) and {len(case.sizes) for case in drawn} >= {1, 18}


@pytest.mark.parametrize(
    "module, function, name, text",
    [
        (rows, "dequantize", "dequantize", '{"format":"mxfp4","rows":3,"k":64,"batch":1,"pitch":16}'),
        (packed_calls, "within", "packed-call", '{"m":3,"n":40,"k":64,"format":"mxfp4","bias":"float16"}'),
        (packed_calls, "within", "packed-groups", '{"sizes":[3,0,2],"n":9,"k":64,"before":1,"format":"mxfp8"}'),
        (packed_calls, "within", "packed-groups", '{"sizes":[3,0,2],"n":9,"k":64,"listed":true,"more":1}'),
    ],
)
def test_a_wrong_result_is_a_failure(module, function: str, name: str, text: str, monkeypatch) -> None:
    """The largest element, twice as large."""
    task = Task(name, text, "sm_90a", 1)
    assert perform(task, slowly=True).outcome == "passed"
    wrong = getattr(module, function)

    def doubled(out: torch.Tensor) -> torch.Tensor:
        return torch.where(out.abs() == out[out.isfinite()].abs().max(), 2 * out, out)

    if function == "within":
        module, wrong = (packed, packed.within) if name == "packed-call" else (module, wrong)
        monkeypatch.setattr(module, "within", lambda out, *right: wrong(doubled(out), *right))
    else:
        monkeypatch.setattr(module, function, lambda *given, **options: doubled(wrong(*given, **options)))
    ended = perform(task)
    assert ended.outcome == "failed" and ("wrong" in ended.error or "differ" in ended.error)


@pytest.mark.parametrize("arch", ["sm_120a", "sm_90a"])
def test_lists_are_plain_data_and_each_case_stands_for_something_else(arch: str) -> None:
    for family in FAMILIES.values():
        if family.every is None or arch not in family.archs or family.ptx is not None:
            continue
        for part in family.parts(arch):
            cases = perform(Task(family.name, "", arch, 1, part=part)).cases
            assert len({stands_for for _, stands_for in cases}) == len(cases) > 20
            for text, _ in cases[::50]:
                assert family.text(family.parse(text)) == text and (not part or family.part_of(text) == part)


def test_what_has_passed_does_not_come_again(tmp_path) -> None:
    """Of a list what stands for the same; a random case no more, and one less is drawn; of other sources, last."""
    family, ledger = FAMILIES["gemm-structure"], Ledger(tmp_path / "ledger.jsonl")
    simulator, sources = family.state("sm_120a")
    common = COMMON | {"simulator": simulator}
    cases = perform(Task(family.name, "", "sm_120a", 1)).cases
    done = json.loads(cases[5][0]) | {"m": 77, "seed": 3}
    ledger.add(Record(family.name, json.dumps(done), "sm_120a", "passed", sources="old", kernels=("k",), **common))
    _, drawn, _ = first(1, 0, ["gated-gemm"])[0]
    for arch in FAMILIES["gated-gemm"].archs:
        ledger.add(Record("gated-gemm", drawn, arch, "passed", sources=FAMILIES["gated-gemm"].state(arch)[1], **common))
    (stream,) = streams([family], ledger, 0, ["sm_120a"])
    assert stream.next().text == "" and stream.waits
    stream.take_list(cases)
    works = list(iter(stream.next, None))
    assert sorted(work.text for work in works[:-1]) == sorted(text for i, (text, _) in enumerate(cases) if i != 5)
    assert (json.loads(works[-1].text), works[-1].seen) == (done, ("k",))
    old = Ledger(tmp_path / "old.jsonl")
    old.add(Record(family.name, json.dumps(done), "sm_120a", "passed", sources=sources, kernels=("k",), **COMMON))
    (stream,) = streams([family], old, 0, ["sm_120a"])
    assert [(work.text, work.seen) for work in stream.again] == [(json.dumps(done), ())], "another simulator's is known"
    (stream,) = streams([family], ledger, 0, ["sm_120a"], new=True)
    stream.next()
    stream.take_list(cases)
    assert len(list(iter(stream.next, None))) == len(cases) - 1
    (stream,) = streams([family], ledger, 0, ["sm_120a"], known=True)
    assert [(json.loads(work.text), work.seen) for work in iter(stream.next, None)] == [(done, ("k",))]
    (stream,) = streams([family], old, 0, ["sm_120a"], known=True)
    assert stream.next() is None and not stream.waits
    again = streams([FAMILIES["gated-gemm"]], ledger, 0)
    assert [stream.left for stream in again] == [FAMILIES["gated-gemm"].goal - 1] * 2
    assert drawn not in {stream.next().text for stream in again for _ in range(2)}


def test_what_has_failed_comes_first(tmp_path) -> None:
    """Before all other streams; once, although it is listed or drawn; what is not listed any more is gone."""
    structures, random = FAMILIES["gemm-structure"], FAMILIES["gated-gemm"]
    ledger, cases = Ledger(tmp_path / "ledger.jsonl"), perform(Task("gemm-structure", "", "sm_120a", 1)).cases
    bad, old = cases[5][0], json.dumps(json.loads(cases[8][0]) | {"m": 99})
    simulator, sources = structures.state("sm_120a")
    for text, outcome in ((cases[7][0], "passed"), (bad, "hung"), (old, "failed")):
        common = COMMON | {"simulator": simulator, "sources": sources}
        ledger.add(Record(structures.name, text, "sm_120a", outcome, **common))
    _, drawn, _ = first(1, 0, ["gated-gemm"])[0]
    ledger.add(Record(random.name, drawn, "sm_120a", "crashed", **COMMON))
    listed, other = streams([structures, random], ledger, 0, ["sm_120a"])
    assert other.left == random.goal - 1
    works = mixed([listed, other], 0)
    asked = {(work.stream, work.text) for work in itertools.islice(works, 2)}
    assert asked == {(listed, ""), (other, drawn)} and next(works).text != drawn
    assert listed.take_list(cases) == [old] and next(works).text == bad
    texts = [work.text for work in iter(listed.next, None)]
    assert len(texts) == len(cases) - 2 and bad not in texts and not listed.failed


def test_a_merged_ledger_has_what_ran_later(tmp_path) -> None:
    here, there = Ledger(tmp_path / "here.jsonl"), Ledger(tmp_path / "there.jsonl")
    for case, outcome in (("{}", "failed"), ('{"seed":1}', "passed")):
        here.add(Record("gemv", case, "sm_90a", outcome, **COMMON))
    there.add(Record("gemv", '{"seed":1}', "sm_90a", "passed", **COMMON))
    there.add(Record("gemv", "{}", "sm_90a", "passed", **COMMON))
    assert here.merge(there) == 1 and here.passed(("gemv", "{}", "sm_90a"))
    assert len(Ledger(here.path).records) == 2


def test_a_ledger_is_kept_compressed_and_begun_with(tmp_path, monkeypatch, capsys) -> None:
    mine, kept, begun = (tmp_path / name for name in ("mine.jsonl", "kept.jsonl.xz", "begun.jsonl"))
    for case, outcome in (("{}", "failed"), ("{}", "passed"), ('{"seed":1}', "passed")):
        Ledger(mine).add(Record("gemv", case, "sm_90a", outcome, kernels=("a",), **COMMON))

    def command(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["long", *map(str, words)])
        return main()

    assert command("--resume", mine, "--keep", kept) == 0 and kept.stat().st_size < mine.stat().st_size
    assert command("--resume", begun, "--merge", kept) == 0 and "2 records" in capsys.readouterr().out
    assert Ledger(begun).records == Ledger(kept).records == Ledger(mine).records
    with pytest.raises(SystemExit, match="--merge: no such file"):
        command("--resume", begun, "--merge", tmp_path / "none.xz")
    with pytest.raises(SystemExit, match="compressed; --merge it"):
        command("--resume", kept)
    with pytest.raises(SystemExit, match=r"--keep: .* ends in \.xz"):
        command("--resume", mine, "--keep", begun)
    assert Ledger(begun).records == Ledger(mine).records


def test_a_case_runs_and_is_known_the_next_time() -> None:
    import cute_nvfp4.sim.session  # noqa: F401  where sessions are known, a case asks for one

    text = f'{{"format":"nvfp4","rule":"{quantize_problems.rules("nvfp4")[0]}","rows":2,"k":32}}'
    ended = perform(Task("quantize", text, "sm_90a", 1), slowly=True)
    assert ended.outcome == "passed" and ended.kernels and ended.runs == 1, ended
    assert perform(Task("quantize", text, "sm_90a", 1, ended.kernels)).outcome == "known"
    assert perform(Task("quantize", text, "sm_90a", 1, ("another",) * len(ended.kernels))).outcome == "passed"
    broken = perform(Task("quantize", text.replace('"k":32', '"k":33'), "sm_90a", 1))
    assert broken.outcome == "failed" and "33" in broken.error


def test_recorded_sums_of_floats_are_those_of_the_gpu() -> None:
    """Real numbers by WGMMA, which are compared by their bits and not as results of a function."""
    assert perform(Task("recorded", '{"file":"h200_wgmma.npz","number":26}', "sm_90a", 1)).outcome == "passed"


def test_failures_shrink_to_the_smallest_case() -> None:
    family = FAMILIES["grouped-gemm"]
    case = family.parse('{"sizes":[[3,40,96],[7,64,64],[130,9,32]],"swap":true,"dtype":"float16","seed":9}')
    small = shrunk(case, lambda c: any(m >= 5 and n > 1 for m, n, _ in c.sizes) and c.dtype == "float16")
    assert family.text(small) == '{"sizes":[[5,2,1]],"dtype":"float16"}'


def serve(connection) -> None:
    """A worker that does as it is told."""
    while True:
        task, limit = connection.recv()
        allow(limit)
        if task.case == "die":
            os._exit(3)
        while task.case == "spin":
            pass
        time.sleep(30 if task.case == "sleep" else 0)
        connection.send(Ended("passed", 0.0))


@pytest.mark.slow
def test_workers_that_hang_or_die_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.long.worker.serve", serve)
    monkeypatch.setattr("tests.long.worker.SHARE", 3)
    worker = Worker()
    try:
        outcomes = [worker.run(Task("", case, "", 1), 10).outcome for case in ("fine", "die", "fine")]
        assert worker.run(Task("", "sleep", "", 1), 10, time.monotonic()).outcome == "unfinished"
        assert outcomes == ["passed", "crashed", "passed"]
        ended = [worker.run(Task("", case, "", 1), limit) for case, limit in (("spin", 10.0), ("sleep", 0.5))]
        assert [x.outcome for x in ended] == ["hung", "hung"]
        assert [x.error for x in ended] == ["no end after 10 s of CPU time", "no end after 1.5 s"]
    finally:
        worker.close()


@pytest.mark.parametrize("failures", [1, 4])
def test_a_process_that_cannot_be_started_is_tried_again(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    context, waited = multiprocessing.get_context("forkserver"), []
    start, left = context.Process.start, [OSError("no process left")] * failures

    def refuse(process) -> None:
        if left:
            raise left.pop()
        start(process)

    monkeypatch.setattr("tests.long.worker.serve", serve)
    monkeypatch.setattr("tests.long.worker.time.sleep", waited.append)
    monkeypatch.setattr(context.Process, "start", refuse)
    worker = Worker()
    try:
        if failures > 3:
            with pytest.raises(OSError, match="no process left"):
                worker.run(Task("", "fine", "", 1), 10)
        else:
            assert worker.run(Task("", "fine", "", 1), 10).outcome == "passed"
    finally:
        worker.close()
    assert waited == [1.0, 5.0, 20.0][:failures]


def test_the_ledger_keeps_the_last_of_each_case_and_sums_up(tmp_path) -> None:
    file, page = tmp_path / "ledger.jsonl", tmp_path / "page.md"
    ledger = Ledger(file)
    ledger.add(Record("gemm", "{}", "sm_100a", "failed", error="E: no", smallest='{"m":1}', **COMMON))
    ledger.add(Record("gemm", "{}", "sm_100a", "passed", kernels=("a", "b"), **COMMON))
    ledger.add(Record("gemv", '{"seed":1}', "sm_90a", "hung", **COMMON))
    again = Ledger(file)
    assert again.records == ledger.records and len(again.records) == 2
    assert again.passed(("gemm", "{}", "sm_100a")).kernels == ("a", "b") and not again.passed(("gemv", "", ""))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for kernel, note in (("a", "Race"), ("a", "Race"), ("a", "harmless"), ("b", "Race")):
        case = json.dumps({"kernel": kernel, "kind": "drop", "ordinal": len(again.records)})
        again.add(Record("mutant", case, "sm_90a", "passed", note=note, **COMMON | {"seconds": 0.0}))
    goal = lambda family, arch: 7 if family == "gemm" else None  # noqa: E731
    write(again, page, goal, lambda family, arch: ("s", ""))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| gemm | sm_100a | 1 | 7 | 2 |  | 2 | 1 | 0 | 0 | 0 | `` |" in text and "in 1.00 hours" in text
    assert (
        "| mutants of | run | `Race` | harmless |" in text
        and "| a | 3 | 2 | 1 |" in text
        and "| b | 1 | 1 | 0 |" in text
    )
    assert total("gemm-structure", "sm_120a") > 90 and total("gemv", "sm_90a") == FAMILIES["gemv"].goal
    record = Record("gemm", "{}", "sm_90a", "failed", smallest='{"m":1}', **COMMON)
    assert record.command == "python -m tests.long --case gemm '{\"m\":1}' --arch sm_90a"


def test_only_cases_of_the_present_sources_count(tmp_path) -> None:
    """Those of this simulator and other kernels, and those of earlier simulators, have tables of their own, without a
    goal."""
    ledger, now = Ledger(tmp_path / "ledger.jsonl"), COMMON | {"simulator": "sim", "sources": "new", "seconds": 3600.0}
    for i, (state, outcome) in enumerate(
        (({}, "passed"), ({"sources": "old"}, "failed"), ({"simulator": "o"}, "passed"))
    ):
        ledger.add(Record("gemv", f'{{"seed":{i}}}', "sm_90a", outcome, **now | state))
    ledger.add(Record("quantize", "{}", "sm_90a", "passed", **now | {"sources": "its own"}))
    case = json.dumps({"kernel": "a", "kind": "drop", "ordinal": 0})
    ledger.add(Record("mutant", case, "sm_90a", "passed", note="Race", **now | {"sources": "old"}))
    ledger.add(Record("gemm", "{}", "sm_90a", "gone", **now))
    states = {"quantize": ("sim", "its own")}
    found = summary(ledger, lambda family, arch: 9, lambda family, arch: states.get(family, ("sim", "new")))
    present, _, rest = found.partition("**2 cases ran with this simulator (`sim`)**")
    changed, _, earlier = rest.partition("**1 cases ran with earlier simulators**")
    assert present.startswith("**2 of 5 cases ran on the sources as they are here.** Simulator: `sim`.")
    assert "| gemv | sm_90a | 1 | 9 | 2 |  | 0 | 1 | 0 | 0 | 0 | `new` |" in present and "in 2.00 hours" in present
    assert "| quantize | sm_90a | 1 | 9 | 2 |  | 0 | 1 | 0 | 0 | 0 | `its own` |" in present
    assert "mutants of" not in present and "| a | 1 | 1 |" in changed
    assert "| gemv | sm_90a | 1 |  | 2 |  | 0 | 0 | 1 | 0 | 0 |\n" in changed
    assert "| `o` | 1 | 1 | 0 | 0 | 0 | 2030-01-02 |" in earlier
    assert "| gemv | sm_90a | 1 |  | 2 |  | 0 | 1 | 0 | 0 | 0 |" in earlier
    none = summary(ledger, lambda family, arch: 9, lambda family, arch: ("newer", "new"))
    assert none.startswith("**0 of 5 cases ran on") and "**5 cases ran with earlier simulators**" in none
    assert summary(ledger).startswith("**0 of 5 cases ran on") and "this simulator" not in summary(ledger)
    assert "earlier" not in summary(Ledger(tmp_path / "none.jsonl"))


def test_the_page_says_what_the_committed_ledger_holds() -> None:
    """Whatever the sources are now: of those that the page names, but for how many cases there are of each family."""
    page = PAGE.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    simulator = re.search(r"imulator[^`\n]*`(\w+)`", page)
    rows = re.findall(r"^\| ([\w-]+) \| (sm_\w+) \|.*\| `(\w+)` \|$", page, re.MULTILINE)
    states = {(family, arch): sources for family, arch, sources in rows}
    kept = Ledger(PAGE.parents[2] / "tests" / "data" / "long_run.jsonl.xz")
    goals = re.compile(r"^(\| [\w-]+ \| sm_\w+ \| [\d,]+ \|)[ \d,]*\|", re.MULTILINE)
    present = lambda family, arch: (simulator[1] if simulator else "", states.get((family, arch), ""))  # noqa: E731
    assert goals.sub(r"\1 |", page) == goals.sub(r"\1 |", summary(kept, lambda family, arch: None, present))


def test_the_same_time_for_each_kind_of_cases_the_cheapest_first(tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for name, seconds in (("gemv", (4.0, 1.0, 2.0)), ("quantize", (0.5, 0.25, 0.75))):
        for took in seconds:
            ledger.add(Record(name, f'{{"seed":{took}}}', "sm_90a", "passed", **COMMON | {"seconds": took}))
    simulator, seen = FAMILIES["gemv"].state("sm_90a")[0], '{"seed":9}'
    now = COMMON | {"simulator": simulator, "seconds": 0.1}
    ledger.add(Record("gemv", seen, "sm_90a", "passed", kernels=("k",), **now))
    every = streams([FAMILIES[name] for name in ("gemv", "quantize")], ledger, 0, ["sm_90a"])
    for stream in every:
        stream.left = 0
    works = [(work.stream.family.name, work.seconds) for work in cheapest(every, 0)]
    quantize, gemv = [("quantize", t) for t in (0.25, 0.5, 0.75)], [("gemv", t) for t in (1.0, 2.0, 4.0)]
    assert works == [gemv[0], *quantize, gemv[1], gemv[2], ("gemv", 0.1)]


def test_a_fuzzed_text_differs_in_few_places_and_always_the_same() -> None:
    ptx = fuzzing.subjects.subject("gemm").ptx
    texts = [fuzzing.fuzzed(ptx, seed) for seed in range(30)]
    assert texts == [fuzzing.fuzzed(ptx, seed) for seed in range(30)] and len(set(texts)) > 20
    for text in texts:
        lines = list(itertools.zip_longest(ptx.split("\n"), text.split("\n")))
        assert sum(a != b for a, b in lines) <= 2 or len(text) > len(ptx)


def test_what_the_simulator_says_of_fuzzed_text_is_fine_and_its_own_errors_are_not(monkeypatch) -> None:
    class Subject:
        ptx = "  add.s32 %r1, %r2, 3;\n"

        def run(self, ptx: str, **_: object) -> None:
            raise error

    monkeypatch.setattr(fuzzing.subjects, "subject", lambda name: Subject())
    error: Exception = CuteNvfp4Error("a hazard")
    fuzzing.run(fuzzing.FuzzCase("gemm", 1))
    error = IndexError("index 7 is out of bounds")
    with pytest.raises(IndexError):
        fuzzing.run(fuzzing.FuzzCase("gemm", 1))

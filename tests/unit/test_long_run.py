"""The runner of ``tests.long``: its order, its ledger, its shrinking, and workers that hang or die."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import quantize_problems

from cute_nvfp4.errors import CuteNvfp4Error
from tests.long import fuzzing
from tests.long.__main__ import work
from tests.long.families import FAMILIES
from tests.long.ledger import BEGIN, END, Ledger, Record
from tests.long.shrink import shrunk
from tests.long.worker import Ended, Task, Worker, allow, perform


def test_the_order_is_random_and_reproducible() -> None:
    def first(seed: int, only: list[str]) -> list[tuple[str, str, str]]:
        return [(family.name, text, arch) for family, text, arch in itertools.islice(work(seed, only), 12)]

    assert first(1, []) == first(1, []) != first(2, [])
    assert {name for name, _, _ in first(1, ["gemv"])} == {"gemv"}


@pytest.mark.parametrize("name", FAMILIES)
def test_cases_are_plain_data(name: str) -> None:
    for family, text, _ in itertools.islice(work(3, [name]), 3):
        assert family.text(family.parse(text)) == text


def test_a_case_runs_and_is_known_the_next_time() -> None:
    text = f'{{"format":"nvfp4","rule":"{quantize_problems.rules("nvfp4")[0]}","rows":2,"k":32}}'
    ended = perform(Task("quantize", text, "sm_90a", 1))
    assert ended.outcome == "passed" and ended.kernels and ended.runs == 1, ended
    assert perform(Task("quantize", text, "sm_90a", 1, ended.kernels)).outcome == "known"
    assert perform(Task("quantize", text, "sm_90a", 1, ("another",) * len(ended.kernels))).outcome == "passed"
    broken = perform(Task("quantize", text.replace('"k":32', '"k":33'), "sm_90a", 1))
    assert broken.outcome == "failed" and "33" in broken.error


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
        assert outcomes == ["passed", "crashed", "passed"]
        ended = [worker.run(Task("", case, "", 1), limit) for case, limit in (("spin", 10.0), ("sleep", 0.5))]
        assert [x.outcome for x in ended] == ["hung", "hung"]
        assert [x.error for x in ended] == ["no end after 10 s of CPU time", "no end after 1.5 s"]
    finally:
        worker.close()


def test_the_ledger_keeps_the_last_of_each_case_and_sums_up(tmp_path) -> None:
    file, page = tmp_path / "ledger.jsonl", tmp_path / "page.md"
    common = {"seconds": 1800.0, "day": "2030-01-02", "commit": "c", "simulator": "s", "runs": 2}
    ledger = Ledger(file)
    ledger.add(Record("gemm", "{}", "sm_100a", "failed", error="E: no", smallest='{"m":1}', **common))
    ledger.add(Record("gemm", "{}", "sm_100a", "passed", kernels=("a", "b"), **common))
    ledger.add(Record("gemv", '{"seed":1}', "sm_90a", "hung", **common))
    again = Ledger(file)
    assert again.records == ledger.records and len(again.records) == 2
    assert again.passed(("gemm", "{}", "sm_100a")).kernels == ("a", "b") and not again.passed(("gemv", "", ""))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    again.write(page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| gemm | 1 | 2 | 2 | 1 | 0 | 0 | 0 |" in text and "in 1.00 hours" in text
    record = Record("gemm", "{}", "sm_90a", "failed", smallest='{"m":1}', **common)
    assert record.command == "python -m tests.long --case gemm '{\"m\":1}' --arch sm_90a"


def test_a_fuzzed_text_differs_in_few_places_and_always_the_same() -> None:
    ptx = fuzzing.subject("gemm").ptx
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

    monkeypatch.setattr(fuzzing, "subject", lambda name: Subject())
    error: Exception = CuteNvfp4Error("a hazard")
    fuzzing.run(fuzzing.FuzzCase("gemm", 1))
    error = IndexError("index 7 is out of bounds")
    with pytest.raises(IndexError):
        fuzzing.run(fuzzing.FuzzCase("gemm", 1))

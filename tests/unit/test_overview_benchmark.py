"""What ``benchmarks/overview.py`` does without a GPU: its rows on small CPU tensors, its limit, and README's table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gemm
import generate
import moe
import overview
import quantize
import tables
from between_torch import Between
from common import Captured
from gemm_contestants import Problem
from gemm_shapes import Shape
from generate_model import TINY, models

CLOCK = overview.Clock(3, lambda: None)


class Replayed:
    """Stands for a CUDA graph: a replay calls again, and writes where the first call did."""

    def __init__(self, call: overview.Call) -> None:
        self.call, self.result = call, call()

    def replay(self) -> None:
        for old, new in zip(self.result, self.call()):
            old.copy_(new)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(call: overview.Call) -> Captured:
        graph = Replayed(call)
        return Captured(graph, graph.result, call)

    random = Problem.random
    monkeypatch.setattr(Problem, "random", lambda shape: random(shape, "cpu"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(quantize, "check", lambda x, options: None)
    for module in (gemm, overview):
        monkeypatch.setattr(module, "capture", capture)
        monkeypatch.setattr(
            module, "take_turns", lambda calls, rounds, clear: {name: [2.0, 1.0, 3.0] for name in calls}
        )


def test_rows_on_small_tensors(on_cpu: None) -> None:
    """Every kind of row calls what it is to time; products are checked, and quack, which is not here, has a note."""
    layer = replace(moe.LAYERS[0], experts=4, top=2, hidden=64, inner=32)
    kinds: list[Iterator[overview.Row]] = [
        overview.vectors((128, 256, 2), CLOCK, "cpu"),
        overview.products(Shape("dense", (3,), 128, 256), CLOCK),
        overview.products(Shape("grouped", (5, 2), 128, 256), CLOCK),
        overview.quantization("four_six_mse", 64, CLOCK, "cpu"),
    ]
    found = [row for kind in kinds for row in kind]
    assert [row.call for row in found] == [
        "`gemv` 128 × 256, 2 matrices",
        "`gemm` 3 × 128 × 256, bf16 rows",
        "`gemm` 3 × 128 × 256, rows quantized to E4M3 in the call",
        "`grouped_gemm` 2 groups of 2 to 5 rows, 128 × 256, bf16 rows",
        "`grouped_gemm_contiguous` 2 groups of 2 to 5 rows, 128 × 256, rows quantized to E4M3 in the call",
        "`quantize` 64 × 64 bf16, rule `four_six_mse`",
    ]
    for row in found:
        assert row.us["ours"] == row.us["peer"] == 2.0 and row.peer in overview.PEER, row
    assert "quack" in found[1].us or found[1].notes["quack"].startswith("not available")
    assert moe.Weights(layer, "cpu", quantized=False).experts is not None


def test_a_model_decodes_and_reads(on_cpu: None) -> None:
    with torch.inference_mode():
        made = models(TINY, ["w4a16"], "cpu", Between())["w4a16"]
        assert overview.decoding(made, 3, 16, "cpu")().shape == (3, TINY.vocabulary)
        assert overview.prompt(made, 9, "cpu")().shape == (1, TINY.vocabulary)
    assert generate.LLAMA_8B.layers == 32


def test_rows_of_a_model(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def uncompiled(mixture: bool) -> tuple[Between, str]:
        return Between(), "eager"

    monkeypatch.setattr(generate, "compiled_between", uncompiled)
    found = list(overview.model(CLOCK, TINY._replace(vocabulary=overview.PROMPT), "cpu"))
    assert [row.call for row in found] == [
        "tiny's shape, uncompiled, a step of decoding, batch 1",
        "tiny's shape, uncompiled, a step of decoding, batch 16",
        "tiny's shape, uncompiled, a prompt of 2048 tokens",
    ]
    assert all(row.us == {"ours": 2.0, "peer": 2.0} for row in found)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict:
    """A record of three kinds of rows: one that works, one that fails, and one that comes too late."""

    def works(clock: overview.Clock) -> Iterator[overview.Row]:
        yield overview.Row("`gemm` a", "cublas", {"ours": 5.0, "peer": 20.0, "quack": 8.0})

    def fails(clock: overview.Clock) -> Iterator[overview.Row]:
        raise RuntimeError("broken\nand more")
        yield

    monkeypatch.setattr(overview, "rows", lambda: {"works": works, "fails": fails})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    about = {"gpu": "NVIDIA H200", "date": "2026-01-02", "driver": "1", "versions": {"torch": "9", "cuda": "13.0"}}
    record = about | {"timing": "medians", "seconds": {}, "rows": []}
    overview.measure(CLOCK, ["works", "fails"], 100.0, record, tmp_path / "overview.json")
    return record


def test_a_failing_row_costs_its_own_line_only(record: dict, tmp_path: Path) -> None:
    assert [row["call"] for row in record["rows"]] == ["`gemm` a"] and (tmp_path / "overview.json").exists()
    assert record["missing"] == ["fails: RuntimeError: broken"]
    late = record | {"rows": [], "seconds": {}}
    assert overview.measure(CLOCK, ["works"], -1.0, late, tmp_path / "late.json") == ["works: left out, 0 s had passed"]
    assert "4.00 ×" in overview.table(record) and "fails: RuntimeError" in overview.table(record)


def test_a_record_goes_on(record: dict, tmp_path: Path) -> None:
    """Rows that are measured again take the place of the old ones; another machine or day is refused."""
    about = {name: record[name] for name in ("gpu", "date", "driver", "versions")}
    again = overview.begun(about, tmp_path / "overview.json")
    overview.keep(again, {"call": "`gemm` a", "us": {"ours": 4.0}})
    overview.keep(again, {"call": "`gemm` b", "us": {}})
    assert [(row["call"], row["us"].get("ours")) for row in again["rows"]] == [("`gemm` a", 4.0), ("`gemm` b", None)]
    with pytest.raises(SystemExit, match="got date 2026-01-02, expected this machine's 2026-01-03"):
        overview.begun(about | {"date": "2026-01-03"}, tmp_path / "overview.json")


def test_reasons_have_words() -> None:
    error = RuntimeError("\n  no tile fits\nmore")
    error.__cause__ = ImportError("no module")
    assert gemm.reason_of(error) == "RuntimeError: no tile fits; from ImportError: no module"


def test_two_gpus_stand_side_by_side(record: dict) -> None:
    """A row that one of them lacks has empty cells there; each has its machine and date above."""
    other = record | {"gpu": "NVIDIA H100 80GB HBM3", "date": "2026-01-03"}
    other["rows"] = [*record["rows"], {"call": "`moe` b", "peer": "grouped_mm", "us": {"ours": 2.0, "peer": 3.0}}]
    text = tables.side_by_side([record, other])
    assert "H200: NVIDIA H200, 2026-01-02" in text and "H100: NVIDIA H100 80GB HBM3, 2026-01-03" in text
    assert "| `gemm` a | cuBLAS bf16 | 5.0 | 20.0 | 4.00 | 8.0 | 5.0 | 20.0 | 4.00 | 8.0 |" in text
    assert "| `moe` b | torch `_grouped_mm`, bf16 |  |  |  |  | 2.0 | 3.0 | 1.50 |  |" in text

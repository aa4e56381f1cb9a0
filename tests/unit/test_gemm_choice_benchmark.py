"""``benchmarks/gemm_choice.py``: what is drawn, what a row says, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gemm_choice as benchmark

from cute_nvfp4.planning.packed import candidates
from cute_nvfp4.planning.tuning import Timed
from cute_nvfp4.target import ARCHITECTURES

HOPPER = ARCHITECTURES["sm_90a"]


def test_problems_are_drawn_again() -> None:
    first, again, other = (list(benchmark.problems(40, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(p.n % 16 == p.k % 16 == 0 and 512 <= min(p.n, p.k) and max(p.n, p.k) <= 16384 for p in first)
    assert min(p.m for p in first) < 4 and max(p.m for p in first) > 2000
    assert all(candidates(p, HOPPER, 132) for p in first)
    (given,) = benchmark.problems(40, 1, True, ["3,64,128"])
    assert (given.m, given.n, given.k, given.dtype, given.quantized) == (3, 64, 128, "float16", True)


@pytest.fixture
def record() -> dict:
    (problem,) = benchmark.problems(1, 1, sizes=["40,4096,4096"])
    plans = candidates(problem, HOPPER, 132)
    timed = [Timed(plan, 10.0 + i, 9.0, 5) for i, plan in enumerate(plans[:4])] + [Timed(plans[4], error="it hangs")]
    return {
        **{"gpu": "a GPU", "date": "today", "seed": 1, "activations": "bfloat16"},
        "rows": [benchmark.row(problem, timed, chosen, 132) for chosen in plans[:2]],
    }


def test_a_row_says_what_the_choice_loses(record: dict) -> None:
    first, second = record["rows"]
    assert (first["loss"], second["loss"]) == (0.0, 0.1)
    assert [plan["chosen"] for plan in second["plans"]] == [False, True, False, False, False]
    assert first["plans"][4]["error"] == "it hangs" and first["plans"][0]["model_us"] > 5


def test_the_table_and_the_exit_code(record: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record))
    assert benchmark.main(["--from", str(file)]) == 1
    text = capsys.readouterr().out
    assert "1 of 2 within 5 %; mean 5.0 %, worst 10.0 %; 2 plans failed" in text and text.count("fastest: ") == 1
    assert benchmark.main(["--from", str(file), "--limit", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record

"""What ``benchmarks/gemm.py`` does without a GPU: shapes, floors, what becomes of contestants, table and plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gemm as benchmark
import gemm_report as report
from common import Captured
from gemm_contestants import OURS, PEERS, Contestant, NotAvailableError, Problem
from gemm_shapes import MEASURED, MODELS, SETS, Ceilings, Shape, floor_us

from cute_nvfp4 import BlockScaledTensor, quantize
from cute_nvfp4.formats import MXFP4, NVFP4
from cute_nvfp4.harness.problem import get_problem
from cute_nvfp4.harness.schema import load_task

DENSE, GATED = Shape("dense", (1,), 128, 256), Shape("gated", (3,), 128, 256)
GROUPED = Shape("grouped", (5, 2), 128, 256)


@pytest.mark.parametrize(
    "shape,us",
    [
        (Shape("dense", (1,), 8192, 8192), 11.9),
        (Shape("dense", (8192,), 8192, 8192), 1395),
        (Shape("dense", (128,), 7168, 16384), 41),
        (Shape("gated", (256,), 3072, 4096), 19.3),
        (Shape("grouped", (192, 320), 3072, 4096), 19.3),
    ],
)
def test_floors_on_an_h200(shape: Shape, us: float) -> None:
    assert floor_us(shape, MEASURED["H200"]) == pytest.approx(us, rel=5e-3)


def test_a_floor_reads_weights_and_scales_of_every_group_once() -> None:
    bytes_only = Ceilings(1e6, float("inf"), 0.0)
    assert floor_us(GROUPED, bytes_only) == 2 * 128 * (128 + 16)
    assert floor_us(GATED, bytes_only) == 2 * 128 * (128 + 16)


@pytest.mark.parametrize(
    "name,problem", [("contest", "nvfp4_gemm"), ("gated", "nvfp4_dual_gemm"), ("grouped", "nvfp4_group_gemm")]
)
def test_shapes_of_the_contest(name: str, problem: str) -> None:
    for shape, case in zip(SETS[name], load_task(get_problem(problem).folder / "task.yml").benchmarks, strict=True):
        m, n, k = (case[x] if isinstance(case[x], list) else [case[x]] for x in "mnk")
        assert (list(shape.m), {shape.n}, {shape.k}) == (m, set(n), set(k))


@pytest.mark.parametrize(
    "name,layers,vocabulary,billions",
    [
        ("Llama-3.1-8B", 32, 128256, 8.03),
        ("Llama-3.1-70B", 80, 128256, 70.55),
        ("Qwen3-8B", 36, 151936, 8.19),
        ("Qwen3-32B", 64, 151936, 32.76),
    ],
)
def test_layers_have_as_many_parameters_as_the_model(name: str, layers: int, vocabulary: int, billions: float) -> None:
    """With the embedding and the head, which are not shared: the published count."""
    model = MODELS[name]
    count = layers * sum(n * k for _, n, k in model.layers()) + 2 * vocabulary * model.hidden
    assert count / 1e9 == pytest.approx(billions, abs=0.006)


class Replayed:
    """Stands for a CUDA graph: a replay calls again, and writes where the first call did."""

    def __init__(self, call) -> None:
        self.call, self.result = call, call()

    def replay(self) -> None:
        for old, new in zip(self.result, self.call()):
            old.copy_(new)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(call) -> Captured:
        graph = Replayed(call)
        return Captured(graph, graph.result, call)

    random = Problem.random
    monkeypatch.setattr(Problem, "random", lambda shape: random(shape, "cpu"))
    monkeypatch.setattr(benchmark, "capture", capture)
    monkeypatch.setattr(benchmark, "take_turns", lambda calls, rounds, clear: {name: [2.0, 1.0, 3.0] for name in calls})


def measured(shape: Shape, *contestants: Contestant) -> dict:
    return benchmark.measure(shape, contestants, 3, None, MEASURED["H200"])


@pytest.mark.parametrize("shape", [DENSE, GATED, GROUPED], ids=lambda shape: shape.problem)
def test_contestants(shape: Shape, on_cpu: None) -> None:
    """On CPU tensors this package multiplies by exact torch; what a peer lacks is a note, and nothing fails."""
    found = measured(shape, *PEERS, *OURS)["results"]
    assert {result["status"] for result in found.values()} <= {"timed", "not available"}, found
    assert found["w4a4-plain"]["status"] == "timed"
    assert ("gemv" in found) == (shape is DENSE) and ("grouped_mm" in found) == (shape is GROUPED)
    if shape is not GATED:  # the peers' silu · mul is a Triton kernel
        assert found["cublas"] == found["cublas"] | {"status": "timed", "median_us": 2.0}


def product(problem: Problem) -> list[torch.Tensor]:
    return [x @ weight.t() for x, weight in zip(problem.x, problem.dense)]


def one_element_off(results: list[torch.Tensor]) -> list[torch.Tensor]:
    results[-1][-1, -1] += 3 * results[-1].abs().max()
    return results


def test_what_is_not_the_product_is_not_timed(on_cpu: None) -> None:
    def refuse(problem: Problem) -> list:
        raise NotAvailableError("no kernel")

    def fail() -> list:
        raise RuntimeError("broken\nand more")

    def keep(problem: Problem) -> list:
        kept = product(problem)
        return [lambda: kept]

    found = measured(
        GROUPED,
        Contestant("right", "", "bf16", lambda p: [lambda: product(p)]),
        Contestant("off", "", "bf16", lambda p: [lambda: one_element_off(product(p))]),
        Contestant("other operands", "", "nvfp4", lambda p: [lambda: product(p)]),
        Contestant("unwritten", "", "bf16", keep),
        Contestant("absent", "", "bf16", refuse),
        Contestant("failing", "", "bf16", lambda p: [fail]),
    )["results"]
    assert {name: result["status"] for name, result in found.items()} == {
        "right": "timed",
        "off": "wrong",
        "other operands": "wrong",
        "unwritten": "wrong",
        "absent": "not available",
        "failing": "failed",
    }
    assert found["failing"]["reason"] == "RuntimeError: broken" and found["absent"]["reason"] == "no kernel"


@pytest.fixture
def record() -> dict:
    def timed(us: float) -> dict:
        return {"status": "timed", "median_us": us, "p10_us": us - 0.1, "p90_us": us + 0.1}

    def row(m: int, **results: dict) -> dict:
        shape = Shape("dense", (m,), 64, 128, "layer")
        return {"m": [m], "n": 64, "k": 128, "text": str(shape), "name": "layer", "floor_us": 4.0, "results": results}

    absent = {"status": "not available", "reason": "no kernel"}
    rows = [
        row(1, cublas=timed(10.0), quack=timed(8.0), w4a16=timed(5.0), w4a4=absent),
        row(2, cublas=timed(10.0), grouped_mm=timed(6.0), w4a16=timed(4.0), w4a4=absent, quack=absent),
    ]
    about = {"date": "2026-01-02", "driver": "1.2", "versions": {"torch": "9"}, "rows": rows}
    ceilings = {"ceilings": MEASURED["H200"]._asdict()}
    found = {"gpu": "Some GPU", "sets": {"m-sweep": about | ceilings, "contest": about | ceilings}}
    return json.loads(json.dumps(found))


def test_table(record: dict) -> None:
    """× is over the faster product in bf16; each reason stands once."""
    lines = report.table(record).splitlines()
    first, second = (line for line in lines[:6] if line.lstrip().startswith(("1, 64", "2, 64")))
    assert "5.0 ±2%" in first and first.split()[-4:] == ["2.00", "–", "1.25", "layer"]
    assert second.split()[-4:] == ["1.50", "–", "–", "layer"]
    assert "w4a4: not available: no kernel (2 shapes)" in lines


def test_plot(record: dict, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert benchmark.main(["--from", str(path), "--plot"]) == 0
    assert path.with_suffix(".svg").read_text().count('<g id="axes_') == 2


def test_what_is_wrong_is_in_the_exit_code(record: dict, tmp_path: Path) -> None:
    record["sets"]["contest"]["rows"][0]["results"]["quack"] = {"status": "wrong", "reason": "x"}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert benchmark.main(["--from", str(path)]) == 1
    assert benchmark.main(["--from", str(path), "--shapes", "m-sweep"]) == 0


def test_dry_run() -> None:
    """In a process of its own: needs neither a GPU nor Triton."""
    command = [sys.executable, benchmark.__file__, "--dry-run", "--shapes", "m-sweep", "gated"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2 + 12 + 4
    assert (
        "1, 8192, 8192  floor    11.9 µs  cublas, quack, triton, humming, humming-w4a8, w4a16" in lines[1]
        and "gemv" in lines[1]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([])
    assert "--dry-run" in capsys.readouterr().err


class StubLayer:
    """What of Humming's layer the benchmark calls, by exact torch: of the tensors that checkpoints of a form have."""

    def __init__(self, n: int, k: int, rule: dict, rows: dict | None, num_experts: int = 0, torch_dtype=None) -> None:
        assert (rule["quant_method"], rows is None) in (("modelopt", True), ("mxfp4", False))
        self.rows, self.block = rows, 16 if rows is None else 32
        self.batch, self.n, self.k, self.dtype = [num_experts] * (num_experts > 0), n, k, torch_dtype
        self.weight_scale_2 = torch.zeros(max(num_experts, 1), 1)

    def to(self, device: object) -> StubLayer:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        shapes = {name: list(x.shape) for name, x in tensors.items()}
        assert shapes["weight"] == [*self.batch, self.n, self.k // 2]
        assert shapes["weight_scale"] == [*self.batch, self.n, self.k // self.block]
        assert self.rows or (tensors["weight_scale_2"] == 1).all()
        form, scale = MXFP4 if self.rows else NVFP4, tensors["weight_scale"]
        self.weight = BlockScaledTensor(tensors["weight"], scale.view(torch.uint8), None, form).dequantize()

    def transform(self) -> None:
        pass

    def __call__(self, x: torch.Tensor, expert_layout=None, compute_config=None) -> torch.Tensor:
        values = (quantize(x, "fp8_e4m3").dequantize() if self.rows else x).float()
        if expert_layout is None:
            return (values @ self.weight.t()).to(self.dtype)
        assert compute_config == {"gemm_type": "grouped_contiguous"} and expert_layout.dtype is torch.int64
        parts = values.split(expert_layout.diff().tolist())
        return torch.cat([part @ w.t() for part, w in zip(parts, self.weight, strict=True)]).to(self.dtype)


@pytest.mark.parametrize("shape", [DENSE, GROUPED], ids=lambda shape: shape.problem)
def test_humming_gets_what_checkpoints_have(shape: Shape, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    module = ModuleType("humming.layer")
    module.HummingLayer = StubLayer
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    found = measured(shape, *(peer for peer in PEERS if peer.name.startswith("humming")))["results"]
    assert {name: x["status"] for name, x in found.items()} == {"humming": "timed", "humming-w4a8": "timed"}, found


def test_humming_is_not_needed(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    (found,) = measured(DENSE, *(peer for peer in PEERS if peer.name == "humming"))["results"].values()
    assert found["status"] == "not available" and "humming" in found["reason"]

"""``cute-nvfp4 tune``: timing in turn, what is stored, and what it says where nothing can be timed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cute_nvfp4.cli import tune as command
from cute_nvfp4.cli.main import app
from cute_nvfp4.formats import FORMATS
from cute_nvfp4.harness import tuning
from cute_nvfp4.harness.tuning import checked_call, operands, product
from cute_nvfp4.planning import gemm_table, packed
from cute_nvfp4.planning.gemm import GemmProblem, candidates, choose
from cute_nvfp4.planning.packed_problem import PackedProblem
from cute_nvfp4.planning.tuning import Timed, time_plans
from cute_nvfp4.sim.clock.tools import found
from cute_nvfp4.target import ARCHITECTURES
from cute_nvfp4.weight_packing import packing_of

needs_ptxas = pytest.mark.skipif(not (found("ptxas") and found("nvdisasm")), reason="no ptxas, or no nvdisasm")
ARCH = ARCHITECTURES["sm_100a"]
SIZES = ("--m", "128", "--n", "4096", "--k", "7168")
PROBLEM = GemmProblem(128, 4096, 7168)


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "gemm.json"
    monkeypatch.setenv(gemm_table.TABLE_VARIABLE, str(file))
    return file


def run(*arguments: str):
    return CliRunner().invoke(app, ["tune", *arguments])


class Clock:
    """A timer of made-up calls: each has a time of its own and slows down, all alike, as the run goes on."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.order, self.turn = times, [], 0

    def prepare(self, plan: str):
        if plan not in self.times:
            raise RuntimeError("it does not compile")
        return lambda: plan

    def __call__(self, call) -> float:
        plan = call()
        self.order.append(plan)
        self.turn += 1
        return 1e3 * self.times[plan] * (1 + self.turn / 1000)


def test_plans_are_timed_in_turn() -> None:
    clock = Clock({"a": 10.0, "b": 9.9, "slow": 20.0})
    told: list[tuple] = []
    found = time_plans(
        ["a", "b", "broken", "slow"], clock.prepare, clock, rounds=20, progress=lambda *what: told.append(what)
    )
    assert [t.plan for t in found] == ["b", "a", "slow", "broken"]
    assert [t.runs for t in found] == [20, 20, 5, 0]
    assert found[3] == Timed("broken", error="RuntimeError: it does not compile")
    assert found[0].best_us < found[0].us < found[1].us
    # there and back, so that nobody is always first
    assert clock.order[:6] == ["a", "b", "slow", "slow", "b", "a"]
    assert clock.order.count("a") == clock.order.count("b") == 20
    assert told[0] == ("compiling and checking", 0, 4) and told[-1] == ("timing 2 of 3 plans", 19, 20)


def test_nothing_runs() -> None:
    clock = Clock({})
    assert [t.error for t in time_plans(["x"], clock.prepare, clock)] == ["RuntimeError: it does not compile"]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_wrong_results_are_not_timed(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = GemmProblem(5, 7, 64, batch=2, a_format=fmt, b_format=fmt, out_major="m")
    a, b = operands(problem, "cpu")
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).mT
    assert torch.allclose(product(a, b).double(), exact, rtol=1e-5, atol=1e-4)
    assert exact.isfinite().all() and exact.abs().max() > 1
    seen = []

    def gemm(a, b, *, out, config):
        seen.append(config)
        assert out.shape == (2, 5, 7) and out.stride(-2) == 1
        out.copy_(exact.to(out.dtype))

    monkeypatch.setattr(tuning, "gemm", gemm)
    call = checked_call(problem, "a plan", a, b, exact)
    call()
    assert seen == ["a plan"] * 2

    def wrong(a, b, *, out, config):
        gemm(a, b, out=out, config=config)
        out[1, 4, 6] += 0.01 * exact.abs().max()

    def lazy(a, b, *, out, config):
        out[:, :4] = exact[:, :4].to(out.dtype)

    for bad in (wrong, lazy):
        monkeypatch.setattr(tuning, "gemm", bad)
        with pytest.raises(ValueError, match="wrong result"):
            checked_call(problem, "a plan", a, b, exact)


@needs_ptxas
def test_plans_by_the_clock(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: plans are executed, timed by the simulator's clock, and the fastest stored as a modelled one."""
    problem, plans = GemmProblem(64, 64, 512), candidates(GemmProblem(64, 64, 512), ARCH, 148)[:2]
    result = run("--m", "64", "--n", "64", "--k", "512", "--clock", "b200", "--top", "2", "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["problems"]
    assert found["clock"] == "b200" and "modelled" in found["timing"] and not any("error" in r for r in found["plans"])
    assert {row["plan"] for row in found["plans"]} == set(map(str, plans))
    assert 0 < found["plans"][0]["us"] <= found["plans"][1]["us"]
    (entry,) = gemm_table.entries()
    assert "modelled" in entry.note and entry.us == pytest.approx(found["plans"][0]["us"], abs=1e-3)
    assert str(choose(problem, ARCH, 148)) == found["plans"][0]["plan"]
    monkeypatch.setattr(tuning, "product", lambda a, b: torch.ones(1, 64, 64))
    assert all("wrong result" in t.error for t in tuning.by_clock(problem, plans[:1], "b200", 148))
    assert run(*SIZES, "--clock", "b200", "--model").exit_code == 2
    assert "expected one of" in run(*SIZES, "--clock", "b300").output


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A B200 on which the model's third plan is fastest and its first does not run."""

    def measure(problem, plans, *, rounds, progress):
        progress("timing", 1, rounds)
        times = {plan: 1e3 * (10 + index) for index, plan in enumerate(plans)} | {plans[2]: 5e3}
        return time_plans(
            plans,
            lambda plan: 1 / 0 if plan == plans[0] else lambda: plan,
            lambda call: times[call()],
            rounds=rounds,
        )

    monkeypatch.setattr(command, "_gpu", lambda: command._Device(ARCH, 148, "NVIDIA B200"))
    monkeypatch.setattr(tuning, "measure", measure)


def test_the_winner_is_stored_and_chosen(gpu: None, table: Path) -> None:
    plans = candidates(PROBLEM, ARCH, 148)
    result = run(*SIZES, "--top", "5", "--rounds", "7", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["kind"] == "measured"
    (found,) = record["problems"]
    assert found["device"] == "NVIDIA B200" and found["stored"] == str(table) and "L2 cold" in found["timing"]
    rows = found["plans"]
    assert [row["plan"] for row in rows] == [str(plans[i]) for i in (2, 1, 3, 4, 0)]
    assert rows[0]["us"] == 5.0 and rows[0]["runs"] == 7 and "ZeroDivisionError" in rows[-1]["error"]
    assert all(row["model_us"] > 2 for row in rows)
    (entry,) = gemm_table.entries()
    assert (entry.plan, entry.us, entry.device) == (plans[2], 5.0, "NVIDIA B200")
    assert "7 calls" in entry.note
    assert choose(PROBLEM, ARCH, 148) == plans[2] != plans[0]


HOPPER = command._Device(ARCHITECTURES["sm_90a"], 132, "NVIDIA H200")


@pytest.mark.parametrize(
    ("m", "x", "format"), [(5, "nvfp4", "nvfp4"), (20, "bfloat16", "mxfp4"), (100, "bfloat16", "mxfp8")]
)
def test_a_prepared_weights_plan_is_stored_and_chosen(
    m: int, x: str, format: str, gpu: None, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_gpu", lambda: HOPPER)
    result = run("--m", str(m), "--n", "4096", "--k", "7168", "--x", x, "--format", format, "--json")
    assert result.exit_code == 0, result.output
    dtype = "float16" if x == "nvfp4" else x
    problem = PackedProblem(
        m=m, n=4096, k=7168, dtype=dtype, out=dtype, quantized=x == "nvfp4", packing=packing_of(FORMATS[format])
    )
    plans = packed.candidates(problem, HOPPER.arch, 132)
    (found,) = json.loads(result.stdout)["problems"]
    assert found["problem"] == dataclasses.asdict(problem) and found["plans"][0]["us"] == 5.0
    assert found["plans"][0]["plan"] == str(plans[2])
    chosen = lambda p: packed.choose(p, HOPPER.arch, 132)  # noqa: E731
    assert chosen(problem) == plans[2] != packed.choose(problem, HOPPER.arch, 131)
    # a gated product of half the columns is tiled alike, one with another dtype of x is not
    gated = dataclasses.replace(problem, n=2048, gate="silu", factors=1)
    assert chosen(gated).tiling == plans[2].tiling and chosen(gated).config.gate == "silu"
    other = "bfloat16" if dtype == "float16" else "float16"
    assert chosen(dataclasses.replace(problem, dtype=other, quantized=False)) != plans[2]
    # of both families, in one file
    run(*SIZES, "--x", x)
    raw = json.loads(table.read_text())
    for change, message in (
        ({"kernel": "mma"}, "kernel is 'mma'"),
        ({"workers": 0}, "at least 1"),
        ({"split_k": 2, "cluster_rows": 2}, r"schedule: got|unknown \['cluster_rows', 'split_k'\]"),
    ):
        entry = {**raw["entries"][0], "plan": {**raw["entries"][0]["plan"], **change}}
        table.write_text(json.dumps({**raw, "entries": [entry]}))
        with pytest.raises(gemm_table.TableError, match=message):
            gemm_table.entries()
    plan = {name: value for name, value in raw["entries"][0]["plan"].items() if name != "overlap"}
    table.write_text(json.dumps({**raw, "entries": [{**raw["entries"][0], "plan": plan}]}))  # of an earlier version
    assert len(gemm_table.entries()) == 1


@pytest.mark.parametrize("packing", ["nvfp4", "mxfp4_near", "mxfp8_e5m2"])
def test_results_of_prepared_weights_are_checked(packing: str) -> None:
    problem = PackedProblem(m=5, n=48, k=288, packing=packing)
    x, weight = operands(problem, "cpu")
    assert (x.shape, weight.rows, weight.dtype, weight.packing) == ((5, 288), 48, torch.bfloat16, packing)
    exact = x.double() @ weight.dequantize(torch.float64).mT
    assert torch.allclose(product(x, weight).double(), exact, rtol=2**-8, atol=1e-3) and exact.abs().max() > 1
    checked_call(problem, None, x, weight, exact)()
    with pytest.raises(ValueError, match="wrong result"):
        checked_call(problem, None, x, weight, exact + 0.02 * exact.abs().max())


def test_measured_and_modelled_have_columns_of_their_own(gpu: None) -> None:
    text = run(*SIZES, "--top", "3").output
    assert "measured on NVIDIA B200" in text and "measured us" in text and "model us" in text
    assert "ZeroDivisionError" in text


def test_no_plan_runs(gpu: None, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure", lambda problem, plans, **_: [Timed(p, error="no") for p in plans])
    result = run(*SIZES)
    assert result.exit_code == 1 and "none of 24 plans could run" in result.output
    assert not table.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a CUDA device")
def test_without_a_gpu(table: Path) -> None:
    result = run(*SIZES)
    assert result.exit_code == 2
    assert "this machine has no CUDA device" in result.output and "--model" in result.output
    assert not table.exists()


def test_on_a_gpu_without_plans(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_nvfp4.runtime import backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX PRO 6000")
    monkeypatch.setattr(backend, "_device_architecture", lambda *_: ARCHITECTURES["sm_120a"])
    backend._resolve.cache_clear()
    result = run(*SIZES)
    backend._resolve.cache_clear()
    assert result.exit_code == 2 and not table.exists()
    assert "cannot time kernels on NVIDIA RTX PRO 6000 (sm_120a): expected sm_90a" in result.output


def test_the_model_ranks_and_stores_nothing(table: Path, tmp_path: Path) -> None:
    file = tmp_path / "ranking.json"
    result = run(*SIZES, "--model", "--top", "3", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "model of a B200, not measured" in result.output
    record = json.loads(file.read_text())
    assert record["kind"] == "model" and not table.exists()
    (found,) = record["problems"]
    plans = candidates(PROBLEM, ARCH, 148)
    assert [row["plan"] for row in found["plans"]] == [str(plan) for plan in plans[:3]]
    assert "us" not in found["plans"][0] and found["speed_of_light_us"] == 2.354
    everything = json.loads(run(*SIZES, "--model", "--top", "0", "--json").stdout)
    assert len(everything["problems"][0]["plans"]) == len(plans)


def test_output_and_formats_reach_the_problem() -> None:
    arguments = ("--m", "64", "--n", "100", "--k", "256", "--l", "2", "--format", "mxfp8", "--out", "float32")
    record = json.loads(run(*arguments, "--out-major", "m", "--model", "--json").stdout)
    problem = GemmProblem(64, 100, 256, 2, a_format="mxfp8", b_format="mxfp8", out="float32", out_major="m")
    assert record["problems"][0]["problem"] == dataclasses.asdict(problem)
    record = json.loads(run("--m", "64", "--n", "100", "--k", "256", "--model", "--json").stdout)
    assert record["problems"][0]["problem"]["vector"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a problem"),
        (("nvfp4_gemm", *SIZES), "give a problem"),
        (("--m", "5", "--model"), "give a problem"),
        (("nvfp4_gemv", "--model"), "nvfp4_gemv is not a GEMM: its parameters are m, k, l"),
        (("nvfp4_nothing", "--model"), "unknown problem 'nvfp4_nothing'"),
        ((*SIZES, "--model", "--top", "-1"), "--top is -1"),
        ((*SIZES, "--rounds", "0"), "--rounds is 0"),
        ((*SIZES[:5], "7160", "--model"), "K: got 7160, expected a multiple of 32"),
        ((*SIZES, "--model", "--format", "fp4"), "a_format: got fp4"),
        ((*SIZES, "--model", "--out", "int8"), "out: got int8"),
        ((*SIZES, "--model", "--out-major", "k"), "out_major: got k"),
        ((*SIZES, "--model", "--arch", "sm_75"), "sm_75"),
        ((*SIZES, "--model", "--arch", "sm_90a", "--x", "int8"), "x: got int8"),
        (
            (*SIZES, "--model", "--arch", "sm_90a", "--format", "fp4"),
            "format: got fp4, expected one of nvfp4, mxfp4, mxfp8, mxfp8_e5m2 on sm_90a",
        ),
        ((*SIZES, "--model", "--arch", "sm_90a", "--l", "2"), "l, out-major: got (2"),
    ],
)
def test_bad_arguments(arguments: tuple, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())

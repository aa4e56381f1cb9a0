"""The model of GEMM times: its figures, its arithmetic, how well it meets published times, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gemm_model as benchmark
import gemm_validation as validation
from gemm_refit import CONSTANTS

from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.planning import rates
from cute_nvfp4.planning.gemm import GemmProblem, candidates, choose, predict_plan
from cute_nvfp4.planning.gemm_model import predict, traffic
from cute_nvfp4.scale_layout import blocked_bytes
from cute_nvfp4.sim.observe.l2 import L2Traffic
from cute_nvfp4.sim.observe.result import MmaCounter, Result
from cute_nvfp4.target import ARCHITECTURES

ARCH = ARCHITECTURES["sm_100a"]
REFITTED = set(CONSTANTS) - {"DIRECT_FACTOR"}
"""No plan whose threads store rows is among those that the constants are fitted to."""


def test_every_figure_says_where_it_comes_from() -> None:
    for name, figure in rates.FIGURES.items():
        assert figure.basis in ("peak", "measured", "fitted", "assumed"), name
        assert len(figure.source) > 20 and figure > 0, name
        assert getattr(rates, name.upper()) == figure, name
    fitted = {name.lower() for name in REFITTED} | {"published_start_us", "published_stage_latency_us"}
    assert {name for name, f in rates.FIGURES.items() if f.basis == "fitted"} == fitted


def test_concurrent_clusters() -> None:
    assert [rates.concurrent_clusters(size, 148) for size in (1, 2, 4, 8)] == [148, 74, 33, 15]
    assert [rates.concurrent_clusters(size, 18) for size in (1, 2, 4, 8)] == [18, 9, 4, 1]
    assert rates.concurrent_clusters(4, 3) == 0


@pytest.mark.parametrize(
    ("m", "n", "k", "products", "published"),
    [
        (128, 7168, 16384, 1, 8.994),
        (128, 4096, 7168, 1, 2.354),
        (128, 7168, 2048, 1, 1.333),
        (256, 4096, 7168, 2, 4.708),
        (512, 4096, 7168, 2, 8.714),
        (256, 3072, 4096, 2, 2.125),
        (512, 3072, 7168, 2, 6.535),
    ],
)
def test_speed_of_light_is_the_published_one(m: int, n: int, k: int, products: int, published: float) -> None:
    least = GemmProblem(m, n, k, products=products).minimum
    assert least.speed_of_light_us == pytest.approx(published, rel=0.004)
    assert least.ceiling_us > least.speed_of_light_us


def test_errors_against_published_times() -> None:
    """The bounds that docs/explanation/gemm_plans.md states."""
    parts = validation.groups(validation.points())
    errors = {name: validation.Errors.of(part) for name, part in parts.items()}
    assert (errors["fitted"].count, errors["held out"].count) == (56, 91)
    assert errors["fitted"].mean < 0.03 and abs(errors["fitted"].worst.error) < 0.10
    assert errors["held out"].mean < 0.06 and abs(errors["held out"].worst.error) < 0.23
    assert errors["held out, M <= 16, N < 8192"].mean < 0.035
    assert -0.14 < errors["held out, M <= 16, N >= 8192"].bias < -0.12


@pytest.mark.parametrize("name", ["PUBLISHED_START_US", "PUBLISHED_STAGE_LATENCY_US", "DRAM_BYTES_S", "SM_BYTES_S"])
def test_the_validation_notices_a_wrong_constant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 2.0 if name.endswith("US") else 0.3
    monkeypatch.setattr(rates, name, getattr(rates, name) * factor)
    fitted = [p for p in validation.points() if p.m in validation.FITTED_M]
    assert validation.Errors.of(fitted).mean > 0.08


def test_constants_are_those_of_the_fit() -> None:
    found = validation.fit([p for p in validation.points() if p.m in validation.FITTED_M])
    assert found == pytest.approx((rates.PUBLISHED_START_US, rates.PUBLISHED_STAGE_LATENCY_US), abs=0.003)


def test_static_by_hand() -> None:
    """One wave of 56 tiles, 28 steps; five stages of 36 KB: every term recomputed from the published figures."""
    p = predict(GemmConfig(tile_n=128), 64, 7168, 7168)
    assert (p.steps, p.waves, p.ctas, p.stages, p.bytes_in_flight) == (28, 1.0, 56, 5, 56 * 5 * 36864)
    mma = 4 * 64 / 1965
    round_trip = 0.4704 + 36864 / 155e3 + mma
    dram = (64 * 3584 + 128 * 448 + 7168 * (3584 + 448) + 64 * 7168 * 2) / 7.53e6
    assert p.dram_us == pytest.approx(dram, rel=1e-9)
    assert p.latency_us == pytest.approx(27 * round_trip / 5, rel=1e-9)
    epilogue = 4 * 0.09059
    assert p.us == pytest.approx(1.725 + round_trip + 27 * round_trip / 5 + dram + epilogue, rel=1e-9)
    assert (p.bound, p.label) == ("mma", "model")


def test_split_and_shares_by_hand() -> None:
    split = predict(GemmConfig(tile_n=64, split_k=4), 128, 1024, 7168)
    assert (split.steps, split.ctas) == (7, 64)
    # three slices of 128 rows, 16 columns, four bytes leave each CTA
    assert split.reduction_us == pytest.approx(0.1369 + 3 * 128 * 16 * 4 / 36.61e3)
    assert split.epilogue_us == pytest.approx(0.09059 * 16 / 32)
    shares = predict(GemmConfig(tile_n=128, scheduler="stream_k"), 128, 7168, 16384)
    assert (shares.steps, shares.ctas) == (25, 148)  # 56 tiles of 64 steps on 148
    assert shares.reduction_us == pytest.approx(2 * (0.4704 + 128 * 128 * 4 / 155e3))
    whole = predict(GemmConfig(tile_n=128, scheduler="stream_k"), 128, 7168, 16384, workers=56)
    assert (whole.steps, whole.reduction_us) == (64, 0.0)


def test_waves_and_rounds() -> None:
    config = GemmConfig(tile_n=128)
    assert predict(config, 1024, 7168, 4096).steps == 4 * 16  # 448 tiles on 148
    assert predict(config, 1024, 7168, 4096, sm_count=152).steps == 3 * 16
    assert predict(config, 1024, 7168, 4096, workers=64).steps == 7 * 16
    # more clusters than run at once: 296 CTAs come in two rounds
    assert predict(config, 1024, 7168, 4096, workers=296).steps == 2 * 2 * 16


def test_more_bytes_in_flight_and_more_ctas_along_k_are_faster() -> None:
    """What the model says of a weight-bound GEMM, and what the choice rests on."""
    deep = [predict(GemmConfig(tile_n=64, stages=s), 4096, 128, 7168).us for s in (2, 3, 4, 5, 6, 7)]
    assert deep == sorted(deep, reverse=True)
    assert deep[0] - deep[-1] > 5
    one, four = (predict(GemmConfig(tile_n=64, split_k=s), 1024, 128, 16384).us for s in (1, 4))
    assert four < one


def test_traffic_counts_every_operand_once() -> None:
    m, n, k, batch = 200, 520, 1056, 3
    expected = m * k // 2 + n * k // 2 + blocked_bytes(m, k // 16) + blocked_bytes(n, k // 16) + 2 * m * n
    assert traffic(GemmConfig(), m, n, k, batch, 148) == batch * expected
    two = traffic(GemmConfig(products=2), m, n, k, 1, 148)
    assert two == expected + n * k // 2 + blocked_bytes(n, k // 16)


def test_traffic_beyond_l2() -> None:
    """A of 302 MB cannot stay in L2: with tiles walked along M it comes again for each column of tiles."""
    m, n, k = 32768, 1024, 16384
    a = m * k // 2 + blocked_bytes(m, k // 16)
    once = traffic(GemmConfig(raster="n"), m, n, k, 1, 148)
    assert traffic(GemmConfig(raster="m"), m, n, k, 1, 148) == once + 7 * a


def test_counted_elsewhere() -> None:
    config = GemmConfig(tile_n=128)
    analytic = predict(config, 128, 7168, 2048)
    same = predict(config, 128, 7168, 2048, dram_bytes=analytic.dram_bytes, mma_flops=analytic.flops)
    assert same.us == pytest.approx(analytic.us, rel=1e-12)
    more = predict(config, 128, 7168, 2048, dram_bytes=2 * analytic.dram_bytes, mma_flops=3 * analytic.flops)
    assert more.dram_us == pytest.approx(2 * analytic.dram_us)
    assert more.mma_us == pytest.approx(3 * analytic.mma_us)


def test_from_counters() -> None:
    problem = GemmProblem(128, 7168, 2048)
    plan = choose(problem, ARCH, 148)
    analytic = predict_plan(plan, problem, 148)
    l2 = L2Traffic(126 << 20, read_bytes=10_000_000, refetched_bytes=5, written_bytes=1_000_000, dirty_bytes=500_000)
    mma = [MmaCounter("tcgen05.mma mxf4nvf4", operations=1, multiply_adds=int(analytic.flops) // 2)]
    result = Result("kernel", 1, {}, {}, mma=mma, l2=l2)
    counted = benchmark.from_counters(result, plan, problem, 148)
    assert counted.dram_bytes == 11_500_000
    assert counted.mma_us == pytest.approx(analytic.mma_us)
    with pytest.raises(ValueError, match="counters on"):
        benchmark.from_counters(Result("kernel", 1, {}, {}), plan, problem, 148)


@pytest.mark.parametrize("kind", ["static", "split", "shares", "pair"])
def test_the_simulator_counts_what_the_model_does(kind: str) -> None:
    """Bytes of DRAM and operations of the MMAs of the compiled kernel, executed, against the analytic counts."""
    problem = GemmProblem(136, 520, 2048, out="float32")
    of_kind = {
        "static": lambda c: not c.pair and c.split_k == 1 and c.scheduler == "static",
        "split": lambda c: c.split_k == 4,
        "shares": lambda c: c.scheduler == "stream_k" and not c.pair,
        "pair": lambda c: c.pair,
    }
    plan = next(plan for plan in candidates(problem, ARCH, 148) if of_kind[kind](plan.config))
    counted, analytic = benchmark.simulated(plan, problem, 148), predict_plan(plan, problem, 148)
    assert counted.flops == analytic.flops
    # flags of equal shares, and scales of which TMA fetches 32-byte sectors, are not in the analytic count
    assert counted.dram_bytes == pytest.approx(analytic.dram_bytes, rel=0.01)


def test_partial_sums_are_traffic() -> None:
    """56 tiles of 64 steps on 148 CTAs: the first 32 have 25, the others 24; most start inside a tile."""
    shares = predict(GemmConfig(tile_n=128, scheduler="stream_k"), 7168, 128, 16384)
    whole = predict(GemmConfig(tile_n=128), 7168, 128, 16384)
    starts = [sum(24 + (v < 32) for v in range(w)) for w in range(148)]
    inside = sum(start % 64 != 0 for start in starts)
    assert shares.dram_bytes - whole.dram_bytes == inside * 128 * 128 * 4


def test_the_benchmark_record() -> None:
    record = benchmark.record(ARCH)
    assert record["label"] == "model" and "nothing was measured" in record["note"]
    for row in record["rows"]:
        # nobody is faster than the model's floor, and the model, which has no gap between launches, is at most a third
        # faster than the best public result
        assert row["speed_of_light_us"] < row["best_rates_us"] < row["model_us"]
        assert 2 / 3 < row["model_us"] / row["best_public_us"] < 1
        assert row["counted_by"] == "analytic" and row["terms"]["label"] == "model"
        assert 1 <= row["dram_bytes_over_least"] < 1.05


def test_refusals() -> None:
    with pytest.raises(ValueError, match="room for 1 stages"):
        predict(GemmConfig(tile_n=256, products=2, out="float32", stages=1), 128, 512, 512)
    with pytest.raises(ValueError, match="no cluster of 8 CTAs fits on 7"):
        predict(GemmConfig(split_k=8), 128, 512, 4096, sm_count=7)

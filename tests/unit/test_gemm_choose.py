"""Which plan a GEMM gets: limits, candidates, the model's best, and the user's table."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from cute_nvfp4.errors import OperandError
from cute_nvfp4.kernels.gemm.config import SPLITS, TILE_N, GemmConfig
from cute_nvfp4.kernels.gemm.limits import can_implement
from cute_nvfp4.planning import gemm as gemm_choose
from cute_nvfp4.planning import gemm_table
from cute_nvfp4.planning.gemm import GemmProblem, Plan, can_run, candidates, choose, predict_plan
from cute_nvfp4.planning.gemm_model import predict
from cute_nvfp4.planning.gemm_table import Entry, TableError
from cute_nvfp4.planning.rates import concurrent_clusters
from cute_nvfp4.target import ARCHITECTURES

ARCH = ARCHITECTURES["sm_100a"]
SHAPES = [
    (1, 1, 32, 1),
    (1, 7168, 7168, 1),
    (128, 256, 256, 1),
    (128, 7168, 16384, 1),
    (512, 4096, 512, 3),
    (2304, 4608, 7168, 1),
    (333, 77, 4128, 2),
    (8192, 8192, 8192, 1),
]


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "tables" / "gemm.json"
    monkeypatch.setenv(gemm_table.TABLE_VARIABLE, str(file))
    # what the model chooses is looked at here, not what the clock has decided (test_clocked_plans.py)
    monkeypatch.setattr(gemm_choose.clocked, "entries", dict)
    return file


def test_benchmark_shapes() -> None:
    """What the model says of bytes in flight, of CTAs along K and of the long dimension shows in what is chosen."""
    first, second, third = (choose(GemmProblem(128, n, k), ARCH, 148) for n, k in BENCHMARKS)
    # 64 steps along K, narrow tiles for 112 CTAs: pairs hold half of B each, and threads store columns
    assert first.swap and first.config.out_major == "m"
    assert (first.config.tile_m, first.config.tile_n, first.workers) == (256, 64, 56)
    # 28 steps, tiles for 64 CTAs: two along K, in the cluster
    assert second.swap and (second.config.split_k, second.config.tile_n) == (2, 64)
    # eight steps are as many as there are stages: nothing to gain along K, and a store by TMA is sooner done
    assert not third.swap and third.config.store == "tma"
    assert (third.config.split_k, third.config.scheduler, third.config.tile_n) == (1, "static", 64)
    for plan, (n, k) in zip((first, second, third), BENCHMARKS):
        problem = GemmProblem(128, n, k)
        found = predict_plan(plan, problem, 148)
        plain = predict(problem.config(ARCH, False, tile_n=128), 128, n, k)
        assert found.bytes_in_flight > 2 * plain.bytes_in_flight and found.ctas >= 112
        assert found.us < plain.us and found.dram_bytes < 1.0001 * problem.minimum.bytes


BENCHMARKS = ((7168, 16384), (4096, 7168), (7168, 2048))


@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_can_be(shape: tuple) -> None:
    problem = GemmProblem(*shape)
    found = candidates(problem, ARCH, 148)
    assert len(found) == len(set(found)) >= 2
    times = [predict_plan(plan, problem, 148).us for plan in found]
    assert all(later >= earlier - 0.011 for earlier, later in itertools.pairwise(times))
    for plan in found:
        c = plan.config
        assert can_implement(c) == ""
        assert c.split_k <= -(-problem.k // c.tile_k)
        assert 1 <= plan.workers <= concurrent_clusters(c.cluster_size, 148)
    assert choose(problem, ARCH, 148) == found[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_better_was_left_out(shape: tuple) -> None:
    """Against every configuration that can be, with as many clusters as fit: the choice loses at most 2 %."""
    problem = GemmProblem(*shape)
    best = predict_plan(choose(problem, ARCH, 148), problem, 148).us
    everything = itertools.product(
        (False, True),
        (False, True),
        TILE_N,
        itertools.product((1, 2, 4), (1, 2, 4)),
        SPLITS,
        ("static", "stream_k"),
        "mn",
    )
    count = 0
    for swap, pair, tile_n, cluster, split_k, scheduler, raster in everything:
        tiling = {"tile_n": tile_n, "pair": pair, "cluster": cluster, "split_k": split_k}
        config = problem.config(ARCH, swap, scheduler=scheduler, raster=raster, **tiling)
        if can_implement(config):
            continue
        m, n = problem.kernel_mn(swap)
        if split_k <= -(-problem.k // config.tile_k):
            assert predict(config, m, n, problem.k, problem.batch).us > 0.98 * best, str(config)
            count += 1
    assert count > 100


def test_formats_and_two_products() -> None:
    mixed = GemmProblem(64, 4096, 4096, a_format="mxfp8", b_format="mxfp8_e5m2")
    plan = choose(mixed, ARCH, 148)
    assert plan.swap and (plan.config.a_format, plan.config.b_format) == ("mxfp8_e5m2", "mxfp8")
    gated = GemmProblem(256, 4096, 7168, products=2, gate="silu")
    plans = candidates(gated, ARCH, 148)
    assert {plan.swap for plan in plans} == {False, True}
    # swapped, the two matrices are the kernel's A
    assert all(plan.config.shared == ("b" if plan.swap else "a") and plan.config.gate == "silu" for plan in plans)


def test_swap_exchanges_what_lies_along_m_and_n() -> None:
    problem = GemmProblem(8, 512, 256, out="float32", out_major="n", bias="n", factors=2)
    plain, swapped = problem.config(ARCH, False), problem.config(ARCH, True)
    assert (plain.out_major, plain.bias, plain.store) == ("n", "n", "tma")
    assert (swapped.out_major, swapped.bias, swapped.store) == ("m", "m", "direct")
    assert swapped.factors == 2 and problem.kernel_mn(True) == (512, 8)
    columns = dataclasses.replace(problem, out_major="m", bias="m")
    assert (columns.config(ARCH, True).store, columns.config(ARCH, True).bias) == ("tma", "n")
    assert dataclasses.replace(problem, vector=False).config(ARCH, False).store == "direct"


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (GemmProblem(0, 1, 32), "M: got 0, expected at least 1"),
        (GemmProblem(1, 1, 48), "K: got 48, expected a multiple of 32: 16 too many"),
        (GemmProblem(1, 2**31, 32), "N: got 2147483648, expected at most 2147483647: 1 too many"),
        (GemmProblem(1, 1, 32, a_format="fp4"), "a_format: got fp4, expected one of nvfp4"),
        (GemmProblem(2**30, 1, 2**20), "bytes of one matrix of A: got 562949953421312"),
        (GemmProblem(2**19, 2**19, 32), "elements of one output"),
        (GemmProblem(128, 64, 1 << 20, batch=1 << 20), "output tiles times k-tiles: got 4294967296"),
        (GemmProblem(1, 1, 32, a_format="mxfp4"), "formats of a and b: got mxfp4 and nvfp4"),
        (GemmProblem(1, 1, 32, a_format="mxfp4", b_format="mxfp8"), "K: got 32, expected a multiple of 128: 32 too"),
        (GemmProblem(1, 1, 32, factors=9), "factors: got 9"),
    ],
)
def test_refusals(problem: GemmProblem, message: str) -> None:
    with pytest.raises(OperandError, match=message.replace("(", r"\(")):
        choose(problem, ARCH, 148)


def test_limits_are_exact() -> None:
    assert can_run(GemmProblem(1, 2**31 - 1, 32)) == ""
    assert can_run(GemmProblem(128, 64, 1 << 20, batch=(2**31 - 1) // 4096)) == ""
    with pytest.raises(OperandError, match="expected sm_100a or sm_103a"):
        choose(GemmProblem(128, 128, 128), ARCHITECTURES["sm_90a"], 132)


def test_small_devices() -> None:
    for sms in (1, 2, 3, 7, 18):
        plan = choose(GemmProblem(512, 4096, 7168), ARCH, sms)
        assert plan.workers * plan.config.cluster_size <= sms


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cold_choice_predicts_few_plans(shape: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prediction takes some 50 µs: of the hundreds of configurations that can be, at most 110 are timed."""
    timed = []
    counted = lambda *args, **options: timed.append(args) or predict(*args, **options)  # noqa: E731
    monkeypatch.setattr(gemm_choose.gemm_model, "predict", counted)
    # a number of multiprocessors that no other test has
    choose(GemmProblem(*shape), ARCH, 147)
    assert 0 < len(timed) <= 110
    count = len(timed)
    choose(GemmProblem(*shape), ARCH, 147)
    assert len(timed) == count


def entry(problem: GemmProblem, plan: Plan, **changes: object) -> Entry:
    fields = {"device": "NVIDIA B200", "arch": "sm_100a", "sm_count": 148, "us": 9.5, "note": "a test"}
    return Entry(problem=problem, plan=plan, **{**fields, **changes})


def test_the_table_wins(table: Path) -> None:
    problem = GemmProblem(128, 4096, 7168)
    modelled = choose(problem, ARCH, 148)
    slowest = candidates(problem, ARCH, 148)[-1]
    assert slowest != modelled
    assert gemm_table.store(entry(problem, slowest)) == table
    assert choose(problem, ARCH, 148) == slowest
    assert choose(problem, ARCH, 148, "NVIDIA B200") == slowest
    # another GPU, another number of multiprocessors, another shape, another architecture
    assert choose(problem, ARCH, 148, "NVIDIA GB200") == modelled
    assert choose(problem, ARCH, 152) != slowest
    assert choose(dataclasses.replace(problem, m=129), ARCH, 148).config != slowest.config
    assert choose(problem, ARCHITECTURES["sm_103a"], 148).config.arch.name == "sm_103a"
    # bias and factors do not matter to the tiling
    biased = choose(dataclasses.replace(problem, bias="n", factors=1), ARCH, 148)
    assert biased.config == dataclasses.replace(slowest.config, bias="m" if slowest.swap else "n", factors=1)
    table.unlink()
    assert choose(problem, ARCH, 148) == modelled


def test_a_newer_entry_replaces_an_older(table: Path) -> None:
    problem, other = GemmProblem(128, 4096, 7168), GemmProblem(128, 7168, 2048)
    plans = candidates(problem, ARCH, 148)
    for plan in plans[1:4]:
        gemm_table.store(entry(problem, plan))
    gemm_table.store(entry(problem, plans[5], device="NVIDIA GB200"))
    gemm_table.store(entry(other, candidates(other, ARCH, 148)[2]))
    assert len(gemm_table.entries()) == 3
    assert choose(problem, ARCH, 148, "NVIDIA B200") == plans[3]
    assert choose(problem, ARCH, 148) == plans[5]  # the last written


def _written(table: Path) -> dict:
    problem = GemmProblem(128, 4096, 7168)
    gemm_table.store(entry(problem, candidates(problem, ARCH, 148)[0]))
    return json.loads(table.read_text())


def test_a_table_survives_a_round_trip(table: Path) -> None:
    _written(table)
    (found,) = gemm_table.entries()
    assert found == entry(found.problem, candidates(found.problem, ARCH, 148)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(version=2), "is not a table of GEMM plans"),
        (lambda t: t.update(entries={}), "is not a table of GEMM plans"),
        (lambda t: t["entries"].append(3), "entry 1: got int, expected an object"),
        (lambda t: t["entries"][0].pop("us"), r"entry 0: missing \['us'\]"),
        (lambda t: t["entries"][0].update(us=-1), "entry 0: us is -1, expected a positive number"),
        (lambda t: t["entries"][0].update(us=float("nan")), "entry 0: us is nan"),
        (lambda t: t["entries"][0].update(arch="sm_90"), "entry 0: arch is 'sm_90', expected one of sm_90a"),
        (lambda t: t["entries"][0].update(sm_count="148"), "sm_count is '148', expected an integer"),
        (lambda t: t["entries"][0]["problem"].update(k=7160), "problem cannot run: K: got 7160"),
        (lambda t: t["entries"][0]["problem"].update(m=True), "problem: m is True, expected an integer"),
        (lambda t: t["entries"][0]["problem"].update(rows=1), r"problem: missing \[\], unknown \['rows'\]"),
        (lambda t: t["entries"][0]["plan"].update(tile_n=96), "plan cannot run: tile_n: got 96, expected one of 64"),
        (lambda t: t["entries"][0]["plan"].update(stages=12), "plan cannot run: shared memory: got 12 stages"),
        (lambda t: t["entries"][0]["plan"].update(cluster=[2]), r"plan: cluster is \[2\], expected two integers"),
        (lambda t: t["entries"][0]["plan"].update(pair=1), "plan: pair is 1, expected true or false"),
        (lambda t: t["entries"][0]["plan"].update(workers=0), "plan cannot run: workers is 0"),
        (lambda t: t["entries"][0]["plan"].pop("swap"), r"plan: missing \['swap'\]"),
    ],
)
def test_malformed_tables(table: Path, change, message: str) -> None:
    content = _written(table)
    change(content)
    table.write_text(json.dumps(content))
    with pytest.raises(TableError, match=message):
        choose(GemmProblem(64, 64, 64), ARCH, 148)
    before = table.read_text()
    with pytest.raises(TableError):
        gemm_table.store(entry(GemmProblem(64, 64, 64), Plan(GemmConfig(), False, 1)))
    assert table.read_text() == before


def test_tables_that_cannot_be_read(table: Path) -> None:
    table.parent.mkdir()
    table.write_text("{")
    with pytest.raises(TableError, match="cannot read the table"):
        choose(GemmProblem(64, 64, 64), ARCH, 148)
    table.unlink()
    table.mkdir()
    with pytest.raises(TableError, match="cannot read the table"):
        choose(GemmProblem(64, 64, 64), ARCH, 148)


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(gemm_table.TABLE_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert gemm_table.path().name == "gemm.json" and "cute_nvfp4" in gemm_table.path().parts

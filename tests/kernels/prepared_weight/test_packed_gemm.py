"""gemm with a prepared weight: WGMMA and the streaming kernel against the exact product, on full-range data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from support import backends
from support.packed_problems import operand, run, within

from cute_nvfp4 import (
    PreparedWeight,
    gemm,
    prepare,
    prepare_weight,
    quantize,
    simulating,
)
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import MXFP8, MXFP8_E5M2, NVFP4, Format
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.limits import can_implement
from cute_nvfp4.kernels.gemm.sm90.schedules import EqualShares, Helped, OverlappedSums, SharedTiles, WholeTiles
from cute_nvfp4.ops.prepared_weight import gemm as prepared_gemm
from cute_nvfp4.planning import packed
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, candidates, choose
from cute_nvfp4.sim import Race, adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("hopper")]


@dataclass(frozen=True)
class Case:
    """out (m, n) = x (m, k) · weight (n, k)ᵀ; ``tiling``: of WGMMA on ``workers`` clusters (None: the plan chosen)."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.float32
    workers: int | None = None
    tiling: dict[str, Any] = field(default_factory=dict)
    quantized: bool = False
    bias: torch.dtype | None = None
    format: Format = NVFP4

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", str(self.dtype)[6:], str(self.out)[6:]]
        words += [f"{name}{value}" for name, value in self.tiling.items()]
        words += [self.format.name] * (self.format is not NVFP4)
        words += ["nvfp4"] * self.quantized + ["bias"] * (self.bias is not None)
        return "-".join(words)

    @property
    def plan(self) -> PackedPlan | None:
        return None if self.workers is None else PackedPlan(WgmmaConfig(**self.tiling), self.workers)


class Problem:
    """Operands of a case, the exact result and the sums of the magnitudes of its products."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.m + case.n)
        self.case, self.weight = case, operand((case.n, case.k), generator, 0.5, case.format, case.dtype)
        self.prepared = prepare_weight(self.weight, dtype=case.dtype)
        if case.quantized:
            self.x = operand((case.m, case.k), generator)
            wide = self.x.dequantize(torch.float64)
        else:
            self.x = torch.randn(case.m, case.k, generator=generator).to(case.dtype).to(backends.device())
            wide = self.x.double()
        self.bias = None
        if case.bias is not None:
            self.bias = torch.randn(case.n, generator=generator).to(case.bias).to(backends.device()) * 100
        values = self.weight.dequantize(torch.float64)
        self.exact, self.magnitude = wide @ values.t() * 0.75, wide.abs() @ values.abs().t() * 0.75
        if self.bias is not None:
            self.exact = self.exact + self.bias.double()

    def run(self) -> torch.Tensor:
        """The kernel's result; an element that it does not write is NaN."""
        case = self.case
        out = torch.full((case.m, case.n), float("nan"), dtype=case.out, device=backends.device())
        gemm(self.x, self.prepared, alpha=0.75, bias=self.bias, out=out, config=case.plan)
        return out

    def right(self, out: torch.Tensor) -> bool:
        return within(out, self.exact, self.magnitude)


SHARES = {"schedule": SharedTiles(split_k=2)}
TURNS = {"warpgroups": 4, "schedule": SharedTiles(split_k=2, k_groups=2)}
OVERLAP = {"stage_tiles": 1, "schedule": OverlappedSums()}
ALONE = {"schedule": SharedTiles(k_groups=2), "stage_tiles": 1}
STREAMED = (
    Case(1, 200, 256),
    Case(16, 130, 272, torch.float16, torch.float16),
    Case(9, 128, 128, torch.float16, quantized=True),
    Case(3, 200, 288, format=MXFP8),
    Case(16, 130, 160, torch.float16, format=MXFP8_E5M2),
    Case(9, 130, 128, torch.float16, quantized=True, format=MXFP8),
)
WGMMA = (
    # chosen; with bias; a few rows with bias; decoded x
    Case(33, 130, 272, out=torch.bfloat16),
    Case(40, 96, 144, bias=torch.bfloat16),
    Case(3, 200, 128, bias=torch.float32, out=torch.bfloat16),
    Case(20, 100, 160, torch.float16, quantized=True),
    # tiles cut between CTAs, whole tiles between; a tile of many CTAs; static; clusters; two CTAs an SM
    Case(24, 600, 256, workers=3, tiling={"tile_n": 8}),
    Case(5, 200, 640, workers=5, tiling={"tile_n": 8}),
    Case(70, 130, 384, torch.float16, torch.float16, 2, {"tile_n": 64, "schedule": WholeTiles()}),
    Case(40, 1100, 256, workers=2, tiling={"tile_n": 32, "schedule": EqualShares(cluster_rows=2)}, out=torch.bfloat16),
    Case(130, 300, 256, workers=2, tiling={"tile_n": 128, "schedule": WholeTiles(cluster_rows=4)}),
    Case(70, 300, 256, workers=3, tiling={"tile_n": 64, "warpgroups": 4}),
    Case(
        60,
        200,
        256,
        workers=3,
        tiling={"tile_n": 32, "ctas_per_sm": 2, "schedule": EqualShares(raster="n")},
        out=torch.float16,
    ),
    Case(260, 136, 256, workers=2, tiling={"tile_n": 256}, out=torch.bfloat16),
    # tiles shared along K by two CTAs, and by four that have parts of different length
    Case(40, 300, 640, workers=3, tiling={"tile_n": 64, "schedule": SharedTiles(split_k=2)}, out=torch.bfloat16),
    Case(50, 200, 640, workers=4, tiling={"tile_n": 32, "schedule": SharedTiles(split_k=4), "ctas_per_sm": 2}),
    # … by two warpgroups of each of two CTAs, of parts of different length, in two pieces, in the shortest ring
    Case(60, 130, 768, workers=2, tiling={**TURNS, "tile_n": 64, "stage_tiles": 1, "stages": 6}, out=torch.bfloat16),
    Case(20, 200, 512, torch.float16, workers=2, tiling={**TURNS, "tile_n": 32}),
    # … of one CTA each; of four warpgroups, with an odd number of eights of columns
    Case(60, 130, 512, workers=2, tiling={"tile_n": 64, "warpgroups": 4, "schedule": SharedTiles(k_groups=2)}),
    Case(110, 130, 512, workers=3, tiling={**ALONE, "tile_n": 112}, out=torch.bfloat16),
    # … whose sums travel during products, of parts of different length; of three warpgroups
    Case(50, 300, 640, workers=3, tiling={**OVERLAP, "tile_n": 64}, out=torch.bfloat16),
    Case(
        100,
        200,
        1024,
        torch.float16,
        workers=2,
        tiling={**OVERLAP, "tile_n": 128, "schedule": OverlappedSums(overlap=2), "warpgroups": 3},
    ),
    # three warpgroups: halves of packed tiles
    Case(40, 390, 256, workers=2, tiling={"tile_n": 64, "warpgroups": 3, "schedule": WholeTiles()}),
    Case(20, 300, 512, workers=2, tiling={**SHARES, "tile_n": 32, "warpgroups": 3, "stage_tiles": 1}),
    # helpers: fewer than tiles, more; of clusters
    Case(30, 330, 512, workers=5, tiling={"tile_n": 32, "schedule": Helped()}),
    Case(70, 200, 512, workers=8, tiling={"tile_n": 64, "schedule": Helped(), "warpgroups": 4}),
    Case(40, 300, 768, workers=4, tiling={"tile_n": 64, "schedule": Helped(split_k=2)}, out=torch.half),
    # other stages
    Case(70, 300, 384, workers=5, tiling={"tile_n": 64, "stage_tiles": 1, "stages": 5}, out=torch.bfloat16),
    Case(20, 300, 640, workers=2, tiling={"tile_n": 32, "stage_tiles": 1, "warpgroups": 4}),
    # tiles of other widths than powers of two
    Case(150, 200, 384, workers=3, tiling={"tile_n": 80}, out=torch.bfloat16),
    Case(100, 130, 512, workers=4, tiling={"tile_n": 96, "schedule": SharedTiles(split_k=2)}, out=torch.bfloat16),
    # the shortest ring of stages of one tile
    Case(20, 200, 640, workers=1, tiling={"tile_n": 16, "stage_tiles": 1, "stages": 3}),
    # eight bits an element
    Case(33, 130, 288, out=torch.bfloat16, format=MXFP8),
    Case(20, 300, 320, workers=2, tiling={"tile_n": 32, "stage_tiles": 1, "warpgroups": 4}, format=MXFP8_E5M2),
    Case(20, 200, 160, torch.float16, torch.float16, format=MXFP8),
    Case(40, 300, 320, workers=3, tiling={"tile_n": 64, "schedule": SharedTiles(split_k=2)}, format=MXFP8_E5M2),
    Case(40, 390, 256, workers=2, tiling={"tile_n": 64, "warpgroups": 3, "schedule": WholeTiles()}, format=MXFP8),
    Case(20, 200, 512, workers=2, tiling={**TURNS, "tile_n": 32}, format=MXFP8),
    Case(40, 300, 512, workers=4, tiling={"tile_n": 64, "schedule": Helped(split_k=2)}, format=MXFP8_E5M2),
    Case(140, 136, 192, workers=2, tiling={"tile_n": 256, "stage_tiles": 1}, out=torch.bfloat16, format=MXFP8),
)
CUT = Case(24, 300, 384, workers=5, tiling={"tile_n": 16, "schedule": EqualShares(cluster_rows=2)}, out=torch.bfloat16)


DEFAULT = (*STREAMED, *(case for i, case in enumerate(WGMMA) if i not in (1, 5, 6, 7, 15, 16, 19, 20, 23)))
"""Every value of every axis of a tiling; the others are slow."""


@pytest.mark.parametrize(
    "case",
    [x if x in DEFAULT else pytest.param(x, marks=pytest.mark.slow) for x in STREAMED + WGMMA],
    ids=str,
)
def test_exact(case: Case) -> None:
    problem = Problem(case)
    assert problem.right(run(problem))


SHARED = Case(12, 130, 384, workers=2, tiling={"tile_n": 16, "schedule": SharedTiles(split_k=2)}, out=torch.bfloat16)
OVERLAPPED = Case(50, 130, 640, workers=2, tiling={**OVERLAP, "tile_n": 64}, out=torch.bfloat16)
TAKEN = Case(20, 128, 1536, workers=1, tiling={**TURNS, "tile_n": 32, "stages": 4}, out=torch.bfloat16)
HELPED = Case(12, 130, 512, workers=3, tiling={"tile_n": 16, "schedule": Helped(split_k=2)})


@pytest.mark.sim_only("runs schedules")
@pytest.mark.sweep
@pytest.mark.parametrize("case", [CUT, SHARED, OVERLAPPED, TAKEN, HELPED], ids=str)
@pytest.mark.parametrize("schedule", adversarial(3), ids=str)
def test_any_schedule_gives_the_same_bits(schedule, case: Case) -> None:
    problem = Problem(case)
    out = run(problem, schedule=schedule)
    assert problem.right(out) and torch.equal(out, run(problem))


@pytest.mark.sim_only("runs schedules")
def test_a_ring_that_k_groups_do_not_divide_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warpgroup that first meets a stage in its second phase does not wait for it: why ``can_implement`` refuses."""
    monkeypatch.setattr(packed, "can_implement", lambda plan: "")
    monkeypatch.setattr(prepared_gemm, "WGMMA", replace(prepared_gemm.WGMMA, can_implement=lambda config: ""))
    odd = {"schedule": SharedTiles(k_groups=2), "tile_n": 32, "ctas_per_sm": 2, "stages": 3}
    problem = Problem(Case(32, 2, 448, torch.float16, torch.float16, workers=1, tiling=odd))
    assert problem.right(run(problem))
    with pytest.raises(Race):
        run(problem, schedule=adversarial(6)[-1])


@pytest.mark.sim_only("compares exact torch on the CPU")
def test_reference_on_the_cpu() -> None:
    problem = Problem(Case(5, 40, 64))
    out = gemm(problem.x.cpu(), _cpu(problem.prepared), alpha=0.75, out_dtype=torch.float32)
    assert torch.allclose(out.double(), problem.exact.cpu(), rtol=1e-6)


def _cpu(weight: PreparedWeight) -> PreparedWeight:
    return PreparedWeight(weight.packed.cpu(), weight.rows, weight.k, weight.dtype, weight.global_scale.cpu())


def test_prepared_weight_is_the_weight() -> None:
    weight = operand((130, 80), torch.Generator().manual_seed(3))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(prepare_weight(weight, dtype=dtype).dequantize(), weight.dequantize())


def test_nan_scale_is_its_row() -> None:
    problem = Problem(Case(24, 200, 256, workers=3, tiling={"tile_n": 32}))
    clean = run(problem)
    problem.prepared.packed[1, 2, 4096 + 8 * 8] = 0xFF  # tile 1, slab 1, row 0: 128 + 16
    out = run(problem)
    row = torch.zeros(200, dtype=torch.bool, device=out.device)
    row[144] = True
    assert out[:, row].isnan().all() and torch.equal(out[:, ~row], clean[:, ~row])


@pytest.mark.sim_only("runs exact torch")
def test_traced_and_differentiated() -> None:
    """One graph, of one operator; gradients of x and of bias."""
    weight = prepare_weight(quantize(torch.randn(48, 64), backend="reference"))
    x, bias = torch.randn(5, 64).bfloat16().requires_grad_(), torch.randn(48).requires_grad_()

    def twice(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return gemm(x, weight, alpha=0.5, bias=bias) * 2

    y = torch.compile(twice, fullgraph=True, backend="aot_eager")(x, bias)
    assert torch.equal(y, twice(x, bias))
    y.float().sum().backward()
    expected = torch.ones(5, 48) @ weight.dequantize()
    assert torch.allclose(x.grad.float(), expected, rtol=2**-7, atol=1e-3) and torch.equal(
        bias.grad, torch.full((48,), 10.0)
    )


@pytest.mark.parametrize("case", [STREAMED[0], STREAMED[2], WGMMA[1], WGMMA[3]], ids=str)
def test_prepared_call(case: Case) -> None:
    """x and out vary; the result is that of gemm, bit for bit."""
    problem, other = Problem(case), Problem(case)
    out = torch.empty((case.m, case.n), dtype=case.out, device=problem.exact.device)

    def both() -> None:
        options = {"alpha": 0.75, "bias": problem.bias}
        step = prepare(gemm, problem.x, problem.prepared, out_dtype=case.out, vary=("a", "out"), **options)
        assert step(other.x, out) is out
        assert torch.equal(out, gemm(other.x, problem.prepared, out_dtype=case.out, **options))
        inside = problem.prepared.packed.view(-1)[: out.numel() * out.element_size()].view(out.dtype)
        with pytest.raises(OperandError, match="memory of out"):
            step(other.x, inside.view(out.shape))

    with simulating():
        both()


LONG = torch.zeros(4, 256, dtype=torch.bfloat16)
ODD = PackedPlan(WgmmaConfig(**ALONE, tile_n=32, stages=5), 1)
X, W = torch.zeros(4, 64, dtype=torch.bfloat16), quantize(torch.ones(32, 64))
BAD = (
    (lambda w: gemm(X.float(), w), OperandTypeError, "dtype of a"),
    (lambda w: gemm(X.half(), w), OperandTypeError, "dtype of a"),
    (lambda w: gemm(X[:, :48], w), OperandError, "shape of a"),
    (lambda w: gemm(X[0], w), OperandError, "shape of a"),
    (lambda w: gemm(torch.zeros(64, 4, dtype=torch.bfloat16).t(), w), OperandError, "stride of a"),
    (lambda w: gemm(torch.zeros(4, 65, dtype=torch.bfloat16)[:, 1:], w), OperandError, "alignment of a"),
    (lambda w: gemm([1.0], w), OperandTypeError, "a: got list"),
    (lambda w: gemm(quantize(X, "mxfp8"), prepare_weight(W, dtype=torch.float16)), OperandTypeError, "for mxfp8"),
    (lambda w: gemm(X, w, bias=torch.zeros(31)), OperandError, "bias"),
    (lambda w: gemm(X, w, out=torch.zeros(32, 4).t()), OperandError, "strides of out"),
    (lambda w: gemm(X, w, out=torch.zeros(4, 31)), OperandError, "shape of out"),
    (lambda w: gemm(X, w, config=object()), OperandTypeError, "config"),
    (lambda w: gemm(X, w, config=PackedPlan(StreamConfig(), 0)), OperandError, "workers"),
    (lambda w: gemm(X, w, config=PackedPlan(StreamConfig(stage_tiles=4), 1)), OperandError, "stage_tiles: got 4"),
    (lambda w: gemm(X, w, config=PackedPlan(WgmmaConfig(tile_n=24), 1)), OperandError, "tile_n"),
    (lambda w: gemm(X, w, config=PackedPlan(WgmmaConfig(stage_tiles=1, stages=2), 1)), OperandError, "stages: got 2"),
    (lambda w: gemm(X, w, config=PackedPlan(WgmmaConfig(tile_n=256, stages=9), 1)), OperandError, "stages: got 9"),
    (lambda w: gemm(LONG, prepare_weight(quantize(LONG)), config=ODD), OperandError, "stages: got 5, expected a mult"),
    (lambda w: gemm(X, w, config=SHARED.plan), OperandError, "workers of a plan with split_k"),
    (lambda w: gemm(X, w, config=replace(SHARED.plan, workers=1)), OperandError, "split_k: got 2"),
    (lambda w: gemm(X, w, config=replace(HELPED.plan, workers=1)), OperandError, "plan with helpers"),
    (lambda w: gemm(X, w, config=PackedPlan(WgmmaConfig(**TURNS, tile_n=32), 1)), OperandError, "K of a plan"),
    (lambda w: gemm(X, w, config=PackedPlan(WgmmaConfig(**TURNS), 1)), OperandError, "k_groups"),
    (lambda w: prepare_weight(X), OperandTypeError, "weight"),
    (lambda w: prepare_weight(W, dtype=torch.float32), OperandTypeError, "dtype"),
    (lambda w: gemm(X, prepare_weight(quantize(torch.ones(2, 32, 64)))), OperandError, "a matrix"),
    (lambda w: PreparedWeight(w.packed, 31, 640, w.dtype), OperandError, "packed weight"),
)  # fmt: skip


@pytest.mark.sim_only("refuses CPU tensors")
@pytest.mark.parametrize("call, error, message", BAD, ids=[message + str(i) for i, (_, _, message) in enumerate(BAD)])
def test_bad_input(call, error, message) -> None:
    weight = prepare_weight(W)
    with simulating("sm_90a"), pytest.raises(error, match=message):
        call(weight)


@pytest.mark.sim_only("compiles for another architecture")
def test_another_architecture_is_refused() -> None:
    """Eight bits of both operands are Hopper's."""
    with simulating("sm_100a"), pytest.raises(OperandError, match="dtype of packed weights on sm_100a: got float8"):
        gemm(X, prepare_weight(W, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("m", [1, 8, 16, 17, 32, 64, 128, 256, 512, 4096])
def test_plans(m: int) -> None:
    """Few rows are streamed; tiles are as narrow as the rows; no more CTAs than run at once."""
    plan = choose(PackedProblem(m=m, n=8192, k=8192), ARCHITECTURES["sm_90a"], 132)
    assert plan.streams == (m <= 16)
    if not plan.streams:
        assert plan.config.tile_n <= max(32, 2 * m)
        assert plan.workers * plan.config.cluster_rows * plan.config.split_k <= 132 * plan.config.ctas_per_sm


@pytest.mark.parametrize(
    "m, n, k, expected",
    [
        (32, 8192, 8192, (32, "static", 2)),
        (64, 8192, 8192, (64, "static", 2)),
        (128, 8192, 8192, (128, "static", 2)),
        (128, 7168, 16384, (128, "helped", 2)),
        (128, 4096, 7168, (128, "static", 2)),
        (128, 7168, 2048, (128, "static", 1)),
        (256, 8192, 8192, (256, "static", 2)),
        (512, 8192, 8192, (256, "static", 1)),
        (2048, 8192, 8192, (256, "static", 1)),
    ],
)
def test_the_plans_that_were_fastest_on_an_h200(m: int, n: int, k: int, expected: tuple[int, str, int]) -> None:
    config = choose(PackedProblem(m=m, n=n, k=k), ARCHITECTURES["sm_90a"], 132).config
    assert (config.tile_n, config.scheduler, config.split_k) == expected


@pytest.mark.parametrize(
    ("m", "n", "k", "raster"),
    [
        # all tiles at once: those with the same weights are neighbours
        (512, 8192, 8192, "n"),
        (2048, 8192, 8192, "n"),
        # so many rows of x at once are more bytes than all weights
        (8192, 8192, 8192, "m"),
        # one tile along x
        (128, 8192, 8192, "m"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_tiles_are_in_the_order_that_reads_fewer_bytes(m: int, n: int, k: int, raster: str, dtype: str) -> None:
    problem = PackedProblem(m=m, n=n, k=k, dtype=dtype)
    for plan in candidates(problem, ARCHITECTURES["sm_90a"], 132):
        if plan.config.scheduler == "static" and plan.config.tile_n == min(m, 256):
            assert plan.config.raster == raster


def test_rings_of_their_own_length_are_shared_evenly() -> None:
    """As long as memory allows, but the same number of stages for each of k_groups."""
    left = set()
    for tile_n, ctas, stage_tiles, warpgroups in product((32, 64, 96, 112, 128), (1, 2), (1, 2), (2, 4)):
        tiling = {"tile_n": tile_n, "ctas_per_sm": ctas, "stage_tiles": stage_tiles, "warpgroups": warpgroups}
        config = WgmmaConfig(**tiling, schedule=SharedTiles(k_groups=2))
        if not can_implement(config):
            assert config.ring_stages % 2 == 0
            left.add(config.most_stages - config.ring_stages)
    assert left == {0, 1}

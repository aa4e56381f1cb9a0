"""gated_gemm with a prepared weight on sm_90a: both kernels against the exact products, on full-range data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import backends
from support.mutants import Source, at, become, drop, instead, outcome
from support.packed_problems import gated_product, operand, run

from cute_nvfp4 import (
    BlockScaledTensor,
    PreparedWeight,
    gated_gemm,
    gemm,
    prepare,
    prepare_weight,
    quantize,
    simulating,
)
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import MXFP8, MXFP8_E5M2, NVFP4, Format
from cute_nvfp4.kernels.gemm.gates import gelu_tanh
from cute_nvfp4.kernels.gemm.packed import stream, stream_sums
from cute_nvfp4.kernels.gemm.packed.decode import sum_factors
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.sm90 import wgmma as wgmma_kernel
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.schedules import EqualShares, SharedTiles, WholeTiles
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, choose
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES
from cute_nvfp4.weight_layout import Packing

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]


@dataclass(frozen=True)
class Case:
    """out (m, n) = gate(x · gateᵀ) · (x · upᵀ), K = k; ``plan``: kernel and CTAs (None: the one chosen)."""

    m: int
    n: int
    k: int
    gate: str = "silu"
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.float32
    plan: PackedPlan | None = None
    quantized: bool = False
    format: Format = NVFP4
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", self.gate, str(self.dtype)[6:], str(self.out)[6:], self.name]
        return "-".join(word for word in [*words, "nvfp4" * self.quantized] if word)


class Problem:
    """Operands of a case, and the exact result; global scales of gate and up differ."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.m + case.n)
        self.case = case
        self.weights = tuple(operand((case.n, case.k), generator, x, case.format, case.dtype) for x in (0.5, -0.125))
        self.prepared = prepare_weight(*self.weights, dtype=case.dtype)
        if case.quantized:
            self.x = operand((case.m, case.k), generator, 0.25)
            wide = self.x.dequantize(torch.float64)
        else:
            self.x = torch.randn(case.m, case.k, generator=generator).to(case.dtype).to(backends.device())
            wide = self.x.double()
        values = [weight.dequantize(torch.float64) for weight in self.weights]
        products = [wide @ value.t() for value in values]
        # arguments of the gate around 4, products small enough for float16
        alpha = 4 / float(products[0].std())
        self.alpha = torch.tensor([alpha], dtype=torch.float32, device=backends.device())
        self.expected = gated_product(wide, values, float(self.alpha), case.gate)

    def run(self) -> torch.Tensor:
        """The kernel's result; an element that it does not write is NaN."""
        case = self.case
        out = torch.full((case.m, case.n), float("nan"), dtype=case.out, device=backends.device())
        gated_gemm(self.x, self.prepared, gate=case.gate, alpha=self.alpha, out=out, config=case.plan)
        return out

    def right(self, out: torch.Tensor) -> bool:
        return self.expected.right(out)


def wgmma(workers: int, **tiling: Any) -> PackedPlan:
    return PackedPlan(WgmmaConfig(**tiling), workers)


HALF, BF16 = torch.float16, torch.bfloat16
TURNS = {"warpgroups": 4, "schedule": SharedTiles(split_k=2, k_groups=2)}
SLABS = StreamConfig(slabs=2, warps_m=2, warps_k=4, stages=8)
CASES = (
    # streamed: rows that are no multiple of 8, of 4, of 64; units cut between CTAs, a slab a warp; NVFP4
    Case(1, 100, 256, out=BF16),
    Case(16, 131, 272, "gelu_erf", HALF, HALF),
    Case(9, 136, 128, dtype=HALF, quantized=True, out=BF16),
    Case(7, 70, 512, "gelu_tanh", plan=PackedPlan(SLABS, 3), name="cut"),
    # WGMMA: chosen; elements; decoded x
    Case(33, 136, 272, out=BF16),
    Case(40, 203, 144, "relu", out=HALF),
    Case(20, 72, 160, "identity", HALF, quantized=True),
    # a tile of many CTAs; eight rows of x; clusters; four warpgroups; the widest tile; two CTAs an SM
    Case(5, 100, 640, plan=wgmma(5, tile_n=8), out=BF16, name="n8"),
    # eight bits an element
    Case(9, 70, 288, out=BF16, format=MXFP8, name="mxfp8"),
    Case(20, 72, 160, "identity", format=MXFP8_E5M2, name="mxfp8_e5m2"),
    Case(70, 72, 384, "gelu_tanh", HALF, HALF, wgmma(2, tile_n=64, schedule=WholeTiles()), name="n64 static"),
    Case(40, 552, 256, out=BF16, plan=wgmma(2, tile_n=32, schedule=EqualShares(cluster_rows=2)), name="cluster"),
    Case(70, 150, 256, plan=wgmma(3, tile_n=64, warpgroups=4), name="four warpgroups"),
    Case(260, 72, 256, out=BF16, plan=wgmma(2, tile_n=256), name="n256"),
    Case(40, 72, 512, out=BF16, plan=wgmma(2, tile_n=64, schedule=SharedTiles(split_k=2)), name="split"),
    Case(
        60,
        104,
        256,
        out=HALF,
        plan=wgmma(3, tile_n=32, ctas_per_sm=2, schedule=EqualShares(raster="n")),
        name="two an SM",
    ),
    # halves of packed tiles; columns of two warpgroups of two CTAs, fewer than are turned at once
    Case(40, 150, 256, out=BF16, plan=wgmma(2, tile_n=32, warpgroups=3, schedule=WholeTiles()), name="192 rows"),
    Case(30, 72, 512, out=HALF, name="turns", plan=wgmma(2, tile_n=32, **TURNS)),
)
CUT = Case(24, 152, 384, out=BF16, plan=wgmma(5, tile_n=16, schedule=EqualShares(cluster_rows=2)))
DEFAULT = (*CASES[:6], CASES[7], CASES[9], *CASES[11:13], *CASES[14:])
"""The others are slow."""


@pytest.mark.parametrize(
    "case", [x if x in DEFAULT else pytest.param(x, marks=pytest.mark.slow) for x in CASES], ids=str
)
def test_exact(case: Case) -> None:
    problem = Problem(case)
    assert problem.right(run(problem))


@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("case", [CUT, CASES[3]], ids=str)
def test_any_schedule_gives_the_same_bits(case: Case) -> None:
    problem = Problem(case)
    out = run(problem)
    assert problem.right(out)
    for schedule in adversarial(2):
        assert torch.equal(out, run(problem, schedule=schedule))


@pytest.mark.sim_only("compares exact torch on the CPU")
@pytest.mark.parametrize("case", [CASES[1], CASES[2]], ids=str)
def test_reference_on_the_cpu(case: Case) -> None:
    problem = Problem(case)
    assert problem.right(problem.run())


def test_prepared_weight_is_both_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = operand((131, 80), generator, 0.5), operand((131, 80), generator, 3.0)
    for dtype in (BF16, HALF):
        gate, up = prepare_weight(*weights, dtype=dtype).dequantize()
        assert torch.equal(gate, weights[0].dequantize()) and torch.equal(up, weights[1].dequantize())


def test_it_is_the_gate_of_two_products() -> None:
    """The same sums as two calls of gemm on one plan, one CTA a tile: bit for bit where the gate does nothing."""
    case = Case(24, 64, 128, "identity", out=torch.float32, plan=wgmma(1, tile_n=32, schedule=WholeTiles()))
    problem = Problem(case)
    out = run(problem)

    def separate() -> list[torch.Tensor]:
        options = {"alpha": problem.alpha, "out_dtype": torch.float32, "config": case.plan}
        return [gemm(problem.x, prepare_weight(weight, dtype=case.dtype), **options) for weight in problem.weights]

    with simulating():
        x, y = separate()
    assert torch.equal(out, x * y)


def test_nan_scale_is_its_column() -> None:
    """A scale of up, row 20: slab 2, row 4, which is packed row 44."""
    problem = Problem(Case(24, 100, 256, plan=wgmma(3, tile_n=32)))
    clean = run(problem)
    problem.prepared.packed[0, 2, 4096 + 2 * 64 + 4 * 8 + 2] = 0xFF
    out = run(problem)
    column = torch.zeros(100, dtype=torch.bool, device=out.device)
    column[20] = True
    assert out[:, column].isnan().all() and torch.equal(out[:, ~column], clean[:, ~column])


@pytest.mark.sim_only("runs exact torch")
def test_traced_and_differentiated() -> None:
    """One graph, of one operator; the gradient of x is that of the same expression in torch."""
    gate, up = (
        quantize(torch.randn(43, 64), backend="reference"),
        quantize(torch.randn(43, 64) * 3, backend="reference"),
    )
    weight = prepare_weight(gate, up)
    x = torch.randn(5, 64).bfloat16().requires_grad_()

    def twice(x: torch.Tensor) -> torch.Tensor:
        return gated_gemm(x, weight, alpha=0.25) * 2

    y = torch.compile(twice, fullgraph=True, backend="aot_eager")(x)
    assert y.dtype is BF16 and torch.equal(y, twice(x))
    y.float().sum().backward()
    same = x.detach().float().requires_grad_()
    first, second = (same @ w.dequantize().t() * 0.25 for w in (gate, up))
    (torch.nn.functional.silu(first) * second * 2).sum().backward()
    assert torch.allclose(x.grad.float(), same.grad, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5]], ids=str)
def test_prepared_call(case: Case) -> None:
    """x, the weight and out vary; the result is that of gated_gemm, bit for bit."""
    problem, other = (
        Problem(case),
        Problem(Case(case.m, case.n, case.k, case.gate, case.dtype, quantized=case.quantized)),
    )
    other.prepared = prepare_weight(*other.weights[::-1], dtype=case.dtype)
    out = torch.empty((case.m, case.n), dtype=case.out, device=problem.expected.exact.device)

    def both() -> None:
        options = {"gate": case.gate, "alpha": 0.5, "out_dtype": case.out}
        step = prepare(gated_gemm, problem.x, problem.prepared, vary=("a", "b", "out"), **options)
        assert step(problem.x, other.prepared, out) is out
        assert torch.equal(out, gated_gemm(problem.x, other.prepared, **options))

    with simulating():
        both()


@pytest.mark.parametrize("m", [3, 20])
def test_quantized_result(m: int) -> None:
    """The bits of quantize of the result in float32, new or in the caller's memory."""
    problem = Problem(Case(m, 64, 160))
    scale = torch.tensor(0.37, device=backends.device())
    out = quantize(torch.zeros(m, 64, device=backends.device()), global_scale=scale)

    def check() -> None:
        made = gated_gemm(problem.x, problem.prepared, alpha=problem.alpha, out_global_scale=0.37)
        wide = gated_gemm(problem.x, problem.prepared, alpha=problem.alpha, out_dtype=torch.float32)
        expected = quantize(wide, global_scale=0.37)
        assert gated_gemm(problem.x, problem.prepared, alpha=problem.alpha, out=out) is out
        for found in (made, out):
            assert torch.equal(found.data, expected.data) and found.global_scale == scale
            assert torch.equal(found.rowmajor_scale(), expected.rowmajor_scale())
        inside = problem.prepared.packed.view(-1)[: m * 32].view(m, 32)
        with pytest.raises(OperandError, match="memory of out"):
            gated_gemm(problem.x, problem.prepared, out=BlockScaledTensor(inside, out.scale, scale))

    if backends.backend() == "cuda":
        check()
    else:
        with simulating("sm_90a"):
            check()


X, W, U = torch.zeros(4, 64, dtype=BF16), quantize(torch.ones(32, 64)), quantize(torch.ones(32, 64))
BAD = (
    (lambda w: gemm(X, w), OperandError, "prepared weight: got gate and up"),
    (lambda w: gated_gemm(X, prepare_weight(W)), OperandError, "prepared weight: got one weight"),
    (lambda w: gated_gemm(X, w, W), OperandError, "weights: got b2"),
    (lambda w: gated_gemm(X, w, interleaved=True), OperandError, "interleaved=True"),
    (lambda w: gated_gemm(X, w, out_global_scale=1.0, out_dtype=torch.float32), OperandTypeError, "out_dtype"),
    (lambda w: gated_gemm(X, w, out_global_scale=1.0, out=torch.zeros(4, 32)), OperandTypeError, "out: got Tensor"),
    (lambda w: gated_gemm(X, w, out=quantize(torch.ones(4, 32), global_scale=None)), OperandError, "scale of out"),
    (lambda w: gated_gemm(X, w, gate="tanh"), OperandError, "gate: got 'tanh'"),
    (lambda w: gated_gemm(X, w, gate=""), OperandError, "gate: got ''"),
    (lambda w: gated_gemm(X.half(), w), OperandTypeError, "dtype of a"),
    (lambda w: gated_gemm(X, w, out=torch.zeros(4, 64)), OperandError, "shape of out"),
    (lambda w: gated_gemm(X, w, out=quantize(X)), OperandError, "shape of the data of out"),
    (lambda w: prepare(gated_gemm, W, W), OperandTypeError, "b1 and b2: got BlockScaledTensor and NoneType"),
    (lambda w: prepare_weight(W, quantize(torch.ones(40, 64))), OperandError, r"nvfp4 \(32, 32\).*\(40, 32\)"),
    (lambda w: prepare_weight(W, quantize(torch.ones(32, 64), global_scale=None)), OperandError, "no global scale"),
    (lambda w: prepare_weight(W, X), OperandTypeError, "up: got Tensor"),
    (lambda w: PreparedWeight(w.packed, 32, 64, w.dtype, w.global_scale, True), OperandError, "one and none"),
    (lambda w: PreparedWeight(w.packed, 200, 64, w.dtype, None, True), OperandError, "two times 200"),
)  # fmt: skip


@pytest.mark.sim_only("refuses CPU tensors")
@pytest.mark.parametrize("call, error, message", BAD, ids=[f"{i}" for i in range(len(BAD))])
def test_bad_input(call, error, message) -> None:
    weight = prepare_weight(W, U)
    with simulating("sm_90a"), pytest.raises(error, match=message):
        call(weight)


@pytest.mark.parametrize("m", [1, 16, 17, 256, 512])
def test_plans_are_those_of_twice_the_rows(m: int) -> None:
    chosen = choose(PackedProblem(m=m, n=4096, k=7168, gate="silu"), ARCHITECTURES["sm_90a"], 132)
    plain = choose(PackedProblem(m=m, n=8192, k=7168), ARCHITECTURES["sm_90a"], 132)
    assert (
        chosen.streams == (m <= 16) and chosen.workers == plain.workers and chosen.scratch(4096) == plain.scratch(8192)
    )


def _of_gate(arguments: Any, packing: Packing) -> tuple:
    return sum_factors(arguments, packing)[:1] * 2


MUTANTS = (
    ("up has the scale of gate", CUT, Source(wgmma_kernel, "sum_factors", _of_gate), "wrong"),
    ("streamed up has the scale of gate", CASES[0], Source(stream, "sum_factors", _of_gate), "wrong"),
    ("rows not turned", CUT, at("stmatrix", become(".trans", "")), "wrong"),
    ("another gate", CASES[0], Source(stream_sums, "GATES", {"silu": gelu_tanh}), "wrong"),
    ("flags not waited for", CUT, at("ld.acquire.gpu", instead("mov.b32 {0}, 1;")), "Race"),
    # they are raised between the two places that lower them
    ("flags not lowered", CASES[3], at("st.release", drop(), slice(None, None, 2)), "wrong"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, case, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name, case, change, noticed) -> None:
    problem = Problem(case)
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") == noticed

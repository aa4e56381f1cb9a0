"""gemm and gated_gemm of rows in FP8 and weights decoded from four bits to E4M3: codes, scales, sums, refusals."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import backends
from support.mutants import LAST, Source, at, drop, instead, outcome
from support.packed_problems import gated_product, operand, run

from cute_nvfp4 import (
    BlockScaledTensor,
    RowScaledTensor,
    export,
    gated_gemm,
    gemm,
    load_exported,
    prepare,
    prepare_weight,
    quantize,
    simulating,
    to_blocked,
)
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import MXFP4, decode_e2m1
from cute_nvfp4.kernels.gemm.packed import decode
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.limits import can_implement
from cute_nvfp4.kernels.gemm.sm90.schedules import Helped, OverlappedSums, SharedTiles, WholeTiles
from cute_nvfp4.ops.quantize_rows import quantize_rows
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.row_scaled import by_rows
from cute_nvfp4.sim.equivalence import Determined
from cute_nvfp4.weight_layout import PACKINGS
from cute_nvfp4.weight_layout_fp8 import LEAST, by_row, pack_rows, unpack_rows

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("hopper")]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """x (m, k) times a weight (n, k); ``tiling`` on ``workers`` clusters (None: the plan chosen)."""

    m: int
    n: int
    k: int
    workers: int | None = None
    tiling: dict[str, Any] = field(default_factory=dict)
    promoted: bool = False
    out: torch.dtype = torch.float32

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", *(f"{name}{value}" for name, value in self.tiling.items())]
        return "-".join([*words, *["promoted"] * self.promoted, str(self.out)[6:]])

    @property
    def plan(self) -> PackedPlan | None:
        return None if self.workers is None else PackedPlan(WgmmaConfig(**self.tiling), self.workers)


class Problem:
    """Numbers whose sums tensor cores keep whole: x of −1, 0 and 1 times powers of two, scales 1, 1.25 and 2."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.m * case.n)
        self.case, device = case, backends.device()
        codes = torch.randint(0, 256, (case.n, case.k // 2), dtype=torch.uint8, generator=generator)
        scales = torch.tensor([0x38, 0x3A, 0x40], dtype=torch.uint8)
        scales = scales[torch.randint(0, 3, (case.n, case.k // 16), generator=generator)]
        weight = BlockScaledTensor(codes.to(device), to_blocked(scales).to(device), torch.tensor(0.5).to(device))
        self.weight = prepare_weight(weight, dtype=E4M3, promoted=case.promoted)
        x = torch.randint(-1, 2, (case.m, case.k), generator=generator).float()
        powers = 2.0 ** torch.randint(-3, 4, (case.m,), generator=generator).float()
        self.x = RowScaledTensor(x.to(E4M3).to(device), powers.to(device))
        wide, values = self.x.dequantize(torch.float64), self.weight.dequantize(torch.float64)
        self.exact = wide @ values.t() * 0.75

    def run(self) -> torch.Tensor:
        """The kernel's result; an element that it does not write is NaN."""
        case = self.case
        out = torch.full((case.m, case.n), float("nan"), dtype=case.out, device=backends.device())
        return gemm(self.x, self.weight, alpha=0.75, out=out, config=case.plan)

    def right(self, out: torch.Tensor) -> bool:
        return torch.equal(out, self.exact.to(out.dtype))


SHARES = {"schedule": SharedTiles(split_k=2)}
TURNS = {"warpgroups": 4, "schedule": SharedTiles(split_k=2, k_groups=2)}
OVERLAP = {"stage_tiles": 1, "schedule": OverlappedSums()}
CASES = (
    Case(40, 130, 272, out=torch.bfloat16),
    Case(24, 600, 256, 3, {"tile_n": 8}),
    Case(130, 300, 256, 2, {"tile_n": 128, "schedule": WholeTiles(cluster_rows=4)}),
    Case(260, 136, 256, 2, {"tile_n": 256}, out=torch.bfloat16),
    Case(40, 300, 640, 3, {"tile_n": 64, **SHARES}),
    Case(60, 130, 768, 2, {**TURNS, "tile_n": 64, "stage_tiles": 1, "stages": 6}),
    Case(50, 300, 640, 3, {**OVERLAP, "tile_n": 64}),
    Case(40, 390, 256, 3, {"tile_n": 64, "warpgroups": 3, "schedule": WholeTiles()}),
    Case(40, 300, 768, 4, {"tile_n": 64, "schedule": Helped(split_k=2)}),
    Case(70, 130, 384, 2, {"tile_n": 64, "stage_tiles": 1}, promoted=True),
    Case(24, 200, 384, 3, {"tile_n": 16, "warpgroups": 4}, promoted=True),
    Case(33, 130, 640, 2, {"tile_n": 64, **SHARES}, promoted=True, out=torch.bfloat16),
)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_that_are_exact(case: Case) -> None:
    problem = Problem(case)
    assert problem.right(run(problem))


@pytest.mark.sim_only("proves it of one run")
@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_schedule_does_the_same(case: Case) -> None:
    """A proof for each structure."""
    problem, causes = Problem(case), Determined()
    assert problem.right(run(problem, others=[causes])) and not causes.doubts


def every_scale() -> BlockScaledTensor:
    """Row s has the scale byte s in all blocks, and every code in each."""
    codes = torch.arange(16).repeat(256, 2).to(torch.uint8)
    data = codes[:, ::2] | codes[:, 1::2] << 4
    scale = torch.arange(256).to(torch.uint8).unsqueeze(1).repeat(1, 2)
    return BlockScaledTensor(data.to(backends.device()), to_blocked(scale).to(backends.device()))


def unit_rows(k: int) -> RowScaledTensor:
    """x whose product with a weight is the weight, transposed."""
    return RowScaledTensor(torch.eye(k).to(E4M3).to(backends.device()), torch.ones(k, device=backends.device()))


@dataclass(frozen=True)
class Decoded:
    """A weight and x whose product is its values."""

    weight: BlockScaledTensor

    def run(self) -> torch.Tensor:
        out = torch.full((self.weight.k, self.weight.rows), float("nan"), device=backends.device())
        return gemm(unit_rows(self.weight.k), prepare_weight(self.weight, dtype=E4M3), out=out)

    def right(self, out: torch.Tensor) -> bool:
        """Whether each value is rounded once, where no scale is too small: to the nearest, ties to even."""
        codes = torch.stack([self.weight.data & 15, self.weight.data >> 4], -1).flatten(1)
        scales = self.weight.format.decode_scale(self.weight.rowmajor_scale()[0], torch.float64)
        rows = by_row(codes.unsqueeze(0), scales.repeat_interleave(self.weight.format.block // 16, -1).unsqueeze(0))
        factor = rows.factor[0].double().unsqueeze(1)
        scales = scales.repeat_interleave(self.weight.format.block, -1)
        exact, found = decode_e2m1(codes, torch.float64) * scales, out.t().double()
        expected = (exact / factor).float().to(E4M3).double() * factor
        moved = (scales.abs() < LEAST * factor) & ((found - exact).abs() <= LEAST * factor)
        return bool(((found == expected) | moved | factor.isnan()).all())


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_every_code_and_scale(seed: int | None) -> None:
    """Alone in a row, and beside all others."""
    if seed is None:
        problem = Decoded(every_scale())
    else:
        problem = Decoded(operand((200, 96), torch.Generator().manual_seed(seed), 1.0))
    assert problem.right(run(problem))


def test_mxfp4_is_exact() -> None:
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(0, 256, (130, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(120, 132, (130, 4), dtype=torch.uint8, generator=generator)
    scale += torch.randint(-100, 100, (130, 1), generator=generator).to(torch.uint8)
    weight = BlockScaledTensor(data.to(backends.device()), to_blocked(scale).to(backends.device()), None, MXFP4)
    prepared = prepare_weight(weight, dtype=E4M3)
    assert torch.equal(prepared.dequantize(torch.float64), weight.dequantize(torch.float64))
    out = run(Decoded(weight))
    assert torch.equal(out.t(), weight.dequantize())
    scale[7, 2] = scale[7].max() - 12
    wider = BlockScaledTensor(data.to(backends.device()), to_blocked(scale).to(backends.device()), None, MXFP4)
    with pytest.raises(OperandError, match="in a row of an MXFP4 weight"):
        prepare_weight(wider, dtype=E4M3)


def test_the_layout_is_its_inverse() -> None:
    generator, packing = torch.Generator().manual_seed(9), PACKINGS["nvfp4"][E4M3]
    codes = torch.randint(0, 16, (2, 130, 208), dtype=torch.uint8, generator=generator)
    rows = by_row(codes, torch.rand(2, 130, 13, generator=generator).to(E4M3).double() * 8 + 1)
    found = unpack_rows(pack_rows(rows, packing), packing)
    scales = rows.scales.float().to(E4M3).double().repeat_interleave(16, -1)
    expected = (decode_e2m1(rows.codes, torch.float64) * scales).float().to(E4M3).double()
    assert torch.equal(found[:, :130, :208], expected) and not found[:, 130:].any() and not found[:, :, 208:].any()


@pytest.mark.parametrize("promoted", [False, True])
def test_full_range(promoted: bool) -> None:
    """Sums of numbers of every size: tensor cores keep about 14 bits, promoted ones more."""
    generator = torch.Generator().manual_seed(3)
    weight = prepare_weight(operand((130, 1024), generator), dtype=E4M3, promoted=promoted)
    x = by_rows(torch.randn(40, 1024, generator=generator).to(backends.device()))

    class Product:
        def run(self) -> torch.Tensor:
            return gemm(x, weight, out_dtype=torch.float32)

    out, wide, values = run(Product()), x.dequantize(torch.float64), weight.dequantize(torch.float64)
    error = (out.double() - wide @ values.t()).abs() / (wide.abs() @ values.abs().t())
    assert error.max() < (2.0**-11 if promoted else 2.0**-9)


def test_gated() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = prepare_weight(*(operand((100, 256), generator, f) for f in (0.5, 0.25)), dtype=E4M3)
    x = by_rows(torch.randn(40, 256, generator=generator).to(backends.device()))

    class Product:
        def run(self) -> torch.Tensor:
            return gated_gemm(x, weight, alpha=0.01, out_dtype=torch.float32)

    exact = gated_product(x.dequantize(torch.float64), list(weight.dequantize(torch.float64)), 0.01, "silu").exact
    assert (run(Product()).double() - exact).norm() < 2e-3 * exact.norm()


def test_nan_scale_is_its_row() -> None:
    weight = every_scale()
    out = run(Decoded(weight))
    assert out[:, [0x7F, 0xFF]].isnan().all() and out[:, :0x7F].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [16, 528, 8192, 36864])
def test_rows_are_quantized_as_torch_does(dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randint(-32768, 32767, (5, k), generator=generator).to(torch.int16).view(dtype)
    x[0], x[1], x[2] = torch.randn(k, generator=generator), 0, torch.randn(k, generator=generator) * 1e-30
    x = x.to(backends.device())

    class Rows:
        def run(self) -> torch.Tensor:
            found = quantize_rows(x)
            return torch.cat([found.data.view(torch.uint8), found.scale.view(torch.uint8).view(5, 4)], 1)

    expected = by_rows(x.cpu())
    expected = torch.cat([expected.data.view(torch.uint8), expected.scale.view(torch.uint8).view(5, 4)], 1)
    found = run(Rows()).cpu()
    scales = torch.stack([found[:, k:], expected[:, k:]]).contiguous().view(torch.float32)
    assert torch.equal(found[:, :k], expected[:, :k]) and torch.equal(*scales.nan_to_num(-1.0))


class InOneLaunch:
    """x in 16 bits, which is quantized before its product."""

    def __init__(self, dtype: torch.dtype, config: PackedPlan | None = None) -> None:
        generator = torch.Generator().manual_seed(8)
        self.weight, self.config = prepare_weight(operand((130, 512), generator), dtype=E4M3), config
        self.x = torch.randn(40, 512, generator=generator).to(dtype).to(backends.device())

    def run(self) -> torch.Tensor:
        return gemm(self.x, self.weight, config=self.config)

    def right(self, out: torch.Tensor) -> bool:
        x = quantize(self.x, "fp8_e4m3")
        return torch.equal(out, gemm(x, self.weight, config=self.config, out_dtype=self.x.dtype))


@pytest.mark.parametrize(
    "dtype, config",
    [
        (torch.bfloat16, None),
        (torch.float16, PackedPlan(WgmmaConfig(tile_n=64, schedule=Helped()), 3)),
        (torch.bfloat16, PackedPlan(WgmmaConfig(**OVERLAP, tile_n=64), 2)),
    ],
)
def test_rows_in_16_bits_are_quantized_first(dtype: torch.dtype, config: PackedPlan | None) -> None:
    problem = InOneLaunch(dtype, config)
    with simulating() if backends.backend() == "sim" else contextlib.nullcontext():
        assert problem.right(problem.run())
        step = prepare(gemm, problem.x, problem.weight, config=config, vary=("a",))
        assert problem.right(step(problem.x.clone()))
    with pytest.raises(OperandError, match="requires a gradient"):
        gemm(problem.x.clone().requires_grad_(), problem.weight)


@pytest.mark.sim_only("changes PTX")
def test_a_product_that_does_not_wait_for_its_rows_is_noticed() -> None:
    problem = InOneLaunch(torch.bfloat16)
    change = at("griddepcontrol.wait", drop())
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") not in ("", None)


@pytest.mark.sim_only("runs exact torch")
def test_traced() -> None:
    weight, x = prepare_weight(W, dtype=E4M3), torch.randn(5, 64).bfloat16()

    def twice(x: torch.Tensor) -> torch.Tensor:
        return gemm(x, weight, alpha=0.5) * 2

    assert torch.equal(torch.compile(twice, fullgraph=True, backend="aot_eager")(x), twice(x))


def test_prepared_and_exported_calls(tmp_path) -> None:
    problem, other = Problem(CASES[0]), Problem(CASES[0])
    out = torch.empty(40, 130, dtype=torch.bfloat16, device=problem.exact.device)
    with simulating():
        step = prepare(gemm, problem.x, problem.weight, alpha=0.75, vary=("a", "out"))
        assert problem.right(step(other.x, out))
        export(tmp_path / "product", gemm, problem.x, problem.weight, alpha=0.75)
        loaded = load_exported(tmp_path / "product")
        assert problem.right(loaded(a=problem.x, b=problem.weight))
        with pytest.raises(OperandError, match="a: got"):
            loaded(a=by_rows(torch.zeros(41, 272)), b=problem.weight)


MUTANTS = (
    ("a step dropped", at("wgmma.mma_async", drop(), LAST)),
    ("magnitudes of the other row", at("prmt.b32", instead("prmt.b32 {0}, {1}, {2}, 0x3210;"), LAST)),
    ("r is never rounded up", Source(decode, "TABLES", ((0x01010100, 0x047FF800), (0x01010101, 0x14100C08)))),
    ("signs of the other row", Source(decode, "SIGN_SHIFT", 0)),
    ("selectors of the other row", Source(decode, "HALF_WORD", 0)),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, change", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name, change) -> None:
    problem = Decoded(operand((200, 128), torch.Generator().manual_seed(1), 1.0))
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") == "wrong"


X8 = RowScaledTensor(torch.zeros(4, 64).to(E4M3), torch.ones(4))
W = quantize(torch.ones(32, 64))
BAD = (
    (lambda w: gemm(X8, prepare_weight(W)), OperandTypeError, "for rows in FP8"),
    (lambda w: gemm(X8, w, config=PackedPlan(WgmmaConfig(tile_n=24), 1)), OperandError, "tile_n"),
    (lambda w: prepare_weight(W, promoted=True), OperandError, "promoted"),
    (lambda w: PreparedWeight(w.packed, 32, 64, E4M3), OperandError, "factors of the rows"),
    (lambda w: RowScaledTensor(X8.data, torch.ones(5)), OperandError, "scale"),
    (lambda w: RowScaledTensor(X8.data, torch.ones(4, 1)), OperandError, "of 128 columns .*w4a8.md"),
    (lambda w: RowScaledTensor(X8.data.float(), X8.scale), OperandTypeError, "data of rows in FP8"),
    (lambda w: RowScaledTensor(torch.zeros(4, 65).to(E4M3)[:, 1:], X8.scale), OperandError, "alignment"),
    (lambda w: gemm(quantize(torch.ones(4, 64)), w), OperandTypeError, "rows in FP8 for a weight"),
    (lambda w: quantize(torch.zeros(4, 32).half(), "fp8_e4m3", "optimal"), OperandError, "arguments of quantize"),
    (lambda w: quantize_rows(torch.zeros(4, 20).half()), OperandError, "multiple of 16"),
    (lambda w: quantize_rows(torch.zeros(4, 32)), OperandTypeError, "dtype of x"),
)


@pytest.mark.sim_only("refuses CPU tensors")
@pytest.mark.parametrize("call, error, message", BAD, ids=[message + str(i) for i, (_, _, message) in enumerate(BAD)])
def test_bad_input(call, error, message) -> None:
    weight = prepare_weight(W, dtype=E4M3)
    with simulating("sm_90a"), pytest.raises(error, match=message):
        call(weight)


def test_limits_of_promoted_sums() -> None:
    wide = WgmmaConfig(dtype="float8_e4m3fn", promoted=True, tile_n=256)
    assert "at most 128 columns" in can_implement(wide)
    assert "expected float8_e4m3fn" in can_implement(WgmmaConfig(promoted=True))

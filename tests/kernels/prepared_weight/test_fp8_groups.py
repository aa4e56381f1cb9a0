"""Grouped products of rows in FP8 and weights decoded to E4M3 on sm_90a: contiguous rows, lists, gates, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from support import backends
from support.fp8_problems import rows, weight
from support.mutants import LAST, Source, at, drop, outcome
from support.packed_problems import gated_product, operand, run

from cute_nvfp4 import (
    BlockScaledTensor,
    RowScaledTensor,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare,
    prepare_weight,
    quantize,
    simulating,
)
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.kernels.gemm.sm90 import groups
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.planning.packed_groups import PackedGroups, choose_groups
from cute_nvfp4.row_scaled import by_rows
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("hopper")]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Groups of ``sizes`` rows, each times an own (n, k); ``tiling`` on ``workers`` CTAs (None: the plan chosen)."""

    sizes: tuple[int, ...]
    n: int
    k: int
    out: torch.dtype = torch.float32
    workers: int | None = None
    tiling: dict[str, Any] = field(default_factory=dict)
    promoted: bool = False

    def __str__(self) -> str:
        words = ["+".join(map(str, self.sizes[:5])), f"{self.n}x{self.k}", str(self.out)[6:]]
        return "-".join([*words, *(f"{name}{x}" for name, x in self.tiling.items()), *["promoted"] * self.promoted])


class Contiguous:
    """Rows of groups, two of no group before and three behind."""

    def __init__(self, case: Case) -> None:
        generator, self.case = torch.Generator().manual_seed(case.n + sum(case.sizes)), case
        groups, total = len(case.sizes), sum(case.sizes) + 5
        self.weight = prepare_weight(weight((groups, case.n, case.k), generator), dtype=E4M3, promoted=case.promoted)
        self.x = rows(total, case.k, generator)
        self.offsets = torch.tensor([*accumulate(case.sizes, initial=2)], dtype=torch.int32, device=backends.device())
        self.alpha = (2.0 ** torch.arange(groups).remainder(5)).to(backends.device())
        self.plan = None
        if case.workers is not None:
            self.plan = PackedPlan(GroupedWgmmaConfig(**case.tiling), case.workers)
        wide, values = self.x.dequantize(torch.float64), self.weight.dequantize(torch.float64)
        exact = torch.full((total, case.n), float("nan"), dtype=torch.float64, device=backends.device())
        edges = self.offsets.tolist()
        for e, (start, end) in enumerate(pairwise(edges)):
            exact[start:end] = wide[start:end] @ values[e].t() * self.alpha[e]
        self.exact = exact.to(case.out)

    def run(self) -> torch.Tensor:
        """The kernel's result; an element that it does not write is NaN."""
        out = torch.full_like(self.exact, float("nan"))
        given = {"offsets": self.offsets, "alpha": self.alpha, "config": self.plan}
        return grouped_gemm_contiguous(self.x, self.weight, out=out, **given)

    def right(self, out: torch.Tensor) -> bool:
        return torch.equal(out.nan_to_num(1e30), self.exact.nan_to_num(1e30))


CASES = (
    Case((1, 0, 3, 40), 130, 272, torch.bfloat16),
    Case((0,) * 33 + (9, 20), 72, 144, workers=3, tiling={"tile_n": 8}),
    Case((33, 7, 70), 136, 256, torch.bfloat16, 3, {"tile_n": 64}),
    Case((130, 0, 20), 130, 400, workers=2, tiling={"tile_n": 128}),
    Case((250, 60), 40, 256, torch.float16, 2, {"tile_n": 256, "stage_tiles": 1}),
    Case((40, 17), 300, 256, workers=2, tiling={"tile_n": 32, "warpgroups": 4}),
    Case((70, 33), 130, 384, workers=2, tiling={"tile_n": 128}, promoted=True),
)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contiguous(case: Case) -> None:
    problem = Contiguous(case)
    assert problem.right(run(problem))


def test_rows_in_16_bits_are_quantized_first() -> None:
    generator = torch.Generator().manual_seed(3)
    stack = prepare_weight(operand((3, 130, 256), generator), dtype=E4M3)
    x = torch.randn(30, 256, generator=generator).bfloat16().to(backends.device())
    given = {"offsets": torch.tensor([0, 10, 11, 30], dtype=torch.int32, device=backends.device())}
    with simulating("sm_90a"):
        got = grouped_gemm_contiguous(x, stack, **given)
        assert got.equal(grouped_gemm_contiguous(quantize(x, "fp8_e4m3"), stack, **given)) and got.dtype is x.dtype
    exact = grouped_gemm_contiguous(x, stack, **given, backend="reference")
    wide, values = by_rows(x).dequantize(torch.float64), stack.dequantize(torch.float64)
    assert torch.allclose(exact[:10].double(), wide[:10] @ values[0].t(), rtol=2.0**-8)
    assert (got.float() - exact.float()).norm() < 2.0**-8 * exact.float().norm()


def test_gated() -> None:
    generator, sizes = torch.Generator().manual_seed(4), (3, 0, 21)
    both = prepare_weight(*(operand((3, 72, 160), generator, f) for f in (0.5, 0.25)), dtype=E4M3)
    x = by_rows(torch.randn(24, 160, generator=generator).to(backends.device()))
    offsets = torch.tensor([*accumulate(sizes, initial=0)], dtype=torch.int32, device=backends.device())
    options = {"offsets": offsets, "gate": "silu", "alpha": 0.01, "out_dtype": torch.float32}
    with simulating("sm_90a"):
        got = grouped_gemm_contiguous(x, both, **options)
    values, wide = both.dequantize(torch.float64), x.dequantize(torch.float64)
    exact = torch.cat([gated_product(a, list(v), 0.01, "silu").exact for a, v in zip(wide.split(sizes), values)])
    assert (got.double() - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("count, gate", [(3, ""), (18, "silu")], ids=["parameters", "workspace"])
def test_lists(count: int, gate: str) -> None:
    """Of sizes of their own, one without rows; factors of rows are found by group."""
    generator, pairs, exact = torch.Generator().manual_seed(count), [], []
    for i in range(count):
        m, n, k = (0 if i == 1 else 1 + 7 * i % 40), 40 + 8 * i % 96, 128 + 32 * (i % 3)
        both = [weight((n, k), generator) for _ in range(1 + bool(gate))]
        x, b = (rows(m, k, generator) if m else None), prepare_weight(*both, dtype=E4M3)
        pairs.append((x, b))
        wide = torch.zeros(0, k, device=backends.device()) if x is None else x.dequantize(torch.float64)
        wide, values = wide.double(), b.dequantize(torch.float64)
        exact.append(gated_product(wide, list(values), 0.25, gate).exact if gate else wide @ values.t() / 4)
    with simulating("sm_90a"):
        got = grouped_gemm(pairs, gate=gate, alpha=0.25, out_dtype=torch.float32)
        if not gate:
            step = prepare(grouped_gemm, [pairs[0]], alpha=0.25, out_dtype=torch.float32, vary=("a",))
            assert step([pairs[0][0]])[0].equal(got[0])
    for found, wanted in zip(got, exact, strict=True):
        assert torch.allclose(found.double(), wanted, rtol=1e-4 if gate else 1e-7, atol=1e-4 if gate else 0.0)


CUT = CASES[2]
MIXED = Case((41, 1, 41, 1), 116, 160, workers=1, tiling={"tile_n": 128})
"""Warpgroups are at tiles of different widths at a time."""


@pytest.mark.sim_only("finds races")
def test_factors_of_tiles_of_different_widths_are_apart() -> None:
    problem = Contiguous(MIXED)
    assert problem.right(run(problem))
    together = Source(GroupedWgmmaConfig, "factor_pitch", property(lambda config: 4 * config.tile_n))
    assert outcome(together, lambda: problem.right(problem.run()), "sm_90a") == "Race"


@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("schedule", adversarial(1), ids=str)
def test_any_schedule_gives_the_same_bits(schedule) -> None:
    problem = Contiguous(CUT)
    assert problem.right(run(problem, schedule=schedule))


MUTANTS = (
    ("a box of x not loaded", at("cp.async.bulk.tensor", drop(), LAST)),
    ("factors of the first group's rows", Source(groups, "SLAB_ROWS", 8)),
    ("factors before they are shared", at("bar.sync", drop(), LAST)),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name, change) -> None:
    problem = Contiguous(CUT)
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") not in ("", None)


X8 = RowScaledTensor(torch.zeros(4, 64).to(E4M3), torch.ones(4))
W = quantize(torch.ones(32, 64))
ONE = prepare_weight(W, dtype=E4M3)
STACK = prepare_weight(
    BlockScaledTensor(torch.zeros(2, 32, 32, dtype=torch.uint8), torch.zeros(2, 32, 4, dtype=torch.uint8)), dtype=E4M3
)
TILE = PackedPlan(GroupedWgmmaConfig(tile_n=256), 1)
PROMOTED = prepare_weight(W, dtype=E4M3, promoted=True)
BAD = (
    (lambda: grouped_gemm([(torch.zeros(4, 64).half(), ONE)]), OperandTypeError, "rows in FP8 for a weight"),
    (lambda: grouped_gemm([(X8, ONE), (X8, PROMOTED)]), OperandError, "promoted on cpu"),
    (lambda: grouped_gemm([(X8, PROMOTED)], config=TILE), OperandError, "promoted sums"),
    (lambda: grouped_gemm([(X8, prepare_weight(W))]), OperandTypeError, "for rows in FP8"),
    (lambda: grouped_gemm_contiguous(X8, STACK), OperandError, "offsets"),
    (lambda: grouped_gemm_contiguous(X8, STACK, offsets=[0, 2, 5]), OperandError, r"offsets\[2\]"),
    (lambda: grouped_gemm_contiguous(X8.data.float(), STACK, offsets=[0, 2, 4]), OperandTypeError, "dtype of x"),
)


@pytest.mark.sim_only("refuses CPU tensors")
@pytest.mark.parametrize("call, error, message", BAD, ids=[message + str(i) for i, (_, _, message) in enumerate(BAD)])
def test_bad_input(call, error, message) -> None:
    with simulating("sm_90a"), pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("promoted", [False, True])
def test_plans_fit_registers(promoted: bool) -> None:
    """A plan is found for few rows and for many."""
    for m in (8, 300, 4096):
        problem = PackedGroups(sizes=((m, 4096, 7168),), stack=8, dtype="float8_e4m3fn", promoted=promoted)
        plan = choose_groups(problem, ARCHITECTURES["sm_90a"], 132)
        assert plan.config.tile_n <= (128 if promoted else 256)

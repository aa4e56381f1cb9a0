"""Grouped GEMM of prepared weights on sm_90a against the exact products, on full-range data."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import backends
import pytest
import torch
from mutants import LAST, at, drop, instead, outcome

from cute_nvfp4 import BlockScaledTensor, GroupedRows, grouped_gemm_contiguous, prepare_weight, simulating, to_blocked
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.sim import adversarial

pytestmark = [pytest.mark.kernels]


@dataclass(frozen=True)
class Case:
    """Groups of ``sizes`` rows, each times an own (n, k); ``before``: rows before the first group."""

    sizes: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.float32
    workers: int | None = None
    tiling: dict[str, Any] = field(default_factory=dict)
    quantized: bool = False
    before: int = 0

    def __str__(self) -> str:
        words = ["+".join(map(str, self.sizes[:6])), f"{self.n}x{self.k}", str(self.out)[6:]]
        words += [f"{name}{value}" for name, value in self.tiling.items()]
        return "-".join(words + ["nvfp4"] * self.quantized)

    @property
    def plan(self) -> PackedPlan | None:
        return None if self.workers is None else PackedPlan(GroupedWgmmaConfig(**self.tiling), self.workers)


def operand(shape: tuple[int, ...], generator: torch.Generator) -> BlockScaledTensor:
    """Every code, and scales of every magnitude but NaN."""
    *rows, k = shape
    data = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 0x7F, (*rows, k // 16), dtype=torch.uint8, generator=generator)
    factor = torch.tensor(0.5)
    device = backends.device()
    return BlockScaledTensor(data.to(device), to_blocked(scale).to(device), factor.to(device))


class Problem:
    """Operands of a case, the exact result and the sums of the magnitudes of its products."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.n + sum(case.sizes))
        device = backends.device()
        self.case, rows, groups = case, case.before + sum(case.sizes) + 3, len(case.sizes)
        self.offsets = torch.tensor([*accumulate(case.sizes, initial=case.before)], dtype=torch.int32, device=device)
        weight = operand((groups, case.n, case.k), generator)
        self.weight = prepare_weight(weight, dtype=case.dtype)
        self.alpha = (torch.randn(groups, generator=generator)).to(device)
        if case.quantized:
            x = operand((rows, case.k), generator)
            self.x, wide = GroupedRows.of(x, self.offsets), x.dequantize(torch.float64)
        else:
            self.x = torch.randn(rows, case.k, generator=generator).to(case.dtype).to(device)
            wide = self.x.double()
        values = weight.dequantize(torch.float64)
        self.exact = torch.full((rows, case.n), float("nan"), dtype=torch.float64, device=device)
        self.magnitude = torch.zeros_like(self.exact)
        edges = self.offsets.tolist()
        for e in range(groups):
            mine = slice(edges[e], edges[e + 1])
            self.exact[mine] = wide[mine] @ values[e].t() * self.alpha[e].double()
            self.magnitude[mine] = wide[mine].abs() @ values[e].abs().t() * self.alpha[e].double().abs()

    def run(self) -> torch.Tensor:
        """The kernel's result; an element that it does not write is NaN."""
        case = self.case
        out = torch.full(self.exact.shape, float("nan"), dtype=case.out, device=backends.device())
        offsets = None if case.quantized else self.offsets
        status = torch.full((1,), 7, dtype=torch.int32, device=backends.device())
        grouped_gemm_contiguous(
            self.x, self.weight, offsets=offsets, alpha=self.alpha, out=out, status=status, config=case.plan
        )
        assert status.item() == 0
        return out

    def right(self, out: torch.Tensor) -> bool:
        """Sums within 2**-20 of the magnitudes, then rounded once; rows of no group are not written."""
        steps = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[self.case.out]
        bound = self.magnitude * 2.0**-20 + self.exact.abs() * steps + 2.0**-24
        largest = torch.finfo(self.case.out).max
        error = (out.double() - self.exact).abs()
        good = (error <= bound) | (self.exact.abs() > largest * (1 - steps)) & out.isinf()
        return bool((good | (self.exact.isnan() & out.isnan())).all())


CASES = (
    # chosen: few rows, many groups, some empty; decoded x
    Case((1, 0, 3, 1), 200, 256, out=torch.bfloat16),
    Case((0,) * 30 + (2, 5, 0, 0, 0, 9) + (0,) * 4, 130, 144, torch.float16, before=2),
    Case((5, 0, 20), 100, 160, torch.float16, torch.float16, quantized=True, before=1),
    # widths of tiles, tiles of two rows of tiles, more tiles than CTAs
    Case((33, 7, 70), 136, 256, workers=3, tiling={"tile_n": 64}, out=torch.bfloat16),
    Case((130, 0, 20, 90), 130, 384, workers=2, tiling={"tile_n": 128}),
    Case((250, 60, 150), 140, 128, torch.float16, torch.float16, 2, {"tile_n": 256}),
    Case((40, 17), 300, 256, workers=2, tiling={"tile_n": 32, "warpgroups": 4}),
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "sm_90a")


def run(problem: Problem, **options: Any) -> torch.Tensor:
    if backends.backend() == "cuda":
        return problem.run()
    with simulating("sm_90a", **options):
        return problem.run()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case) -> None:
    problem = Problem(case)
    assert problem.right(run(problem))

"""Two hundred random products of rows in FP8 and weights in four bits, bit for bit: dense, gated, grouped; any plan."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from support import backends
from support.fp8_problems import rows, weight

from cute_nvfp4 import (
    PreparedWeight,
    gated_gemm,
    gemm,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    simulating,
)
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GROUP_TILE_N
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, candidates
from cute_nvfp4.planning.packed_groups import PackedGroups, choose_groups
from cute_nvfp4.row_scaled import RowScaledTensor
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]
E4M3 = torch.float8_e4m3fn
KINDS = ("dense", "gated", "contiguous", "gated contiguous", "list")
OUTS = (torch.float32, torch.bfloat16, torch.float16)
SM90 = ARCHITECTURES["sm_90a"]


def part(x: RowScaledTensor, start: int, end: int) -> RowScaledTensor:
    """Rows ``start`` to ``end``."""
    return RowScaledTensor(x.data[start:end].clone(), x.scale[start:end].clone())


class Product:
    """The product that ``seed`` names: its operands, its plan, and the bits of the result."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.kind, self.out, self.promoted = KINDS[seed % len(KINDS)], draw.choice(OUTS), draw.random() < 0.2
        self.gate = draw.choice(("relu", "identity")) if "gated" in self.kind else ""
        n, k = draw.randint(1, 300), 16 * draw.randint(2, 64)
        sizes = [draw.randint(1, 280)]
        if self.kind not in ("dense", "gated"):
            sizes = [draw.choice((0, 1, draw.randint(1, 20), draw.randint(1, 150))) for _ in range(draw.randint(2, 6))]
            sizes[draw.randrange(len(sizes))] = draw.randint(1, 90)
        self.alpha = draw.choice((1.0, 0.75, -2.0))
        self.bias = None
        if self.kind == "dense" and draw.random() < 0.4:
            self.bias = (torch.randint(-9, 9, (n,), generator=generator) / 4).to(backends.device())
        stack = (len(sizes),) if "contiguous" in self.kind else ()

        def prepared() -> PreparedWeight:
            both = (weight((*stack, n, k), generator) for _ in range(1 + bool(self.gate)))
            return prepare_weight(*both, dtype=E4M3, promoted=self.promoted)

        self.sizes, count = sizes, len(sizes) if self.kind == "list" else 1
        self.weights = [prepared() for _ in range(count)]
        self.x = [rows(m, k, generator) if m else None for m in (sizes if count > 1 else [sum(sizes)])]
        self.plan = self.planned(draw, n, k)

    def planned(self, draw: random.Random, n: int, k: int) -> PackedPlan | None:
        """One of the plans that could be chosen, or None for the planner's choice."""
        options = {"dtype": "float8_e4m3fn", "out": str(self.out)[6:], "gate": self.gate, "promoted": self.promoted}
        if draw.random() < 0.2:
            return None
        if len(self.sizes) == 1:
            problem = PackedProblem(m=self.sizes[0], n=n, k=k, vector=n % 8 == 0, factors=1, **options)
            return draw.choice(candidates(problem, SM90, 132))
        sizes = tuple((m, n, k) for m in self.sizes if m)
        if self.kind != "list":
            options, sizes = options | {"stack": len(self.sizes)}, ((sum(self.sizes), n, k),)
        plan = choose_groups(PackedGroups(sizes=sizes, **options), SM90, 132)
        given = {"tile_n": draw.choice([x for x in GROUP_TILE_N if x <= (32 if self.promoted else 256)])}
        config = type(plan.config)(**given, stage_tiles=1 if given["tile_n"] == 256 else draw.choice((1, 2)))
        return PackedPlan(config, draw.randint(1, 5))

    def run(self) -> list[torch.Tensor]:
        """Results, of which what no kernel writes is NaN."""
        options: dict[str, Any] = {"alpha": self.alpha, "config": self.plan}
        given = [(x, w) for x, w in zip(self.x, self.weights)]
        outs = [self.empty(0 if x is None else x.rows, w) for x, w in given]
        if self.kind == "list":
            return grouped_gemm(given, out=outs, **options)
        (x, w), (out,) = given[0], outs
        if "contiguous" in self.kind:
            offsets = torch.tensor([*accumulate(self.sizes, initial=0)], dtype=torch.int32, device=out.device)
            return [grouped_gemm_contiguous(x, w, offsets=offsets, gate=self.gate, out=out, **options)]
        if self.gate:
            return [gated_gemm(x, w, gate=self.gate, out=out, **options)]
        return [gemm(x, w, bias=self.bias, out=out, **options)]

    def empty(self, m: int, w: PreparedWeight) -> torch.Tensor:
        return torch.full((m, w.rows), float("nan"), dtype=self.out, device=backends.device())

    def expected(self) -> list[torch.Tensor]:
        """The right bits: sums are exact, their products with factors too, and what follows is rounded as in fp32."""
        if self.kind == "list":
            return [self.product(x, w.dequantize(torch.float64)) for x, w in zip(self.x, self.weights) if x is not None]
        (x,), values = self.x, self.weights[0].dequantize(torch.float64)
        if "contiguous" not in self.kind:
            return [self.product(x, values)]
        edges = enumerate(pairwise(accumulate(self.sizes, initial=0)))
        return [torch.cat([self.product(part(x, *edge), values[e]) for e, edge in edges if edge[1] > edge[0]])]

    def product(self, x: RowScaledTensor, values: torch.Tensor) -> torch.Tensor:
        wide = x.dequantize(torch.float64)
        sums = [wide @ v.t() * self.alpha for v in (values if self.gate else [values])]
        if self.bias is not None:
            sums[0] = sums[0] + self.bias.double()
        sums = [s.to(torch.float32) for s in sums]
        if self.gate:
            sums = [(sums[0].relu() if self.gate == "relu" else sums[0]) * sums[1]]
        return sums[0].to(self.out)

    def __str__(self) -> str:
        return f"{self.kind} {self.sizes} x {self.weights[0]}, {self.out}, bias {self.bias is not None}, {self.plan}"


@pytest.mark.sweep(64)
@pytest.mark.parametrize("seed", range(200))
def test_random_product(seed: int) -> None:
    problem = Product(seed)
    with simulating("sm_90a"):
        got = [x for x in problem.run() if len(x)]
    for found, wanted in zip(got, problem.expected(), strict=True):
        assert torch.equal(found, wanted), problem

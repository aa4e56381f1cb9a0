"""``nvfp4_dual_gemm``: C = silu(A B1ᵀ) ∘ (A B2ᵀ), silu(x) = x / (1 + exp(-x)). Public scales are uniform in [0, 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...problem import Expected
from ...schema import Case
from ..data import draw_scales_up_to_one, exact_product, expected
from ..dense import DenseProblem


class DualGemmProblem(DenseProblem):
    name = "nvfp4_dual_gemm"
    folder = Path(__file__).parent
    weights = ("b1", "b2")
    # A full-range draw bounds the product of two scales, so that the product of two sums over K = 7168 stays finite in
    # fp16. The bound cannot be much smaller: the largest scale, 448, times the smallest, 2^-9, is 0.875.
    scale_product_bound = 1.0
    public_scales = staticmethod(draw_scales_up_to_one)

    def reference(self, case: Case, tensors: Mapping[str, torch.Tensor], *, magnitude: bool = True) -> list[Expected]:
        """Exact operands; sums g, u, silu and product in float64; magnitude ``|silu'(g) u| S_g + |silu(g)| S_u``."""
        a, b1, b2 = self.operands(case)
        gate, gate_size = exact_product(tensors, a, b1, magnitude=magnitude)
        up, up_size = exact_product(tensors, a, b2, magnitude=magnitude)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        if not magnitude:
            return [expected(silu * up, None)]
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return [expected(silu * up, (slope * up).abs_() * gate_size + silu.abs() * up_size)]

    def peer(self, case: Case, device: torch.device) -> tuple[str, Callable[[], object]]:
        m, n, k, batch = case["m"], case["n"], case["k"], case["l"]
        a = torch.randn(batch, m, k, dtype=torch.bfloat16, device=device)
        b1, b2 = (torch.randn(batch, n, k, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(2))
        silu = torch.nn.functional.silu
        return "torch bf16 bmm, silu, mul", lambda: silu(torch.bmm(a, b1), inplace=True).mul_(torch.bmm(a, b2))


PROBLEM = DualGemmProblem()

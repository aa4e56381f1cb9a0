"""Data and exact answer of ``nvfp4_dual_gemm``: C = silu(A B1ᵀ) ∘ (A B2ᵀ), silu(x) = x / (1 + exp(-x)).

Operands are stored as :mod:`..data` describes; C is stored as (L, M, N) fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...problem import Buffer, DataKind, Expected
from ...schema import Case
from ..data import (
    Operand,
    blocked_view,
    check_k,
    draw_operands,
    draw_unit_scales,
    elements_view,
    exact_product,
    expected,
    scales_view,
)

# Full-range draws bound the product of two scales, so that the product of two sums over K = 7168 stays finite in
# fp16. It cannot be much smaller: the largest scale, 448, times the smallest, 2^-9, is 0.875.
SCALE_PRODUCT_BOUND = 1.0
_OPERANDS = ("a", "b1", "b2")


class DualGemmProblem:
    """See :class:`cute_nvfp4.harness.problem.Problem`."""

    name = "nvfp4_dual_gemm"
    folder = Path(__file__).parent

    def validate(self, case: Case) -> None:
        check_k(case["k"])

    def _operands(self, case: Case) -> list[Operand]:
        return [Operand(name, case["m" if name == "a" else "n"], case["k"], case["l"]) for name in _OPERANDS]

    def buffers(self, case: Case) -> list[Buffer]:
        inputs = [buffer for operand in self._operands(case) for buffer in operand.buffers()]
        return [*inputs, Buffer("c", (case["l"], case["m"], case["n"]), "float16", output=True)]

    def generate(self, case: Case, seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """Draws the inputs with torch's CPU generator; see ``draw_operands``. Public scales are uniform in [0, 1)."""
        a, *bs = self._operands(case)
        return draw_operands(a, bs, kind, draw_unit_scales, SCALE_PRODUCT_BOUND, torch.Generator().manual_seed(seed))

    def views(self, tensors: Mapping[str, torch.Tensor]) -> tuple:
        """(a, b1, b2, sfa, sfb1, sfb2, sfa_permuted, sfb1_permuted, sfb2_permuted, c) as the protocol shapes them."""
        elements = [elements_view(tensors[name]) for name in _OPERANDS]
        scales = [scales_view(tensors[f"sf{name}"]) for name in _OPERANDS]
        blocked = [blocked_view(tensors[f"sf{name}_permuted"]) for name in _OPERANDS]
        return (*elements, *scales, *blocked, tensors["c"].permute(1, 2, 0))

    def reference(self, case: Case, tensors: Mapping[str, torch.Tensor], *, magnitude: bool = True) -> list[Expected]:
        """Exact operands; sums g and u, silu and product in float64; magnitude ``|silu'(g) u| S_g + |silu(g)| S_u``."""
        a, b1, b2 = self._operands(case)
        gate, gate_size = exact_product(tensors, a, b1, magnitude=magnitude)
        up, up_size = exact_product(tensors, a, b2, magnitude=magnitude)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        if not magnitude:
            return [expected(silu * up, None)]
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return [expected(silu * up, (slope * up).abs_() * gate_size + silu.abs() * up_size)]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        return [((case["m"], case["n"], case["l"]), "float16")]

    def useful_bytes(self, case: Case) -> int:
        """A, B1, B2, their scales, and C."""
        return sum(operand.nbytes for operand in self._operands(case)) + 2 * case["m"] * case["n"] * case["l"]

    def flops(self, case: Case) -> int:
        """Of the two products."""
        return 4 * case["m"] * case["n"] * case["k"] * case["l"]

    def peer(self, case: Case, device: torch.device) -> tuple[str, Callable[[], object]]:
        m, n, k, batch = case["m"], case["n"], case["k"], case["l"]
        a = torch.randn(batch, m, k, dtype=torch.bfloat16, device=device)
        b1, b2 = (torch.randn(batch, n, k, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(2))
        silu = torch.nn.functional.silu
        return "torch bf16 bmm, silu, mul", lambda: silu(torch.bmm(a, b1), inplace=True).mul_(torch.bmm(a, b2))


PROBLEM = DualGemmProblem()

"""Data and exact answer of ``nvfp4_gemm``: C = A Bᵀ.

Operands are stored as :mod:`..data` describes; C is stored as (L, M, N) fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from ...problem import Buffer, DataKind, Expected
from ...schema import Case
from ..data import (
    SCALE_PRODUCT_BOUND,
    Operand,
    blocked_view,
    check_k,
    draw_integer_scales,
    draw_operands,
    elements_view,
    exact_product,
    expected,
    scales_view,
)

PUBLIC_SCALES = partial(draw_integer_scales, 0, 2)


class GemmProblem:
    """See :class:`cute_nvfp4.harness.problem.Problem`."""

    name = "nvfp4_gemm"
    folder = Path(__file__).parent

    def validate(self, case: Case) -> None:
        check_k(case["k"])

    def _operands(self, case: Case) -> tuple[Operand, Operand]:
        k, batch = case["k"], case["l"]
        return Operand("a", case["m"], k, batch), Operand("b", case["n"], k, batch)

    def buffers(self, case: Case) -> list[Buffer]:
        inputs = [buffer for operand in self._operands(case) for buffer in operand.buffers()]
        return [*inputs, Buffer("c", (case["l"], case["m"], case["n"]), "float16", output=True)]

    def generate(self, case: Case, seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """Draws the inputs with torch's CPU generator; see ``draw_operands``. Public scales are 0, 1 and 2."""
        a, b = self._operands(case)
        generator = torch.Generator().manual_seed(seed)
        return draw_operands(a, [b], kind, PUBLIC_SCALES, SCALE_PRODUCT_BOUND, generator)

    def views(self, tensors: Mapping[str, torch.Tensor]) -> tuple:
        """(a, b, sfa, sfb, sfa_permuted, sfb_permuted, c) as the protocol shapes them."""
        elements = [elements_view(tensors[name]) for name in ("a", "b")]
        scales = [scales_view(tensors[name]) for name in ("sfa", "sfb")]
        blocked = [blocked_view(tensors[name]) for name in ("sfa_permuted", "sfb_permuted")]
        return (*elements, *scales, *blocked, tensors["c"].permute(1, 2, 0))

    def reference(self, case: Case, tensors: Mapping[str, torch.Tensor], *, magnitude: bool = True) -> list[Expected]:
        return [expected(*exact_product(tensors, *self._operands(case), magnitude=magnitude))]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        return [((case["m"], case["n"], case["l"]), "float16")]

    def useful_bytes(self, case: Case) -> int:
        """A, B, their scales, and C."""
        return sum(operand.nbytes for operand in self._operands(case)) + 2 * case["m"] * case["n"] * case["l"]

    def flops(self, case: Case) -> int:
        return 2 * case["m"] * case["n"] * case["k"] * case["l"]

    def peer(self, case: Case, device: torch.device) -> tuple[str, Callable[[], object]]:
        m, n, k, batch = case["m"], case["n"], case["k"], case["l"]
        a = torch.randn(batch, m, k, dtype=torch.bfloat16, device=device)
        b = torch.randn(batch, n, k, dtype=torch.bfloat16, device=device).transpose(1, 2)
        out = torch.empty(batch, m, n, dtype=torch.bfloat16, device=device)
        return "torch bf16 bmm", lambda: torch.bmm(a, b, out=out)


PROBLEM = GemmProblem()

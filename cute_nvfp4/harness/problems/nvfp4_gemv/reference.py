"""``nvfp4_gemv``: c = A b.

Operands are stored as :mod:`..data` describes. b has 128 rows, of which row 0 is the vector and the others are padding.
c is stored as (L, M, 1) fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...problem import DataKind, Expected
from ...schema import Case
from ..data import (
    ANY_BYTE,
    BLOCK,
    E4M3_MAGNITUDES,
    SCALE_PRODUCT_BOUND,
    Operand,
    draw_bytes,
    draw_codes,
    draw_integer_scales,
    e2m1_pair_table,
    e4m3_table,
    expected,
    partner_limit,
    stored,
)
from ..dense import DenseProblem

B_ROWS = 128
_ELEMENTS_AT_ONCE = 1 << 21  # most elements of A that are decoded to float64 at a time


class GemvProblem(DenseProblem):
    name = "nvfp4_gemv"
    folder = Path(__file__).parent

    public_mask = 3  # bytes 0 to 3: every odd element is zero

    def columns(self, case: Case) -> int:
        return 1

    def operands(self, case: Case) -> list[Operand]:
        m, k, batch = case["m"], case["k"], case["l"]
        return [Operand("a", m, k, batch), Operand("b", B_ROWS, k, batch)]

    def generate(self, case: Case, seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """Draws the inputs with torch's CPU generator.

        public: elements are bytes 0 to 3, scales are the integers 0 to 2. full: every E2M1 code, and every finite E4M3
        code of both signs; within a block of K, |sfa * sfb| is at most ``SCALE_PRODUCT_BOUND``.
        """
        a, b = self.operands(case)
        generator = torch.Generator().manual_seed(seed)
        mask = self.public_mask if kind == "public" else ANY_BYTE
        elements_a, elements_b = (draw_bytes(operand.elements_shape, mask, generator) for operand in (a, b))
        if kind == "public":
            sfa, sfb = (draw_integer_scales(0, 2, operand.scales_shape, generator) for operand in (a, b))
        else:
            sfb = _draw_signed(torch.full(b.scales_shape, E4M3_MAGNITUDES), generator)
            sfa = _draw_signed(partner_limit(sfb[:, :1], SCALE_PRODUCT_BOUND).expand(a.scales_shape), generator)
        return stored("a", elements_a, sfa) | stored("b", elements_b, sfb)

    def reference(self, case: Case, tensors: Mapping[str, torch.Tensor], *, magnitude: bool = True) -> list[Expected]:
        """Products and sums in float64 (exact for these draws) from the row-major scales."""
        device = tensors["a"].device
        pairs, scales = e2m1_pair_table().to(device), e4m3_table().to(device)
        m, k, batch = case["m"], case["k"], case["l"]
        value = torch.empty(m, 1, batch, dtype=torch.float64, device=device)
        sizes = torch.empty_like(value)
        step = max(1, _ELEMENTS_AT_ONCE // k)
        for index in range(batch):
            vector = pairs[tensors["b"][index, 0].long()].view(-1, BLOCK)
            vector = vector * scales[tensors["sfb"][index, 0].long()].view(-1, 1)
            for first in range(0, m, step):
                rows = slice(first, first + step)
                products = pairs[tensors["a"][index, rows].int()].view(-1, k // BLOCK, BLOCK).mul_(vector)
                scale = scales[tensors["sfa"][index, rows].int()]
                value[rows, 0, index] = (products.sum(-1) * scale).sum(-1)
                sizes[rows, 0, index] = (products.abs_().sum(-1) * scale.abs_()).sum(-1)
        return [expected(value, sizes)]

    def useful_bytes(self, case: Case) -> int:
        """Bytes of A, its scales, the vector (one row of b), its scales, and c."""
        m, k, batch = case["m"], case["k"], case["l"]
        return batch * ((m + 1) * (k // 2 + k // BLOCK) + 2 * m)

    def peer(self, case: Case, device: torch.device) -> tuple[str, Callable[[], object]]:
        m, k, batch = case["m"], case["k"], case["l"]
        a = torch.randn(batch, m, k, dtype=torch.bfloat16, device=device)
        b = torch.randn(batch, k, 1, dtype=torch.bfloat16, device=device)
        out = torch.empty(batch, m, 1, dtype=torch.bfloat16, device=device)
        return "torch bf16 bmm", lambda: torch.bmm(a, b, out=out)


def _draw_signed(limit: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """E4M3 codes with a magnitude uniform in [0, limit) and a uniform sign."""
    magnitude = draw_codes(limit, generator)
    return magnitude | torch.randint(0, 2, limit.shape, generator=generator, dtype=torch.uint8) << 7


PROBLEM = GemvProblem()

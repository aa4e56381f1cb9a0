"""The common part of the problems whose result is one C, from one A and the Bs that multiply it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from ..problem import Buffer, DataKind, Expected
from ..schema import Case
from .data import (
    ANY_BYTE,
    PUBLIC_MASK,
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
    varied,
)


class DenseProblem:
    """C (M, N, L) = A Bᵀ with a case's m, n, k and l; subclasses may have several Bs or another result.

    Operands are stored as :mod:`.data` describes; C is stored as (L, M, N) fp16. See
    :class:`cute_nvfp4.harness.problem.Problem`.
    """

    name: str
    folder: Path
    weights: tuple[str, ...] = ("b",)
    """The names of the Bs."""
    scale_product_bound = SCALE_PRODUCT_BOUND
    public_scales: Callable[[tuple[int, ...], torch.Generator], torch.Tensor] = staticmethod(
        partial(draw_integer_scales, 0, 2)
    )

    public_mask = PUBLIC_MASK

    def validate(self, case: Case) -> None:
        check_k(case["k"])

    def columns(self, case: Case) -> int:
        """N, the number of columns of C."""
        return case["n"]

    def operands(self, case: Case) -> list[Operand]:
        """A, then each B."""
        k, batch = case["k"], case["l"]
        return [Operand("a", case["m"], k, batch), *(Operand(name, case["n"], k, batch) for name in self.weights)]

    def buffers(self, case: Case) -> list[Buffer]:
        inputs = [buffer for operand in self.operands(case) for buffer in operand.buffers()]
        return [*inputs, Buffer("c", (case["l"], case["m"], self.columns(case)), "float16", output=True)]

    def generate(self, case: Case, seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """Draws the inputs with torch's CPU generator; see ``draw_operands``."""
        a, *bs = self.operands(case)
        generator = torch.Generator().manual_seed(seed)
        return draw_operands(a, bs, kind, self.public_scales, self.scale_product_bound, generator)

    def vary(self, contents: Mapping[str, torch.Tensor], seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """See ``varied``; rows of ``full`` data keep their places, since its scales match by row."""
        public = kind == "public"
        return varied(contents, self.public_mask if public else ANY_BYTE, public, seed)

    def views(self, tensors: Mapping[str, torch.Tensor]) -> tuple:
        """(a, b, sfa, sfb, sfa_permuted, sfb_permuted, c) in the protocol's shapes, with two Bs each of b's twice."""
        names = ("a", *self.weights)
        elements = [elements_view(tensors[name]) for name in names]
        scales = [scales_view(tensors[f"sf{name}"]) for name in names]
        blocked = [blocked_view(tensors[f"sf{name}_permuted"]) for name in names]
        return (*elements, *scales, *blocked, tensors["c"].permute(1, 2, 0))

    def reference(self, case: Case, tensors: Mapping[str, torch.Tensor], *, magnitude: bool = True) -> list[Expected]:
        return [expected(*exact_product(tensors, *self.operands(case), magnitude=magnitude))]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        return [((case["m"], self.columns(case), case["l"]), "float16")]

    def useful_bytes(self, case: Case) -> int:
        """Bytes of every operand, its scales, and C."""
        return sum(operand.nbytes for operand in self.operands(case)) + 2 * case["m"] * case["n"] * case["l"]

    def flops(self, case: Case) -> int:
        """Floating-point operations of the products with each B."""
        return 2 * len(self.weights) * case["m"] * self.columns(case) * case["k"] * case["l"]

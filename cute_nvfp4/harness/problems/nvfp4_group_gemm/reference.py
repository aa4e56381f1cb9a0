"""Data and exact answers of ``nvfp4_group_gemm``: Cᵢ = Aᵢ Bᵢᵀ, where each group has its own M, N and K.

Operands are stored as :mod:`..data` describes, with the group's index in their names (a0, sfa0, …). Cᵢ is stored as
(1, Mᵢ, Nᵢ) fp16. Every group has L = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from ...problem import Buffer, DataKind, Expected
from ...schema import Case
from ..data import (
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

PUBLIC_SCALES = partial(draw_integer_scales, 1, 3)


class GroupGemmProblem:
    """See :class:`cute_nvfp4.harness.problem.Problem`."""

    name = "nvfp4_group_gemm"
    folder = Path(__file__).parent

    def validate(self, case: Case) -> None:
        for group, k in enumerate(case["k"]):
            try:
                check_k(k)
            except ValueError as error:
                raise ValueError(f"group {group}: {error}") from error

    def _sizes(self, case: Case) -> list[tuple[int, int, int]]:
        return list(zip(case["m"], case["n"], case["k"]))

    def _groups(self, case: Case) -> list[tuple[Operand, Operand]]:
        return [
            (Operand(f"a{group}", m, k, 1), Operand(f"b{group}", n, k, 1))
            for group, (m, n, k) in enumerate(self._sizes(case))
        ]

    def buffers(self, case: Case) -> list[Buffer]:
        buffers: list[Buffer] = []
        for group, (a, b) in enumerate(self._groups(case)):
            buffers += [*a.buffers(), *b.buffers(), Buffer(f"c{group}", (1, a.rows, b.rows), "float16", output=True)]
        return buffers

    def generate(self, case: Case, seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """Draws the groups in order with torch's CPU generator; see ``draw_operands``. Public scales are 1, 2 and 3."""
        generator = torch.Generator().manual_seed(seed)
        contents: dict[str, torch.Tensor] = {}
        for a, b in self._groups(case):
            contents |= draw_operands(a, [b], kind, PUBLIC_SCALES, SCALE_PRODUCT_BOUND, generator)
        return contents

    def vary(self, contents: Mapping[str, torch.Tensor], seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """See ``varied``."""
        public = kind == "public"
        return varied(contents, PUBLIC_MASK if public else ANY_BYTE, public, seed)

    def views(self, tensors: Mapping[str, torch.Tensor]) -> tuple:
        """([(a, b, c), ...], [(sfa, sfb), ...], [(sfa, sfb) blocked, ...], [(m, n, k, l), ...])."""
        abc, scales, blocked, sizes = [], [], [], []
        groups = sum(name.startswith("c") for name in tensors)
        for group in range(groups):
            a, b = (elements_view(tensors[f"{name}{group}"]) for name in "ab")
            c = tensors[f"c{group}"].permute(1, 2, 0)
            abc.append((a, b, c))
            scales.append(tuple(scales_view(tensors[f"sf{name}{group}"]) for name in "ab"))
            blocked.append(tuple(blocked_view(tensors[f"sf{name}{group}_permuted"]) for name in "ab"))
            sizes.append((a.shape[0], b.shape[0], 2 * a.shape[1], 1))
        return abc, scales, blocked, sizes

    def reference(self, case: Case, tensors: Mapping[str, torch.Tensor], *, magnitude: bool = True) -> list[Expected]:
        return [expected(*exact_product(tensors, a, b, magnitude=magnitude)) for a, b in self._groups(case)]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        return [((m, n, 1), "float16") for m, n, _ in self._sizes(case)]

    def useful_bytes(self, case: Case) -> int:
        """Bytes of A, B, their scales, and C of every group."""
        return sum(a.nbytes + b.nbytes + 2 * a.rows * b.rows for a, b in self._groups(case))

    def flops(self, case: Case) -> int:
        return sum(2 * m * n * k for m, n, k in self._sizes(case))

    def peer(self, case: Case, device: torch.device) -> tuple[str, Callable[[], object]]:
        groups = [
            [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (n, k), (m, n))]
            for m, n, k in self._sizes(case)
        ]

        def loop() -> None:
            for a, b, c in groups:
                torch.mm(a, b.t(), out=c)

        return "loop of torch bf16 mm", loop


PROBLEM = GroupGemmProblem()

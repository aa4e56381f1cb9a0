"""``nvfp4_gemm``: C = A Bᵀ. Public scales are 0, 1 and 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...schema import Case
from ..dense import DenseProblem


class GemmProblem(DenseProblem):
    name = "nvfp4_gemm"
    folder = Path(__file__).parent

    def peer(self, case: Case, device: torch.device) -> tuple[str, Callable[[], object]]:
        m, n, k, batch = case["m"], case["n"], case["k"], case["l"]
        a = torch.randn(batch, m, k, dtype=torch.bfloat16, device=device)
        b = torch.randn(batch, n, k, dtype=torch.bfloat16, device=device).transpose(1, 2)
        out = torch.empty(batch, m, n, dtype=torch.bfloat16, device=device)
        return "torch bf16 bmm", lambda: torch.bmm(a, b, out=out)


PROBLEM = GemmProblem()

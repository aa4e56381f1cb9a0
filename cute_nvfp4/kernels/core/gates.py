"""What joins the two products of a gated GEMM, in fp32: gate(x) · y for x = alpha·A·B1ᵀ, y = alpha·A·B2ᵀ."""

from __future__ import annotations

GATES: dict = {}

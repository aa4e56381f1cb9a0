"""Operands, references and tolerances for tests of products with prepared weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cute_nvfp4 import BlockScaledTensor, simulating, to_blocked
from cute_nvfp4.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, Format
from cute_nvfp4.reference import GATES
from support import backends

STEEPEST = 1.13
"""The largest slope of any gate."""
GATE_ERROR = 2e-5
"""The relative error of a gate (``kernels.gemm.gates``)."""
STEPS = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half a step of a dtype, relative, and a bit more for float32."""


class Runs(Protocol):
    def run(self) -> torch.Tensor: ...


SPECIAL = {MXFP8: 0x7F, MXFP8_E5M2: 0x7C}
"""The first magnitude code that is not a finite number."""
POWERS = {
    torch.bfloat16: {MXFP4: range(107, 138), MXFP8: range(107, 148), MXFP8_E5M2: range(97, 138)},
    torch.float16: {MXFP4: range(111, 136), MXFP8: range(110, 133), MXFP8_E5M2: range(107, 116)},
}
"""Scale codes of MX for weights without a global scale, with products that fp32 holds."""


def operand(
    shape: tuple[int, ...],
    generator: torch.Generator,
    factor: float = 0.5,
    format: Format = NVFP4,
    dtype: torch.dtype = torch.bfloat16,
) -> BlockScaledTensor:
    """An operand (…, rows, K) of every code but NaN and infinities. NVFP4's scales have every magnitude but NaN, with
    ``factor`` as global scale; MX's scales have values that weights for ``dtype`` may have."""
    *rows, k = shape
    data = torch.randint(0, 256, (*rows, format.data_columns(k)), dtype=torch.uint8, generator=generator)
    device = backends.device()
    if format is not NVFP4:
        data = torch.where(data & 0x7F >= SPECIAL[format], data & 0x80, data) if format in SPECIAL else data
        powers = POWERS[dtype][format]
        scale = torch.randint(powers.start, powers.stop, (*rows, k // 32), dtype=torch.uint8, generator=generator)
        return BlockScaledTensor(data.to(device), to_blocked(scale).to(device), None, format)
    scale = torch.randint(0, 0x7F, (*rows, k // 16), dtype=torch.uint8, generator=generator)
    return BlockScaledTensor(data.to(device), to_blocked(scale).to(device), torch.tensor(factor).to(device))


def run(problem: Runs, arch: str = "sm_90a", **options: Any) -> torch.Tensor:
    """The kernel's result on the GPU, or in the simulator with its ``options``."""
    if backends.backend() == "cuda":
        return problem.run()
    with simulating(arch, **options):
        return problem.run()


def within(out: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> bool:
    """Whether sums are within 2**-20 of the magnitudes, then rounded once; NaN where the exact sums are."""
    steps = STEPS[out.dtype]
    bound = magnitude * 2.0**-20 + exact.abs() * steps + 2.0**-24
    error = (out.double() - exact).abs()
    good = (error <= bound) | (exact.abs() > torch.finfo(out.dtype).max * (1 - steps)) & out.isinf()
    return bool((good | (exact.isnan() & out.isnan())).all())


@dataclass(frozen=True)
class Gated:
    """gate(x · gateᵀ) · (x · upᵀ), and the tolerance of a kernel's result before it is rounded."""

    exact: torch.Tensor
    error: torch.Tensor

    def right(self, out: torch.Tensor) -> bool:
        bound = self.error + self.exact.abs() * STEPS[out.dtype]
        return bool(((out.double() - self.exact).abs() <= bound).all())


def gated_product(x: torch.Tensor, weights: Sequence[torch.Tensor], alpha: float, gate: str) -> Gated:
    """The gated product of float64 ``x`` and two weights: both sums, times ``alpha``, have a tolerance of 2**-20 of
    their magnitudes."""
    a, b = (x @ weight.t() * alpha for weight in weights)
    errors = [(x.abs() @ weight.abs().t()) * (abs(alpha) * 2.0**-20) for weight in weights]
    gated = GATES[gate](a)
    error = STEEPEST * errors[0] * (b.abs() + errors[1]) + gated.abs() * errors[1]
    return Gated(gated * b, error + (gated * b).abs() * GATE_ERROR + 2.0**-24)

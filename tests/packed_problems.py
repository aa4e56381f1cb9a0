"""What tests of products with prepared weights have in common."""

from __future__ import annotations

from typing import Any, Protocol

import backends
import torch

from cute_nvfp4 import BlockScaledTensor, simulating, to_blocked


class Runs(Protocol):
    def run(self) -> torch.Tensor: ...


def operand(shape: tuple[int, ...], generator: torch.Generator, factor: float = 0.5) -> BlockScaledTensor:
    """(…, rows, K) of every code, and scales of every magnitude but NaN; ``factor``: the global scale."""
    *rows, k = shape
    data = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 0x7F, (*rows, k // 16), dtype=torch.uint8, generator=generator)
    device = backends.device()
    return BlockScaledTensor(data.to(device), to_blocked(scale).to(device), torch.tensor(factor).to(device))


def run(problem: Runs, arch: str = "sm_90a", **options: Any) -> torch.Tensor:
    """The kernel's result on the GPU that there is, or in the simulator with its ``options``."""
    if backends.backend() == "cuda":
        return problem.run()
    with simulating(arch, **options):
        return problem.run()


def within(out: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> bool:
    """Whether sums are within 2**-20 of the magnitudes, then rounded once; NaN where the exact ones are."""
    steps = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[out.dtype]
    bound = magnitude * 2.0**-20 + exact.abs() * steps + 2.0**-24
    error = (out.double() - exact).abs()
    good = (error <= bound) | (exact.abs() > torch.finfo(out.dtype).max * (1 - steps)) & out.isinf()
    return bool((good | (exact.isnan() & out.isnan())).all())

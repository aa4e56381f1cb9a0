"""What stands between the two products of an expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import OperandError
from ...kernels.moe.config import ACTIVATIONS
from ..checks import number


@dataclass(frozen=True)
class ActivationFunction:
    """One of ``ACTIVATIONS`` by name; alpha and limit are those of "clamped_swiglu"."""

    name: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            expected = f"one of {', '.join(ACTIVATIONS)}"
            raise OperandError.of("activation of experts", got=repr(self.name), expected=expected)
        for name in ("alpha", "limit"):
            value = number(f"{name} of an activation", getattr(self, name))
            if not 0.0 < value < float("inf"):
                raise OperandError.of(f"{name} of an activation", got=value, expected="a positive number")

    @property
    def halves(self) -> int:
        """Matrices of the first product: gate and up, or one."""
        return 1 if self.name == "relu2" else 2

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        """The activation (…, I) of [gate, up] (…, 2 I), or of one matrix (…, I), in the dtype of the product."""
        if self.name == "relu2":
            return product.relu().square()
        gate, up = product.chunk(2, dim=-1)
        if self.name == "silu":
            return gate / (1.0 + torch.exp(-gate)) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1.0)

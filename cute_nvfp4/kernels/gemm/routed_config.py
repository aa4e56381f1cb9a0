"""The part of a grouped configuration for rows that are slots of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import explain

ACTIVATIONS = {"clamped_swiglu": 2, "relu2": 1}
"""Activations between the two products of an expert, besides gates, and the number of matrices that each takes."""


@dataclass(frozen=True, kw_only=True)
class RoutedConfig:
    """The part of a configuration that is for rows of experts.

    gathered: whether rows of x are those of the slots' tokens. biased: whether each group has a bias. activation: one
    of ``ACTIVATIONS`` instead of the gate (``gates.activate``), or "". constants: the constants of the activation.
    weighted: the dtype of router weights that multiply rows of the output, or "". added: whether the kernel adds these
    rows to the rows of their tokens.
    """

    gathered: bool = False
    biased: bool = False
    activation: str = ""
    constants: tuple[float, ...] = ()
    weighted: str = ""
    added: bool = False

    @property
    def of_slots(self) -> bool:
        """Whether rows are slots."""
        return self != RoutedConfig()

    def limit(self, products: int) -> str:
        """The reason why the activation does not fit ``products`` matrices, or an empty string."""
        if self.activation not in ("", *(name for name, count in ACTIVATIONS.items() if count == products)):
            expected = f"one of {', '.join(ACTIVATIONS)}, with as many products as it takes"
            return explain("activation", got=f"{self.activation!r} of {products} products", expected=expected)
        return ""

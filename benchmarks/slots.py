"""The rows of a token's experts before they are added up."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Slots(NamedTuple):
    """rows (top, H) of one token's experts, in any order, and their weights (top,), None where rows have them."""

    rows: torch.Tensor
    weights: torch.Tensor | None

    def summed(self, like: torch.Tensor) -> torch.Tensor:
        """What they add up to, in the shape of ``like``."""
        rows = self.rows.float()
        rows = rows if self.weights is None else rows * self.weights.float()[:, None]
        return rows.sum(0).to(self.rows.dtype).view(like.shape)

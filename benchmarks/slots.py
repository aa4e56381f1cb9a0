"""The rows of a token's experts before their sum."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Slots(NamedTuple):
    """The rows (top, H) of one token's experts, in any order. weights: (top,); None if the rows are already
    weighted."""

    rows: torch.Tensor
    weights: torch.Tensor | None

    def summed(self, like: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the rows, in the shape of ``like``."""
        rows = self.rows.float()
        rows = rows if self.weights is None else rows * self.weights.float()[:, None]
        return rows.sum(0).to(self.rows.dtype).view(like.shape)

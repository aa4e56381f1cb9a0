"""Checks flags in scratch memory. A launch must leave them at zero, because the next launch on the stream uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cute_nvfp4.ops.scratch import Scratch


@contextmanager
def keeping_flags() -> Iterator[list[torch.Tensor]]:
    """Within this block, collects the flags of the scratch memory that launches use."""
    init, kept = Scratch.__init__, []

    def keep(self: Scratch, sums: torch.Tensor, flags: torch.Tensor) -> None:
        init(self, sums, flags)
        kept.append(flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scratch, "__init__", keep)
        yield kept


def lowered(flags: list[torch.Tensor]) -> bool:
    """Whether all flags are zero."""
    return not any(bool(each.any()) for each in flags)

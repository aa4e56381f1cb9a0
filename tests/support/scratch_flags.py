"""Flags in scratch memory that a launch must leave as it found them, zero: the next launch on the stream uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cute_nvfp4.ops.scratch import Scratch


@contextmanager
def keeping_flags() -> Iterator[list[torch.Tensor]]:
    """Gives the flags of the scratch memory that launches within the block have had."""
    init, kept = Scratch.__init__, []

    def keep(self: Scratch, sums: torch.Tensor, flags: torch.Tensor) -> None:
        init(self, sums, flags)
        kept.append(flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scratch, "__init__", keep)
        yield kept


def lowered(flags: list[torch.Tensor]) -> bool:
    """Whether all are zero."""
    return not any(bool(each.any()) for each in flags)

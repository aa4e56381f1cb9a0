"""NVFP4 operands with codes and scales of all kinds, and the distance of a result from a reference."""

from __future__ import annotations

import torch

from cute_nvfp4 import BlockScaledTensor, to_blocked

from . import backends


def operand(rows: int, k: int, seed: int, batched: bool = False) -> BlockScaledTensor:
    """An operand with every code and every scale but NaN, including negative ones, zeros and subnormals; its padding is
    random."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (rows, k // 16), dtype=torch.uint8, generator=generator)
    scale[scale & 0x7F == 0x7F] = 0x38
    blocked = to_blocked(scale)
    own = to_blocked(torch.full_like(scale, 255)) == 255
    anything = torch.randint(0, 256, blocked.shape, dtype=torch.uint8, generator=generator)
    blocked = torch.where(own, blocked, anything).view(blocked.dtype)
    data, blocked = backends.place(data), backends.place(blocked)
    return BlockScaledTensor(data.unsqueeze(0) if batched else data, blocked, backends.place(torch.tensor(0.75)))


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the exact result; NaN if an element was not written."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())

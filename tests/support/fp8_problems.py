"""Operands of FP8 products whose sums are exact in tensor cores, so that a result has one right value."""

from __future__ import annotations

import torch

from cute_nvfp4 import BlockScaledTensor, RowScaledTensor, to_blocked
from support import backends


def weight(shape: tuple[int, ...], generator: torch.Generator) -> BlockScaledTensor:
    """A weight (…, N, K) with scales 1, 1.25 and 2: its sums with ``rows`` are exact in tensor cores."""
    *lead, k = shape
    codes = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.tensor([0x38, 0x3A, 0x40], dtype=torch.uint8)
    scales = scales[torch.randint(0, 3, (*lead, k // 16), generator=generator)]
    device = backends.device()
    # each row of the weight has its own power of two
    scales += torch.randint(-2, 3, (*lead, 1), generator=generator).to(torch.uint8) * 8
    return BlockScaledTensor(codes.to(device), to_blocked(scales).to(device), torch.tensor(0.5).to(device))


def rows(count: int, k: int, generator: torch.Generator) -> RowScaledTensor:
    """Rows (count, K) of −1, 0 and 1 times a power of two for each row."""
    x = torch.randint(-1, 2, (count, k), generator=generator).float()
    powers = 2.0 ** torch.randint(-3, 4, (count,), generator=generator).float()
    return RowScaledTensor(x.to(torch.float8_e4m3fn).to(backends.device()), powers.to(backends.device()))

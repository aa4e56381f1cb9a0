#!POPCORN leaderboard nvfp4_gemv
#!POPCORN gpu B200
"""A submission that imports Triton: it multiplies by torch, or launches a kernel of Triton if ``LAUNCH`` says so."""

import torch
import triton
import triton.language as tl
from task import input_t, output_t

LAUNCH = True
TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@triton.jit
def zero(c, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(c + at, tl.zeros((BLOCK,), tl.float16), mask=at < count)


def decoded(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed codes (rows, K/2) and E4M3 scales (rows, K/16) of one matrix -> (rows, K) in float32."""
    codes = data.view(torch.uint8)
    values = TABLE.to(codes.device)[torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()]
    return values * scale.float().repeat_interleave(16, 1)


def custom_kernel(data: input_t) -> output_t:
    a, b, sfa, sfb, _, _, c = data
    if LAUNCH:
        zero[(triton.cdiv(c.numel(), 128),)](c, c.numel(), 128)
    for batch in range(c.shape[2]):
        vector = decoded(b[:, :, batch], sfb[:, :, batch])[0]
        c[:, 0, batch] = (decoded(a[:, :, batch], sfa[:, :, batch]) @ vector).half()
    return c

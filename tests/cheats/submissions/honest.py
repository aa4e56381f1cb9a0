"""A slow, right answer in plain torch: what a cheat pretends to compute."""

import torch

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def decode(elements, scales):
    """(R, K/2, L) and (R, K/16, L) as float64 (L, R, K)."""
    codes = elements.view(torch.uint8).permute(2, 0, 1).long()
    table = _E2M1.to(codes.device)
    values = torch.stack((table[codes & 15], table[codes >> 4]), dim=-1).flatten(-2)
    return values * scales.permute(2, 0, 1).double().repeat_interleave(16, dim=-1)


def gemv(data):
    """The exact result as fp16 (M, 1, L)."""
    a, b, sfa, sfb = data[:4]
    return (decode(a, sfa) * decode(b, sfb)[:, :1]).sum(-1).t().unsqueeze(1).half()


def custom_kernel(data):
    data[-1].copy_(gemv(data))
    return data[-1]

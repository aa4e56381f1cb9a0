"""A mixture of experts on prepared weights: route, two grouped products, combine."""

from __future__ import annotations

import torch

from cute_nvfp4 import PreparedWeight, grouped_gemm_contiguous


def mixture_of_experts(
    x: torch.Tensor, router: torch.Tensor, gate_up: PreparedWeight, down: PreparedWeight, top: int
) -> torch.Tensor:
    """The weighted sum of ``top`` experts for each row of x (T, K). Never waits for the device; a CUDA graph can hold
    it."""
    weights, chosen = (x.float() @ router).softmax(-1).topk(top)
    order = chosen.flatten().argsort(stable=True)
    token = order // top
    counts = (chosen.flatten()[:, None] == torch.arange(router.shape[1], device=x.device)).sum(0)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    hidden = grouped_gemm_contiguous(x[token], gate_up, offsets=offsets, gate="silu")
    rows = grouped_gemm_contiguous(hidden, down, offsets=offsets, out_dtype=torch.float32)
    weighed = rows * weights.flatten()[order, None]
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, token, weighed)

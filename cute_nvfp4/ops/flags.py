"""Flags of launches whose CTAs wait for each other: words that are 0 before a launch, and after it again."""

from __future__ import annotations

import torch

from ..runtime.backend import capturing, stream_of
from ..target import Target

POOL_WORDS = 1 << 18
"""Words that are zeroed at once, outside of any graph, for the launches that graphs will record."""


def lowered_flags(words: int, target: Target, device: torch.device) -> torch.Tensor:
    """``words`` flags, all lowered, that no other launch uses at the same time.

    Launches of a stream follow each other, so they share flags. A launch that a CUDA graph records has flags of its
    own, because the graph may run beside that stream: they come from a pool, so that the graph has no node that zeroes
    them. Only a graph of more launches than the pool holds zeroes the flags of the rest in each replay.
    """
    if target.backend != "cuda":
        return torch.zeros(words, dtype=torch.int32, device=device)
    if capturing(target):
        pool = _pools.get(device)
        if pool is None or pool.numel() < words:
            return torch.zeros(words, dtype=torch.int32, device=device)
        _pools[device] = pool[words:]
        return pool[:words]
    place = device, stream_of(target, device)
    flags = _flags.get(place)
    if flags is None or flags.numel() < words:
        flags = _flags[place] = torch.zeros(words, dtype=torch.int32, device=device)
    pool = _pools.get(device)
    if pool is None or pool.numel() < POOL_WORDS // 2:
        _pools[device] = torch.zeros(POOL_WORDS, dtype=torch.int32, device=device)
        # a graph may run on any stream
        torch.cuda.current_stream(device).synchronize()
    return flags


_flags: dict[tuple[torch.device, int], torch.Tensor] = {}
_pools: dict[torch.device, torch.Tensor] = {}

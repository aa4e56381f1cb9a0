"""Scratch memory of launches whose CTAs add partial sums: fp32 workspaces, and flags that are 0 between launches."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..kernels.gemm.arguments import PartialSums
from ..runtime.backend import device_index
from ..runtime.simulating import session_number
from ..runtime.torch_private import raw_stream
from ..target import Target

POOL_WORDS = 1 << 18
"""Words of flags that are zeroed at once, outside of any graph, for launches that graphs record later."""


class Scratch:
    """fp32 values for partial sums, and int32 flags, all 0. addresses: those of both."""

    def __init__(self, sums: torch.Tensor, flags: torch.Tensor) -> None:
        self.sums, self.flags = sums, flags
        self.floats, self.words = sums.numel(), flags.numel()
        self.addresses = sums.data_ptr(), flags.data_ptr()

    def leave(self, stream: torch.cuda.Stream) -> None:
        """Keeps this memory from other tensors until the work that is queued on ``stream`` ends."""
        for tensor in (self.sums, self.flags):
            tensor.record_stream(stream)


def partial_sums(size: tuple[int, int]) -> PartialSums:
    """The arguments for partial sums and flags; null addresses if ``size`` (floats, words) has no flags."""
    return PartialSums("scratch.sums", "scratch.flags") if size[1] else PartialSums(0, 0)


def scratch_for(
    size: tuple[int, int], target: Target, device: torch.device, **buffers: tuple[tuple[int, ...], torch.dtype]
) -> tuple[str, Callable[[tuple, bool], Any], Any] | None:
    """The ``extra`` of ``Operation.planned`` for a launch with scratch memory; None if the launch needs none.

    size: floats of "scratch.sums" and words of "scratch.flags". buffers: shapes and dtypes of further new tensors, by
    name. Sums and flags belong to the stream, or to the graph that records it; a prepared call has its own.
    """
    if not (size[1] or buffers):
        return None
    memory, none = namedtuple("Memory", ("sums", "flags", *buffers)), torch.empty(0, device="meta")
    like = memory(none, none, *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in buffers.values()))
    new = [functools.partial(torch.empty, shape, dtype=dtype, device=device) for shape, dtype in buffers.values()]

    def make(args: tuple, kept: bool) -> Any:
        found = like if not size[1] else (scratch_of if kept else _own_scratch)(*size, target, device)
        return memory(found.sums, found.flags, *[one() for one in new]) if new else found

    return "scratch", make, like


def scratch_of(floats: int, words: int, target: Target, device: torch.device) -> Scratch:
    """Scratch memory of at least ``floats`` and ``words``, which no other launch uses at the same time.

    Launches of a stream run one after the other, so they share the stream's memory. A launch that a CUDA graph records
    has its own, because the graph may run beside that stream. Its flags come from a pool, so that no node of the graph
    zeroes them. Only if a graph has more launches than the pool serves, each replay zeroes the flags of the rest.
    """
    if target.backend != "cuda":
        return _own_scratch(floats, words, target, device)
    held = _held()
    if torch.cuda.is_current_stream_capturing():
        pool = held.pools.get(device)
        if pool is None or pool.numel() < words:
            return _own_scratch(floats, words, target, device)
        held.pools[device] = pool[words:]
        return Scratch(torch.empty(floats, dtype=torch.float32, device=device), pool[:words])
    index = device_index(device)
    key = index, raw_stream(index)
    found = held.streams.get(key)
    if found is None or found.floats < floats or found.words < words:
        if found is not None:
            floats, words = max(floats, found.floats), max(words, found.words)
            found.leave(torch.cuda.current_stream(device))
        found = held.streams[key] = outlasting(lambda: _own_scratch(floats, words, target, device), device)
        held.fill_pool(device)
    return found


def outlasting(make: Callable[[], Any], device: torch.device) -> Any:
    """What ``make`` returns: memory that is filled on ``device`` and outlives the call that asks for it.

    ``make`` runs in another thread, and the result is ready on the device. ``torch.compile(mode="reduce-overhead")``
    takes what this thread allocates from the memory of its CUDA graphs, and refuses a graph that leaves it allocated.
    """

    def made() -> Any:
        with torch.cuda.device(device):
            found = make()
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def _own_scratch(floats: int, words: int, target: Target, device: torch.device) -> Scratch:
    """New scratch memory, for one launch alone."""
    sums = torch.empty(floats, dtype=torch.float32, device=device)
    return Scratch(sums, torch.zeros(words, dtype=torch.int32, device=device))


class Held:
    """The scratch memory of each stream, and each device's pool of flags. session: 0 for real GPUs."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.streams: dict[tuple[int, int], Scratch] = {}
        self.pools: dict[torch.device, torch.Tensor] = {}

    def fill_pool(self, device: torch.device) -> None:
        """Fills the pool of flags for graphs that will be captured."""
        pool = self.pools.get(device)
        if pool is None or pool.numel() < POOL_WORDS // 2:
            # a graph may run on any stream, so the words must be ready before it does
            words = functools.partial(torch.zeros, POOL_WORDS, dtype=torch.int32, device=device)
            self.pools[device] = outlasting(words, device)


def _held() -> Held:
    """The scratch memory of the GPUs in use now; a new simulated session starts with none."""
    global _kept
    session = session_number()
    if _kept.session != session:
        _kept = Held(session)
    return _kept


_kept = Held(0)

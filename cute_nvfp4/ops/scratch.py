"""Scratch memory of launches whose CTAs add up their sums: workspaces, and flags that are 0 before and after one."""

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
"""Words that are zeroed at once, outside of any graph, for the launches that graphs will record."""


class Scratch:
    """fp32 numbers for partial sums, and flags, all lowered. addresses: of both."""

    def __init__(self, sums: torch.Tensor, flags: torch.Tensor) -> None:
        self.sums, self.flags = sums, flags
        self.floats, self.words = sums.numel(), flags.numel()
        self.addresses = sums.data_ptr(), flags.data_ptr()

    def leave(self, stream: torch.cuda.Stream) -> None:
        """Has what is queued on ``stream`` end before another tensor gets this memory."""
        for tensor in (self.sums, self.flags):
            tensor.record_stream(stream)


def partial_sums(size: tuple[int, int]) -> PartialSums:
    """Where a launch with scratch memory of this size has its partial sums and flags; one without has none."""
    return PartialSums("scratch.sums", "scratch.flags") if size[1] else PartialSums(0, 0)


def scratch_for(
    size: tuple[int, int], target: Target, device: torch.device, **places: tuple[tuple[int, ...], torch.dtype]
) -> tuple[str, Callable[[tuple, bool], Any], Any] | None:
    """The ``extra`` of ``Operation.planned`` for a launch with scratch memory: "scratch.sums" and "scratch.flags", so
    many floats and words, and by their names new tensors of these shapes and dtypes; None for one without.

    Sums and flags are those of the stream, or of the graph that records it; those of a prepared call are its own.
    """
    if not (size[1] or places):
        return None
    memory, none = namedtuple("Memory", ("sums", "flags", *places)), torch.empty(0, device="meta")
    like = memory(none, none, *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in places.values()))
    new = [functools.partial(torch.empty, shape, dtype=dtype, device=device) for shape, dtype in places.values()]

    def make(given: tuple, kept: bool) -> Any:
        found = like if not size[1] else (scratch_of if kept else _own_scratch)(*size, target, device)
        return memory(found.sums, found.flags, *[one() for one in new]) if new else found

    return "scratch", make, like


def scratch_of(floats: int, words: int, target: Target, device: torch.device) -> Scratch:
    """Gives scratch memory of at least ``floats`` and ``words``, which no other launch uses at the same time.

    Launches of a stream follow each other, so they share what is kept for it. A launch that a CUDA graph records has
    its own, because the graph may run beside that stream: its flags come from a pool, so that no node of the graph
    zeroes them. Only a graph of more launches than the pool holds zeroes the flags of the rest in each replay.
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
    place = index, raw_stream(index)
    found = held.streams.get(place)
    if found is None or found.floats < floats or found.words < words:
        if found is not None:
            floats, words = max(floats, found.floats), max(words, found.words)
            found.leave(torch.cuda.current_stream(device))
        found = held.streams[place] = outlasting(lambda: _own_scratch(floats, words, target, device), device)
        held.fill_pool(device)
    return found


def outlasting(make: Callable[[], Any], device: torch.device) -> Any:
    """What ``make`` gives, whose memory is filled on ``device`` and outlasts the call that asks for it.

    Another thread makes it: ``torch.compile(mode="reduce-overhead")`` takes what this thread allocates from the memory
    of its CUDA graphs, and refuses a graph that leaves some of that allocated. It waits for the device.
    """

    def made() -> Any:
        with torch.cuda.device(device):
            found = make()
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def _own_scratch(floats: int, words: int, target: Target, device: torch.device) -> Scratch:
    """Memory of a launch's own."""
    sums = torch.empty(floats, dtype=torch.float32, device=device)
    return Scratch(sums, torch.zeros(words, dtype=torch.int32, device=device))


class Held:
    """What is kept for each stream, and the flags of each device for graphs. session: its number, 0 for real GPUs."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.streams: dict[tuple[int, int], Scratch] = {}
        self.pools: dict[torch.device, torch.Tensor] = {}

    def fill_pool(self, device: torch.device) -> None:
        """Has words for graphs that will be captured."""
        pool = self.pools.get(device)
        if pool is None or pool.numel() < POOL_WORDS // 2:
            # a graph may run on any stream: the words are there before it does
            words = functools.partial(torch.zeros, POOL_WORDS, dtype=torch.int32, device=device)
            self.pools[device] = outlasting(words, device)


def _held() -> Held:
    """What belongs to the GPUs that run now; memory of a session that has ended is none."""
    global _kept
    session = session_number()
    if _kept.session != session:
        _kept = Held(session)
    return _kept


_kept = Held(0)

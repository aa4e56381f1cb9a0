"""Memory that the harness shares with the process of a submission: a case's buffers and room for its results.

The inputs of every case start at the same addresses, so contents change under pointers that a submission may
have seen before. The harness keeps its own copy of what it wrote and compares.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .problem import Buffer, Problem
from .schema import Case

_ALIGNMENT = 4096


@dataclass(frozen=True)
class Slot:
    """Where a buffer lies in the arena."""

    buffer: Buffer
    offset: int
    nbytes: int


def _slots(buffers: Sequence[Buffer], start: int) -> tuple[list[Slot], int]:
    slots, offset = [], start
    for buffer in buffers:
        nbytes = prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize
        slots.append(Slot(buffer, offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return slots, offset


@dataclass(frozen=True)
class Layout:
    """A case's buffers, and the places its outputs are copied to."""

    buffers: list[Slot]
    results: list[Slot]
    nbytes: int

    @classmethod
    def of(cls, problem: Problem, case: Case) -> Layout:
        buffers, end = _slots(problem.buffers(case), 0)
        shapes = enumerate(problem.output_shapes(case))
        results, end = _slots([Buffer(f"result{i}", shape, dtype, True) for i, (shape, dtype) in shapes], end)
        return cls(buffers, results, end)


class Arena:
    """A shared mapping; ``fd`` is inherited by the worker, which opens it by number."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        self._owner = fd is None
        if fd is None:
            fd = os.memfd_create("cute_nvfp4_harness")
            os.ftruncate(fd, nbytes)
        self.fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The buffer as a contiguous CPU tensor over the shared memory."""
        raw = self._bytes[slot.offset : slot.offset + slot.nbytes]
        return raw.view(getattr(torch, slot.buffer.dtype)).view(slot.buffer.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the arena."""
        first = self._bytes.data_ptr()
        return first <= tensor.data_ptr() < first + self.nbytes

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with its last tensor."""
        if self._owner:
            os.close(self.fd)

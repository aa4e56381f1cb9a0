"""Memory that the harness shares with the process of a submission: one call's buffers and room for its results.

It only carries contents from one process to the other: the submission's tensors lie in its process's
:class:`~cute_nvfp4.harness.workspace.Workspace`. The harness keeps its own copy of what it wrote and compares.
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

ALIGNMENT = 4096  # of every buffer, in bytes


@dataclass(frozen=True)
class Slot:
    """Where a buffer lies in the arena, or in one call's part of the workspace."""

    buffer: Buffer
    offset: int
    nbytes: int


def _slots(buffers: Sequence[Buffer], start: int) -> tuple[list[Slot], int]:
    slots, offset = [], start
    for buffer in buffers:
        nbytes = prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize
        slots.append(Slot(buffer, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return slots, offset


@dataclass(frozen=True)
class Layout:
    """A case's buffers (``buffer_nbytes`` together), and after them the places its outputs are copied to."""

    buffers: list[Slot]
    results: list[Slot]
    buffer_nbytes: int
    nbytes: int

    @classmethod
    def of(cls, problem: Problem, case: Case) -> Layout:
        buffers, buffer_nbytes = _slots(problem.buffers(case), 0)
        shapes = enumerate(problem.output_shapes(case))
        results, end = _slots([Buffer(f"result{i}", shape, dtype, True) for i, (shape, dtype) in shapes], buffer_nbytes)
        return cls(buffers, results, buffer_nbytes, end)

    @property
    def inputs(self) -> list[Slot]:
        return [slot for slot in self.buffers if not slot.buffer.output]

    @property
    def outputs(self) -> list[Slot]:
        return [slot for slot in self.buffers if slot.buffer.output]


def tensor_at(memory: torch.Tensor, slot: Slot, start: int = 0) -> torch.Tensor:
    """The buffer as a contiguous tensor over ``memory`` (bytes), its layout beginning at ``start``."""
    raw = memory[start + slot.offset : start + slot.offset + slot.nbytes]
    return raw.view(getattr(torch, slot.buffer.dtype)).view(slot.buffer.shape)


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
        return tensor_at(self._bytes, slot)

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with its last tensor."""
        if self._owner:
            os.close(self.fd)

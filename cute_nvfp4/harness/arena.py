"""Memory that the judge shares with the process of a submission: the tensors of its calls, and room for more.

On a CPU and in the simulated GPU the tensors that a submission is called with lie in it: the judge writes inputs and
NaN into them, and reads outputs from them itself. On a GPU it only carries contents. The judge reads and writes the
file; the other processes map it (``mapped``).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .errors import HarnessError
from .problem import Buffer, Problem
from .schema import Case

ALIGNMENT = 4096  # of every buffer, in bytes
GAP = 1 << 16
"""Bytes between two tensors: an access that runs past the end of one does not reach the next."""
HEAP = 64 << 30
"""Bytes for what a submission allocates in the simulated GPU; memory is taken when it is written."""

_ADD_SEALS, _SEAL_SIZE = 1033, 0x1 | 0x2 | 0x4  # Linux: no more seals, not shrunk, not grown


@dataclass(frozen=True)
class Slot:
    """Where a buffer lies in a call's part of the arena."""

    buffer: Buffer
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A call's buffers, and after them the places its outputs are copied to where they lie elsewhere."""

    buffers: list[Slot]
    results: list[Slot]
    nbytes: int

    @classmethod
    def of(cls, problem: Problem, case: Case) -> Layout:
        slots, end = _placed(problem.buffers(case), 0)
        return cls(slots, [], end).with_results(problem.output_shapes(case))

    def with_results(self, kinds: Sequence[tuple[tuple[int, ...], str]]) -> Layout:
        """This layout with places for results of these shapes and dtypes."""
        buffers = [Buffer(f"result{i}", shape, dtype, True) for i, (shape, dtype) in enumerate(kinds)]
        last = self.buffers[-1]
        return Layout(self.buffers, *_placed(buffers, last.offset + _room(last.nbytes)))

    @property
    def inputs(self) -> list[Slot]:
        return [slot for slot in self.buffers if not slot.buffer.output]

    @property
    def outputs(self) -> list[Slot]:
        return [slot for slot in self.buffers if slot.buffer.output]


def _placed(buffers: Sequence[Buffer], offset: int) -> tuple[list[Slot], int]:
    """Places for them from ``offset`` on, and where the last one ends."""
    slots = []
    for buffer in buffers:
        slots.append(Slot(buffer, offset, prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize))
        offset += _room(slots[-1].nbytes)
    return slots, offset


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT + GAP


def tensor_at(memory: torch.Tensor, slot: Slot, start: int = 0) -> torch.Tensor:
    """The buffer as a contiguous tensor over ``memory`` (bytes), its layout beginning at ``start``."""
    raw = memory[start + slot.offset : start + slot.offset + slot.nbytes]
    return raw.view(getattr(torch, slot.buffer.dtype)).view(slot.buffer.shape)


class Arena:
    """The judge's side: a file in memory. ``calls`` bytes are for tensors of calls, the rest is a heap."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.nbytes = calls + HEAP
        self.fd = os.memfd_create("cute_nvfp4_harness", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SIZE)  # a file cut short would end the device, which maps it

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Writes the bytes of a tensor, one of a GPU by way of the CPU."""
        data = memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        while len(data):
            done = os.pwrite(self.fd, data, offset)
            data, offset = data[done:], offset + done

    def read(self, offset: int, shape: Sequence[int], dtype: str, stride: Sequence[int] | None = None) -> torch.Tensor:
        """A private copy of the tensor at ``offset``; ``stride`` in elements, contiguous by default.

        Raises:
            HarnessError: it is not in the arena.
        """
        kind = getattr(torch, dtype)
        steps = stride if stride is not None else torch.empty(tuple(shape), device="meta").stride()
        nbytes = span(shape, steps, kind.itemsize)
        if min(0, offset, *steps) < 0 or offset + nbytes > self.nbytes:
            raise HarnessError(f"{nbytes} bytes at {offset} are not in the memory that was handed over")
        data = torch.empty(nbytes, dtype=torch.uint8)
        view, at = memoryview(data.numpy()), 0
        while at < nbytes:
            at += os.preadv(self.fd, [view[at:]], offset + at)
        return torch.as_strided(data.view(kind), tuple(shape), tuple(steps))

    def close(self) -> None:
        """Closes the file; its memory goes with the last process that maps it."""
        os.close(self.fd)


def span(shape: Sequence[int], stride: Sequence[int], size: int) -> int:
    """Bytes from the first element to the end of the last one, of elements of ``size`` bytes."""
    return (sum((n - 1) * s for n, s in zip(shape, stride)) + 1) * size if prod(shape) else 0

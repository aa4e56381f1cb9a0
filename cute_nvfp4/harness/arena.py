"""Memory that the judge shares with a submission's process: the tensors of its calls, and a heap.

On a CPU and in the simulated GPU the tensors that a submission is called with lie in this memory: the judge writes
inputs and NaN to them, and reads the outputs itself. On a GPU the memory only carries contents. The judge reads and
writes the file; the other processes map it (``mapped``).
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

ALIGNMENT = 4096  # bytes, of every buffer
GAP = 1 << 16
"""Bytes between two tensors: an access just past the end of one does not reach the next."""
HEAP = 64 << 30
"""Bytes for a submission's allocations in the simulated GPU. The system provides memory when it is written."""

_ADD_SEALS, _SEAL_SIZE = 1033, 0x1 | 0x2 | 0x4  # Linux: no more seals, no shrinking, no growing


@dataclass(frozen=True)
class Slot:
    """The place of a buffer in the arena's part for one call."""

    buffer: Buffer
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The buffers of a call, and after them the results: copies of outputs that lie elsewhere."""

    buffers: list[Slot]
    results: list[Slot]
    nbytes: int

    @classmethod
    def of(cls, problem: Problem, case: Case) -> Layout:
        slots, end = _placed(problem.buffers(case), 0)
        return cls(slots, [], end).with_results(problem.output_shapes(case))

    def with_results(self, kinds: Sequence[tuple[tuple[int, ...], str]]) -> Layout:
        """This layout, with room for results of these shapes and dtypes."""
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
    """A slot for each buffer, from ``offset`` on, and the end of the last slot."""
    slots = []
    for buffer in buffers:
        slots.append(Slot(buffer, offset, prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize))
        offset += _room(slots[-1].nbytes)
    return slots, offset


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT + GAP


def tensor_at(memory: torch.Tensor, slot: Slot, start: int = 0) -> torch.Tensor:
    """The buffer as a contiguous tensor over ``memory`` (bytes). start: where its layout begins in it."""
    raw = memory[start + slot.offset : start + slot.offset + slot.nbytes]
    return raw.view(getattr(torch, slot.buffer.dtype)).view(slot.buffer.shape)


class Arena:
    """The judge's side: a file in memory. calls: bytes for the tensors of calls; the heap follows them."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.nbytes = calls + HEAP
        self.fd = os.memfd_create("cute_nvfp4_harness", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SIZE)  # truncating the file would end the device, which maps it

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Writes the bytes of a tensor; one on a GPU goes through the CPU."""
        data = memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        while len(data):
            done = os.pwrite(self.fd, data, offset)
            data, offset = data[done:], offset + done

    def read(self, offset: int, shape: Sequence[int], dtype: str, stride: Sequence[int] | None = None) -> torch.Tensor:
        """A private copy of the tensor at ``offset``. stride: in elements, contiguous by default.

        Raises:
            HarnessError: the tensor is not in the arena.
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
        """Closes the file. Its memory is freed with the last process that maps it."""
        os.close(self.fd)


def span(shape: Sequence[int], stride: Sequence[int], size: int) -> int:
    """Bytes from the first element to the end of the last one. size: bytes of an element."""
    return (sum((n - 1) * s for n, s in zip(shape, stride)) + 1) * size if prod(shape) else 0

"""The tensors that a submission is called with, for every call of a batch, in its own process.

They keep their addresses from case to case, so that contents change under addresses that a submission has seen before.
On a GPU they lie in one block of its memory; elsewhere they are the arena itself, which the judge fills and reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .arena import ALIGNMENT, Layout, tensor_at
from .mapped import BASE, Mapped
from .problem import Problem
from .schema import Case
from .spoiled import Spoiled, spoil

# Bound before a submission is imported: see integrity.py.
_fill = torch.Tensor.fill_
_copy = torch.Tensor.copy_


class Workspace:
    """Tensors for up to ``batch`` calls on one case. adopt: makes a tensor in the arena one of the device that the
    submission finds; None on a GPU, for which the arena only carries contents."""

    def __init__(
        self, problem: Problem, memory: Mapped, adopt: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self._problem, self._adopt = problem, adopt
        self._arena = torch.from_numpy(memory.bytes_at(0, memory.nbytes))
        self._memory = memory
        self._block = torch.empty(0, dtype=torch.uint8, device="cuda" if adopt is None else "cpu")
        self._laid_out: tuple[Case, int] | None = None
        self._calls: list[dict[str, torch.Tensor]] = []
        self._starts: list[int] = []
        self.layout: Layout = None

    def lay_out(self, case: Case, batch: int) -> None:
        """Makes the tensors for ``batch`` calls on ``case``, unless they exist."""
        if (case, batch) == self._laid_out:
            return
        self.layout = layout = Layout.of(self._problem, case)
        self._calls = []
        if self._adopt is None:
            needed = batch * layout.nbytes + ALIGNMENT
            if self._block.numel() < needed:
                self._block = None  # frees the old memory first
                self._block = torch.empty(needed, dtype=torch.uint8, device="cuda")
            first = -self._block.data_ptr() % ALIGNMENT
            self._starts = [first + call * layout.nbytes for call in range(batch)]
            self._calls = [
                {s.buffer.name: tensor_at(self._block, s, at) for s in layout.buffers} for at in self._starts
            ]
        else:
            self._calls = [{s.buffer.name: self._in_arena(s, call) for s in layout.buffers} for call in range(batch)]
        self._laid_out = case, batch

    def _in_arena(self, slot, call: int) -> torch.Tensor:
        """A tensor in the arena, with a storage of its own."""
        raw = torch.from_numpy(self._memory.bytes_at(call * self.layout.nbytes + slot.offset, slot.nbytes))
        return self._adopt(raw.view(getattr(torch, slot.buffer.dtype)).view(slot.buffer.shape))

    def data(self, index: int) -> tuple:
        """A new ``data`` tuple of call ``index``."""
        return self._problem.views(self._calls[index])

    def take_inputs(self, index: int) -> None:
        """Fills the inputs of call ``index`` from the arena's first call. On a GPU only."""
        for slot in self.layout.inputs:
            _copy(self._calls[index][slot.buffer.name], tensor_at(self._arena, slot))

    def spoil(self, order: Sequence[int]) -> Spoiled:
        """Makes elements of the inputs of the calls of ``order`` wrong. On a GPU only."""
        return spoil(self._block, self.layout.inputs, [self._starts[index] for index in order])

    def give_inputs(self, index: int) -> None:
        """Writes the inputs of call ``index`` to the arena, as the submission left them. On a GPU only."""
        for slot in self.layout.inputs:
            _copy(tensor_at(self._arena, slot), self._calls[index][slot.buffer.name])

    def result(self, index: int, number: int) -> tuple[torch.Tensor, int]:
        """The tensor in the arena for output ``number`` of call ``index``, and its offset."""
        slot, start = self.layout.results[number], 0 if self._adopt is None else index * self.layout.nbytes
        return tensor_at(self._arena, slot, start), start + slot.offset

    def expect(self, kinds: Sequence[tuple[tuple[int, ...], str]]) -> None:
        """Makes room for results of these shapes and dtypes, if the problem does not define its outputs."""
        self.layout = self.layout.with_results(kinds)

    def poison(self) -> None:
        """Fills every output with NaN. On a GPU only: elsewhere the judge does."""
        for tensors in self._calls if self._adopt is None else ():
            for slot in self.layout.outputs:
                _fill(tensors[slot.buffer.name], float("nan"))

    def offset(self, tensor: torch.Tensor) -> int | None:
        """The offset of ``tensor`` in the arena; None if it lies elsewhere."""
        at = tensor.data_ptr() - BASE
        return at if 0 <= at < self._memory.nbytes else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the tensors of calls, or in memory that other cases used."""
        storage = tensor.untyped_storage().data_ptr()
        block = self._block.data_ptr()
        inside = any(storage == t.untyped_storage().data_ptr() for call in self._calls for t in call.values())
        return inside or block <= storage < block + self._block.numel()

    def aliases(self, tensor: torch.Tensor) -> list[str]:
        """The names of the inputs that ``tensor`` shares bytes with."""
        first, last = _span(tensor)
        found = []
        for call in self._calls:
            for slot in self.layout.inputs:
                begin, end = _span(call[slot.buffer.name])
                if first < end and begin < last:
                    found.append(slot.buffer.name)
        return list(dict.fromkeys(found))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the tensor's first byte, and of the byte after its last one."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()

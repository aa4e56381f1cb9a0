"""The tensors that a submission is called with, in its own process: those of every call of a batch.

They lie in one block of memory that is kept from case to case, so contents change under addresses that a submission
may have seen before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .arena import ALIGNMENT, Arena, Layout, Slot, tensor_at
from .problem import Problem
from .schema import Case

# Taken before a submission is imported: see integrity.py.
_fill = torch.Tensor.fill_
_copy = torch.Tensor.copy_


class Workspace:
    """Tensors for up to ``batch`` calls on one case, on ``device``; the arena is how their contents come and go.

    ``gap`` bytes (a multiple of the alignment) follow each tensor and belong to none.
    """

    def __init__(self, problem: Problem, device: torch.device, arena: Arena, gap: int = 0) -> None:
        self._problem, self._device, self._arena, self._gap = problem, device, arena, gap
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._laid_out: tuple[Case, int] | None = None
        self._calls: list[dict[str, torch.Tensor]] = []
        self.layout: Layout

    def lay_out(self, case: Case, batch: int) -> bool:
        """Makes room for ``batch`` calls on ``case``; what the tensors hold is then undefined.

        False where it was laid out so before, and nothing changed.
        """
        if (case, batch) == self._laid_out:
            return False
        self.layout = Layout.of(self._problem, case)
        each = self.layout.buffer_nbytes + len(self.layout.buffers) * self._gap
        needed = batch * each + ALIGNMENT
        if self._memory.numel() < needed:
            self._calls, self._memory = [], None  # the old memory goes first
            self._memory = torch.empty(needed, dtype=torch.uint8, device=self._device)
        first = -self._memory.data_ptr() % ALIGNMENT
        self._calls = [
            {
                slot.buffer.name: tensor_at(self._memory, slot, first + call * each + index * self._gap)
                for index, slot in enumerate(self.layout.buffers)
            }
            for call in range(batch)
        ]
        self._laid_out = case, batch
        return True

    @property
    def memory(self) -> torch.Tensor:
        """The block of memory that holds all of them."""
        return self._memory

    def tensors(self) -> Iterator[tuple[int, Slot, torch.Tensor]]:
        """Every tensor, with the number of its call and its place in the layout."""
        for number, tensors in enumerate(self._calls):
            for slot in self.layout.buffers:
                yield number, slot, tensors[slot.buffer.name]

    def data(self, index: int) -> tuple:
        """The ``data`` tuple of call ``index``, newly made."""
        return self._problem.views(self._calls[index])

    def take_inputs(self, index: int) -> None:
        """Fills the inputs of call ``index`` from the arena."""
        for slot in self.layout.inputs:
            _copy(self._calls[index][slot.buffer.name], self._arena.tensor(slot))

    def give_inputs(self, index: int) -> None:
        """Writes the inputs of call ``index`` to the arena, as the submission left them."""
        for slot in self.layout.inputs:
            _copy(self._arena.tensor(slot), self._calls[index][slot.buffer.name])

    def poison(self) -> None:
        """Fills every output with NaN."""
        for tensors in self._calls:
            for slot in self.layout.outputs:
                _fill(tensors[slot.buffer.name], float("nan"))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` begins in this memory."""
        first = self._memory.data_ptr()
        return first <= tensor.data_ptr() < first + self._memory.numel()

    def aliases(self, tensor: torch.Tensor) -> list[str]:
        """Names of the inputs, of any call, whose memory ``tensor`` overlaps."""
        if tensor.numel() == 0:
            return []
        first = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1
        last = first + reach * tensor.element_size()
        found = {}
        for tensors in self._calls:
            for slot in self.layout.inputs:
                begin = tensors[slot.buffer.name].data_ptr()
                if first < begin + slot.nbytes and begin < last:
                    found[slot.buffer.name] = True
        return list(found)

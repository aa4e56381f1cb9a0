"""The tensors that a submission is called with, in its own process: those of every call of a batch.

They lie in one piece of memory that is kept from case to case, so contents change under addresses that a submission
may have seen before.
"""

from __future__ import annotations

import torch

from .arena import ALIGNMENT, Arena, Layout, tensor_at
from .problem import Problem
from .schema import Case

# Taken before a submission is imported: see integrity.py.
_fill = torch.Tensor.fill_
_copy = torch.Tensor.copy_


class Workspace:
    """Tensors for up to ``batch`` calls on one case, on ``device``; the arena is how their contents come and go."""

    def __init__(self, problem: Problem, device: torch.device, arena: Arena) -> None:
        self._problem, self._device, self._arena = problem, device, arena
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._laid_out: tuple[Case, int] | None = None
        self._calls: list[dict[str, torch.Tensor]] = []
        self.layout: Layout

    def lay_out(self, case: Case, batch: int) -> None:
        """Makes room for ``batch`` calls on ``case``; what the tensors hold is then undefined."""
        if (case, batch) == self._laid_out:
            return
        self.layout = Layout.of(self._problem, case)
        needed = batch * self.layout.buffer_nbytes + ALIGNMENT
        if self._memory.numel() < needed:
            self._calls, self._memory = [], None  # the old memory goes first
            self._memory = torch.empty(needed, dtype=torch.uint8, device=self._device)
        first = -self._memory.data_ptr() % ALIGNMENT
        starts = [first + index * self.layout.buffer_nbytes for index in range(batch)]
        self._calls = [
            {slot.buffer.name: tensor_at(self._memory, slot, start) for slot in self.layout.buffers} for start in starts
        ]
        self._laid_out = case, batch

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

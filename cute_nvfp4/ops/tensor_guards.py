"""Guards of tensors: whether others are like them, which torch says in C++ of all at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..runtime.torch_private import guards


class TensorGuards:
    """Dtypes, shapes, strides, devices and gradients of ``tensors``, and which of them are the same; addresses are not
    compared."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # torch's guards take no tensor twice
        first = [next(j for j, y in enumerate(tensors) if y is x) for x in tensors]
        self._twice = [(i, j) for i, j in enumerate(first) if i != j]
        self._distinct = sorted(set(first))
        self._guards = guards([tensors[i] for i in self._distinct])

    def check(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many ``tensors`` are like these."""
        if self._twice:
            if any(tensors[i] is not tensors[j] for i, j in self._twice):
                return False
            tensors = [tensors[i] for i in self._distinct]
        return self._guards.check(*tensors)

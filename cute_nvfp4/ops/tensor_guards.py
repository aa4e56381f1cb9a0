"""Guards of tensors: torch compares a list of tensors with known ones in one C++ call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..runtime.torch_private import guards


class TensorGuards:
    """Guards for the dtypes, shapes, strides, devices and gradients of ``tensors``, and which of them are the same
    tensor. They do not compare addresses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # torch's guards refuse a tensor that occurs twice
        first = [next(j for j, y in enumerate(tensors) if y is x) for x in tensors]
        self._twice = [(i, j) for i, j in enumerate(first) if i != j]
        self._distinct = sorted(set(first))
        self._guards = guards([tensors[i] for i in self._distinct])

    def check(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, as many as the guarded ones, are like them."""
        if self._twice:
            if any(tensors[i] is not tensors[j] for i, j in self._twice):
                return False
            tensors = [tensors[i] for i in self._distinct]
        return self._guards.check(*tensors)

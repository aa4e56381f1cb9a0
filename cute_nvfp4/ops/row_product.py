"""Quantizes one row of activations and multiplies it by a weight: two launches, planned once for rows of one kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import itemgetter

import torch

from ..errors import OperandError
from ..operand import BlockScaledTensor
from ..runtime.backend import Backend
from ..scale_layout import blocked_bytes
from .gemv import gemv
from .planned import Preparation
from .prepare import preparation
from .quantize import quantize

# torch's own allocations have at least this alignment; scales lie behind the data at a multiple of it
_ALIGNMENT = 64


class RowProduct:
    """Computes x · Wᵀ for rows x (1, K), with the bits and launches of ``quantize`` with a global scale and ``gemv``.

    A call allocates the quantized row and the result (1, N), writes their addresses, and launches. Calls share no
    memory that is written. The caller keeps the weight where it is, and gives rows like the one that was planned for.
    """

    def __init__(
        self, x: torch.Tensor, scale: torch.Tensor, weight: BlockScaledTensor, rule: str, backend: Backend
    ) -> None:
        """Raises OperandError, TargetError: bad arguments, or a request that needs more than two launches."""
        self._data_bytes = weight.k // 2
        self._scale_at = -(-self._data_bytes // _ALIGNMENT) * _ALIGNMENT
        size = self._scale_at + blocked_bytes(1, weight.k // 16)
        self._memory = functools.partial(torch.empty, size, dtype=torch.uint8, device=x.device)
        self._result = functools.partial(torch.empty, (1, weight.rows), dtype=x.dtype, device=x.device)
        self._weight = weight
        operand = self._operand(self._memory(), scale)
        first = preparation(quantize, x, rule=rule, global_scale=scale, out=operand)
        second = preparation(gemv, weight, operand, out=self._result()[0], backend=backend)
        # (x, data, scales, global scale), and (data, scales, global scale, result)
        data, blocks, factor = (place for _, place in first.slots["out"])
        self._first = _filler(first, {first.slots["x"][0][1]: 0, data: 1, blocks: 2, factor: 3})
        data, blocks, factor = (place for _, place in second.slots["b"])
        self._second = _filler(second, {data: 0, blocks: 1, factor: 2, second.slots["out"][0][1]: 3})
        self._quantize, self._gemv = first.launch, second.launch
        self._owners = (first.owners, second.owners) if first.reads_owners else None

    def __call__(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        memory, y = self._memory(), self._result()
        data, factor = memory.data_ptr(), scale.data_ptr()
        blocks = data + self._scale_at
        written = read = (memory, y)
        if self._owners is not None:
            a = self._operand(memory, scale)
            written = self._owners[0]({"x": x, "out": a})
            read = self._owners[1]({"a": self._weight, "b": a, "out": y})
        self._quantize(self._first((x.data_ptr(), data, blocks, factor)), written)
        self._gemv(self._second((data, blocks, factor, y.data_ptr())), read)
        return y

    def _operand(self, memory: torch.Tensor, scale: torch.Tensor) -> BlockScaledTensor:
        return BlockScaledTensor(memory[: self._data_bytes][None], memory[self._scale_at :], scale)


def row_product(
    x: torch.Tensor, scale: torch.Tensor, weight: BlockScaledTensor, rule: str, backend: Backend
) -> RowProduct | None:
    """The ``RowProduct`` of these; None if the public functions must compute it, or must say why they cannot."""
    try:
        return RowProduct(x, scale, weight, rule, backend)
    except OperandError:
        return None


def _filler(made: Preparation, taken: Mapping[int, int]) -> Callable[[tuple], tuple]:
    """A function that puts a call's values among those of ``made``. taken: indices there to indices in the call."""
    values, count = made.values, len(made.values)
    take = itemgetter(*(count + taken[i] if i in taken else i for i in range(count)))
    return lambda addresses: take(values + addresses)

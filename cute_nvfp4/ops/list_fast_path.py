"""The fast path of grouped_gemm: if operands are like those of an earlier call, only their addresses are needed.

Operands have keys, which must be those of a call that was planned and checked. Bare tensors have none; torch's guards
compare their dtypes, shapes, strides, devices and gradients, all in one C++ call. Neither covers addresses, which are
compared with those of earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add, or_
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..operand import span_bytes
from ..runtime.backend import Backend
from ..runtime.bounded import Bounded
from ..runtime.overlap import overlap
from ..runtime.simulating import surroundings
from .dispatch import increment_versions, modes
from .list_launch import NO_ROOM, ListLaunch, Pair, reader
from .tensor_guards import TensorGuards

CALLS = Bounded()
"""The latest call for each ``_key``."""


def repeated(problems: Any, gate: str, out: Any, out_dtype: Any, backend: Any) -> list[Tensor] | None:
    """The results, if operands are like those of the last call with this key, and apart; None: take the slow path."""
    if is_dynamo_compiling() or modes() or not (out is None or type(out) is list or type(out) is tuple):
        return None
    try:
        call = CALLS.get(_key(problems, gate, out, out_dtype, backend))
    except (AttributeError, IndexError, TypeError, ValueError):
        # not pairs of operands, or not hashable: the slow path raises the error
        return None
    return None if call is None else call(problems, out)


def remember(
    launch: ListLaunch,
    new: Callable[[], list[Tensor]],
    results: list[Tensor],
    problems: Sequence[Pair],
    gate: str,
    out: Sequence[Tensor] | None,
    out_dtype: torch.dtype | None,
    backend: Backend,
) -> None:
    """Keeps a call that returned ``results``, if its tensors let later calls with its key take the fast path."""
    again = RepeatedCall(launch, new, problems, results, out is not None)
    if again.usable:
        CALLS[_key(problems, gate, out, out_dtype, backend)] = again


def _key(problems: Sequence[Pair], gate: str, out: Any, out_dtype: Any, backend: Any) -> tuple:
    kinds = [b.key if type(a) is Tensor else (a.key, b.key) for a, b in problems]
    count = None if out is None else len(out)
    return *kinds, gate, out_dtype, backend, count, surroundings(problems[0][1].key.on_cpu)


class RepeatedCall:
    """A call for operands like those of ``problems``, in which all groups have rows.

    launch: the planned launch, which is repeatable. new: makes results. has_out: whether the caller gave the outputs.
    usable: whether the operands are aligned.
    """

    def __init__(
        self,
        launch: ListLaunch,
        new: Callable[[], list[Tensor]],
        problems: Sequence[Pair],
        outs: list[Tensor],
        has_out: bool,
    ) -> None:
        self._launch, self._new, self._run = launch, new, getattr(launch.launch, "of_values", None)
        self._decodes = not launch.only_addresses
        n = self._groups = len(problems)
        scale_parts = [part for part, how in launch.scales.items() if how != "none"]
        self._tensors, self._scales = reader(launch.operands), reader(scale_parts)
        # bare tensors have no key
        self._floats = reader([part for part in launch.operands if part.name is None])
        self._factors = [n * scale_parts.index(part) for part in launch.factors]
        self._count = n * (len(launch.operands) + 1)
        tensors, scales = self._tensors(problems), self._scales(problems)
        guarded = [*self._floats(problems), *(outs if has_out else ()), *scales]
        self._same_kind = TensorGuards(guarded).check if guarded else lambda tensors: True
        every = (*tensors, *outs, *scales)
        self._sizes = [span_bytes(x) for x in every]
        self._written = [x in range(len(tensors), self._count) for x in range(len(every))]
        addresses = [x.data_ptr() for x in every]
        self._steps = self._steps_of(addresses)
        self._known = Bounded()
        self.usable = self._values(addresses, has_out) is not None

    def __call__(self, problems: Sequence[Pair], out: Sequence[Tensor] | None) -> list[Tensor] | None:
        """The results, or None if the call must take the slow path."""
        scales = self._scales(problems)
        if not self._same_kind([*self._floats(problems), *(out or ()), *scales]):
            return None
        outs = self._new() if out is None else list(out)
        addresses = tuple(map(Tensor.data_ptr, (*self._tensors(problems), *outs, *scales)))
        values = self._known.get(addresses)
        if values is None:
            values = self._values(addresses, out is not None)
            if values is None:
                return None
            self._known[addresses] = values
        if self._decodes:
            self._launch(values, (problems, outs, None))
        elif self._run is None:
            self._launch.launch(values, (problems, outs, None, NO_ROOM, None))
        else:
            self._run(values)
        if out is not None and is_grad_enabled():
            increment_versions(tuple(outs))
        return outs

    def _values(self, addresses: Sequence[int], has_out: bool) -> tuple | None:
        """The values of the launch for these addresses; None unless they are aligned and the caller's outputs apart."""
        if reduce(or_, addresses[: self._count]) % 16 or self._steps_of(addresses) != self._steps:
            return None
        if has_out and overlap(zip(addresses, map(add, addresses, self._sizes), self._written)):
            return None
        operands = addresses[: self._count] if self._decodes else self._launch.ordered(addresses)
        return (*operands, 1.0, *(addresses[self._count + i] for i in self._factors))

    def _steps_of(self, addresses: Sequence[int]) -> list[int]:
        """The distances of the groups' global scales from the first group's."""
        scales, n = addresses[self._count :], self._groups
        return [x - scales[i - i % n] for i, x in enumerate(scales)]

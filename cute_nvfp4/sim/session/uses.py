"""Who used the bytes of a storage, and whether the next use is in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from cute_nvfp4.sim.observe.touched import Runs
from cute_nvfp4.sim.session.order import Clock, Timeline

_MOST = 256
"""Uses of a storage that are remembered for each stream, the newest; one stands for those before it of its bytes."""


class Bytes:
    """Some bytes of memory: from ``low`` to before ``high``; ``runs`` are they exactly. Equal keys are equal bytes."""

    def __init__(self, low: int, high: int, key: Hashable, runs: Callable[[], Runs]) -> None:
        self.low, self.high, self.key, self._make = low, high, key, runs
        self._runs: Runs | None = None

    @property
    def runs(self) -> Runs:
        if self._runs is None:
            self._runs = self._make()
        return self._runs

    @staticmethod
    def of_runs(runs: Runs) -> Bytes:
        """The memory that a launch has touched."""
        key = len(runs.first), hash(runs.first.tobytes()), hash(runs.last.tobytes())
        return Bytes(int(runs.first[0]), int(runs.last[-1]), key, lambda: runs)

    @staticmethod
    def of_span(address: int, size: int) -> Bytes:
        return Bytes(address, address + size, (address, size), lambda: _one(address, address + size))

    @staticmethod
    def of_tensor(tensor: torch.Tensor) -> Bytes | None:
        """The elements of a strided tensor, None where it has none."""
        shape, stride, size, start = tuple(tensor.shape), tensor.stride(), tensor.element_size(), tensor.data_ptr()
        if not tensor.numel():
            return None
        end = start + (sum((n - 1) * s for n, s in zip(shape, stride)) + 1) * size
        dense = end - start == math.prod(shape) * size
        make = (lambda: _one(start, end)) if dense else (lambda: _strided(start, shape, stride, size))
        return Bytes(start, end, (start, shape, stride, size), make)

    def shared(self, other: Bytes) -> tuple[int, int] | None:
        """The first bytes that both have."""
        if self.high <= other.low or other.high <= self.low:
            return None
        return self.runs.shared(other.runs)


def _one(start: int, end: int) -> Runs:
    return Runs(np.array([start]), np.array([end]))


def _strided(start: int, shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> Runs:
    """A run for each element, joined where they touch."""
    first = np.array([start])
    for n, s in zip(shape, stride):
        first = (first[:, None] + np.arange(n if s else 1) * s * size).ravel()
    return Runs.of(first, first + size)


@dataclass(frozen=True)
class Use:
    """A use of ``bytes`` by work number ``number`` of ``timeline``; ``what`` and ``where`` say what it is."""

    timeline: Timeline
    number: int
    write: bool
    bytes: Bytes
    what: str
    where: str = ""


@dataclass
class Uses:
    """The uses of one storage, by timeline."""

    _by: dict[Timeline, dict[Hashable, Use]] = field(default_factory=dict)

    def unordered(self, use: Use, clock: Clock) -> tuple[Use, int] | None:
        """An earlier use that clashes with ``use``, which comes after ``clock``, and the first byte of both."""
        for timeline, uses in self._by.items():
            known = clock.get(timeline, 0)
            if timeline == use.timeline:
                continue
            for old in uses.values():
                if old.number > known and (old.write or use.write) and (both := old.bytes.shared(use.bytes)):
                    return old, both[0]
        return None

    def add(self, use: Use) -> None:
        mine = self._by.setdefault(use.timeline, {})
        key = use.write, use.bytes.key
        mine.pop(key, None)
        mine[key] = use
        if len(mine) > _MOST:
            del mine[next(iter(mine))]

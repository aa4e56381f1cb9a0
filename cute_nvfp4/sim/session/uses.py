"""The uses of a storage's bytes, and the check whether the next use is ordered after them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from cute_nvfp4.sim.observe.touched import Runs
from cute_nvfp4.sim.session.order import Clock, Timeline

_MOST = 256
"""A storage keeps this many newest uses for each timeline; a use replaces an older like use of the same bytes."""


class Bytes:
    """A set of bytes in [``low``, ``high``), which ``runs`` lists exactly. Equal keys mean equal sets."""

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
        """Returns the bytes of ``runs``, which must not be empty."""
        key = len(runs.first), hash(runs.first.tobytes()), hash(runs.last.tobytes())
        return Bytes(int(runs.first[0]), int(runs.last[-1]), key, lambda: runs)

    @staticmethod
    def of_span(address: int, size: int) -> Bytes:
        return Bytes(address, address + size, (address, size), lambda: _one(address, address + size))

    @staticmethod
    def of_tensor(tensor: torch.Tensor) -> Bytes | None:
        """Returns the bytes of a strided tensor's elements, or None if it has none."""
        shape, stride, size, start = tuple(tensor.shape), tensor.stride(), tensor.element_size(), tensor.data_ptr()
        if not tensor.numel():
            return None
        end = start + (sum((n - 1) * s for n, s in zip(shape, stride)) + 1) * size
        make = (lambda: _one(start, end)) if _dense(shape, stride) else (lambda: _strided(start, shape, stride, size))
        return Bytes(start, end, (start, shape, stride, size), make)

    def shared(self, other: Bytes) -> tuple[int, int] | None:
        """Returns the first run (begin, end) of bytes that both have, or None."""
        if self.high <= other.low or other.high <= self.low:
            return None
        return self.runs.shared(other.runs)


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Returns whether the elements fill their span: each dimension goes on where those of smaller strides end."""
    filled = 1
    for s, n in sorted((s, n) for n, s in zip(shape, stride) if n > 1 and s):
        if s != filled:
            return False
        filled *= n
    return True


def _one(start: int, end: int) -> Runs:
    return Runs(np.array([start]), np.array([end]))


def _strided(start: int, shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> Runs:
    """Returns the runs of a strided tensor: one for each element, joined where they touch."""
    first = np.array([start])
    for n, s in zip(shape, stride):
        first = (first[:, None] + np.arange(n if s else 1) * s * size).ravel()
    return Runs.of(first, first + size)


@dataclass(frozen=True)
class Use:
    """An access of ``bytes``."""

    timeline: Timeline
    number: int  #: the number of the accessing work on its timeline
    write: bool
    bytes: Bytes
    what: str  #: the name of the work in messages
    where: str = ""  #: the place in the program that issued it


@dataclass
class Uses:
    """The uses of one storage, by timeline."""

    _by: dict[Timeline, dict[Hashable, Use]] = field(default_factory=dict)

    def unordered(self, use: Use, clock: Clock) -> tuple[Use, int] | None:
        """Returns an earlier use that races with ``use`` of ``clock``, and the first byte that both have, or None."""
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

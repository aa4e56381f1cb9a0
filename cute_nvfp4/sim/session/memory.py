"""The device memory of a session: torch storages that count as CUDA memory, and blocks that CUDA calls allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.session.uses import Uses

ALIGNMENT = 512
"""Alignment of device memory in bytes, that of torch's CUDA allocator."""
_MOST_NAMES = 3
_DEPTH = 12


@dataclass(frozen=True)
class Part:
    """A tensor inside a larger storage. Kernels may access its bytes, but not the gaps between parts.

    ``base`` is its address and ``size`` its length in bytes; messages call it ``name``.
    """

    base: int
    size: int
    name: str
    writable: bool = True


@dataclass
class _Entry:
    """A device or pinned storage; ``index`` is its CUDA device. Without ``parts``, kernels may access all of it."""

    storage: StorageWeakRef
    base: int
    size: int
    label: str
    index: int
    parts: tuple[Part, ...] = ()
    uses: Uses = field(default_factory=Uses)


class _Block(NamedTuple):
    data: np.ndarray
    label: str
    uses: Uses

    @property
    def base(self) -> int:
        return self.data.ctypes.data


class Heap:
    """An allocator of host memory that serves as device memory."""

    def buffer(self, size: int) -> np.ndarray:
        """Returns ``size`` uninitialised bytes at an address aligned to ``ALIGNMENT``."""
        data = np.empty(size + ALIGNMENT, np.uint8)
        start = -data.ctypes.data % ALIGNMENT
        return data[start : start + size]

    def fits(self, address: int) -> bool:
        """Returns whether a storage at ``address`` can serve as device memory without being moved."""
        return address % ALIGNMENT == 0


def tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yields the tensors in an argument or a result, and in up to four levels of lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)) and depth < 4:
        for part in value:
            yield from tensors_in(part, depth + 1)
    elif isinstance(value, dict) and depth < 4:
        for part in value.values():
            yield from tensors_in(part, depth + 1)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Returns a key of the storage of a strided host tensor, None for any other tensor."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


class DeviceMemory:
    """The record of the host memory that serves as device memory.

    ``adopt`` enters a torch storage, which leaves when torch frees it. Pinned storages belong to the host, but kernels
    may access them.
    """

    def __init__(self, heap: Heap | None = None) -> None:
        self._heap = heap or Heap()
        self._tensors: dict[int, _Entry] = {}
        self._pinned: dict[int, _Entry] = {}
        self._blocks: dict[int, _Block] = {}
        self._made = 0

    def device_index(self, tensor: torch.Tensor) -> int | None:
        """Returns the ordinal of the CUDA device that ``tensor`` is on, None for a host tensor."""
        entry = self._tensors.get(storage_key(tensor) or 0)
        return None if entry is None or entry.storage.expired() else entry.index

    def entry(self, tensor: torch.Tensor) -> _Entry | None:
        """Returns the entry of the device or pinned storage of ``tensor``, None for any other tensor."""
        key = storage_key(tensor) or 0
        found = self._tensors.get(key) or self._pinned.get(key)
        return None if found is None or found.storage.expired() else found

    def uses_at(self, address: int) -> _Entry | _Block | None:
        """Returns the storage or block that contains ``address``, or None."""
        for entries in (self._tensors, self._pinned):
            for entry in entries.values():
                if entry.base <= address < entry.base + entry.size and not entry.storage.expired():
                    return entry
        return next((b for at, b in self._blocks.items() if at <= address < at + b.data.nbytes), None)

    @property
    def pins(self) -> bool:
        """Whether any storage is pinned."""
        return bool(self._pinned)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        entry = self._pinned.get(storage_key(tensor) or 0)
        return entry is not None and not entry.storage.expired()

    def adopt(self, tensor: torch.Tensor, index: int = 0, *, pinned: bool = False) -> None:
        """Makes the storage of ``tensor`` memory of CUDA device ``index``, or pinned memory.

        Where the storage does not fit the heap, ``tensor`` moves to a new one with the same values.
        """
        key = storage_key(tensor)
        entries = self._pinned if pinned else self._tensors
        if key is None or key in entries:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() and not self._heap.fits(storage.data_ptr()):
            with torch._C.DisableTorchFunction():
                storage = self._move(tensor, storage)
        self._made += 1
        if self._made % 4096 == 0:
            self.forget_dead()
        label = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        entry = _Entry(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes(), label, index)
        entries[storage._cdata] = entry

    def _move(self, tensor: torch.Tensor, old: torch.UntypedStorage) -> torch.UntypedStorage:
        new = torch.from_numpy(self._heap.buffer(old.nbytes())).untyped_storage()
        new.copy_(old)
        moved = torch.empty(0, dtype=tensor.dtype).set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            moved = moved.conj()
        if tensor.is_neg():
            moved = moved._neg_view()
        tensor.data = moved
        return tensor.untyped_storage()

    def forget_dead(self) -> None:
        """Drops the entries of storages that torch has freed."""
        for entries in (self._tensors, self._pinned):
            for key in [k for k, e in entries.items() if e.storage.expired()]:
                del entries[key]

    def divide(self, tensor: torch.Tensor, parts: Iterable[Part]) -> None:
        """Lets kernels access only ``parts`` of the storage of ``tensor``, which must be device memory."""
        with torch._C.DisableTorchFunction():
            self._tensors[storage_key(tensor)].parts = tuple(parts)

    def allocate(self, size: int, label: str) -> int:
        """Allocates a block of ``size`` bytes, which messages call ``label``; returns its address."""
        data = self._heap.buffer(max(size, 1))
        self._blocks[data.ctypes.data] = _Block(data, label, Uses())
        return data.ctypes.data

    def free(self, address: int) -> bool:
        """Frees the block that starts at ``address``; returns False if there is none."""
        return self._blocks.pop(address, None) is not None

    def used(self) -> int:
        """Returns the bytes of device memory in use."""
        self.forget_dead()
        return sum(e.size for e in self._tensors.values()) + sum(block.data.nbytes for block in self._blocks.values())

    def snapshot(self, frame: FrameType | None = None) -> GlobalMemory:
        """Returns the memory of a launch. Variables of ``frame`` and its callers give tensors their names."""
        self.forget_dead()
        with torch._C.DisableTorchFunction():
            names = _names(frame)
        memory = GlobalMemory()
        for entries in (self._tensors, self._pinned):
            for key, entry in entries.items():
                for part in entry.parts:
                    memory.add_span(part.base, part.size, part.name, part.writable, entry.uses)
                if entry.size and not entry.parts:
                    found = names.get(key)
                    name = f"{'/'.join(found)} ({entry.label})" if found else entry.label
                    memory.add_span(entry.base, entry.size, name, owner=entry.uses)
        for at, block in self._blocks.items():
            memory.add_span(at, block.data.nbytes, block.label, owner=block.uses)
        return memory


def _names(frame: FrameType | None) -> dict[int, list[str]]:
    """Maps the key of a storage to the names of variables that hold tensors on it, innermost frames first."""
    found: dict[int, list[str]] = {}

    def note(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            key = storage_key(value)
            names = found.setdefault(key, []) if key is not None else None
            if names is not None and name not in names and len(names) < _MOST_NAMES:
                names.append(name)
        elif isinstance(value, (list, tuple)) and len(value) <= 64:
            for i, part in enumerate(value):
                if isinstance(part, torch.Tensor):
                    note(f"{name}[{i}]", part)

    depth = 0
    while frame is not None and depth < _DEPTH:
        if not _is_library(frame):
            for name, value in list(frame.f_locals.items()):
                note(name, value)
            depth += 1
        frame = frame.f_back
    return found


def _is_library(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("torch", "cutlass", "cute_nvfp4", "runpy")

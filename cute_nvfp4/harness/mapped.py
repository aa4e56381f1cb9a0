"""The arena in the submission's process and in the device: mapped, at the same address."""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import weakref

import numpy as np

from .errors import HarnessError

BASE = 0x2000_0000_0000
"""The address of the arena: far from what Linux maps by itself."""
_FIXED_NOREPLACE, _NORESERVE = 0x100000, 0x4000


class Mapped:
    """``nbytes`` of the arena's file ``fd``, mapped at ``BASE``. Raises ``HarnessError`` if that is impossible."""

    def __init__(self, fd: int, nbytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3]
        libc.mmap.argtypes = [*libc.mmap.argtypes, ctypes.c_long]
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        at = libc.mmap(BASE, nbytes, rights, mmap.MAP_SHARED | _FIXED_NOREPLACE, fd, 0)
        if at != BASE:
            raise HarnessError(f"{nbytes} bytes at {BASE:#x} cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self.fd, self.nbytes = fd, nbytes

    def bytes_at(self, offset: int, size: int) -> np.ndarray:
        """``size`` bytes as an array over the shared memory."""
        return np.frombuffer((ctypes.c_uint8 * size).from_address(BASE + offset), np.uint8)

    def copy(self) -> np.ndarray:
        """A copy of the memory. Only parts that were ever written take memory in it."""
        copied = np.frombuffer(mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE), np.uint8)
        last = 0
        while True:
            try:
                first = os.lseek(self.fd, last, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # no data from there on
                    raise
                return copied
            last = os.lseek(self.fd, first, os.SEEK_HOLE)
            copied[first:last] = self.bytes_at(first, last - first)


class SharedHeap:
    """The heap of a simulated GPU (``sim.session.memory.Heap``), after the calls' tensors in the arena; first fit."""

    ALIGNMENT = 512

    def __init__(self, memory: Mapped, start: int) -> None:
        self._memory = memory
        self._free = [(start, memory.nbytes)]  # disjoint and not adjacent, in order

    def fits(self, address: int) -> bool:
        return BASE <= address < BASE + self._memory.nbytes

    def buffer(self, size: int) -> np.ndarray:
        taken = -(-max(size, 1) // self.ALIGNMENT) * self.ALIGNMENT
        index = next((i for i, (first, last) in enumerate(self._free) if last - first >= taken), None)
        if index is None:
            raise MemoryError(f"the simulated GPU has no {size} bytes left")
        first, last = self._free[index]
        self._free[index : index + 1] = [(first + taken, last)] if last - first > taken else []
        raw = (ctypes.c_uint8 * size).from_address(BASE + first)
        weakref.finalize(raw, self._give_back, first, first + taken)
        return np.frombuffer(raw, np.uint8) if size else np.empty(0, np.uint8)

    def _give_back(self, first: int, last: int) -> None:
        at = bisect.bisect(self._free, (first, last))
        if at < len(self._free) and self._free[at][0] == last:
            last = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == first:
            at, first = at - 1, self._free.pop(at - 1)[0]
        self._free.insert(at, (first, last))

"""Gathers and scatters of 16-byte chunks in host memory for the copy engines, with checks of bounds.

A chunk is moved as a cell, one complex128, which NumPy copies as 16 bytes without change. Addresses have 64 bits and
wrap: maps of ragged tensors reach their rows by way of the far end of memory.

Common arguments: ``chunks`` are addresses / 16; ``say`` words the errors. A read raises ``OutOfBounds`` for bytes in no
tensor, a write also ``ReadOnlyWrite``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.errors import OutOfBounds, ReadOnlyWrite
from cute_nvfp4.sim.machine.global_memory import GlobalMemory, Region

CHUNK = 16
CELL = np.dtype("c16")
ALL_CHUNKS = (1 << 60) - 1
"""The mask to which addresses / 16 wrap."""
Say = Callable[[str, int], str]
"""A function that makes the text of an error from what is wrong and the row of the operation."""


def cells(region: Region) -> tuple[int, np.ndarray]:
    """Returns (address / 16 of the first cell, a live view of the whole cells of a region)."""
    first, rows = region.rows(8, CHUNK)
    return first // CHUNK, rows.view(CELL).reshape(-1)


def home(memory: GlobalMemory, chunks: np.ndarray, write: bool) -> Region | None:
    """Returns the region that holds all of ``chunks``, writable if ``write``, or None if each chunk must be checked."""
    low, high = int(chunks.min()) * CHUNK, int(chunks.max()) * CHUNK + CHUNK
    region = memory.find(low)
    if region is None or high > region.end or (write and not region.writable):
        return None
    return region


def wrapped(chunks: np.ndarray) -> np.ndarray:
    """Returns addresses / 16 modulo 2^64 bytes."""
    return chunks & ALL_CHUNKS


def gather_boxes(memory: GlobalMemory, first: np.ndarray, chunks: np.ndarray, say: Say) -> np.ndarray:
    """Reads cells (k, m) at ``first`` (k,) + ``chunks`` (m,)."""
    region = _home_of_boxes(memory, first, chunks, write=False)
    if region is None:
        return gather(memory, wrapped(first[:, None] + chunks[None, :]), say)
    start, table = cells(region)
    return table.take((first - start)[:, None] + chunks[None, :])


def scatter_boxes(memory: GlobalMemory, first: np.ndarray, chunks: np.ndarray, data: np.ndarray, say: Say) -> None:
    """Writes cells (k, m) at ``first`` (k,) + ``chunks`` (m,); of several for one address the last remains."""
    region = _home_of_boxes(memory, first, chunks, write=True)
    if region is None:
        scatter(memory, wrapped(first[:, None] + chunks[None, :]), data, say)
        return
    start, table = cells(region)
    table[(first - start)[:, None] + chunks[None, :]] = data


def _home_of_boxes(memory: GlobalMemory, first: np.ndarray, chunks: np.ndarray, write: bool) -> Region | None:
    low, high = int(first.min()) + int(chunks.min()), int(first.max()) + int(chunks.max())
    return home(memory, np.array([low, high]), write)


def gather(memory: GlobalMemory, chunks: np.ndarray, say: Say) -> np.ndarray:
    """Reads the cells at ``chunks`` (k, m)."""
    region = home(memory, chunks, write=False)
    if region is not None:
        first, table = cells(region)
        return table.take(chunks - first)
    out = np.empty(chunks.shape, CELL)
    for row in range(len(chunks)):
        for where, chosen in _split(memory, chunks[row], say, row, write=False):
            first, table = cells(where)
            out[row, chosen] = table.take(chunks[row, chosen] - first)
    return out


def scatter(memory: GlobalMemory, chunks: np.ndarray, data: np.ndarray, say: Say) -> None:
    """Writes the cells ``data`` at ``chunks`` (k, m); of several for one address the last remains."""
    region = home(memory, chunks, write=True)
    if region is not None:
        first, table = cells(region)
        table[chunks - first] = data
        return
    for row in range(len(chunks)):
        for where, chosen in _split(memory, chunks[row], say, row, write=True):
            first, table = cells(where)
            table[chunks[row, chosen] - first] = data[row, chosen]


def _split(memory: GlobalMemory, chunks: np.ndarray, say: Say, row: int, write: bool):
    """Yields (region, positions in ``chunks`` that lie in it) for the chunks (m,) of operation ``row``."""
    starts = np.array([r.base for r in memory.regions], np.uint64)
    ends = np.array([r.end for r in memory.regions], np.uint64)
    address = chunks.astype(np.uint64) * np.uint64(CHUNK)
    index = np.searchsorted(starts, address, side="right") - 1
    last = address + np.uint64(CHUNK - 1)
    bad = (index < 0) | (last >= (ends[index] if len(ends) else np.uint64(0)))
    if bad.any():
        raise OutOfBounds(say(memory.describe(_first_outside(memory, int(address[bad.argmax()]))), row))
    for k in np.unique(index).tolist():
        region = memory.regions[k]
        if write and not region.writable:
            raise ReadOnlyWrite(say(f"tensor {region.name!r} is read-only", row))
        yield region, np.flatnonzero(index == k)


def _first_outside(memory: GlobalMemory, address: int) -> int:
    """Returns the address of the first byte of the chunk at ``address`` that no tensor holds."""
    for byte in range(address, address + CHUNK):
        region = memory.find(byte)
        if region is None or byte >= region.end:
            return byte
    return address


def bytes_at(memory: GlobalMemory, address: int, count: int, say: Say, row: int = 0, write: bool = False) -> np.ndarray:
    """Returns ``count`` bytes of one tensor at a host address, as a live view that is only written if ``write``."""
    if not count:
        return np.empty(0, np.uint8)
    address &= (1 << 64) - 1
    region = memory.find(address)
    if region is None or address + count > region.end:
        at = address if region is None or address >= region.end else region.end
        raise OutOfBounds(say(memory.describe(at), row))
    if write and not region.writable:
        raise ReadOnlyWrite(say(f"tensor {region.name!r} is read-only", row))
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)

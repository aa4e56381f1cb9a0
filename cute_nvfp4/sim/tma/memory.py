"""Chunks of 16 bytes in host memory: gathers and scatters of the copy engines, with bounds.

A chunk travels as one complex128, which numpy moves as 16 bytes without looking at them. Addresses have 64 bits and
wrap: maps of ragged tensors reach their rows by way of the far end of memory.
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
"""Addresses / 16 are counted modulo this, and one more."""
Say = Callable[[str, int], str]
"""Makes the text of an error from what is wrong and the index of the operation."""


def cells(region: Region) -> tuple[int, np.ndarray]:
    """(address / 16 of the first cell, the whole cells of a region)."""
    first, rows = region.rows(8, CHUNK)
    return first // CHUNK, rows.view(CELL).reshape(-1)


def home(memory: GlobalMemory, chunks: np.ndarray, write: bool) -> Region | None:
    """The region that holds all of ``chunks`` (address / 16), or None when one must look at each."""
    low, high = int(chunks.min()) * CHUNK, int(chunks.max()) * CHUNK + CHUNK
    region = memory.find(low)
    if region is None or high > region.end or (write and not region.writable):
        return None
    return region


def wrapped(chunks: np.ndarray) -> np.ndarray:
    """Addresses / 16 as they are modulo 2^64 bytes."""
    return chunks & ALL_CHUNKS


def gather_boxes(memory: GlobalMemory, first: np.ndarray, chunks: np.ndarray, say: Say) -> np.ndarray:
    """Cells (k, m) at ``chunks`` (m,) after each ``first`` (k,)."""
    region = _home_of_boxes(memory, first, chunks, write=False)
    if region is None:
        return gather(memory, wrapped(first[:, None] + chunks[None, :]), say)
    start, table = cells(region)
    return table.take((first - start)[:, None] + chunks[None, :])


def scatter_boxes(memory: GlobalMemory, first: np.ndarray, chunks: np.ndarray, data: np.ndarray, say: Say) -> None:
    """Writes cells (k, m) at ``chunks`` (m,) after each ``first`` (k,); of several for one address the last stays."""
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
    """Cells at ``chunks`` (k, m); raises ``OutOfBounds`` for the first that lies in no tensor."""
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
    """Writes cells; of several for one address the last stays."""
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
    """Yields (region, positions) for chunks (m,) of one operation."""
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
    """The first byte of a chunk that no tensor holds."""
    for byte in range(address, address + CHUNK):
        region = memory.find(byte)
        if region is None or byte >= region.end:
            return byte
    return address


def bytes_at(memory: GlobalMemory, address: int, count: int, say: Say, row: int = 0, write: bool = False) -> np.ndarray:
    """Bytes of one tensor, as a view (count,) of live memory; ``write``: they will be written."""
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

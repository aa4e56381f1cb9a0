"""Shared-memory matrix descriptors, and where the 16-byte chunks of an operand lie (PTX ISA, "Shared Memory
Descriptor", "Matrix Descriptors", "Shared Memory Layout and Swizzling"; the canonical layouts are those of CuTe's
``make_umma_desc``).

Every layout moves whole 16-byte chunks, so that an operand is a table of chunk numbers. The table depends on the
descriptor's fields and on the low ten bits of the start address, which decide the swizzle, and is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.errors import Hazard, UnsupportedInstruction

LAYOUTS = {0: "none", 1: "128B_BASE32B", 2: "128B", 4: "64B", 6: "32B"}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_BASE32B": 128}
"""Bytes of a swizzle atom along the leading dimension."""
_ROWS = {"none": (0, 4), "32B": (1, 4), "64B": (3, 4), "128B": (7, 4), "128B_BASE32B": (3, 5)}
"""Which bits of the row go into the address, and where."""
PERIOD = 1024
"""The swizzle patterns repeat every 1024 bytes, or a divisor of that."""


class DescriptorError(Hazard):
    """A matrix or instruction descriptor that no tensor core accepts."""


@dataclass(frozen=True)
class MatrixDescriptor:
    """What a descriptor says apart from the start address; offsets in bytes.

    ``absolute``: the leading dimension is an address, where a row of 48 bytes (K = 96) goes on when the swizzle atom
    ends; ``lbo`` is then its distance from the 1024-byte boundary below the start.
    """

    layout: str
    lbo: int
    sbo: int
    base_offset: int = 0
    absolute: bool = False

    @property
    def unswizzled(self) -> bool:
        return self.layout == "none"


@lru_cache(maxsize=4096)
def decode(desc: int) -> MatrixDescriptor:
    """The fields of a 64-bit descriptor; bits 0-13 (start address) are left to ``start_of``."""
    if desc >> 46 & 7 != 1:
        raise DescriptorError(f"matrix descriptor {desc:#018x}: bits 48-46 are {desc >> 46 & 7:03b}, must be 001")
    layout = LAYOUTS.get(desc >> 61 & 7)
    if layout is None:
        raise DescriptorError(f"matrix descriptor {desc:#018x}: {desc >> 61 & 7} is no swizzling mode")
    if desc >> 53 & 0xFF:
        raise DescriptorError(f"matrix descriptor {desc:#018x}: bits 60-53 must be 0")
    lbo, absolute = (desc >> 16 & 0x3FFF) << 4, bool(desc >> 52 & 1)
    if absolute:
        lbo -= ((desc & 0x3FFF) << 4) // PERIOD * PERIOD
    return MatrixDescriptor(layout, lbo, (desc >> 32 & 0x3FFF) << 4, desc >> 49 & 7, absolute)


def start_of(desc: np.ndarray) -> np.ndarray:
    """Start addresses (bytes) of descriptors (k,)."""
    return ((desc.astype(np.uint64) & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)


def alike(desc: np.ndarray) -> np.ndarray:
    """(k,) keys, equal for descriptors that ``decode`` takes for the same and whose starts agree modulo 1024; with an
    address as leading dimension the start is part of the key."""
    masked = desc & ~np.uint64(0x3FC0)
    return np.where(desc >> np.uint64(52) & np.uint64(1), desc, masked)


def encode(start: int, layout: str, lbo: int, sbo: int, base_offset: int = 0, absolute: bool = False) -> int:
    """The 64-bit descriptor of these fields (bytes); with ``absolute`` ``lbo`` is an address."""
    code = {v: k for k, v in LAYOUTS.items()}[layout]
    fields = (start >> 4 & 0x3FFF) | (lbo >> 4 & 0x3FFF) << 16 | (sbo >> 4 & 0x3FFF) << 32
    return fields | 1 << 46 | base_offset << 49 | absolute << 52 | code << 61


def swizzle(address: np.ndarray, layout: str, base_offset: int = 0) -> np.ndarray:
    """Where the byte at ``address`` of the plain layout lies: row bits are XORed into the chunk bits.

    ``base_offset`` says how many 128-byte rows the pattern's start is away from its natural boundary.
    """
    mask, shift = _ROWS[layout]
    return address ^ ((address >> 7) - base_offset & mask) << shift


@lru_cache(maxsize=1024)
def k_major_chunks(desc: MatrixDescriptor, low: int, rows: int, chunks: int) -> np.ndarray:
    """(rows, chunks) chunk numbers of a K-major operand, relative to the 1024-byte boundary below the start.

    ``low``: start address modulo 1024. Row r is in group r // 8 (SBO bytes apart); a row of ``chunks`` 16-byte chunks
    continues inside the swizzle atom, and without swizzling LBO bytes further on. Three chunks are a row of K = 96,
    which may begin near the end of its atom and goes on in another (CuTe's circular buffers of A and B).
    """
    if desc.layout == "128B_BASE32B":
        raise DescriptorError("128B swizzling with 32B atomicity is for MN-major operands")
    r, u = np.arange(rows, dtype=np.int64)[:, None], np.arange(chunks, dtype=np.int64)[None, :]
    if chunks == 3:
        return _circular_chunks(desc, low, r, u)
    inside = u * (desc.lbo if desc.unswizzled else 16)
    plain = low + r // 8 * desc.sbo + r % 8 * SPAN[desc.layout] + inside
    return _chunks(swizzle(plain, desc.layout, desc.base_offset))


def _circular_chunks(desc: MatrixDescriptor, low: int, r: np.ndarray, u: np.ndarray) -> np.ndarray:
    """``k_major_chunks`` for K = 96: beyond 128 bytes of K it goes on where the descriptor's address points."""
    if desc.layout != "128B":
        raise UnsupportedInstruction(f"K = 96 with layout {desc.layout}; only 128-byte swizzling is modelled")
    beyond = low % 128 + 16 * u - 128
    if (beyond >= 0).any() and not desc.absolute:
        raise UnsupportedInstruction("K = 96 across the end of a swizzle atom needs an address as leading dimension")
    plain = r // 8 * desc.sbo + r % 8 * 128 + np.where(beyond < 0, low + 16 * u, desc.lbo + beyond)
    return _chunks(swizzle(plain, desc.layout, desc.base_offset))


@lru_cache(maxsize=1024)
def mn_major_chunks(desc: MatrixDescriptor, low: int, chunks: int, k: int) -> np.ndarray:
    """(k, chunks) chunk numbers of an MN-major operand: row kk holds ``chunks`` x 16 bytes of the M or N dimension."""
    kk, u = np.arange(k, dtype=np.int64)[:, None], np.arange(chunks, dtype=np.int64)[None, :]
    if desc.unswizzled:
        plain = low + u * desc.sbo + kk % 8 * 16 + kk // 8 * desc.lbo
    else:
        wide, deep = SPAN[desc.layout] // 16, 4 if desc.layout == "128B_BASE32B" else 8
        plain = low + u % wide * 16 + u // wide * desc.lbo + kk % deep * SPAN[desc.layout] + kk // deep * desc.sbo
    return _chunks(swizzle(plain, desc.layout, desc.base_offset))


def _chunks(address: np.ndarray) -> np.ndarray:
    table = address >> 4
    table.flags.writeable = False
    return table

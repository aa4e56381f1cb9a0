"""Matrix descriptors of tcgen05, and the layouts of operand tiles in shared memory.

The sources are the PTX ISA ("Shared Memory Descriptor", "Matrix Descriptors", "Shared Memory Layout and Swizzling")
and CuTe's ``make_umma_desc`` for the canonical layouts. Every layout permutes whole 16-byte chunks, so a table of
chunk numbers describes an operand tile. A chunk number is an address divided by 16, relative to the 1024-byte boundary
at or below the start address. A table depends only on the descriptor's fields and on the start address modulo 1024,
which selects the swizzle pattern. Each table is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.errors import Hazard, UnsupportedInstruction

LAYOUTS = {0: "none", 1: "128B_BASE32B", 2: "128B", 4: "64B", 6: "32B"}  # swizzling modes by code (bits 63-61)
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_BASE32B": 128}
"""Bytes of one row of the swizzle atom, along the contiguous dimension of the operand."""
_ROWS = {"none": (0, 4), "32B": (1, 4), "64B": (3, 4), "128B": (7, 4), "128B_BASE32B": (3, 5)}
"""(mask, shift) of each swizzle: the bits of the 128-byte row number in ``mask`` are XORed into the address at bit
``shift``."""
PERIOD = 1024
"""Distance in bytes after which every swizzle pattern repeats."""


class DescriptorError(Hazard):
    """The error for a matrix or instruction descriptor that no tensor core accepts."""


@dataclass(frozen=True)
class MatrixDescriptor:
    """The fields of a matrix descriptor without its start address."""

    layout: str  # swizzling mode, one of the values of ``LAYOUTS``
    lbo: int  # leading dimension byte offset; see ``absolute``
    sbo: int  # stride dimension byte offset
    base_offset: int = 0  # matrix base offset, in 128-byte rows (``swizzle``)
    absolute: bool = False
    """Whether the leading dimension field holds an address (bit 52, for K = 96). A 48-byte row that reaches the end of
    its swizzle atom continues at that address. ``lbo`` is then the address minus the 1024-byte boundary at or below
    the start."""

    @property
    def unswizzled(self) -> bool:
        return self.layout == "none"


@lru_cache(maxsize=4096)
def decode(desc: int) -> MatrixDescriptor:
    """Returns the fields of a 64-bit descriptor, except its start address (``start_of``). Raises ``DescriptorError``
    when fixed bits are wrong or the swizzling mode does not exist."""
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
    """Returns the start addresses (k,) in bytes of descriptors (k,)."""
    return ((desc.astype(np.uint64) & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)


def alike(desc: np.ndarray) -> np.ndarray:
    """Returns keys (k,) of descriptors. Equal keys mean equal fields and equal start addresses modulo 1024. Where the
    leading dimension field holds an address, they mean equal descriptors."""
    masked = desc & ~np.uint64(0x3FC0)
    return np.where(desc >> np.uint64(52) & np.uint64(1), desc, masked)


def encode(start: int, layout: str, lbo: int, sbo: int, base_offset: int = 0, absolute: bool = False) -> int:
    """Returns the 64-bit descriptor with these fields. ``start``, ``lbo`` and ``sbo`` are in bytes; with ``absolute``,
    ``lbo`` is an address in shared memory."""
    code = {v: k for k, v in LAYOUTS.items()}[layout]
    fields = (start >> 4 & 0x3FFF) | (lbo >> 4 & 0x3FFF) << 16 | (sbo >> 4 & 0x3FFF) << 32
    return fields | 1 << 46 | base_offset << 49 | absolute << 52 | code << 61


def swizzle(address: np.ndarray, layout: str, base_offset: int = 0) -> np.ndarray:
    """Returns the address at which swizzling places the byte that the plain layout has at ``address``.

    ``base_offset`` is the distance, in 128-byte rows, from the natural boundary of the swizzle pattern to its start.
    """
    mask, shift = _ROWS[layout]
    return address ^ ((address >> 7) - base_offset & mask) << shift


@lru_cache(maxsize=1024)
def k_major_chunks(desc: MatrixDescriptor, low: int, rows: int, chunks: int) -> np.ndarray:
    """Returns the chunk numbers (rows, chunks) of a K-major operand.

    ``low`` is the start address modulo 1024. Groups of eight rows are SBO bytes apart. The ``chunks`` chunks of a row
    are adjacent in the swizzle atom, or LBO bytes apart without swizzling. Three chunks are a row of K = 96. Such a row
    may cross the end of its swizzle atom and continue in another one (CuTe's circular buffers of A and B).
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
    """Returns ``k_major_chunks`` for K = 96: beyond the 128 bytes of a swizzle atom, a row continues at the address in
    the descriptor."""
    if desc.layout != "128B":
        raise UnsupportedInstruction(f"K = 96 with layout {desc.layout}; only 128-byte swizzling is modelled")
    beyond = low % 128 + 16 * u - 128
    if (beyond >= 0).any() and not desc.absolute:
        raise UnsupportedInstruction("K = 96 across the end of a swizzle atom needs an address as leading dimension")
    plain = r // 8 * desc.sbo + r % 8 * 128 + np.where(beyond < 0, low + 16 * u, desc.lbo + beyond)
    return _chunks(swizzle(plain, desc.layout, desc.base_offset))


@lru_cache(maxsize=1024)
def mn_major_chunks(desc: MatrixDescriptor, low: int, chunks: int, k: int) -> np.ndarray:
    """Returns the chunk numbers (k, chunks) of an MN-major operand, whose M or N dimension takes ``chunks`` chunks.
    ``low`` is the start address modulo 1024."""
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

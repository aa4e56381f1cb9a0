"""Global memory: the tensors that a kernel may access, which lie in host memory and keep their addresses."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cute_nvfp4.errors import OperandTypeError, explain

SECTOR = 32
"""Bytes of a sector, the granule of requests to L2 and DRAM."""
_ALIGN = 128
_FAR = 1 << 20
"""The distance in bytes from the nearest tensor above which an address is taken not to be meant for any tensor."""


@dataclass
class Region:
    """Bytes ``[base, base + size)`` of live host memory."""

    base: int
    size: int
    name: str  #: the tensor's name in messages
    writable: bool
    owner: Any = field(repr=False, default=None)  #: the object whose memory it is, which the region keeps alive
    _views: dict[tuple[int, int], tuple[int, np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def end(self) -> int:
        return self.base + self.size

    def rows(self, element: int, total: int) -> tuple[int, np.ndarray]:
        """Returns (address of row 0, live view of the bytes in rows of ``total`` bytes, a multiple of ``element``).

        The view has unsigned integers of ``element`` bytes, shape (rows, total // element), or (rows,) if both sizes
        are equal. Row 0 begins at the first multiple of ``total``.
        """
        key = (element, total)
        if key not in self._views:
            first = -(-self.base // total) * total
            count = max(0, (self.end - first) // total)
            shape = (count,) if element == total else (count, total // element)
            raw = (ctypes.c_uint8 * (count * total)).from_address(first) if count else bytearray()
            self._views[key] = (first, np.frombuffer(raw, dtype=f"u{element}").reshape(shape))
        return self._views[key]


class GlobalMemory:
    """The tensors that exist while a kernel runs; ``regions`` has them in the order of their addresses.

    Every global access must lie inside one region. Bytes between two regions are out of bounds, even if the host has
    mapped them.
    """

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._starts: list[int] = []

    def add(self, tensor: Any, name: str = "", writable: bool = True) -> Region:
        """Registers the bytes of a tensor under its host address, and returns their region.

        tensor: a torch CPU tensor or a numpy array. For a strided view, the region spans from its first to its last
            element. The region holds a reference to it.
        name: the name in messages; by default "tensor" and a number.
        writable: whether kernels may store to it.

        Raises ``OperandTypeError`` for any other object.
        """
        base, size = _span(tensor)
        return self.add_span(base, size, name or f"tensor{len(self.regions)}", writable, tensor)

    def add_span(self, base: int, size: int, name: str, writable: bool = True, owner: Any = None) -> Region:
        """Registers ``size`` bytes at host address ``base``. Overlapping regions are joined into one, which has their
        names joined by "+" and is writable if one of them is."""
        region = Region(base, size, name, writable, owner)
        overlapping = [r for r in self.regions if r.base < region.end and region.base < r.end]
        if overlapping:
            both = [*overlapping, region]
            low, high = min(r.base for r in both), max(r.end for r in both)
            names = "+".join(dict.fromkeys(r.name for r in both))
            region = Region(low, high - low, names, any(r.writable for r in both), [r.owner for r in both])
            for r in overlapping:
                self.regions.remove(r)
        self.regions.append(region)
        self.regions.sort(key=lambda r: r.base)
        self._starts = [r.base for r in self.regions]
        return region

    def find(self, address: int) -> Region | None:
        """Returns the last region that begins at or below ``address``, or None; it may end before ``address``."""
        i = bisect.bisect_right(self._starts, address) - 1
        return self.regions[i] if i >= 0 else None

    def describe(self, address: int) -> str:
        """Returns, for a message, where ``address`` lies relative to the nearest tensor."""
        if not self.regions:
            return f"address {address:#x}, and no tensor is registered"
        near = min(self.regions, key=lambda r: max(r.base - address, address - r.end + 1, 0))
        offset = address - near.base
        if offset < 0:
            place = f"{-offset} bytes before tensor {near.name!r}"
        elif offset >= near.size:
            place = f"{offset - near.size} bytes past the end of tensor {near.name!r}"
        else:
            place = f"byte {offset} of tensor {near.name!r}"
        place += f" ({near.size} bytes)"
        if max(-offset, offset - near.size) >= _FAR:
            hint = 'is a tensor missing device="cuda"?'
            return f"address {address:#x} belongs to no device memory: it lies {place}; {hint}"
        return f"address {address:#x} is {place}"


def _span(tensor: Any) -> tuple[int, int]:
    if isinstance(tensor, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(tensor) if hasattr(np.lib, "array_utils") else np.byte_bounds(tensor)
        return low, high - low
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):
        if tensor.device.type != "cpu":
            raise OperandTypeError(
                explain("simulated memory", got=f"a tensor on {tensor.device}", expected="a CPU tensor")
            )
        if tensor.numel() == 0:
            return tensor.data_ptr(), 0
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
        return tensor.data_ptr(), (last + 1) * tensor.element_size()
    raise OperandTypeError(
        explain("simulated memory", got=type(tensor).__name__, expected="a torch tensor or a numpy array")
    )


def owned(size: int, name: str) -> Region:
    """Returns a new writable region of ``size`` zeroed bytes whose base is a multiple of 128."""
    raw = np.zeros(size + _ALIGN, np.uint8)
    base = -(-raw.ctypes.data // _ALIGN) * _ALIGN
    return Region(base, size, name, True, raw)

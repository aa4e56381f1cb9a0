"""What a tile copy does, element by element, straight from the PTX ISA ("Tensors", "Tiled Mode", "Swizzling Modes")."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from .case import TensorMap
from .descriptor import KINDS

#: swizzle -> (mask of the row bits, which become bits 4 and up of the address)
_ROWS = {0: 0, 1: 1, 2: 3, 3: 7}
_SPAN = {0: 0, 1: 32, 2: 64, 3: 128}


def swizzled(address: int, swizzle: int) -> int:
    """Where a byte of shared memory goes: the pattern belongs to the address, not to the tile."""
    return address ^ (address >> 7 & _ROWS[swizzle]) << 4


def unit(spec: TensorMap) -> int:
    """Bytes of an element."""
    return KINDS[spec.kind][1] // 8


def tile_shape(spec: TensorMap) -> tuple[int, ...]:
    """Elements of the tile in shared memory, innermost first; the step of dimension 0 is not used."""
    return (spec.box[0], *(-(-b // s) for b, s in zip(spec.box[1:], spec.steps[1:])))


def tile_bytes(spec: TensorMap) -> int:
    if spec.pixels:
        return spec.box[0] * spec.pixels * unit(spec)
    return int(np.prod(tile_shape(spec))) * unit(spec)


def elements(spec: TensorMap, coordinates: tuple[int, ...], units: bool = False) -> Iterator[tuple[int, int | None]]:
    """(byte in the unswizzled tile, byte in the buffer or None when out of bounds) of every element of a tile.

    Rows narrower than the span of a swizzle are a span apart. With ``units`` all of a row's 16 bytes are in bounds
    when the first of them are.
    """
    shape, size = tile_shape(spec), unit(spec)
    pitches = (size, *spec.strides)
    ranges = [range(n) for n in reversed(shape)]
    steps = (1, *spec.steps[1:])
    together = 16 // size if units else 1
    pitch = max(shape[0] * size, _SPAN[spec.swizzle])
    for number, index in enumerate(itertools.product(*ranges)):
        where = [c + i * s for c, i, s in zip(coordinates, reversed(index), steps)]
        first = (where[0] // together * together, *where[1:])
        inside = all(0 <= w < d for w, d in zip(first, spec.dims))
        place = number // shape[0] * pitch + index[-1] * size
        yield place, spec.offset + sum(w * p for w, p in zip(where, pitches)) if inside else None


def fill_element(spec: TensorMap) -> bytes:
    """What stands for an element out of bounds: the NaN is what the H200 writes."""
    return (b"\xf7\x7f" * 4 if spec.fill else bytes(8))[: unit(spec)]


def load(spec: TensorMap, memory: np.ndarray, coordinates: tuple[int, ...], shared: np.ndarray, at: int) -> None:
    """Puts a tile into ``shared``, whose first byte has an address that is a multiple of 1024."""
    size, nothing = unit(spec), np.frombuffer(fill_element(spec), np.uint8)
    for place, source in elements(spec, coordinates):
        to = swizzled(at + place, spec.swizzle)
        shared[to : to + size] = nothing if source is None else memory[source : source + size]


def stored(
    spec: TensorMap, memory: np.ndarray, coordinates: tuple[int, ...], shared: np.ndarray, at: int, combine=None
) -> None:
    """Puts a tile of shared memory into the tensor; ``combine(old, new)`` works on bytes of one element.

    The H200 does not cut the last 16 bytes of a row that begins inside the tensor.
    """
    size = unit(spec)
    for place, target in elements(spec, coordinates, units=True):
        if target is not None:
            source = swizzled(at + place, spec.swizzle)
            new = shared[source : source + size]
            old = memory[target : target + size]
            memory[target : target + size] = new if combine is None else combine(old.copy(), new.copy())

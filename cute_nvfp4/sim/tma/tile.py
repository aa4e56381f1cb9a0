"""Where a tensor copy reads and writes: from a tensor map and coordinates to 16-byte chunks (PTX ISA, "Tensors").

Everything the engine touches is made of whole chunks of 16 bytes: addresses, strides, box rows and the innermost
coordinate must all be multiples of them. So a copy is an index array over chunks, in global and in shared memory.
Seen on an H200, and not all in the ISA: with a swizzle, the rows of a box are as far apart in shared memory as the
swizzle is wide, even if they are shorter; the element stride of dimension 0 does nothing; a store that ends inside a
chunk writes the whole chunk; a tf32 load rounds to nearest even; NaN fill is 0x7ff7 in every half-word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.numerics.single import to_tf32
from cute_nvfp4.sim.tma.descriptor import SPAN, TensorMap
from cute_nvfp4.sim.tma.memory import wrapped

CHUNK = 16
FILL = {False: np.uint64(0), True: np.uint64(0x7FF77FF77FF77FF7)}


@dataclass(frozen=True)
class Plan:
    """One copy of a map, whatever its coordinates: ``rows`` (r, rank) how far each box row lies from the coordinates,
    in elements; ``chunks`` of a row in shared memory; ``place`` (m,) the chunk of shared memory, from the start of the
    destination, of each chunk of the box in row order; ``order`` (m,) sorts ``place``; ``dense``: it has no gaps;
    ``bytes`` what complete_tx counts, which is without padding."""

    rows: np.ndarray
    chunks: int
    place: np.ndarray
    order: np.ndarray
    dense: bool
    bytes: int


@lru_cache(maxsize=1024)
def plan(m: TensorMap, phase: int, row_count: int = 0) -> Plan:
    """The plan for destinations at ``phase`` = address / 16 mod 64; ``row_count`` rows instead of those of the box
    (four for gather4, the pixels for im2col)."""
    chunks = m.row_chunks
    rows = np.zeros((row_count, m.rank), np.int64) if row_count else _box_rows(m)
    pitch = chunks if m.swizzle == "none" else SPAN[m.swizzle] // CHUNK
    linear = (np.arange(len(rows))[:, None] * pitch + np.arange(chunks)[None, :]).ravel() + phase
    place = _swizzled(linear, m.swizzle) - phase
    order = np.argsort(place)
    dense = bool(place[order[0]] == 0 and place[order[-1]] == len(place) - 1)
    return Plan(rows, chunks, place, order, dense, len(rows) * m.box[0] * m.bits // 8)


def _swizzled(chunk: np.ndarray, swizzle: str) -> np.ndarray:
    """Where the chunk ``chunk`` = address / 16 of the plain layout lies."""
    if swizzle == "128B_ATOM_32B":
        return chunk ^ (chunk >> 3 & 3) << 1
    return chunk ^ (chunk >> 3 & {"none": 0, "32B": 1, "64B": 3, "128B": 7}[swizzle])


def _box_rows(m: TensorMap) -> np.ndarray:
    steps = [np.arange(0, m.box[d], m.element_strides[d]) for d in range(1, m.rank)]
    grid = np.meshgrid(*reversed(steps), indexing="ij") if steps else []
    columns = [g.ravel() for g in reversed(grid)]
    count = len(columns[0]) if columns else 1
    return np.stack([np.zeros(count, np.int64), *columns], axis=1)


@dataclass(frozen=True)
class Window:
    """The part of a box that lies in the tensor, in the order of shared memory: ``keep`` (n,) positions of whole chunks
    (None: all of them) and ``chunks`` (n,) their addresses / 16 from that of the coordinates; ``tail`` (t,) positions
    and ``tail_chunks`` (t,) the same of chunks of which only ``tail_bytes`` lie in the tensor."""

    keep: np.ndarray | None
    chunks: np.ndarray
    tail: np.ndarray
    tail_chunks: np.ndarray
    tail_bytes: int

    @property
    def written(self) -> tuple[np.ndarray | None, np.ndarray]:
        """Positions and chunks that a store writes: whole chunks only."""
        if not len(self.tail):
            return self.keep, self.chunks
        keep = np.arange(len(self.chunks)) if self.keep is None else self.keep
        return np.concatenate([keep, self.tail]), np.concatenate([self.chunks, self.tail_chunks])


@lru_cache(maxsize=1024)
def _limits(m: TensorMap) -> tuple[np.ndarray, ...]:
    """(steps, sizes, counts, chunk strides) by dimension; dimension 0 in chunks."""
    chunks = m.box[0] * m.bits // (8 * CHUNK)
    counts = [chunks, *(-(-b // s) for b, s in zip(m.box[1:], m.element_strides[1:]))]
    sizes = [m.dims[0] * m.bits // (8 * CHUNK), *m.dims[1:]]
    strides = [1, *(s // CHUNK for s in m.strides)]
    return tuple(np.array(x, np.int64) for x in ([1, *m.element_strides[1:]], sizes, counts, strides))


def _in_chunks(m: TensorMap, coords: np.ndarray) -> np.ndarray:
    """Coordinates (k, rank) with dimension 0 in chunks."""
    out = coords.copy()
    out[:, 0] = coords[:, 0] * m.bits // (8 * CHUNK)
    return out


def corner(m: TensorMap, coords: np.ndarray) -> np.ndarray:
    """(k,) host addresses / 16 of the elements at ``coords`` (k, rank), which need not exist; before they wrap."""
    return _in_chunks(m, coords) @ _limits(m)[3] + m.address // CHUNK


def bounds(m: TensorMap, coords: np.ndarray) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """[(rows, key)]: boxes at ``coords`` (k, rank) by how they lie to the edges; ``key`` is for ``window``. It has, for
    each dimension, the first step inside the tensor and the first one past it, then the chunk that is cut or -1."""
    steps, sizes, counts, _ = _limits(m)
    at = _in_chunks(m, coords)
    low = np.clip(-(at // steps), 0, counts)
    high = np.clip(-((at - sizes) // steps), 0, counts)
    cut = np.full(len(at), -1)
    if m.dims[0] * m.bits % (8 * CHUNK):
        edge = sizes[0] - at[:, 0]
        cut = np.where((edge >= 0) & (edge < counts[0]), edge, -1)
    keys = np.concatenate([low, high, cut[:, None]], axis=1)
    if len(keys) == 1 or (keys == keys[0]).all():
        return [(np.arange(len(keys)), tuple(keys[0].tolist()))]
    found: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(map(tuple, keys.tolist())):
        found.setdefault(key, []).append(row)
    return [(np.array(rows), key) for key, rows in found.items()]


@lru_cache(maxsize=4096)
def window(m: TensorMap, phase: int, key: tuple[int, ...]) -> Window:
    """The ``key`` of ``bounds`` for destinations at ``phase``."""
    p, rank = plan(m, phase), m.rank
    low, high, cut = key[:rank], key[rank : 2 * rank], key[-1]
    index = p.rows // np.array(m.element_strides, np.int64)
    rows = np.ones(len(p.rows), bool)
    for d in range(1, rank):
        rows &= (index[:, d] >= low[d]) & (index[:, d] < high[d])
    along = np.arange(p.chunks)
    whole = (rows[:, None] & (along >= low[0]) & (along < high[0])).ravel()[p.order]
    part = (rows[:, None] & (along == cut)).ravel()[p.order]
    starts = p.rows[:, 1:] @ _limits(m)[3][1:] if rank > 1 else np.zeros(1, np.int64)
    relative = (starts[:, None] + along[None, :]).ravel()[p.order]
    keep, tail = np.flatnonzero(whole), np.flatnonzero(part)
    cut_bytes = m.dims[0] * m.bits // 8 % CHUNK
    return Window(None if whole.all() else keep, relative[keep], tail, relative[tail], cut_bytes)


def row_chunks(m: TensorMap, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chunks (r, u) of box rows that start at ``rows`` (r, rank), as host address / 16, and their valid bytes.

    A chunk (r, u) has 16 bytes in the tensor, 0, or what is left of a dimension 0 that ends inside it.
    """
    chunks = m.box[0] * m.bits // (8 * CHUNK)
    along = rows[:, :1] * m.bits // 8 + CHUNK * np.arange(chunks)[None, :]
    valid = np.where(along < 0, 0, np.clip(m.dims[0] * m.bits // 8 - along, 0, CHUNK))
    others = ((rows[:, 1:] >= 0) & (rows[:, 1:] < np.array(m.dims[1:], np.int64))).all(axis=1)
    return wrapped(corner(m, rows)[:, None] + np.arange(chunks)[None, :]), valid * others[:, None]


def round_tf32(chunks: np.ndarray) -> np.ndarray:
    """What a load of type tf32 does to binary32: 10 bits of mantissa, to nearest even; every NaN is 0x7fffe000."""
    return to_tf32(chunks.view("f4"), "rn").view(chunks.dtype)


PADDING = np.uint8(0xA5)
"""What padding becomes here. The ISA does not say, so that nothing may depend on it."""


def unpacked(packed: np.ndarray, m: TensorMap) -> np.ndarray:
    """Cells (n,) of packed rows of 128 elements to the cells (n * 8 / bits,) of their padded form."""
    used = 2 * m.bits
    out = np.full((len(packed) * CHUNK // used, CHUNK), PADDING)
    out[:, :used] = packed.view(np.uint8).reshape(-1, used)
    return out.reshape(-1).view(packed.dtype)

"""The 16-byte chunks that a tensor copy reads and writes, from its tensor map and coordinates (PTX ISA, "Tensors").

Addresses, strides, box rows and the innermost coordinate are all multiples of 16 bytes, so a copy is an index array
over chunks in global and in shared memory. A copy's coordinates are those of the first element of its box.

An H200 does the following, some of which is not in the ISA. With a swizzle, the rows of a box in shared memory are as
far apart as the swizzle is wide, even if they are shorter. The element stride of dimension 0 does nothing. A store that
ends inside a chunk writes the whole chunk. A tf32 load rounds to nearest even. NaN fill is 0x7ff7 in every half-word.
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
"""The 8 bytes that fill elements out of bounds, by ``TensorMap.nan_fill``."""


@dataclass(frozen=True)
class Plan:
    """The layout of a box of a tensor map in shared memory, which does not depend on the coordinates."""

    rows: np.ndarray  #: (r, rank) the distance of each box row from the coordinates, in elements
    chunks: int  #: chunks of a box row in shared memory
    place: np.ndarray  #: (m,) for each chunk of the box in row order, its place in shared memory from the box's start
    order: np.ndarray  #: (m,) indices that sort ``place``
    dense: bool  #: whether the box has no gaps in shared memory
    bytes: int  #: bytes that complete_tx counts, without padding


@lru_cache(maxsize=1024)
def plan(m: TensorMap, phase: int, row_count: int = 0) -> Plan:
    """Returns the plan of boxes at shared addresses with ``phase`` = address / 16 mod 64. ``row_count`` replaces the
    number of rows of the box: four for gather4 and scatter4, the pixels for im2col."""
    chunks = m.row_chunks
    rows = np.zeros((row_count, m.rank), np.int64) if row_count else _box_rows(m)
    pitch = chunks if m.swizzle == "none" else SPAN[m.swizzle] // CHUNK
    linear = (np.arange(len(rows))[:, None] * pitch + np.arange(chunks)[None, :]).ravel() + phase
    place = _swizzled(linear, m.swizzle) - phase
    order = np.argsort(place)
    dense = bool(place[order[0]] == 0 and place[order[-1]] == len(place) - 1)
    return Plan(rows, chunks, place, order, dense, len(rows) * m.box[0] * m.bits // 8)


def _swizzled(chunk: np.ndarray, swizzle: str) -> np.ndarray:
    """Returns the place to which a swizzle moves each ``chunk``; both are addresses / 16."""
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
    """The part of a box that lies in the tensor. Positions are those of chunks in the order of shared memory."""

    keep: np.ndarray | None  #: (n,) positions of the chunks that lie wholly in the tensor; None: all do
    chunks: np.ndarray  #: (n,) their addresses / 16 in global memory, from that of the coordinates
    tail: np.ndarray  #: (t,) positions of the chunks that lie in the tensor in part
    tail_chunks: np.ndarray  #: (t,) their addresses / 16 in global memory, from that of the coordinates
    tail_bytes: int  #: bytes of each of those chunks that lie in the tensor

    @property
    def written(self) -> tuple[np.ndarray | None, np.ndarray]:
        """The positions (None: all) and the chunks that a store writes, which writes a cut chunk as a whole."""
        if not len(self.tail):
            return self.keep, self.chunks
        keep = np.arange(len(self.chunks)) if self.keep is None else self.keep
        return np.concatenate([keep, self.tail]), np.concatenate([self.chunks, self.tail_chunks])


@lru_cache(maxsize=1024)
def _limits(m: TensorMap) -> tuple[np.ndarray, ...]:
    """Returns (element strides, tensor sizes, steps of the box, strides in chunks), each (rank,), where dimension 0
    counts in chunks."""
    chunks = m.box[0] * m.bits // (8 * CHUNK)
    counts = [chunks, *(-(-b // s) for b, s in zip(m.box[1:], m.element_strides[1:]))]
    sizes = [m.dims[0] * m.bits // (8 * CHUNK), *m.dims[1:]]
    strides = [1, *(s // CHUNK for s in m.strides)]
    return tuple(np.array(x, np.int64) for x in ([1, *m.element_strides[1:]], sizes, counts, strides))


def _in_chunks(m: TensorMap, coords: np.ndarray) -> np.ndarray:
    """Returns the coordinates (k, rank) with dimension 0 in chunks."""
    out = coords.copy()
    out[:, 0] = coords[:, 0] * m.bits // (8 * CHUNK)
    return out


def corner(m: TensorMap, coords: np.ndarray) -> np.ndarray:
    """Returns host addresses / 16 (k,), before they wrap, of ``coords`` (k, rank), which may lie outside the tensor."""
    return _in_chunks(m, coords) @ _limits(m)[3] + m.address // CHUNK


def bounds(m: TensorMap, coords: np.ndarray) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Sorts boxes at ``coords`` (k, rank) by how they lie to the edges of the tensor; returns (rows, key) of each kind.

    ``key``, for ``window``, has the first step inside the tensor in each dimension, then the first step past it in
    each, then the chunk of a row that the end of dimension 0 cuts, or -1.
    """
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
    """Returns the window of boxes with the ``key`` of ``bounds``, at shared addresses with ``phase`` (see ``plan``)."""
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
    """Returns the chunks (r, u) of box rows that begin at ``rows`` (r, rank), as host address / 16, and how many bytes
    of each lie in the tensor: 16, 0, or fewer where dimension 0 ends inside the chunk."""
    chunks = m.box[0] * m.bits // (8 * CHUNK)
    along = rows[:, :1] * m.bits // 8 + CHUNK * np.arange(chunks)[None, :]
    valid = np.where(along < 0, 0, np.clip(m.dims[0] * m.bits // 8 - along, 0, CHUNK))
    others = ((rows[:, 1:] >= 0) & (rows[:, 1:] < np.array(m.dims[1:], np.int64))).all(axis=1)
    return wrapped(corner(m, rows)[:, None] + np.arange(chunks)[None, :]), valid * others[:, None]


def round_tf32(chunks: np.ndarray) -> np.ndarray:
    """Rounds binary32 as a load of type tf32 does: to 10 mantissa bits, to nearest even; a NaN becomes 0x7fffe000."""
    return to_tf32(chunks.view("f4"), "rn").view(chunks.dtype)


PADDING = np.uint8(0xA5)
"""The byte that fills padding in shared memory. The ISA leaves it open, so no kernel may depend on it."""


def unpacked(packed: np.ndarray, m: TensorMap) -> np.ndarray:
    """Unpacks cells (n,) of rows of 128 packed elements to the cells (8 * n / bits,) of their padded form."""
    used = 2 * m.bits
    out = np.full((len(packed) * CHUNK // used, CHUNK), PADDING)
    out[:, :used] = packed.view(np.uint8).reshape(-1, used)
    return out.reshape(-1).view(packed.dtype)

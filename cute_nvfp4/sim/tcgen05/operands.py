"""Gathers what an MMA reads: operand tiles from shared and tensor memory, scale factors from tensor memory.

In the shapes, ``k`` is the number of rows (issuing threads that execute together), ``g`` the number of CTAs of a CTA
group, and ``steps`` the number of fused instructions. ``ctas`` (k, g) holds CTA indices in the wave. One ``take`` with
a cached index table gathers each operand; the table depends on descriptors only.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.errors import OutOfBounds
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.machine.tensor_memory import COLUMNS, LANES
from cute_nvfp4.sim.tcgen05 import elements
from cute_nvfp4.sim.tcgen05.descriptor import PERIOD, MatrixDescriptor, k_major_chunks, mn_major_chunks
from cute_nvfp4.sim.tcgen05.layouts import Part


@lru_cache(maxsize=1024)
def operand_chunks(
    desc: MatrixDescriptor, mn_major: bool, low: int, deltas: tuple[int, ...], rows: int, bits: int, chunks: int = 2
) -> np.ndarray:
    """Returns the chunk numbers of one operand of fused instructions.

    The shape is (rows, steps * chunks) for a K-major operand, and (steps * K, rows * bits / 128) for an MN-major one.
    ``low`` is the first instruction's start address modulo 1024. ``deltas`` are the distances in bytes of all start
    addresses from the first one. ``bits`` is the size of an element, and ``chunks`` the chunks of a K-major row.
    """
    tables = []
    for delta in deltas:
        at = (low + delta) % PERIOD
        if mn_major:
            table = mn_major_chunks(desc, at, rows * bits // 128, 256 // bits)
        else:
            table = k_major_chunks(desc, at, rows, chunks)
        tables.append(table + (low + delta - at) // 16)
    out = np.concatenate(tables, axis=0 if mn_major else 1)
    out.flags.writeable = False
    return out


_EXTENTS: dict[int, tuple[np.ndarray, int, int]] = {}


def _extent(chunks: np.ndarray) -> tuple[int, int]:
    """Returns the least and the greatest chunk number of a cached table."""
    known = _EXTENTS.get(id(chunks))
    if known is None or known[0] is not chunks:
        if len(_EXTENTS) > 4096:
            _EXTENTS.clear()
        known = _EXTENTS[id(chunks)] = (chunks, int(chunks.min()), int(chunks.max()))
    return known[1:]


def check_inside(base: np.ndarray, chunks: np.ndarray, size: int, where) -> None:
    """Raises ``OutOfBounds`` unless the chunks of a cached table lie within the ``size`` bytes of shared memory. The
    chunk numbers count from the addresses ``base`` (k,)."""
    first, last = _extent(chunks)
    low, high = int(base.min()) + 16 * first, int(base.max()) + 16 * last + 16
    if low < SHARED_BASE or high > SHARED_BASE + size:
        raise OutOfBounds(
            f"{where()}: the operand covers bytes {low - SHARED_BASE}..{high - SHARED_BASE - 1} of shared memory, "
            f"which has {size} bytes"
        )


def gather(shared: np.ndarray, ctas: np.ndarray, base: np.ndarray, chunks: np.ndarray, size: int, where) -> np.ndarray:
    """Returns the bytes (k, g, *chunks.shape[:-1], bytes) that ``shared`` (CTAs, stride) holds in ``chunks``.

    The chunk numbers count from the addresses ``base`` (k,). ``size`` is the number of bytes of shared memory of a CTA.
    """
    check_inside(base, chunks, size, where)
    place = ctas * (shared.shape[1] // 16) + (base[:, None] - SHARED_BASE) // 16
    index = place.reshape(*place.shape, *(1,) * chunks.ndim) + chunks
    out = shared.reshape(-1).view("c16").take(index)
    return out.view("u1").reshape(*index.shape[:-1], 16 * chunks.shape[-1])


def matrix(raw: np.ndarray, t: str, mn_major: bool) -> np.ndarray:
    """Returns an operand as f32 (k, g * rows, K) from gathered bytes (k, g, rows, bytes), or (k, g, K, bytes) with
    ``mn_major``; ``t`` is the element type."""
    values = elements.decode(raw, t)
    if mn_major:
        values = values.transpose(0, 1, 3, 2)
    k, g, rows, depth = values.shape
    return values.reshape(k, g * rows, depth)


def words(tmem: np.ndarray, ctas: np.ndarray, columns: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns words (k, g, steps, *table.shape) of tensor memory. ``columns`` (k, steps) are the base columns, and
    ``table`` holds lane * 512 + column relative to them."""
    base = ctas[:, :, None] * (LANES * COLUMNS) + columns[:, None, :]
    index = base.reshape(*base.shape, *(1,) * table.ndim) + table
    return tmem.reshape(-1).take(index)


@lru_cache(maxsize=8)
def _rows_table(count: int) -> np.ndarray:
    return np.arange(LANES, dtype=np.int64)[:, None] * COLUMNS + np.arange(count)


def tensor_matrix(tmem: np.ndarray, ctas: np.ndarray, columns: np.ndarray, t: str) -> np.ndarray:
    """Returns A as f32 (k, g, 128 lanes, K) from tensor memory; each step reads 8 columns from ``columns`` (k, steps)
    on."""
    data = np.ascontiguousarray(words(tmem, ctas, columns, _rows_table(8)).transpose(0, 1, 3, 2, 4))
    return elements.decode(data.reshape(*data.shape[:3], -1).view("u1"), t, tensor_memory=True)


def scale_words(first: int, count: int) -> int:
    """Returns how many words hold the ``count`` scales of a row that begin at byte ``first``; only K = 96 needs two."""
    return -(-(first + count) // 4)


def scale_stride(rows: int) -> int:
    """Returns the distance in columns from one word of a row's scales to the next. One word of each of 128 rows fills
    four columns, and the rows are padded to a multiple of 128 (CuTe's ``tmem_sf_frg``)."""
    return -(-rows // 128) * 4


@lru_cache(maxsize=64)
def _sfa_table(lane: int, rows: int, wide: int) -> np.ndarray:
    """Returns lane * 512 + column (rows, wide) of the scale words of A: row m has its first word in lane ``lane`` + m,
    column m // 32, and the next one ``scale_stride`` columns further on."""
    m = np.arange(rows, dtype=np.int64)
    return ((lane + m) * COLUMNS + m // 32)[:, None] + scale_stride(rows) * np.arange(wide)


@lru_cache(maxsize=64)
def _sfb_table(lane: int, quarters: int, count: int, wide: int) -> np.ndarray:
    """Returns lane * 512 + column (quarters, columns of D, wide) of the scale words of B: every quarter of the lanes
    has a copy, with those of column n in lane n % 32 and column n // 32."""
    n = np.arange(count, dtype=np.int64)
    first = (lane + 32 * np.arange(quarters, dtype=np.int64)[:, None] + n % 32) * COLUMNS + n // 32
    return first[..., None] + scale_stride(count) * np.arange(wide)


def scale_codes(w: np.ndarray, ids: tuple[int, ...], count: int) -> np.ndarray:
    """Returns scale bytes (k, g, ..., steps * count) from words (k, g, steps, ..., wide); ``ids`` has the first byte of
    each step."""
    raw = np.ascontiguousarray(w).view("u1").reshape(*w.shape[:-1], 4 * w.shape[-1])
    chosen = [raw[:, :, s, ..., i : i + count] for s, i in enumerate(ids)]
    return chosen[0] if len(chosen) == 1 else np.concatenate(chosen, axis=-1)


def sfa_codes(tmem, ctas, columns, part: Part, ids, count: int) -> np.ndarray:
    """Returns the scale bytes (k, g, rows, steps * count) of A."""
    table = _sfa_table(part.lanes.start, part.rows.stop - part.rows.start, scale_words(max(ids), count))
    return scale_codes(words(tmem, ctas, columns, table), ids, count)


def sfb_codes(tmem, ctas, columns, part: Part, ids, count: int) -> np.ndarray:
    """Returns the scale bytes (k, g, quarters, n, steps * count) of B, as each quarter of the data path reads them."""
    lanes = part.lanes
    wide = scale_words(max(ids), count)
    table = _sfb_table(lanes.start, (lanes.stop - lanes.start) // 32, part.n.stop - part.n.start, wide)
    return scale_codes(words(tmem, ctas, columns, table), ids, count)


def scaled(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Returns ``values`` (..., K) times ``factors`` (..., blocks); a factor scales K / blocks adjacent values."""
    blocks = factors.shape[-1]
    out = np.ascontiguousarray(values).reshape(*values.shape[:-1], blocks, -1) * factors[..., None]
    return out.reshape(values.shape)

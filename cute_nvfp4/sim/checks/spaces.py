"""Shadows of shared memory and tensor memory.

Shared memory is watched in chunks of 16 bytes, the grain of all asynchronous copies. A chunk that somebody accesses in
part is split into granules of the kernel's narrowest store, until an access to the whole chunk joins it again: operand
tiles stay cheap in kernels that also store single bytes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from cute_nvfp4.sim.checks.regions import CtaShadow
from cute_nvfp4.sim.checks.shadow import Actor, Shadow

CHUNK = 16
SPLIT = np.uint64(2**64 - 1)
TENSOR_COLUMNS, TENSOR_LANES = 512, 16


class SharedShadow:
    """Shared memory of the ``ctas`` CTAs of a wave, ``stride`` bytes each, by byte of ``wave.shared``; ``grain`` bytes
    are the narrowest store."""

    def __init__(self, ctas: int, stride: int, grain: int, report: Callable[..., None], strict: bool = False) -> None:
        self.grain, self.ratio = min(grain, CHUNK), CHUNK // min(grain, CHUNK)
        self.chunks = CtaShadow(ctas, -(-stride // CHUNK), partial(report, CHUNK))
        self.parts = Shadow(self.chunks.size * self.ratio, partial(report, self.grain)) if self.ratio > 1 else None
        self.split_any = False
        for shadow in (self.chunks, self.parts):
            if shadow is not None:
                shadow.strict = strict

    def tile(self, cta: np.ndarray, chunks: np.ndarray, who: Actor, write: bool) -> None:
        """An access to ``chunks`` (k, m), or (1, m) for all, of CTAs (k,)."""
        places = self.chunks.places(cta, chunks)
        if self.split_any and (self.chunks.last.take(places) == SPLIT).any():
            self.whole((cta * self.chunks.granules)[:, None] + chunks, who, write)
        else:
            self.chunks.access(places, who, write)

    def whole(self, chunk: np.ndarray, who: Actor, write: bool, flag: bool = False) -> None:
        """An access to whole chunks that lanes choose; ``flag`` as in :meth:`Shadow.access`."""
        self.chunks.part(chunk)
        if self.split_any:
            split = self.chunks.last.take(chunk) == SPLIT
            if split.any():
                self._whole_split(chunk, who, write, flag, split)
                return
        self.chunks.access(chunk, who, write, flag)

    def _whole_split(self, chunk, who: Actor, write: bool, flag: bool, split) -> None:
        parts = (chunk[split][:, None] * self.ratio + np.arange(self.ratio)).ravel()
        some = who.at(chunk.shape, split)
        wide = _widen(some, self.ratio)
        self.parts.access(parts, wide, write, flag)
        if write and not who.strong:
            # The parts are left behind; the chunk is one again.
            self.parts.forget(parts)
            self.chunks.last[chunk[split]] = some.epoch
        rest = ~split
        if rest.any():
            self.chunks.access(chunk[rest], who.at(chunk.shape, rest), write, flag)

    def part(self, byte: np.ndarray, width: int, who: Actor, write: bool, flag: bool = False) -> None:
        """An access to ``width`` bytes at ``byte`` (aligned to the width), less than a chunk; shape (n, m) or (q,)."""
        chunk = byte // CHUNK
        self.chunks.part(chunk)
        if self.parts is None:
            # No store is as narrow, so nothing is lost by taking the chunk for it.
            self.chunks.access(chunk, who, write, flag)
            return
        self._split(chunk)
        count = max(1, width // self.grain)
        index = byte // self.grain
        if count > 1:
            flat = np.ones(byte.shape, bool)
            who = _widen(who.at(byte.shape, flat), count)
            index = (index.ravel()[:, None] + np.arange(count)).ravel()
        self.parts.access(index, who, write, flag)

    def _split(self, chunk: np.ndarray) -> None:
        last = self.chunks.last.take(chunk)
        fresh = last != SPLIT
        if not fresh.any():
            return
        chunk, last = chunk[fresh], last[fresh]
        parts = chunk[..., None] * self.ratio + np.arange(self.ratio)
        self.parts.last[parts] = last[..., None]
        for mine, theirs in ((self.parts.readers, self.chunks.readers), (self.parts.atomics, self.chunks.atomics)):
            if theirs is None:
                continue
            if mine is None:
                mine = self.parts.atomics = type(theirs)(self.parts.size)
            mine.grow(theirs.count)
            mine.mask[parts] = theirs.mask[chunk][..., None]
            for p, found in theirs.present(chunk):
                mine.store[p][parts] = found[..., None]
            theirs.clear(chunk)
        self.chunks.last[chunk] = SPLIT
        self.split_any = True

    def of_bytes(self, first: int, end: int):
        """Yields (shadow, granules, where what is known of each stands) of the bytes ``first`` .. ``end``."""
        chunk = np.arange(first // CHUNK, -(-end // CHUNK))
        places = self.chunks.leaders(chunk)
        split = self.chunks.last[places] == SPLIT
        yield self.chunks, chunk[~split], places[~split]
        if split.any():
            parts = (chunk[split][:, None] * self.ratio + np.arange(self.ratio)).ravel()
            yield self.parts, parts, parts

    def byte_of(self, shadow: Shadow, index: int) -> int:
        return index * (CHUNK if shadow is self.chunks else self.grain)


@lru_cache(maxsize=64)
def _groups(start: int, stop: int) -> np.ndarray:
    return np.arange(start // TENSOR_LANES, -(-stop // TENSOR_LANES))


def _widen(who: Actor, count: int) -> Actor:
    """Each of the agents (q,) for ``count`` granules."""
    where = np.repeat(np.arange(len(who.base)), count)
    return who.at(who.base.shape, where)


class TensorShadow:
    """Tensor memory: granules of 16 lanes and one column."""

    def __init__(self, ctas: int, report: Callable[..., None]) -> None:
        self.per_cta = 128 // TENSOR_LANES * TENSOR_COLUMNS
        self.cells = CtaShadow(ctas, self.per_cta, report)

    def granules(self, lanes, columns: np.ndarray) -> np.ndarray:
        """(k, m) granules of a CTA for lanes (a slice or array) and columns (k, c); one row where all are alike."""
        group = _groups(lanes.start, lanes.stop) if isinstance(lanes, slice) else np.unique(lanes // TENSOR_LANES)
        if len(columns) > 1 and (columns == columns[0]).all():
            columns = columns[:1]
        return ((group * TENSOR_COLUMNS)[None, :, None] + columns[:, None, :]).reshape(len(columns), -1)

    def place(self, index: int) -> tuple[int, int, int]:
        """(CTA, first lane, column) of a granule."""
        cta, rest = divmod(index, self.per_cta)
        return cta, rest // TENSOR_COLUMNS * TENSOR_LANES, rest % TENSOR_COLUMNS

    def bytes_of(self, index: np.ndarray) -> np.ndarray:
        """The bytes of granules (k,) in ``wave.tmem``, (CTAs, 128, 512) words."""
        cta, rest = np.divmod(index, self.per_cta)
        group, column = np.divmod(rest, TENSOR_COLUMNS)
        lanes = (cta * 128 + group * TENSOR_LANES)[:, None] + np.arange(TENSOR_LANES)
        words = lanes * TENSOR_COLUMNS + column[:, None]
        return (4 * words.ravel()[:, None] + np.arange(4)).ravel()

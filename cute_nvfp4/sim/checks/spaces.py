"""Shadows of shared memory and tensor memory.

The granules of shared memory are chunks of 16 bytes, like those of all asynchronous copies. An access to part of a
chunk splits the chunk into granules as wide as the kernel's narrowest store, until an ordinary write to all of it joins
them again. So operand tiles stay cheap in kernels that also store single bytes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from cute_nvfp4.sim.checks.regions import CtaShadow
from cute_nvfp4.sim.checks.shadow import Actor, Shadow

CHUNK = 16
SPLIT = np.uint64(2**64 - 1)
"""The epoch of the last write that marks a chunk as split."""
TENSOR_COLUMNS, TENSOR_LANES = 512, 16


class SharedShadow:
    """The shadow of the shared memory of ``ctas`` CTAs, ``stride`` bytes each, by byte of ``wave.shared``.

    ``grain`` is the number of bytes of the kernel's narrowest store. ``report`` is called with the size of a granule
    and the arguments of ``Shadow.told``.
    """

    def __init__(self, ctas: int, stride: int, grain: int, report: Callable[..., None], strict: bool = False) -> None:
        self.grain, self.ratio = min(grain, CHUNK), CHUNK // min(grain, CHUNK)
        self.chunks = CtaShadow(ctas, -(-stride // CHUNK), partial(report, CHUNK))
        self.parts = Shadow(self.chunks.size * self.ratio, partial(report, self.grain)) if self.ratio > 1 else None
        self.split_any = False
        for shadow in (self.chunks, self.parts):
            if shadow is not None:
                shadow.strict = strict

    def tile(self, cta: np.ndarray, chunks: np.ndarray, who: Actor, write: bool) -> None:
        """Checks and records an access to ``chunks`` (k, m), or (1, m) for all, of CTAs (k,)."""
        places = self.chunks.places(cta, chunks)
        if self.split_any and (self.chunks.last.take(places) == SPLIT).any():
            self.whole((cta * self.chunks.granules)[:, None] + chunks, who, write)
        else:
            self.chunks.access(places, who, write)

    def whole(self, chunk: np.ndarray, who: Actor, write: bool, flag: bool = False) -> None:
        """Checks and records an access to whole chunks that lanes choose; ``flag`` is that of :meth:`Shadow.access`."""
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
            # the chunk is whole again
            self.parts.forget(parts)
            self.chunks.last[chunk[split]] = some.epoch
        rest = ~split
        if rest.any():
            self.chunks.access(chunk[rest], who.at(chunk.shape, rest), write, flag)

    def part(self, byte: np.ndarray, width: int, who: Actor, write: bool, flag: bool = False) -> None:
        """Checks and records an access to less than a chunk: ``width`` bytes at each ``byte``, (n, m) or (q,), a
        multiple of the width."""
        chunk = byte // CHUNK
        self.chunks.part(chunk)
        if self.parts is None:
            # no store is narrower than a chunk, so the chunk can stand for its part
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
        """Yields (shadow, granules, granules that hold their history) for the bytes ``first`` to before ``end``."""
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
    """Returns each of the agents (q,) ``count`` times, for as many granules."""
    where = np.repeat(np.arange(len(who.base)), count)
    return who.at(who.base.shape, where)


class TensorShadow:
    """The shadow of tensor memory, in granules of 16 lanes and one column."""

    def __init__(self, ctas: int, report: Callable[..., None]) -> None:
        self.per_cta = 128 // TENSOR_LANES * TENSOR_COLUMNS
        self.cells = CtaShadow(ctas, self.per_cta, report)

    def granules(self, lanes, columns: np.ndarray) -> np.ndarray:
        """Returns the granules (k, m) of a CTA for lanes (a slice or array) and columns (k, c); (1, m) if all agree."""
        group = _groups(lanes.start, lanes.stop) if isinstance(lanes, slice) else np.unique(lanes // TENSOR_LANES)
        if len(columns) > 1 and (columns == columns[0]).all():
            columns = columns[:1]
        return ((group * TENSOR_COLUMNS)[None, :, None] + columns[:, None, :]).reshape(len(columns), -1)

    def place(self, index: int) -> tuple[int, int, int]:
        """Returns the CTA, the first lane and the column of a granule."""
        cta, rest = divmod(index, self.per_cta)
        return cta, rest // TENSOR_COLUMNS * TENSOR_LANES, rest % TENSOR_COLUMNS

    def bytes_of(self, index: np.ndarray) -> np.ndarray:
        """Returns the bytes of granules (k,) as indices into the bytes of ``wave.tmem``, (CTAs, 128, 512) words."""
        cta, rest = np.divmod(index, self.per_cta)
        group, column = np.divmod(rest, TENSOR_COLUMNS)
        lanes = (cta * 128 + group * TENSOR_LANES)[:, None] + np.arange(TENSOR_LANES)
        words = lanes * TENSOR_COLUMNS + column[:, None]
        return (4 * words.ravel()[:, None] + np.arange(4)).ravel()

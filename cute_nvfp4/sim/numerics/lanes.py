"""Exchanges between the lanes of a warp, as pure functions on arrays (n, 32) of n warps."""

from __future__ import annotations

import numpy as np

LANES = np.arange(32, dtype=np.int64)[None, :]


def rounds(values: np.ndarray) -> list[np.ndarray]:
    """Splits the indices of ``values`` (k,) into rounds, none of which has two equal values: round r holds the index of
    the r-th occurrence of each value."""
    if not len(values):
        return []
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    nth = np.arange(len(values)) - np.repeat(starts, np.diff(np.r_[starts, len(values)]))
    return np.split(order[np.argsort(nth, kind="stable")], np.cumsum(np.bincount(nth))[:-1])


def ballot(p: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Returns u32 masks (n, 1) of the lanes in ``lanes`` (n, 32) where ``p`` is true."""
    packed = np.packbits(p & lanes, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").astype("u4")


def members(mask: np.ndarray) -> np.ndarray:
    """Returns whether each lane (n or 1, 32) is in the member mask; ``mask`` is (n or 1, 1 or 32)."""
    return (mask >> LANES.astype("u4") & np.uint32(1)).astype(bool)


def shuffle_source(mode: str, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (source lane, in range) of shfl (PTX ISA, "shfl.sync"). ``b`` is the lane or distance. ``c`` holds a
    clamp in bits 0 to 4 and a segment mask in bits 8 to 12."""
    distance, c = (b & np.uint32(31)).astype("i8"), c.astype("i8")
    segment, clamp = c >> 8 & 31, c & 31
    most = (LANES & segment) | (clamp & ~segment)
    least = LANES & segment
    if mode == "up":
        j = LANES - distance
        ok = j >= most
    elif mode == "down":
        j = LANES + distance
        ok = j <= most
    elif mode == "bfly":
        j = LANES ^ distance
        ok = j <= most
    else:
        j = least | (distance & ~segment & 31)
        ok = j <= most
    return np.where(ok, j, LANES), ok


def reduce_lanes(x: np.ndarray, lanes: np.ndarray, fn: np.ufunc, neutral) -> np.ndarray:
    """Returns the reduction (n, 1) by ``fn`` of the values in ``lanes``; ``neutral`` is its neutral element."""
    return fn.reduce(np.where(lanes, x, x.dtype.type(neutral)), axis=1, keepdims=True, dtype=x.dtype)

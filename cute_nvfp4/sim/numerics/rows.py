"""Finds equal rows, so that a caller computes their common result once."""

from __future__ import annotations

from functools import cache

import numpy as np


def distinct(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (first, of) for the rows of 64-bit ``words`` (n, m): ``first`` has the index of the first row of each set
    of equal rows, and ``of`` (n,) the set of each row."""
    _, first, of = np.unique(words @ _odd(words.shape[1]), return_index=True, return_inverse=True)
    if (words != words[first[of]]).any():
        # Different rows have the same hash, so every row becomes a set.
        return np.arange(len(words)), np.arange(len(words))
    return first, of


@cache
def _odd(count: int) -> np.ndarray:
    """Returns random odd factors; the dot product of a row with them is its hash."""
    return np.random.default_rng(0).integers(1 << 63, size=count, dtype="u8") | np.uint64(1)

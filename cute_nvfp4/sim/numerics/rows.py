"""Rows that are the same, so that what is computed of them is computed once."""

from __future__ import annotations

from functools import cache

import numpy as np


def distinct(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each kind of row of 64-bit ``words`` (n, m), and the kind that each row is (n,)."""
    _, first, of = np.unique(words @ _odd(words.shape[1]), return_index=True, return_inverse=True)
    if (words != words[first[of]]).any():
        # two kinds of one sum
        return np.arange(len(words)), np.arange(len(words))
    return first, of


@cache
def _odd(count: int) -> np.ndarray:
    """Factors by which the sums of different rows differ."""
    return np.random.default_rng(0).integers(1 << 63, size=count, dtype="u8") | np.uint64(1)

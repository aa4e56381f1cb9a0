"""Bank conflicts of shared memory.

Shared memory has 32 banks of 4 bytes; successive words lie in successive banks (CUDA C++ Programming Guide, "Shared
Memory" of compute capability 5.x and later). In one pass a bank serves one word, to any number of lanes. The banks
serve a request of 64 bits a lane in two halves of the warp, and one of 128 bits a lane in four quarters. ldmatrix and
stmatrix move one 8x8 matrix at a time (eight rows of 16 bytes), which is a quarter of 128 bits a lane.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.numerics.rows import distinct

BANKS, WORD = 32, 4


def passes(address: np.ndarray, lanes: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the passes (n,) of n requests of ``width`` bytes a lane, and their passes without bank conflicts (n,).

    address: (n, 32) byte addresses of shared memory, or host addresses that agree with them modulo 128.
    lanes: (n, 32) booleans, which say what lanes take part.
    """
    # warps of other CTAs mostly make the same requests, from another base
    base = address[:, :1].astype("i8") & -BANKS * WORD
    kinds, of = distinct(np.where(lanes, address - base, -1 << 40).view("u8"))
    most, least = _passes((address - base)[kinds], lanes[kinds], width)
    return most[of], least[of]


def _passes(address: np.ndarray, lanes: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    phases, words = max(1, width // WORD), max(1, width // WORD)
    n = len(address)
    first = (address >> 2).reshape(n * phases, -1, 1)
    nobody = np.iinfo("i8").min
    word = np.where(lanes.reshape(n * phases, -1, 1), first + np.arange(words), nobody).reshape(n * phases, -1)
    word.sort(axis=1)
    new = word != nobody
    new[:, 1:] &= word[:, 1:] != word[:, :-1]
    row, _ = np.nonzero(new)
    load = np.bincount(row * BANKS + word[new] % BANKS, minlength=n * phases * BANKS)
    worst = load.reshape(n, phases, BANKS).max(axis=2)
    return worst.sum(axis=1), (worst > 0).sum(axis=1)

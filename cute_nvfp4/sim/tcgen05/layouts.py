"""Layouts of tensor memory: the lanes and columns of accumulators, loads, stores and copies (PTX ISA, "Data Path
Layout Organization", "Data Movement Shape"; CuTe's ``tmem_frg`` and copy traits)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Part:
    """A block of the accumulator D of one CTA. It begins at D's base column in each of its lanes."""

    rows: slice  # rows of D
    n: slice  # columns of D
    lanes: slice | tuple[int, ...]  # lanes of tensor memory, one for each row


@lru_cache(maxsize=256)
def accumulator(m: int, n: int, cta_group: int, ws: bool, lane: int = 0) -> tuple[Part, ...]:
    """Returns the parts of the accumulator D that one CTA holds. The layout letters are those of the PTX ISA.

    Layouts A and D (M = 256 of a CTA pair, M = 128) place row i in lane i. Layout F (M = 64) places rows 16 i to
    16 i + 15 in the lower half of the 32 lanes of quarter i, or in the upper half when the base lane ``lane`` is 16.
    Layouts B and E (M = 128 of a pair, M = 64 with .ws) place the left half of the columns in lanes 0 to 63 and the
    right half in lanes 64 to 127. Layout G (M = 32 with .ws) places a quarter of the columns in each quarter of lanes.
    """
    own = m // cta_group
    if own == 128:
        return (Part(slice(0, 128), slice(0, n), slice(0, 128)),)
    if own == 64 and not ws and cta_group == 1:
        lanes = tuple(32 * (r // 16) + r % 16 + lane for r in range(64))
        return (Part(slice(0, 64), slice(0, n), lanes),)
    fold = 128 // own
    wide = n // fold
    return tuple(
        Part(slice(0, own), slice(i * wide, (i + 1) * wide), slice(i * own, (i + 1) * own)) for i in range(fold)
    )


@dataclass(frozen=True)
class Movement:
    """A data movement shape of tcgen05.ld and tcgen05.st, relative to the base address.

    Register r of thread t is the word at lane ``lane[t, r]`` and column ``column[t, r]``.
    """

    lanes: int  # number of lanes accessed, 16 or 32
    lane: np.ndarray  # (32, registers)
    column: np.ndarray  # (32, registers)
    high: np.ndarray  # (32,) bool: whether the thread's columns start at the split offset of .16x32bx2

    @property
    def registers(self) -> int:
        return self.lane.shape[1]


@lru_cache(maxsize=64)
def movement(shape: str, num: int) -> Movement:
    """Returns the tables of ``shape``, repeated ``num`` times along the columns."""
    t = np.arange(32)[:, None]
    words = {"16x128b": 2, "16x256b": 4}.get(shape, 1)
    r = np.arange(num * words)[None, :]
    high = np.zeros(32, bool)
    if shape == "32x32b":
        lane, column = t + 0 * r, r + 0 * t
    elif shape == "16x64b":
        lane, column = 8 * (t & 1) + t // 4 + 0 * r, (t >> 1 & 1) + 2 * r
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (r & 1), t % 4 + 4 * (r // 2)
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (r >> 1 & 1), 2 * (t % 4) + (r & 1) + 8 * (r // 4)
    else:
        lane, column, high = t % 16 + 0 * r, r + 0 * t, np.arange(32) >= 16
    return Movement(32 if shape == "32x32b" else 16, lane, column, high)


COPIES = {
    ("128x256b", ""): (128, 2),
    ("4x256b", ""): (4, 2),
    ("128x128b", ""): (128, 1),
    ("64x128b", "warpx2::02_13"): (64, 1),
    ("64x128b", "warpx2::01_23"): (64, 1),
    ("32x128b", "warpx4"): (32, 1),
}
"""(rows, 16-byte chunks in a row) of the source of tcgen05.cp, by shape and multicast."""


@lru_cache(maxsize=16)
def copy_lanes(shape: str, multicast: str) -> np.ndarray:
    """Returns the lanes (copies, rows) to which tcgen05.cp copies each source row."""
    rows, _ = COPIES[shape, multicast]
    r = np.arange(rows)
    if shape == "4x256b":
        # Each row goes to the first lane of a quarter.
        return (32 * r)[None, :]
    if multicast == "warpx4":
        return r[None, :] + 32 * np.arange(4)[:, None]
    if multicast == "warpx2::02_13":
        return r[None, :] + 64 * np.arange(2)[:, None]
    if multicast == "warpx2::01_23":
        return (r + 32 * (r // 32))[None, :] + 32 * np.arange(2)[:, None]
    return r[None, :]

"""Which lanes and columns of tensor memory hold what (PTX ISA, "Data Path Layout Organization", "Data Movement
Shape"; CuTe's ``tmem_frg`` and copy traits)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Part:
    """Rows ``rows`` and columns of D ``n`` lie in ``lanes``, from the base column on. ``lanes`` is a slice, or a tuple
    of lane numbers."""

    rows: slice
    n: slice
    lanes: slice | tuple[int, ...]


@lru_cache(maxsize=256)
def accumulator(m: int, n: int, cta_group: int, ws: bool, lane: int = 0) -> tuple[Part, ...]:
    """The parts of the rows of D that one CTA holds.

    Layouts A and D (M = 256 of a pair, M = 128): a row a lane. F (M = 64): rows 16 i .. 16 i + 15 in lanes 32 i ..,
    or, from a base lane of 16, in the upper halves. B and E (M = 128 of a pair, M = 64 with .ws): 64 rows, the right
    half of the columns in lanes 64 .. 127. G (M = 32 with .ws): quarters of the columns in the four quarters of lanes.
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
    """A tcgen05.ld/st shape: register r of thread t is the word at lane ``lane[t, r]``, column ``column[t, r]``;
    ``high`` (t,) marks the threads whose columns start at the split offset of .16x32bx2."""

    lanes: int
    lane: np.ndarray
    column: np.ndarray
    high: np.ndarray

    @property
    def registers(self) -> int:
        return self.lane.shape[1]


@lru_cache(maxsize=64)
def movement(shape: str, num: int) -> Movement:
    """(32, registers) tables of ``shape`` repeated ``num`` times along the columns."""
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
"""Rows and 16-byte chunks a row of the source of tcgen05.cp, by shape and multicast."""


@lru_cache(maxsize=16)
def copy_lanes(shape: str, multicast: str) -> np.ndarray:
    """(copies, rows): the lanes that each source row goes to."""
    rows, _ = COPIES[shape, multicast]
    r = np.arange(rows)
    if shape == "4x256b":
        # One row for each quarter of the lanes.
        return (32 * r)[None, :]
    if multicast == "warpx4":
        return r[None, :] + 32 * np.arange(4)[:, None]
    if multicast == "warpx2::02_13":
        return r[None, :] + 64 * np.arange(2)[:, None]
    if multicast == "warpx2::01_23":
        return (r + 32 * (r // 32))[None, :] + 32 * np.arange(2)[:, None]
    return r[None, :]

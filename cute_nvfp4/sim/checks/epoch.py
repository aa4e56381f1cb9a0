"""Epochs: who made an access, and when, in 64 bits.

An epoch is ``[label 16][component 16][strong 1][lane 6][narrow 1][clock 24]``. The component says whose clock counts (a
warp's own, one of its asynchronous pipes, or an mbarrier), the lane which thread of a warp it was (``MANY``: several).
The label is the instruction, or the cluster in global memory, whose clocks are kept by cluster. 0 stands for no access.
"""

from __future__ import annotations

import numpy as np

CLOCK_MASK = (1 << 24) - 1
MANY = 32
"""The lane of an access that several lanes made together."""

_STRONG, _NARROW = 1 << 31, 1 << 24
_AGENT = np.uint64((1 << 48) - 1)
_ORDERED = np.uint64(0xFFFF_FFFF_7FFF_FFFF)


def pack(label, component, clock, lane=MANY, strong: bool = False, narrow: bool = False) -> np.ndarray:
    """Epochs of arrays that broadcast together."""
    how = (_STRONG if strong else 0) | (_NARROW if narrow else 0)
    low = (np.asarray(clock, np.int64) & CLOCK_MASK) | (np.asarray(lane, np.int64) << 25) | how
    high = (np.asarray(label, np.int64) & 0xFFFF) << 16 | np.asarray(component, np.int64)
    return (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)


def labels(epochs: np.ndarray) -> np.ndarray:
    """The labels (uint16) of ``epochs``."""
    return epochs.view(np.uint16)[..., 3::4]


def components(epochs: np.ndarray) -> np.ndarray:
    """uint16, the shape of ``epochs``, which must be contiguous."""
    return epochs.view(np.uint16)[..., 2::4]


def clocks(epochs: np.ndarray) -> np.ndarray:
    """The clocks of ``epochs``."""
    return epochs.view(np.uint32)[..., 0::2] & np.uint32(CLOCK_MASK)


def lanes(epochs: np.ndarray) -> np.ndarray:
    """The lanes of ``epochs``, ``MANY`` for more than one."""
    return (epochs.view(np.uint32)[..., 0::2] >> np.uint32(25)) & np.uint32(63)


def strong(epochs: np.ndarray) -> np.ndarray:
    """Whether the accesses of ``epochs`` are strong."""
    return (epochs.view(np.uint32)[..., 0::2] & np.uint32(_STRONG)) != 0


def narrow(epochs: np.ndarray) -> np.ndarray:
    """Whether strong accesses of ``epochs`` name a scope that leaves out threads which can touch the bytes too."""
    return (epochs.view(np.uint32)[..., 0::2] & np.uint32(_NARROW)) != 0


def same_agent(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether all but the label is equal."""
    return ((a ^ b) & _AGENT) == 0


def by_many(epochs: np.ndarray) -> np.ndarray:
    """The epochs with the lane replaced by ``MANY``."""
    clear = np.uint64(((1 << 64) - 1) ^ (63 << 25))
    return (epochs & clear) | np.uint64(MANY << 25)

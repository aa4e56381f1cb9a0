"""Epochs: who made an access, and when, in 64 bits.

An epoch is ``[label 16][component 16][strong 1][lane 6][narrow 1][clock 24]``. The component says whose clock counts (a
warp's own, one of its asynchronous pipes, or an mbarrier). The lane says which thread of the warp it was; ``MANY`` and
above stand for several (``lane_sets``). For an atomic operation that an mbarrier ends, the lane is the rank of the CTA
that issued it. The label is the number of the instruction; for global memory it is the number of the cluster, because
each cluster has its own clocks. 0 stands for no access. In launches of many clusters the label has more bits and the
component fewer: functions take the component's ``bits`` (:func:`component_bits`).
"""

from __future__ import annotations

import numpy as np

CLOCK_MASK = (1 << 24) - 1
MANY = 32
"""The lane of an access that several lanes made together, or lanes that are not known."""

_STRONG, _NARROW = 1 << 31, 1 << 24
_NO_LANE = np.uint64(((1 << 64) - 1) ^ (63 << 25))


def component_bits(clusters: int, components: int) -> int:
    """Returns the bits of a component in a launch of ``clusters`` clusters, each of which has ``components``."""
    return min(16, max(32 - (clusters - 1).bit_length(), components.bit_length()))


def pack(label, component, clock, lane=MANY, strong: bool = False, narrow: bool = False, bits: int = 16) -> np.ndarray:
    """Returns the epochs (uint64) made of these fields, which broadcast together."""
    how = (_STRONG if strong else 0) | (_NARROW if narrow else 0)
    low = (np.asarray(clock, np.int64) & CLOCK_MASK) | (np.asarray(lane, np.int64) << 25) | how
    high = np.asarray(label, np.int64) << bits | np.asarray(component, np.int64)
    return (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)


def labels(epochs: np.ndarray, bits: int = 16) -> np.ndarray:
    """Returns the labels (uint16 or uint32) of ``epochs``, which must be contiguous."""
    return epochs.view(np.uint16)[..., 3::4] if bits == 16 else sources(epochs) >> np.uint32(bits)


def components(epochs: np.ndarray, bits: int = 16) -> np.ndarray:
    """Returns the components (uint16) of ``epochs``, which must be contiguous."""
    low = epochs.view(np.uint16)[..., 2::4]
    return low if bits == 16 else low & np.uint16((1 << bits) - 1)


def sources(epochs: np.ndarray) -> np.ndarray:
    """Returns the labels and components together (uint32) of ``epochs``, which must be contiguous."""
    return epochs.view(np.uint32)[..., 1::2]


def clocks(epochs: np.ndarray) -> np.ndarray:
    """Returns the clocks (uint32) of ``epochs``, which must be contiguous."""
    return epochs.view(np.uint32)[..., 0::2] & np.uint32(CLOCK_MASK)


def lanes(epochs: np.ndarray) -> np.ndarray:
    """Returns the lanes (uint32) of ``epochs``."""
    return (epochs.view(np.uint32)[..., 0::2] >> np.uint32(25)) & np.uint32(63)


def strong(epochs: np.ndarray) -> np.ndarray:
    """Whether the accesses of ``epochs`` are strong."""
    return (epochs.view(np.uint32)[..., 0::2] & np.uint32(_STRONG)) != 0


def narrow(epochs: np.ndarray) -> np.ndarray:
    """Whether strong accesses of ``epochs`` name a scope that excludes some threads which can access the bytes."""
    return (epochs.view(np.uint32)[..., 0::2] & np.uint32(_NARROW)) != 0


def strength(epochs: np.ndarray) -> np.ndarray:
    """Returns (int8) 0 for weak accesses, 1 for narrow strong ones, 2 for other strong ones: of two that are in order,
    the second races wherever the first does if it is no stronger."""
    return np.where(strong(epochs), np.where(narrow(epochs), np.int8(1), np.int8(2)), np.int8(0))


def same_agent(a: np.ndarray, b: np.ndarray, bits: int = 16) -> np.ndarray:
    """Whether epochs ``a`` and ``b`` are equal in all fields but the label."""
    return ((a ^ b) << np.uint64(32 - bits)) == 0


def by_many(epochs: np.ndarray) -> np.ndarray:
    """Returns the epochs with ``MANY`` as their lane."""
    return (epochs & _NO_LANE) | np.uint64(MANY << 25)


def by_lane(epochs: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Returns the epochs with other lanes."""
    return (epochs & _NO_LANE) | (lanes.astype(np.uint64) << np.uint64(25))

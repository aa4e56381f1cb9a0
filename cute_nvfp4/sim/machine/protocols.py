"""Protocols of the wave and the group, for the parts of the machine that ``wave`` imports.

``wave`` imports its engines, mbarriers and special registers, so these know it by the protocols of this file. Files
that ``wave`` does not import use its classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Announcer(Protocol):
    """The announcer of events: ``hears`` and one method for each event of ``events.Listener``."""

    def hears(self, event: str) -> bool: ...

    def __getattr__(self, event: str) -> Callable[..., None]: ...


class Wave(Protocol):
    """The CTAs that are resident together (see ``wave.Wave``). Arrays are indexed by CTA or by warp of the wave."""

    run: Any
    events: Announcer
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    count: int
    cluster_size: int
    sm_count: int
    warps_per_cta: int
    shared_bytes: int
    dynamic_smem: int
    steps: int
    progress: int
    changes: int
    rank: np.ndarray
    cluster_index: np.ndarray
    cta_alive: np.ndarray
    cta_coordinates: tuple[np.ndarray, ...]
    cta_index: np.ndarray
    cta_of_warp: np.ndarray
    warp_in_cta: np.ndarray

    def cta_name(self, cta: int) -> str: ...

    def thread(self, warp: int, lane: int) -> str: ...


class Group(Protocol):
    """Warps that are about to run the same block (see ``wave.Group``)."""

    wave: Any
    warps: np.ndarray
    mask: np.ndarray | None
    regs: list[np.ndarray]

    @property
    def n(self) -> int: ...

    def lanes(self, mask: np.ndarray | None = None) -> np.ndarray: ...

"""Where a role stands in the ring of stages of the WGMMA kernel."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32

from .config import WgmmaConfig


class Pipeline(NamedTuple):
    """The ring of stages: shared addresses of the first full and the first empty barrier."""

    full: Int32
    empty: Int32


class Position(NamedTuple):
    """A stage of the ring, and the phase of its barriers."""

    stage: Int32
    phase: Int32


def advance(config: WgmmaConfig, at: Position) -> Position:
    """To the next stage."""
    following = at.stage + 1
    last = following == config.ring_stages
    return Position(cutlass.select_(last, Int32(0), following), cutlass.select_(last, at.phase ^ 1, at.phase))


def advance_own(config: WgmmaConfig, at: Position) -> Position:
    """To the next stage of a warpgroup; the ring has as many for each of ``k_groups``."""
    if config.k_groups == 1:
        return advance(config, at)
    following = at.stage + config.k_groups
    last = following >= config.ring_stages
    stage = cutlass.select_(last, following - config.ring_stages, following)
    return Position(stage, cutlass.select_(last, at.phase ^ 1, at.phase))

"""The loading warp: it fills every stage that becomes empty with a tile of each operand, by TMA.

In a cluster, each CTA loads its part of a tile for all CTAs that need it: A's for the CTAs along N, B's for those along
M. A CTA of a pair has its own rows of A and its own half of B's columns; both CTAs get all of B's scale factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from ..barriers import Barriers
from ..config import GemmConfig
from ..operands import Loads
from ..problem import Problem, Scheduler
from ..stage_copies import CtaTile, Slot, TmaLoader, first_atom
from ..tile_scheduler import CtaPlace, WorkTile
from .operands import make_mma, shared_operands


class LoadMasks(NamedTuple):
    """Masks of the CTAs, one bit each, that get this CTA's part of A and SFA, of B, and of SFB."""

    a: Int16
    b: Int16
    sfb: Int16


def multicast_masks(config: GemmConfig, place: CtaPlace) -> LoadMasks:
    """The masks for this CTA. Bit r is the CTA of rank x + cm·(y + cn·part)."""
    cm, cn = config.cluster
    row = sum(1 << (cm * y) for y in range(cn))
    column = sum(1 << x for x in range(0, cm, config.ctas))
    everyone = (1 << cm) - 1
    first = place.part * (cm * cn)
    along_n, along_m = first + place.x, first + place.y * cm
    return LoadMasks(
        Int16(Int32(row) << along_n),
        Int16(Int32(column) << (along_m + place.v)),
        Int16(Int32(everyone) << along_m),
    )


@dataclass(frozen=True)
class MulticastLoader(TmaLoader):
    """The loading warp's copies in a cluster. part: this CTA's slice of the tiled MMA."""

    part: Any
    masks: LoadMasks

    def tiles(self, work: WorkTile) -> Iterator[CtaTile]:
        config, part, place, masks = self.config, self.part, self.place, self.masks
        (cm, cn), ctas = config.cluster, config.ctas
        for_a, for_sfb = Slot(place.y, cn, masks.a), Slot(place.x, cm, masks.sfb)
        for_b = Slot(place.x // ctas, cm // ctas, masks.b)
        yield CtaTile(part.partition_A, config.tile_m, work.m // ctas, for_a, lambda: work.m, for_a)
        atom_b = partial(first_atom, work.n, config.tile_n)
        yield CtaTile(part.partition_B, config.tile_n, work.n, for_b, atom_b, for_sfb)


@cute.jit
def load(
    config: cutlass.Constexpr[GemmConfig],
    loads: Loads,
    base: cute.Pointer,
    barriers: Barriers,
    scheduler: Scheduler,
    problem: Problem,
):
    """Runs the loop of the loading warp."""
    mma, place = make_mma(config), scheduler.place
    part, shared = mma.get_slice(place.v), shared_operands(config, mma, base)
    loader = MulticastLoader(config, loads, shared, place, problem, part, multicast_masks(config, place))
    loader.fill(barriers.operands, scheduler)

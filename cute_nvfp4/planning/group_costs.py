"""Modelled times of the work tiles of a grouped GEMM of packed weights on sm_90a.

The constants are in ``group_costs.json``. ``benchmarks/fit_group_costs.py`` writes the file: for each constant its
value, the value that a fit to the recorded plans gives, and whether the value comes from that record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig
from .packed_model import recorded

RECORD = Path(__file__).with_name("group_costs.json")


@dataclass(frozen=True)
class GroupCosts:
    """Tables of µs by the rows of x in a tile, between which ``tile_us`` interpolates. start_us: a launch, its first
    bytes and its last store. stage, stage_fp8: by CTAs of an SM, the time of the SM for 128 rows of the weight and 128
    of K; two CTAs hide each other's waits in tiles of few rows. tile: beginning and storing a tile. gathered: the same
    for the first product of experts, which gathers and activates."""

    start_us: float
    stage: Mapping[int, Mapping[int, float]]
    stage_fp8: Mapping[int, Mapping[int, float]]
    tile: Mapping[int, float]
    gathered: Mapping[int, float]

    @classmethod
    def of(cls, values: Mapping[str, float]) -> GroupCosts:
        """The costs from ``values``, whose names are those of tables and keys, separated by spaces."""
        tables: dict[str, dict] = {"stage": {1: {}, 2: {}}, "stage_fp8": {1: {}, 2: {}}, "tile": {}, "gathered": {}}
        for name, value in values.items():
            table, *keys = name.split()
            if not keys:
                continue
            *ctas, width = map(int, keys)
            (tables[table][ctas[0]] if ctas else tables[table])[width] = value
        return cls(values["start_us"], **tables)

    def tile_us(self, config: GroupedWgmmaConfig, width: int, k: int) -> float:
        """µs of a work tile of ``width`` rows of x."""
        stage = (self.stage_fp8 if config.fp8 else self.stage)[config.ctas_per_sm]
        begin = self.gathered if config.gathered else self.tile
        steps = -(-k // config.tile_k)
        return steps * _interpolated(stage, width) * config.ctas_per_sm + _interpolated(begin, width)


def _interpolated(times: Mapping[int, float], width: int) -> float:
    """The interpolated time of tiles with ``width`` rows of x."""
    return float(np.interp(width, list(times), list(times.values())))


GROUP_COSTS = GroupCosts.of(recorded(RECORD))

"""Modelled times of work tiles of a grouped GEMM of packed weights on sm_90a.

The constants are in ``group_costs.json``, which ``benchmarks/fit_group_costs.py`` writes: of each its value, what a fit
to the measured plans that are on record gives, and whether the value comes from that record.
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
    """Tables by the rows of x in a tile, between which times are interpolated; in µs.

    start_us: launch, first bytes and last store. stage, stage_fp8: of a multiprocessor for 128 rows of the weight and
    128 of K, by its CTAs: two hide from one another what tiles of few rows wait for. tile: to begin and to store a
    tile; gathered: the same of the first product of experts, whose rows are gathered and activated.
    """

    start_us: float
    stage: Mapping[int, Mapping[int, float]]
    stage_fp8: Mapping[int, Mapping[int, float]]
    tile: Mapping[int, float]
    gathered: Mapping[int, float]

    @classmethod
    def of(cls, values: Mapping[str, float]) -> GroupCosts:
        """The costs from ``values``, each entry of a table by its name and its keys, with spaces between."""
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
        return steps * _between(stage, width) * config.ctas_per_sm + _between(begin, width)


def _between(times: Mapping[int, float], width: int) -> float:
    """The time of tiles of ``width`` rows of x."""
    return float(np.interp(width, list(times), list(times.values())))


GROUP_COSTS = GroupCosts.of(recorded(RECORD))

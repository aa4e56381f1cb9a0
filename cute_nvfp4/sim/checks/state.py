"""The state that the listeners of the checks share in one wave."""

from __future__ import annotations

import math

import numpy as np

from cute_nvfp4.sim.checks.clocks import Clocks, Layers
from cute_nvfp4.sim.checks.findings import Findings
from cute_nvfp4.sim.checks.foreign import Foreign, Left
from cute_nvfp4.sim.checks.lane_sets import LaneSets
from cute_nvfp4.sim.checks.report import Labels, Reporter
from cute_nvfp4.sim.machine.wave import Wave


class State:
    """The clocks of a wave, what its warps know of other clusters, and the reporter of hazards.

    ``cluster_of_warp`` (warps,) is the number of each warp's cluster in the launch. ``flying[kind]`` (warps,) is the
    clock of the last operation of a kind ("tensor", "wgmma", "bulk_read") that a warp has issued; ``flying_at[kind]``
    (warps,) is the label of its instruction. ``labels`` and ``left`` (``foreign``) are shared by all waves of a launch.
    """

    def __init__(
        self,
        wave: Wave,
        labels: Labels,
        left: dict[int, list[Left]],
        kinds: tuple[str, ...],
        layers: Layers,
        lane_sets: LaneSets | None,
        findings: Findings,
    ) -> None:
        self.wave, self.labels, self.title, self.findings = wave, labels, wave.run.launch.title, findings
        clusters = math.prod(wave.run.launch.grid) // wave.cluster_size
        slots = max(8, len(wave.mbarriers.offset_of))
        self.clocks = Clocks(
            wave.warps, wave.warps_per_cta, wave.cluster_size, kinds, slots, layers, lane_sets, clusters
        )
        self.reporter = Reporter(wave, self.clocks, labels, findings)
        # as far as labels have room for it
        self.cluster_of_warp = wave.cluster_index[wave.cta_of_warp] & ((1 << 32 - self.clocks.bits) - 1)
        self.foreign = Foreign(self.clocks, left, self.cluster_of_warp)
        flying = [k for k in ("tensor", "wgmma", "bulk_read") if k in self.clocks.kinds]
        self.flying = {k: np.zeros(wave.warps, np.int32) for k in flying}
        self.flying_at = {k: np.zeros(wave.warps, np.uint16) for k in flying}

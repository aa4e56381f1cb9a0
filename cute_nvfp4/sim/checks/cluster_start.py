"""Checks that a CTA is known to have started before another CTA accesses its shared memory.

The CTAs of a cluster are scheduled together, but one may execute before another has begun. "Accessing data in
distributed shared memory requires all the thread blocks to exist. A user can guarantee that all thread blocks have
started executing" by the cluster's barrier (CUDA C++ Programming Guide, "Distributed Shared Memory"). A wait at
``barrier.cluster`` shows that, with relaxed arrivals too, and so does any release by a thread of the CTA.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.model import Instruction


class ClusterStart:
    """The check that the listeners call for accesses to other CTAs."""

    def __init__(self, state: State) -> None:
        self.state, self.clocks = state, state.clocks

    def needed(self, i: Instruction, warps: np.ndarray, cta: np.ndarray) -> None:
        """Reports ``warps`` that access memory of CTAs ``cta`` not known to have started; both arrays broadcast."""
        c = self.clocks
        if c.cluster_size == 1:
            return
        warps, cta = np.broadcast_arrays(warps, cta)
        other = (warps // c.warps_per_cta != cta) & ~c.met[warps]
        if not other.any():
            return
        warps, cta = warps[other], cta[other]
        of = (cta % c.cluster_size * c.warps_per_cta)[:, None] + np.arange(c.warps_per_cta)
        told = np.maximum(c.known[warps[:, None], 0, of], c.far[warps[:, None], 0, of])
        late = ~(told > 0).any(axis=1)
        if late.any():
            k = int(late.argmax())
            name = self.state.wave.cta_name(int(cta[k]))
            self.state.findings.hazard(
                "access-before-start",
                f"{self.state.title}: {self.state.reporter.thread(int(warps[k]), ep.MANY)} at {i.where()} touches "
                f"shared memory of {name}, which may not have started: barrier.cluster.arrive and barrier.cluster.wait "
                "(or news of a thread of that CTA) would have to come before",
                i,
            )

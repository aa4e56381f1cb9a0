"""Checks of an instruction that uses mbarriers: they exist, and their initialisation is visible to it."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.model import Instruction


class BarrierUse:
    """Finds mbarriers, and checks that their initialisation comes before a use."""

    def __init__(self, state: State) -> None:
        self.wave, self.title, self.clocks = state.wave, state.title, state.clocks
        self.labels, self.reporter, self.findings = state.labels, state.reporter, state.findings

    def slots(self, where: str, cta: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Returns the slots of the mbarriers at ``offset`` (k,) of CTAs (k,), and makes room for them in the clocks.
        Raises ``MbarrierMisuse``, with the place ``where``, if one is not valid."""
        slot = self.wave.mbarriers.find(where, cta, offset)
        self.clocks.ensure(int(slot.max(initial=0)))
        return slot

    def ready(
        self, instruction: Instruction, warps: np.ndarray, cta: np.ndarray, slot: np.ndarray, proxy: bool
    ) -> None:
        """Reports mbarriers whose initialisation does not happen before their use by warps (k,), or, for a use through
        the asynchronous ``proxy``, is not visible to it."""
        c = self.clocks
        cluster, b = cta // c.cluster_size, c.barrier(cta, slot)
        init = c.initialised[cluster, b]
        at = c.base(warps) + ep.components(init, c.bits)
        late = ep.clocks(init) > c.flat.take(at)
        hidden = ep.clocks(init) > c.flat.take(at + c.room) if proxy else late
        if not (late.any() or hidden.any()):
            return
        k = int((late | hidden).argmax())
        by = cluster[k] * c.per_cluster + int(ep.components(init[k : k + 1], c.bits)[0]) % c.per_cluster
        init_at = self.labels.instruction(int(ep.labels(init[k : k + 1], c.bits)[0])).where()
        name, who = self.wave.mbarriers.name(int(cta[k]), int(slot[k])), self.reporter.thread(int(warps[k]), ep.MANY)
        text = f"{self.title}: the {name}\n  is initialised by {self.reporter.thread(int(by), ep.MANY)} at {init_at}"
        if late[k]:
            self.findings.hazard(
                "mbarrier-init-order",
                f"{text}\n  and used by {who} at {instruction.where()},\n  and nothing orders the two; a barrier (with "
                "fence.mbarrier_init before it, in a cluster) would have to come between",
                instruction,
            )
            return
        self.findings.hazard(
            "mbarrier-init-proxy",
            f"{text}\n  and used through the asynchronous proxy by {who} at {instruction.where()};\n"
            "  fence.mbarrier_init (or fence.proxy.async) is missing between",
            instruction,
        )

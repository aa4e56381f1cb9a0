"""Checks at the exit of a CTA: no access to its shared or tensor memory may still be in flight."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.memory import Shadows
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.wave import Group

_WHAT = {
    "tensor": (
        "tensor-work-at-exit",
        "a tensor-core operation of",
        "no thread of the CTA has waited for a tcgen05.commit after it",
    ),
    "wgmma": (
        "wgmma-at-exit",
        "a wgmma of",
        "wgmma.commit_group and wgmma.wait_group are missing after it",
    ),
    "bulk_read": (
        "bulk-store-at-exit",
        "a bulk copy out of shared memory issued by",
        "cp.async.bulk.wait_group.read is missing after it",
    ),
}
"""What a hazard says, by kind of operation: the class of the hazard, the operation in words, and what is missing."""


class Ending(Listener):
    """Checks CTAs when they exit, and mbarrier phases when the wave is over."""

    def __init__(self, state: State, shadows: Shadows) -> None:
        self.state, self.shadows = state, shadows

    def exited(self, g: Group) -> None:
        gone = ~self.state.wave.live[g.warps].any(axis=1)
        warps = g.warps[gone]
        if not len(warps):
            return
        self.state.clocks.leave(warps)
        ctas = np.unique(warps // self.state.clocks.warps_per_cta)
        alive = self.state.wave.live.reshape(self.state.wave.count, -1).any(axis=1)
        ended = ctas[~alive[ctas]]
        if len(ended):
            self._check(ended)

    def finished(self) -> None:
        self._phases()

    def closed(self) -> None:
        self.shadows.release()

    def _phases(self) -> None:
        """Reports mbarrier phases that never complete.

        The ISA lets a kernel end in the middle of a phase, so that is a warning. A wait for such a phase is a deadlock,
        and arrivals on their way to a CTA that exits are hazards of their own. A negative tx-count is a hazard: a copy
        has completed bytes that no phase expects.
        """
        barriers, c, labels = self.state.wave.mbarriers, self.state.clocks, self.state.labels
        for cta, slot in barriers.unfinished():
            last = c.last_use[cta // c.cluster_size, c.barrier(cta, slot)]
            instruction = labels.instruction(int(last))
            text = (
                f"{self.state.title}: the kernel ends in the middle of a phase of the {barriers.name(cta, slot)}: "
                f"{barriers.state(cta, slot)}; its last use is {instruction.where()}"
            )
            if barriers.tx[cta, slot] < 0:
                self.state.findings.hazard("phase-overrun", text, instruction)
            else:
                self.state.findings.warn("unfinished-phase", f"{text}, and nobody waits for the phase", instruction)

    def _check(self, ctas: np.ndarray) -> None:
        """Checks that everything which accesses CTAs (k,) happened before they exit, by what their warps know."""
        self._flying(ctas)
        self._signals(ctas)
        if self.state.clocks.cluster_size > 1:
            for cta in ctas.tolist():
                self._memory(cta)

    def _flying(self, ctas: np.ndarray) -> None:
        """Checks the asynchronous operations that warps of the CTAs have issued."""
        c = self.state.clocks
        for kind, issued in self.state.flying.items():
            per_cta = issued.reshape(c.ctas, -1)[ctas]
            warps = ctas[:, None] * c.warps_per_cta + np.arange(c.warps_per_cta)
            over = c.exit[ctas[:, None], c.component(kind, warps)]
            bad = per_cta > over
            if bad.any():
                row, col = np.argwhere(bad)[0]
                rule, what, how = _WHAT[kind]
                warp = int(warps[row, col])
                instruction = self.state.labels.instruction(int(self.state.flying_at[kind][warp]))
                who = f"{self.state.reporter.thread(warp, ep.MANY)} at {instruction.where()}"
                cta = self.state.wave.cta_name(int(ctas[row]))
                self.state.findings.hazard(
                    rule,
                    f"{self.state.title}: {cta} exits while {what} {who} may still be under way: {how}",
                    instruction,
                )

    def _signals(self, ctas: np.ndarray) -> None:
        """Checks the arrivals and completions that will reach mbarriers of the CTAs."""
        c = self.state.clocks
        if not c.barriers or not c.signals.any():
            return
        cluster, rank = ctas // c.cluster_size, ctas % c.cluster_size
        b = np.arange(0, c.barriers, c.cluster_size)[None, :] + rank[:, None]
        bad = c.signals[cluster[:, None], b] > c.exit[ctas][:, None, :]
        if not bad.any():
            return
        row, slot, component = (int(x) for x in np.argwhere(bad)[0])
        cta = int(ctas[row])
        name = self.state.wave.mbarriers.name(cta, slot)
        source = self.state.reporter.arrival(component, int(cluster[row]))
        instruction = self.state.labels.instruction(int(c.sender[int(cluster[row]), b[row, slot], component]))
        self.state.findings.hazard(
            "arrival-at-exit",
            f"{self.state.title}: {self.state.wave.cta_name(cta)} exits while {source} (of {instruction.where()}) may "
            f"still be on the way to its {name}: no thread of the CTA has waited for it",
            instruction,
        )

    def _memory(self, cta: int) -> None:
        """Checks the accesses to the shared memory of a CTA, those of other CTAs of its cluster included."""
        c, wave = self.state.clocks, self.state.wave
        known = c.exit[cta]
        first = cta * wave.shared_stride
        for shadow, index, places in self.shadows.shared.of_bytes(first, first + wave.shared_stride):
            found = [e for _, e in shadow.readers.present(places)] + [shadow.last.take(places)]
            found += [e for _, e in shadow.atomics.present(places)] if shadow.atomics is not None else []
            for epochs in found:
                bad = ep.clocks(epochs) > known.take(ep.components(epochs, c.bits))
                if bad.any():
                    self._report(cta, shadow, int(index[bad.argmax()]), int(epochs[bad.argmax()]))

    def _report(self, cta: int, shadow, index: int, found: int) -> None:
        e = np.array([found], np.uint64)
        wave = self.state.wave
        instruction = self.state.labels.instruction(int(ep.labels(e, self.state.clocks.bits)[0]))
        offset = self.shadows.shared.byte_of(shadow, index) - cta * wave.shared_stride
        self.state.findings.hazard(
            "access-at-exit",
            f"{self.state.title}: {wave.cta_name(cta)} exits while {instruction.where()} may still access byte "
            f"{offset} of its shared memory: nothing makes it wait for that",
            instruction,
        )

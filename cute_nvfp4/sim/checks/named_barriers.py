"""Checks of the phases of named barriers (PTX ISA, "barrier{.cta}").

Warps may use different forms of the instruction "using the same barrier name and thread count"; ``.red`` must not be
"intermixed" with the other forms in one phase. The arrival that makes the number of threads complete ends a phase. A
warp may arrive without knowing that the previous phase has ended. In another order of the warps it then arrives in that
phase and takes the place of another warp, for which nobody waits: "care must be taken to keep a warp from executing
more barrier instructions than intended prior to the reset of the barrier". A warp knows the end of a phase if it has
waited for it, or has since synchronised with a warp that has.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.clocks import NAMED_BARRIERS
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.wave import Group

_PLAIN, _REDUCES = 1, 2


class NamedBarriers(Listener):
    """The phases of the named barriers of each CTA.

    Arrays (CTA, barrier): ``ended`` is the number of phases that are over. For the phase under way, ``threads`` is the
    thread count of its instructions, 0 before the first arrival; ``form`` says whether it reduces; ``first`` is the
    label of the first arrival. Arrays (warps, barriers): ``here`` has one bit for each lane that has arrived in the
    phase under way; ``waited`` is the number of phases that were over after the warp's last wait. ``opened`` (CTA,
    barrier, warps of the CTA) is the clock from which a warp follows the end of the last phase, 0 if it did not wait.
    """

    def __init__(self, state: State) -> None:
        self.wave, self.clocks, self.labels = state.wave, state.clocks, state.labels
        self.title, self.reporter, self.findings = state.title, state.reporter, state.findings
        c, shape = self.clocks, (state.clocks.ctas, NAMED_BARRIERS)
        self.every = int(np.prod(state.wave.block))
        self.ended, self.threads = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.form, self.first = np.zeros(shape, np.int8), np.zeros(shape, np.uint16)
        self.here = np.zeros((c.warps, NAMED_BARRIERS), np.uint32)
        self.waited = np.zeros((c.warps, NAMED_BARRIERS), np.int32)
        self.opened = np.zeros((*shape, c.warps_per_cta), np.int32)

    def barrier_arrived(self, g: Group, i: Instruction, ident: np.ndarray, count: np.ndarray) -> None:
        warps, at = g.warps, (g.warps // self.clocks.warps_per_cta, ident)
        self._alike(g, i, at, np.where(count > 0, count, self.every))
        lanes = (g.lanes() << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
        again = (self.here[warps, ident] & lanes) != 0
        unsure = self.waited[warps, ident] != self.ended[at]
        if unsure.any():
            unsure[unsure] = ~self._know(warps[unsure], at[0][unsure], ident[unsure])
        self.here[warps, ident] |= lanes
        if again.any():
            self._report(g, i, at, again, "comes a second time to one phase of it, and is counted twice")
        elif unsure.any():
            what = "comes without knowing that the phase before has ended: in another order of the warps it takes the "
            self._report(g, i, at, unsure, f"{what}place of one that others wait for there")

    def _alike(self, g: Group, i: Instruction, at: tuple[np.ndarray, np.ndarray], threads: np.ndarray) -> None:
        """Checks that all arrivals in a phase name the same number of threads, and that all reduce or none does."""
        new = self.threads[at] == 0
        if new.any():
            fresh = at[0][new], at[1][new]
            self.threads[fresh], self.first[fresh] = threads[new], self.labels.label(i)
            self.form[fresh] = _REDUCES if "red" in i.mods else _PLAIN
        other = self.threads[at] != threads
        if other.any():
            k = int(other.argmax())
            wants = f"comes for {int(threads[k])} threads, and others to the same phase for {int(self.threads[at][k])}"
            self._report(g, i, at, other, wants, "barrier-count")
        mixed = self.form[at] != (_REDUCES if "red" in i.mods else _PLAIN)
        if mixed.any():
            self._report(g, i, at, mixed, "mixes bar.red with another form in one phase", "barrier-count")

    def _know(self, warps: np.ndarray, cta: np.ndarray, ident: np.ndarray) -> np.ndarray:
        """Whether each of the warps (k,) knows the end of the last phase from a warp that has waited for it."""
        c = self.clocks
        clock = self.opened[cta, ident]
        of = (cta % c.cluster_size * c.warps_per_cta)[:, None] + np.arange(c.warps_per_cta)
        return ((clock > 0) & (c.known[warps[:, None], 0, of] >= clock)).any(axis=1)

    def barrier_opened(self, warps: np.ndarray, ident: np.ndarray) -> None:
        cta, inside = np.divmod(warps, self.clocks.warps_per_cta)
        self.waited[warps, ident] = self.ended[cta, ident] + 1
        self.opened[cta, ident] = 0
        self.opened[cta, ident, inside] = self.clocks.now[warps]

    def barrier_ended(self, cta: np.ndarray, ident: np.ndarray) -> None:
        self.ended[cta, ident] += 1
        self.threads[cta, ident] = 0
        self.here.reshape(self.clocks.ctas, -1, NAMED_BARRIERS)[cta, :, ident] = 0

    def finished(self) -> None:
        for cta, ident in np.argwhere(self.threads > 0).tolist():
            i = self.labels.instruction(int(self.first[cta, ident]))
            text = f"{self.title}: the kernel ends in the middle of a phase of barrier {ident} of "
            text += f"{self.wave.cta_name(cta)}, which began with {i.where()}"
            self.findings.warn("unfinished-barrier", text, i)

    def _report(self, g: Group, i: Instruction, at, bad: np.ndarray, what: str, rule: str = "barrier-phase") -> None:
        k = int(bad.argmax())
        cta, ident = int(at[0][k]), int(at[1][k])
        first = self.labels.instruction(int(self.first[cta, ident]))
        where = f"{self.reporter.thread(int(g.warps[k]), ep.MANY)} at {i.where()}"
        text = f"{self.title}: barrier {ident}: {where}\n  {what};\n  the phase began with {first.where()}"
        self.findings.hazard(rule, text, i)

"""Who takes part in a phase of a named barrier (PTX ISA, "barrier{.cta}").

Warps may use different forms of the instruction "using the same barrier name and thread count"; ``.red`` must not be
"intermixed" with the other forms in one phase. A phase ends with the arrival that makes its number complete. So a warp
that comes without knowing that the phase before has ended may come into that phase, in another order of the warps,
and take the place of one that is then not waited for: "care must be taken to keep a warp from executing more barrier
instructions than intended prior to the reset of the barrier". Who has waited at a phase knows its end, and so does
whoever has met one of those since.
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
    """The phases of named barriers. ``ended`` counts those of each (CTA, barrier) that are over; of the phase under way
    ``threads`` is the number that who takes part has named, 0 before anybody has come, ``form`` whether it reduces,
    ``first`` the label of the first arrival.

    ``here`` (warps, barriers) are the lanes that have come to the phase under way, one bit each, and ``waited``
    (warps, barriers) how many phases had ended when a warp's last wait was over. ``opened`` (CTA, barrier, warps of the
    CTA) are the clocks from which on what a warp does follows the end of the last phase, 0 for those who did not wait.
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
        """All that take part in a phase name the same number of threads, and all reduce or none does."""
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
        """(k,) whether the warps know the end of the last phase from somebody who has waited for it."""
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

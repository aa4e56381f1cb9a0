"""Checks that nothing accesses the registers of a wgmma in flight (PTX ISA, "wgmma.wait_group")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.in_flight import accumulator, fragment
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener, Mask
from cute_nvfp4.sim.machine.wave import Group
from cute_nvfp4.sim.wgmma.fragments import WARPS

_GROUPS = 16
"""The number of wgmma groups that are told apart: at most 8 are in flight."""
FRAGMENT = 0
"""The value of ``by`` for a register of A."""


class WarpgroupRegisters(Listener):
    """Follows which registers the wgmmas of each warp use, and which of them have been waited for.

    Arrays (warps, registers of wgmma): ``used`` is the number of the last group that uses a register, ``by`` the number
    of the accumulator that the register is part of, ``at`` the label of the instruction. ``over`` (warps,) is the last
    group that has been waited for; ``open`` (warps,) is the group that the next commit closes. ``loaded`` (warps, 16)
    is the warp's clock at the last wgmma with A in registers, for each group modulo 16: no wgmma ends before the
    registers of all its warps are loaded.
    """

    def __init__(self, state: State) -> None:
        self.wave, self.findings, self.title, self.labels = state.wave, state.findings, state.title, state.labels
        self.clocks = state.clocks
        code = [i for i in state.wave.run.kernel.source.code if i.base == "wgmma" and i.mods[0] == "mma_async"]
        names = dict.fromkeys(n for i in code for n in (*accumulator(i), *fragment(i)))
        self.column = {name: j for j, name in enumerate(names)}
        keys = {id(i): (accumulator(i), _shape(i)) for i in code}
        tuples = list(dict.fromkeys(keys.values()))
        self.uses = {
            id(i): (self._columns(accumulator(i)), 1 + tuples.index(keys[id(i)]), self._columns(fragment(i)))
            for i in code
        }
        shape = (state.wave.warps, len(names))
        self.used, self.by, self.at = np.zeros(shape, np.int32), np.zeros(shape, np.int16), np.zeros(shape, np.uint16)
        self.loaded = np.zeros((state.wave.warps, _GROUPS), np.int32)
        self.open, self.over = np.ones(state.wave.warps, np.int32), np.zeros(state.wave.warps, np.int32)

    def _columns(self, names: tuple[str, ...]) -> np.ndarray:
        return np.array([self.column[n] for n in names], int)

    def issued(self, pending: Pending, queued: bool) -> None:
        if pending.completion.kind != "wgmma":
            return
        i, warps = pending.instruction, pending.warps[:, None]
        d, number, a = self.uses[id(i)]
        flying_d = self.used[warps, d] > self.over[warps]
        if flying_d.any():
            self._report(i, pending.warps, d, flying_d & (self.by[warps, d] != number), " as its accumulator")
        if len(a):
            flying_a = (self.used[warps, a] > self.over[warps]) & (self.by[warps, a] != FRAGMENT)
            self._report(i, pending.warps, a, flying_a, " as A")
            self.loaded[pending.warps, self.open[pending.warps] % _GROUPS] = self.clocks.now[pending.warps]
            self.clocks.now[pending.warps] += 1
        for columns, what in ((a, FRAGMENT), (d, number)):
            self.used[warps, columns] = self.open[warps]
            self.by[warps, columns], self.at[warps, columns] = what, self.labels.label(i)

    def warpgroup_committed(self, warps: np.ndarray, i: Instruction) -> None:
        self.loaded[warps, (self.open[warps] + 1) % _GROUPS] = self.loaded[warps, self.open[warps] % _GROUPS]
        self.open[warps] += 1

    def warpgroup_waited(self, warps: np.ndarray, i: Instruction, pending: int) -> None:
        self.over[warps] = np.maximum(self.over[warps], self.open[warps] - 1 - pending)
        if "load" in self.clocks.kinds:
            for other in warps.reshape(-1, WARPS).T:
                of = np.repeat(other, WARPS)
                self.clocks.learn("load", warps, self.loaded[of, self.over[of] % _GROUPS], of=of)

    def registers_used(self, g: Group, i: Instruction, mask: Mask, names: tuple[str, ...]) -> None:
        warps = g.warps if mask is None else g.warps[np.broadcast_to(mask, (g.n, 32)).any(axis=1)]
        columns = self._columns(names)
        self._report(i, warps, columns, self.used[warps[:, None], columns] > self.over[warps, None], "")

    def _report(self, i: Instruction, warps: np.ndarray, columns: np.ndarray, bad: np.ndarray, role: str) -> None:
        if not bad.any():
            return
        row, j = (int(x) for x in np.argwhere(bad)[0])
        warp, column = int(warps[row]), int(columns[j])
        name = list(self.column)[column].partition("@")[0]
        earlier = self.labels.instruction(int(self.at[warp, column])).where()
        kind = "the fragment of A" if self.by[warp, column] == FRAGMENT else "the accumulator"
        self.findings.hazard(
            "register-in-flight",
            f"{self.title}: {self.wave.thread(warp, 0)} at {i.where()} uses register {name}{role}, which is part of "
            f"{kind} of the asynchronous {earlier}: wgmma.commit_group and wgmma.wait_group are missing between them",
            i,
        )


def _shape(i: Instruction) -> str:
    """Returns the shape in the opcode: wgmmas of one shape on one accumulator are in order (PTX ISA, "wgmma.fence")."""
    return next(m for m in i.mods if m.startswith("m64n"))

"""Registers that decide something that can be seen must have been written."""

from __future__ import annotations

from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.errors import UndefinedRegister
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.protocols import Group


class Registers(Listener):
    """Raises for registers that nobody has written."""

    def __init__(self, state: State) -> None:
        self.state = state

    def undefined(self, g: Group, slot: int, i: Instruction) -> None:
        name = list(g.wave.run.kernel.slots)[slot].partition("@")[0]
        who = g.wave.thread(int(g.warps[0]), int(g.lanes()[0].argmax()))
        raise UndefinedRegister(f"{i.where()}: register {name} has never been written; {who} in {self.state.title}")

"""The logical clock of a launch: one step a block that a group of warps executes, one an operation of an engine.

Steps order events; they say nothing of time.
"""

from __future__ import annotations

from collections.abc import Iterable

from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.wave import Group, Wave


class Steps(Listener):
    """Counts; ``now`` goes on over the waves of a launch. It must hear before those who read it."""

    now = 0

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        return (self,)

    def block(self, g: Group, index: int) -> None:
        self.now += 1

    def completed(self, pending: Pending) -> None:
        self.now += 1

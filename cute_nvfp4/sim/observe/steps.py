"""The logical clock of a launch. A step is a block that a group of warps executes, or an operation of an engine.

Steps order events; they are no measure of time.
"""

from __future__ import annotations

from collections.abc import Iterable

from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.wave import Group, Wave


class Steps(Listener):
    """Counts the steps of a launch in ``now``, over all its waves. It must hear an event before its readers do."""

    now = 0

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        return (self,)

    def block(self, g: Group, index: int) -> None:
        self.now += 1

    def completed(self, pending: Pending) -> None:
        self.now += 1

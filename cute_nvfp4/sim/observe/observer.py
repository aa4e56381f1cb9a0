"""Who watches a launch: passes what the executor and the engines do on to the counters and the trace.

There is an observer only when somebody wants to know. It keeps the logical clock: one step for each block that a group
of warps executes, and one for each operation of an engine. Steps order events; they say nothing of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cute_nvfp4.sim.frontend.model import Instruction
    from cute_nvfp4.sim.machine.engine import Pending, Wait
    from cute_nvfp4.sim.machine.wave import Group, Wave
    from cute_nvfp4.sim.observe.counters import Counters
    from cute_nvfp4.sim.observe.trace import Recorder


class Observer:
    """Watches one launch; ``counters`` and ``recorder`` may be None."""

    def __init__(self, counters: Counters | None, recorder: Recorder | None) -> None:
        self.counters, self.recorder = counters, recorder
        self.step = 0
        self._wave: Wave | None = None

    def enter(self, wave: Wave) -> None:
        """A wave begins."""
        self._wave = wave
        if self.counters is not None:
            self.counters.enter(wave.warps)
        if self.recorder is not None:
            self.recorder.enter(wave, self.step)

    def block(self, group: Group, index: int) -> None:
        """A group is about to execute a block."""
        self.step += 1
        if self.recorder is not None:
            self.recorder.block(group, index, self.step)

    def parked(self, group: Group, instruction: Instruction, wait: Wait | None = None) -> None:
        """A group stops at a barrier (without ``wait``) or because of ``wait``."""
        if self.counters is not None:
            self.counters.parked(group, instruction, self.step)
        if self.recorder is not None:
            self.recorder.parked(group, instruction, wait, self.step)

    def resumed(self, group: Group, instruction: Instruction) -> None:
        """Warps that were parked go on."""
        if self.counters is not None:
            self.counters.resumed(group, instruction, self.step)
        if self.recorder is not None:
            self.recorder.resumed(group, instruction, self.step)

    def issued(self, pending: Pending) -> None:
        """An operation has been queued."""
        if self.recorder is not None:
            self.recorder.issued(pending, self._wave, self.step)

    def performed(self, pending: Pending) -> None:
        """An operation is done at once, as a part of the block."""
        if self.counters is not None:
            self.counters.engine(pending, self._wave)

    def completed(self, pendings: list[Pending]) -> None:
        """Queued operations are about to be done, one after the other."""
        for pending in pendings:
            self.step += 1
            self.performed(pending)
            if self.recorder is not None:
                self.recorder.completed(pending, self.step)

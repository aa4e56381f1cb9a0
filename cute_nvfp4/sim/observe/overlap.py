"""Launches of a stream that may run at the same time: a programmatic one begins before those before it have ended."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.observe.touched import Runs, Touched

_MOST = 4
"""Launches that may still run, the newest; a chain of programmatic ones may be longer."""


class Overlap:
    """The launches of one stream, in their order; those that may still run when the next one begins are kept."""

    def __init__(self) -> None:
        self._running: list[tuple[str, Touched]] = []

    def begin(self, launch: Launch, what: str, memory: GlobalMemory) -> tuple[EarlierLaunches | None, Touched]:
        """What may still run when ``launch``, which ``what`` names, begins; and a client that it must have."""
        if not launch.programmatic:
            self._running = []
        earlier, touched = EarlierLaunches(self._running) if self._running else None, Touched(memory)
        self._running = [*self._running, (what, touched)][-_MOST:]
        return earlier, touched


class EarlierLaunches:
    """What launches have touched, for the checks (``checks.dependency.Earlier``)."""

    def __init__(self, launches: list[tuple[str, Touched]]) -> None:
        self._runs = [(what, write, runs) for what, touched in launches for _, write, runs in touched.runs()]

    def clash(self, address: np.ndarray, length: int, write: bool) -> tuple[int, int, str] | None:
        mine = Runs.of(address, address + length)
        for what, wrote, runs in self._runs:
            both = mine.shared(runs) if wrote or write else None
            if both is not None:
                inside = (address <= both[0]) & (both[0] < address + length)
                return int(np.argmax(inside)), both[0], f"{'written' if wrote else 'read'} by {what}"
        return None

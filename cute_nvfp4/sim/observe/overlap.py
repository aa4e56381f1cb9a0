"""Launches of one stream that may run at the same time, because of programmatic dependent launch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cute_nvfp4.sim.machine.events import Listener, Mask
from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.wave import Group, Wave
from cute_nvfp4.sim.observe.touched import Runs, Touched

_MOST = 4
"""How many launches are kept as running, the newest ones; a chain of programmatic launches may be longer."""


class Overlap:
    """The launches of one stream that may still run when the next one begins.

    A launch that does not execute griddepcontrol.launch_dependents has ended by then (PTX ISA, "griddepcontrol"). The
    launches before it have ended if each of its CTAs executes griddepcontrol.wait ahead of launch_dependents, or ahead
    of its end.
    """

    def __init__(self) -> None:
        self._running: list[tuple[str, Noted]] = []

    def begin(self, launch: Launch, what: str, memory: GlobalMemory) -> tuple[EarlierLaunches | None, Noted]:
        """Returns the launches that may still run when ``launch`` begins (None if there are none), and the client that
        the run of ``launch`` needs. ``what`` names the launch in messages."""
        if self._running:
            last = self._running[-1][1]
            last.wave_over()
            before = [] if last.waited else self._running[:-1]
            self._running = [*before, *(self._running[-1:] if last.lets_begin else [])]
        if not launch.programmatic:
            self._running = []
        earlier, noted = EarlierLaunches(self._running) if self._running else None, Noted(memory)
        self._running = [*self._running, (what, noted)][-_MOST:]
        return earlier, noted


class Noted(Touched):
    """A client that marks what a launch touches, and how the launch uses griddepcontrol: ``lets_begin`` says whether it
    executes launch_dependents, ``waited`` whether each CTA executes wait ahead of that, or ahead of its end."""

    def __init__(self, memory: GlobalMemory) -> None:
        super().__init__(memory)
        self.lets_begin, self.waited = False, True
        self._waited: np.ndarray | None = None

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        self.wave_over()
        self._waited = np.zeros(wave.count, bool)
        return super().listeners(wave)

    def dependency_waited(self, g: Group, mask: Mask) -> None:
        self._waited[self._ctas(g, mask)] = True

    def dependents_launched(self, g: Group, mask: Mask) -> None:
        ctas = self._ctas(g, mask)
        self.lets_begin |= len(ctas) > 0
        self.waited &= bool(self._waited[ctas].all())

    def _ctas(self, g: Group, mask: Mask) -> np.ndarray:
        return g.wave.cta_of_warp[g.warps[g.lanes(mask).any(axis=1)]]

    def wave_over(self) -> None:
        """Takes into account that the wave that was heard last has ended."""
        if self._waited is not None:
            self.waited &= bool(self._waited.all())
            self._waited = None


class EarlierLaunches:
    """The bytes that earlier launches have touched, for the checks (``checks.dependency.Earlier``)."""

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

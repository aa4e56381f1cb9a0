"""Checks of tensor memory allocation: fresh columns hold nothing, and freed columns must no longer be in use."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.memory import Shadows
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.events import Listener


class TensorMemoryUse(Listener):
    """Clears the history of columns at tcgen05.alloc, and checks columns at tcgen05.dealloc."""

    def __init__(self, state: State, shadows: Shadows) -> None:
        self.state, self.shadows = state, shadows

    def tensor_allocated(self, cta: np.ndarray, first: np.ndarray, columns: np.ndarray) -> None:
        for c, f, n in zip(cta.tolist(), first.tolist(), columns.tolist()):
            self.shadows.tensor.cells.forget(self._places(c, np.arange(f, f + n)))

    def tensor_freed(self, i: Instruction, warps, cta: np.ndarray, first, columns, pair: np.ndarray) -> None:
        """Checks that all accesses to the columns, in both CTAs of a pair, are over."""
        c = self.state.clocks
        for k, w in enumerate(warps.tolist()):
            warp = np.array([w])
            thread = c.component("thread", warp)[:, None]
            epoch = ep.pack(self.state.labels.label(i), thread, c.now[warp][:, None], bits=c.bits)
            who = Actor(c, i, epoch, c.base(warp)[:, None], warp[:, None], thread)
            for one in pair[k].tolist():
                span = np.arange(int(first[k]), int(first[k]) + int(columns[k]))
                self._over(self._places(one, span), who)

    def _places(self, cta: int, columns: np.ndarray) -> np.ndarray:
        tensor = self.shadows.tensor
        return tensor.cells.places(np.array([cta]), tensor.granules(slice(0, 128), columns[None]))

    def _over(self, index: np.ndarray, who) -> None:
        cells = self.shadows.tensor.cells
        for _, found in cells.readers.present(index):
            if (bad := who.unordered(found)) is not None:
                cells.report("write after read", who, index, bad, found)
        last = cells.last.take(index)
        if (bad := who.unordered(last)) is not None:
            cells.report("write after write", who, index, bad, last)

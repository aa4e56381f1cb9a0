"""The shadows of one wave (shared, tensor and global memory), and the report of a conflict in each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from cute_nvfp4.sim.checks.barrier_words import BarrierWords
from cute_nvfp4.sim.checks.global_memory import GlobalShadows
from cute_nvfp4.sim.checks.report import first
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.checks.spaces import CHUNK, SharedShadow, TensorShadow
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.machine.layout import SHARED_BASE

_MAY_GO_NOWHERE = ("ld", "ldu", "ldmatrix", "tcgen05", "wgmma")
"""Instructions that read into registers, tensor memory or products. A value that nobody has written may stay there."""


class Shadows:
    """The shadows that the listeners of one wave share.

    ``shared`` and ``tensor`` last for the wave, ``globals`` for the launch. ``barrier_words`` has the words of shared
    memory that only mbarrier instructions may access. ``grain`` is that of ``SharedShadow``. ``unwritten`` is
    ``Unwritten.read`` for this wave.
    """

    def __init__(self, state: State, globals_: GlobalShadows, grain: int, unwritten: Callable[..., None]) -> None:
        self.unwritten = unwritten
        wave, self.state = state.wave, state
        self.shared = SharedShadow(wave.count, wave.shared_stride, grain, self._in_shared, state.findings.strict)
        self.tensor = TensorShadow(wave.count, self._in_tensor)
        self.globals = globals_
        globals_.told, globals_.foreign = self._in_global, state.foreign.ordered
        self.barrier_words = BarrierWords(state)

    def release(self) -> None:
        """Lets go of the shadows when the wave is over, as those of global memory still refer to this object."""
        self.globals.told = self.globals.foreign = self.globals = self.shared = self.tensor = None

    def touch_shared(self, byte: np.ndarray, width: int, who: Actor, write: bool, flag: bool = False) -> None:
        """Checks and records an access to ``width`` bytes at each ``byte`` of ``wave.shared``."""
        if width < CHUNK:
            self.shared.part(byte, width, who, write, flag)
            return
        for j in range(width // CHUNK):
            self.shared.whole(byte // CHUNK + j, who, write, flag)

    def touch_global(self, address: np.ndarray, length: int, who: Actor, write: bool, label: int) -> None:
        """Checks and records an access by instruction ``label`` to ``length`` bytes at each ``address`` (k, m)."""
        for region, where in self.globals.by_region(address, length):

            def enter(watched, where=where):
                first, count = watched.granules(address, length)
                some = who
                if where is not None:
                    first, some = first[where], who.at(first.shape, where)
                    some = some.at((len(first),), np.repeat(np.arange(len(first)), count))
                    return (first[:, None] + np.arange(count)).ravel(), some, label
                return (first[..., None] + np.arange(count)).reshape(len(first), -1), some, label

            self.globals.touch(region, write, address.size, enter)

    def _in_shared(self, size: int, kind: str, who, index, bad, epochs) -> None:
        at, granule, found = first(bad, index, epochs)
        cta, byte = divmod(granule * size, self.state.wave.shared_stride)
        place = f"byte {byte} of the shared memory (address {byte + SHARED_BASE:#x}) of {self.state.wave.cta_name(cta)}"
        if kind == "uninitialized" and who.instruction.base in _MAY_GO_NOWHERE:
            bad, index = np.broadcast_arrays(bad, index)
            bytes_ = (index[bad][:, None] * size + np.arange(size)).ravel()
            say = partial(self.state.reporter.uninitialized, who, place, at)
            self.unwritten("shared", self.state.wave.shared2d.size, bytes_, say, who.instruction)
            return
        self.state.reporter.conflict(kind, who, place, at, found, None)

    def _in_tensor(self, kind: str, who, index, bad, epochs) -> None:
        at, granule, found = first(bad, index, epochs)
        cta, lane, column = self.tensor.place(granule)
        place = f"tensor memory of {self.state.wave.cta_name(cta)}, lanes {lane}..{lane + 15}, column {column}"
        if kind == "uninitialized":
            bad, index = np.broadcast_arrays(bad, index)
            say = partial(self.state.reporter.uninitialized, who, place, at)
            tmem = self.state.wave.tmem
            self.unwritten("tensor", tmem.nbytes, self.tensor.bytes_of(index[bad]), say, who.instruction)
            return
        self.state.reporter.conflict(kind, who, place, at, found, None)

    def _in_global(self, watched, kind: str, who, index, bad, epochs) -> None:
        at, granule, found = first(bad, index, epochs)
        address = max(watched.start + granule * watched.grain, watched.region.base)
        label = int((watched.read_by if kind == "write after read" else watched.wrote)[granule])
        if kind == "constant" and not who.instruction.base.startswith("ld"):
            label = int(watched.constant[granule])
        place = self.state.wave.run.memory.describe(address).partition(" is ")[2]
        self.state.reporter.conflict(kind, who, place, at, found, label)

"""Checks of programmatic dependent launches: what they access before they wait for earlier launches.

Such a launch may begin before the previous launch on its stream has ended. It sees what that launch stores only after
griddepcontrol.wait (PTX ISA, "griddepcontrol"; CUDA Programming Guide, "Programmatic Dependent Launch"). The accessing
thread may execute the wait itself, or synchronise with another thread of its cluster that has executed it. Waits in
other clusters do not count.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.asynchronous import issuer_of
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener, Mask, Values
from cute_nvfp4.sim.machine.layout import WINDOW_SHIFT
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group

MAP_BYTES = 128
"""The size of a tensor map."""


class Earlier(Protocol):
    """The accesses of earlier launches that may still run."""

    def clash(self, address: np.ndarray, length: int, write: bool) -> tuple[int, int, str] | None:
        """Returns the first conflict of accesses to ``length`` bytes at each ``address`` (m,), None if there is none.

        The result is the index of the access, the address of the first byte in conflict, and in words which launch has
        read or written it.
        """
        ...


class Dependency(Listener):
    """Reports accesses that come before the wait. ``earlier`` is None where no earlier launch may still run."""

    def __init__(self, state: State, earlier: Earlier | None) -> None:
        self.state, self.earlier = state, earlier

    def dependency_waited(self, g: Group, mask: Mask) -> None:
        warps = g.warps[g.lanes(mask).any(axis=1)]
        self.state.clocks.learn("dependency", warps, np.ones(len(warps), np.int32))

    def early(self, warps: np.ndarray) -> np.ndarray:
        """Whether each of the warps (k,) neither has waited nor has synchronised with a warp that has."""
        c = self.state.clocks
        if "dependency" not in c.kinds:
            return np.ones(len(warps), bool)
        first = c.kinds["dependency"] * c.per_cluster
        return ~c.known[warps, 0, first : first + c.per_cluster].any(axis=1)

    def wrote(self, address: int) -> bool:
        """Whether a launch that may still run has written the tensor map at ``address``."""
        return self.earlier is not None and self.earlier.clash(np.array([address]), MAP_BYTES, False) is not None

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._lanes(g, a, space, host, mask, False)

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        self._lanes(g, a, space, host, mask, True)

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._lanes(g, a, space, host, mask, True)

    def map_used(self, i: Instruction, warps: np.ndarray, addresses: np.ndarray) -> None:
        if self.earlier is not None:
            addresses = addresses.astype(np.int64)
            rows = np.flatnonzero(self.early(warps) & (addresses >> WINDOW_SHIFT == 0))
            self._check(i, warps[rows], np.full(len(rows), ep.MANY), addresses[rows], MAP_BYTES, False)

    def issued(self, pending: Pending, queued: bool) -> None:
        if self.earlier is None or not (early := self.early(pending.warps)).any():
            return
        for f in pending.footprints(self.state.wave):
            if f.space == "global" and f.place.length:
                by = issuer_of(pending, f, len(f.cta))
                address = np.broadcast_to(f.place.address, (len(by), np.shape(f.place.address)[-1]))[early[by]]
                warps = np.repeat(pending.warps[by][early[by]], address.shape[1])
                lanes = np.full(len(warps), ep.MANY)
                self._check(pending.instruction, warps, lanes, address.ravel(), f.place.length, f.write)

    def _lanes(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, write: bool) -> None:
        if space == "global" and self.earlier is not None and (early := self.early(g.warps)).any():
            rows, lanes = np.nonzero(g.lanes(mask) & early[:, None])
            address = np.broadcast_to(host, (g.n, 32))[rows, lanes]
            self._check(a.instruction, g.warps[rows], lanes, address, a.total, write)

    def _check(self, i: Instruction, warps, lanes, address: np.ndarray, length: int, write: bool) -> None:
        found = self.earlier.clash(address, length, write) if len(address) else None
        if found is None:
            return
        row, byte, what = found
        place = self.state.wave.run.memory.describe(byte).partition(" is ")[2]
        thread = self.state.reporter.thread(int(warps[row]), int(lanes[row]))
        self.state.findings.hazard(
            "programmatic-order",
            f"{self.state.title}: {place}\n  is {what}, which may still run,\n"
            f"  and {'written' if write else 'read'} by {thread} at {i.where()};\n"
            "  griddepcontrol.wait, by a thread that this one has met since, would have to come between",
            i,
        )

"""Tensor maps that the device changes: the tensormap proxy must be told (PTX ISA, "fence.proxy.tensormap").

A map in global memory that the launch has written needs, before a copy uses it, fence.proxy.tensormap::generic.acquire
by the thread that issues the copy, after the write has happened before it.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.dependency import MAP_BYTES, Dependency
from cute_nvfp4.sim.checks.memory import Shadows
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.layout import WINDOW_SHIFT
from cute_nvfp4.sim.machine.wave import Group


class TensorMaps(Listener):
    """``versions`` counts the changes of each map of the launch, by address; ``seen`` has the version that
    (warp, address) has acquired. A map that a launch wrote which may still run (``dependency``) has been changed once,
    and is acquired after the wait for that launch."""

    def __init__(self, state: State, shadows: Shadows, versions: dict[int, int], dependency: Dependency) -> None:
        self.state, self.shadows, self.versions, self.dependency = state, shadows, versions, dependency
        self.seen: dict[tuple[int, int], int] = {}

    def written(self, addresses: np.ndarray) -> None:
        """tensormap.cp_fenceproxy or tensormap.replace on global memory."""
        for at in np.unique(addresses // MAP_BYTES * MAP_BYTES).tolist():
            self.versions[at] = self.versions.get(at, 0) + 1

    def _version(self, at: int) -> int:
        return self.versions.get(at, 0) + self.dependency.wrote(at)

    def acquired(self, g: Group, mask: np.ndarray | None, addr: np.ndarray, off: int) -> None:
        """fence.proxy.tensormap::generic.acquire of the maps at ``addr + off``."""
        if not self.versions and self.dependency.earlier is None:
            return
        rows, cols = np.nonzero(g.lanes(mask))
        addresses = np.broadcast_to(addr, (g.n, 32))[rows, cols].astype(np.int64) + off
        for pair in {*zip(g.warps[rows].tolist(), addresses.tolist())}:
            if not self.dependency.wrote(pair[1]) or not self.dependency.early(np.array(pair[:1])).any():
                self.seen[pair] = self._version(pair[1])

    def map_used(self, i: Instruction, warps: np.ndarray, addresses: np.ndarray) -> None:
        """Maps in parameters are left out: no kernel can change them."""
        if not self.versions and self.dependency.earlier is None:
            return
        addresses = addresses.astype(np.int64)
        keep = addresses >> WINDOW_SHIFT == 0
        warps, addresses = warps[keep], addresses[keep]
        for w, at in zip(warps.tolist(), addresses.tolist()):
            if self.seen.get((w, at), 0) < self._version(at):
                where = self.state.wave.run.memory.describe(at).partition(" is ")[2]
                self.state.findings.hazard(
                    "tensor-map-fence",
                    f"{self.state.title}: the tensor map at {where} has been changed by the kernel, or by one that "
                    f"may still run, and {self.state.reporter.thread(w, ep.MANY)} uses it at {i.where()} without "
                    "fence.proxy.tensormap::generic.acquire after the change",
                    i,
                )
        if len(warps):
            self._map_read(i, warps, addresses)

    def _map_read(self, i: Instruction, warps: np.ndarray, addresses: np.ndarray) -> None:
        c, label = self.state.clocks, self.state.labels.label(i)
        thread, cluster = c.component("thread", warps)[:, None], self.state.cluster_of_warp[warps][:, None]
        epoch = ep.pack(cluster, thread, c.now[warps][:, None])
        who = Actor(c, i, epoch, c.base(warps)[:, None], warps[:, None], thread, cluster=cluster, distinct=False)
        self.shadows.touch_global(addresses[:, None], MAP_BYTES, who, False, label)

"""Checks of tensor maps that the device changes (PTX ISA, "fence.proxy.tensormap").

A copy may use a map in global memory that the launch has written only after the thread that issues the copy has
executed fence.proxy.tensormap::generic.acquire, and the write must happen before that fence. The scopes of the fence
and of the release (by tensormap.cp_fenceproxy) must both include the other thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.dependency import MAP_BYTES, Dependency
from cute_nvfp4.sim.checks.memory import Shadows
from cute_nvfp4.sim.checks.scopes import CLUSTER, CTA, GPU, scope_of
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.layout import WINDOW_SHIFT
from cute_nvfp4.sim.machine.wave import Group


@dataclass
class Changes:
    """The changes of one tensor map in a launch."""

    count: int = 0
    cluster: int = -1  # the cluster of the last change, -1 for none
    rank: int = -1  # the rank in that cluster of the CTA that made it
    scope: int = GPU  # the scope of its release

    def reaches(self, cluster: int, rank: int, scope: int) -> bool:
        """Whether an acquire of ``scope`` in the CTA ``rank`` of ``cluster`` synchronises with the last change."""
        scope = min(scope, self.scope)
        if self.cluster in (-1, cluster):
            return self.cluster == -1 or scope >= (CTA if rank == self.rank else CLUSTER)
        return scope >= GPU


class TensorMaps(Listener):
    """Checks that each copy uses an acquired version of its tensor map.

    ``versions`` has the changes of the launch's maps, by address; ``seen`` has the version that a (warp, address) has
    acquired. A write by an earlier launch that may still run (``dependency``) counts as one change, which can be
    acquired only after the wait for that launch.
    """

    def __init__(self, state: State, shadows: Shadows, versions: dict[int, Changes], dependency: Dependency) -> None:
        self.state, self.shadows, self.versions, self.dependency = state, shadows, versions, dependency
        self.seen: dict[tuple[int, int], int] = {}

    def written(self, i: Instruction, warps: np.ndarray, addresses: np.ndarray) -> None:
        """Records tensormap.cp_fenceproxy or tensormap.replace on global memory, by warps (k,)."""
        for warp, at in zip(warps.tolist(), (addresses // MAP_BYTES * MAP_BYTES).tolist()):
            before = self.versions.get(at, Changes())
            self.versions[at] = Changes(before.count + 1, *self._place(warp), scope_of(i))

    def _place(self, warp: int) -> tuple[int, int]:
        c = self.state.clocks
        return int(self.state.cluster_of_warp[warp]), warp % c.per_cluster // c.warps_per_cta

    def _version(self, at: int) -> int:
        return self.versions.get(at, Changes()).count + self.dependency.wrote(at)

    def acquired(self, i: Instruction, g: Group, mask: np.ndarray | None, addr: np.ndarray, off: int) -> None:
        """Records fence.proxy.tensormap::generic.acquire of the maps at ``addr + off``."""
        if not self.versions and self.dependency.earlier is None:
            return
        rows, cols = np.nonzero(g.lanes(mask))
        addresses = np.broadcast_to(addr, (g.n, 32))[rows, cols].astype(np.int64) + off
        for pair in {*zip(g.warps[rows].tolist(), addresses.tolist())}:
            if not self.versions.get(pair[1], Changes()).reaches(*self._place(pair[0]), scope_of(i)):
                continue
            if not self.dependency.wrote(pair[1]) or not self.dependency.early(np.array(pair[:1])).any():
                self.seen[pair] = self._version(pair[1])

    def map_used(self, i: Instruction, warps: np.ndarray, addresses: np.ndarray) -> None:
        """Checks the maps that copies use, except maps in parameters, which no kernel can change."""
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
                    "fence.proxy.tensormap::generic.acquire after the change, whose scope, and that of the release, "
                    "includes the other thread",
                    i,
                )
        if len(warps):
            self._map_read(i, warps, addresses)

    def _map_read(self, i: Instruction, warps: np.ndarray, addresses: np.ndarray) -> None:
        c, label = self.state.clocks, self.state.labels.label(i)
        thread, cluster = c.component("thread", warps)[:, None], self.state.cluster_of_warp[warps][:, None]
        epoch = ep.pack(cluster, thread, c.now[warps][:, None], bits=c.bits)
        who = Actor(c, i, epoch, c.base(warps)[:, None], warps[:, None], thread, cluster=cluster, distinct=False)
        self.shadows.touch_global(addresses[:, None], MAP_BYTES, who, False, label)

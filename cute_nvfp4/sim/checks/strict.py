"""Warnings of ``strict=True``: what the ISA requires and NVIDIA's own kernels leave out.

* One lane signals for its warp (an arrival or a store that releases), and no barrier of the warp stands between the
  signal and what other lanes have loaded or stored.
* tcgen05 operations of several threads lack tcgen05.fence: ``::before_thread_sync`` between a load or store of tensor
  memory and an arrival, or ``::after_thread_sync`` between a wait for operations of other threads and the next one.
* A CTA allocates tensor memory and keeps the permit: another CTA on the same multiprocessor waits until it exits.

The shadows find what else is strict: writes of the asynchronous proxy after reads of threads, without a proxy fence.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks.generic import order
from cute_nvfp4.sim.checks.kernel import is_tcgen05
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener, Mask, Values
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group

_RELEASES = ("release", "acq_rel", "sc")
_LOADS = ("tmem_load", "tmem_store")
_TENSOR = ("tensor", *_LOADS)


class Strict(Listener):
    """The listener for these warnings; it must hear each event after ``Synchronisation``.

    ``touched`` (warps, 32) marks lanes that have accessed memory since the lanes of their warp last met. ``used`` has
    the last load or store of tensor memory by a warp since its last ``::before_thread_sync`` fence. ``behind`` (2,
    warps) says whether the warp has learned of reads, and of writes, of tensor memory by other warps since its last
    ``::after_thread_sync`` fence. ``heard`` (warps, components of tcgen05) has the clocks known at its last wait.
    """

    def __init__(self, state: State) -> None:
        self.state, self.clocks, self.wave = state, state.clocks, state.wave
        c = state.clocks
        self.touched = np.zeros((c.warps, 32), bool)
        self.used: dict[int, Instruction] = {}
        kinds = [c.kinds[kind] for kind in _TENSOR if kind in c.kinds]
        self.columns = np.concatenate([kind * c.per_cluster + np.arange(c.per_cluster) for kind in kinds] or [[]])
        self.columns = self.columns.astype(np.int64)
        self.heard = np.zeros((c.warps, len(self.columns)), np.int32)
        self.reads = self.columns // c.per_cluster == c.kinds.get("tmem_load", -1)
        self.behind = np.zeros((2, c.warps), bool)
        # warps of a CTA share tensor memory, and so do those of a pair of CTAs
        pair = any("cta_group::2" in i.mods for i in state.wave.run.kernel.source.code)
        self.sharing = c.warps_per_cta * (1 + pair)
        self._permit()

    def _warn(self, rule: str, warp: int, i: Instruction, what: str) -> None:
        where = f"{self.state.title}: {self.state.reporter.thread(warp, 32)} at {i.where()}"
        self.state.findings.warn(rule, f"{where} {what}", i)

    def _permit(self) -> None:
        code = self.wave.run.kernel.source.code
        if not any(is_tcgen05(i, "relinquish_alloc_permit") for i in code):
            for i in (i for i in code if is_tcgen05(i, "alloc")):
                text = "the kernel has no tcgen05.relinquish_alloc_permit: CTAs that share a multiprocessor wait here"
                self.state.findings.warn("allocation-permit", f"{self.state.title}: {i.where()}: {text}", i)

    # lanes

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._touch(g, a, space, mask)

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        self._touch(g, a, space, mask)

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._touch(g, a, space, mask)

    def _touch(self, g: Group, a: Access, space: str, mask: Mask) -> None:
        if space not in ("shared", "cluster", "global"):
            return
        lanes = g.lanes(mask)
        if a.kind != "load" and order(a) in _RELEASES:
            self._signal(a.instruction, g.warps, lanes)
        self.touched[g.warps] |= lanes

    def _signal(self, i: Instruction, warps: np.ndarray, lanes: np.ndarray) -> None:
        """Warns of signals by ``lanes`` (k, 32) of ``warps`` (k,) after accesses of other lanes of the same warp."""
        for warp in warps[lanes.any(axis=1) & (self.touched[warps] & ~lanes).any(axis=1)].tolist():
            self._warn(
                "lane-signal", warp, i, "signals for other lanes too, which bar.warp.sync would have to come before"
            )

    def warp_synced(self, g: Group, mask: Mask, members: Mask) -> None:
        warps = g.warps[g.lanes(mask).any(axis=1)]
        if members is None:
            self._met(warps)
        else:
            self.touched[g.warps] &= ~(members & g.lanes(mask).any(axis=1, keepdims=True))

    def tensor_waited(self, g: Group, mask: Mask, kind: str) -> None:
        self._met(g.warps)

    def warpgroup_waited(self, warps: np.ndarray, i: Instruction, pending: int) -> None:
        self._met(warps)

    def _met(self, warps: np.ndarray) -> None:
        self.touched[warps] = False

    # what signals and waits

    def mbarrier_arrives(self, g: Group, i: Instruction, rows, lanes, cta, offset: np.ndarray, release: bool) -> None:
        warps = np.unique(g.warps[rows])
        if release and "expect_tx" not in i.mods:
            mine = np.zeros((self.clocks.warps, 32), bool)
            mine[g.warps[rows], lanes] = True
            self._signal(i, warps, mine[warps])
        self._before(warps)

    def barrier_arrived(self, g: Group, i: Instruction, ident: np.ndarray, count: np.ndarray) -> None:
        # named barriers mostly order shared memory between warps that load, so only tcgen05.st counts here
        self._met(g.warps)
        self._before(np.array([w for w in g.warps.tolist() if w in self.used and "st" in self.used[w].mods], np.int64))

    def cluster_arrived(self, g: Group, lanes: np.ndarray, release: bool) -> None:
        self._met(g.warps)
        self._before(g.warps)

    def mbarrier_passed(self, g: Group, i: Instruction, mask, done, cta, slot, acquire: bool) -> None:
        self._after(g.warps)

    def barrier_opened(self, warps: np.ndarray, ident: np.ndarray) -> None:
        self._after(warps)

    def cluster_waited(self, g: Group, lanes: np.ndarray) -> None:
        self._after(g.warps)

    # tensor memory

    def tensor_fenced(self, g: Group, i: Instruction, mask: Mask) -> None:
        if "fence::after_thread_sync" in i.mods:
            self.behind[:, g.warps] = False
        else:
            for warp in g.warps.tolist():
                self.used.pop(warp, None)

    def issued(self, pending: Pending, queued: bool) -> None:
        kind = pending.completion.kind
        if kind not in _TENSOR or "commit" in pending.instruction.mods:
            return
        for warp in np.unique(pending.warps).tolist():
            if kind in _LOADS:
                self.used[warp] = pending.instruction
            if self.behind[1 if kind == "tmem_load" else slice(None), warp].any():
                self.behind[:, warp] = False
                what = "follows a wait for others' tcgen05 operations without tcgen05.fence::after_thread_sync between"
                self._warn("tensor-fence", warp, pending.instruction, what)

    def _before(self, warps: np.ndarray) -> None:
        for warp in self.used.keys() & set(warps.tolist()):
            what = "is followed by an arrival without tcgen05.fence::before_thread_sync between"
            self._warn("tensor-fence", warp, self.used.pop(warp), what)

    def _after(self, warps: np.ndarray) -> None:
        if not len(self.columns):
            return
        told = self.clocks.known[warps, 0][:, self.columns]
        theirs, mine = self.columns % self.clocks.per_cluster, (warps % self.clocks.per_cluster)[:, None]
        others = (theirs != mine) & (theirs // self.sharing == mine // self.sharing)
        new = (told > self.heard[warps]) & others
        for which, columns in enumerate((self.reads, ~self.reads)):
            self.behind[which, warps] |= new[:, columns].any(axis=1)
        self.heard[warps] = told

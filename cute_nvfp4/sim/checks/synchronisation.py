"""The listener for synchronisation: barriers, mbarriers, fences and groups of copies."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.barrier_use import BarrierUse
from cute_nvfp4.sim.checks.cluster_start import ClusterStart
from cute_nvfp4.sim.checks.kernel import fenced_space
from cute_nvfp4.sim.checks.memory import Shadows
from cute_nvfp4.sim.checks.scopes import CLUSTER, CTA, scope_of, written_scope
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.checks.tensor_maps import TensorMaps
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.bulk_groups import groups
from cute_nvfp4.sim.machine.events import Listener, Mask
from cute_nvfp4.sim.machine.wave import Group
from cute_nvfp4.sim.wgmma.fragments import WARPS


class Synchronisation(Listener):
    """Records in the clocks what makes one access happen before another, and checks the use of mbarriers."""

    def __init__(
        self, state: State, shadows: Shadows, barriers: BarrierUse, maps: TensorMaps, start: ClusterStart
    ) -> None:
        self.start = start
        self.wave, self.clocks, self.labels, self.foreign = state.wave, state.clocks, state.labels, state.foreign
        self.title, self.reporter, self.findings = state.title, state.reporter, state.findings
        self.barriers, self.maps, self.barrier_words = barriers, maps, shadows.barrier_words
        self.cluster_parity = np.zeros(state.wave.warps, np.int64)

    # barriers

    def warp_synced(self, g: Group, mask: Mask, members: Mask) -> None:
        """Records that lanes have met; those that ``members`` leaves out have not met the others."""
        warps = self._active(g, mask)
        if members is None or members.all():
            self.clocks.meet(warps)
            return
        here = np.broadcast_to(members, (g.n, 32))[np.searchsorted(g.warps, warps)]
        whole = (here | ~self.wave.live[warps]).all(axis=1)
        self.clocks.meet(warps[whole])
        for warp, lanes in zip(warps[~whole].tolist(), here[~whole]):
            self.clocks.meet_some(warp, lanes)

    def barrier_arrived(self, g: Group, i: Instruction, ident: np.ndarray, count: np.ndarray) -> None:
        warps = g.warps
        self.foreign.give("named", warps, warps // self.clocks.warps_per_cta, ident)
        self.clocks.named_arrive(warps, ident)

    def barrier_opened(self, warps: np.ndarray, ident: np.ndarray) -> None:
        cta = warps // self.clocks.warps_per_cta
        self.foreign.take("named", warps, cta, ident)
        self.clocks.named_open(warps, ident)

    def barrier_ended(self, cta: np.ndarray, ident: np.ndarray) -> None:
        for key in [k for k in self.foreign.at_barrier if k[0] == "named" and ((cta == k[1]) & (ident == k[2])).any()]:
            del self.foreign.at_barrier[key]
        self.clocks.named_end(cta, ident)

    def cluster_arrived(self, g: Group, lanes: np.ndarray, release: bool) -> None:
        warps = g.warps[lanes.any(axis=1)]
        parity = self.wave.cluster_barrier.waits_for[warps].max(axis=1) & 1
        self.cluster_parity[warps] = parity
        if release:
            self.foreign.give("cluster", warps, warps // self.clocks.per_cluster, parity)
        self.clocks.cluster_arrive(warps, parity, release)

    def cluster_waited(self, g: Group, lanes: np.ndarray) -> None:
        warps = g.warps[lanes.any(axis=1)]
        parity = self.cluster_parity[warps]
        self.foreign.take("cluster", warps, warps // self.clocks.per_cluster, parity)
        self.clocks.cluster_wait(warps, parity)

    # mbarriers

    def mbarrier_initialised(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        c, warps = self.clocks, g.warps[rows]
        slot = self.wave.mbarriers.slots(offset)
        c.ensure(int(slot.max()))
        clock = c.initialise(warps)
        epochs = ep.pack(self.labels.label(i), c.component("init", warps), clock, lanes, bits=c.bits)
        c.initialised[cta // c.cluster_size, c.barrier(cta, slot)] = epochs
        self.barrier_words.set(cta, offset, True)

    def mbarrier_replaced(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        name = self.wave.mbarriers.name(int(cta[0]), int(self.wave.mbarriers.slots(offset)[0]))
        who = self.reporter.thread(int(g.warps[rows[0]]), int(lanes[0]))
        self.findings.hazard(
            "mbarrier-again",
            f"{self.title}: {name}\n  is initialised again by {who} at {i.where()} without mbarrier.inval before",
            i,
        )

    def mbarrier_invalidated(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """Checks that no arrival or completion may still be on the way to mbarriers that mbarrier.inval ends."""
        c, warps = self.clocks, g.warps[rows]
        slot = self.barriers.slots(i.where(), cta, offset)
        self.barriers.ready(i, warps, cta, slot, proxy=False)
        late = c.signals[cta // c.cluster_size, c.barrier(cta, slot)] > c.snapshot(warps)[:, 0]
        if late.any():
            k, component = (int(x) for x in np.argwhere(late)[0])
            source = self.reporter.arrival(component, int(cta[k]) // c.cluster_size)
            self.findings.hazard(
                "mbarrier-inval",
                f"{self.title}: {self.reporter.thread(int(warps[k]), int(lanes[k]))} at {i.where()} ends the "
                f"{self.wave.mbarriers.name(int(cta[k]), int(slot[k]))} while {source} may still be on the way to it",
                i,
            )
        self.barrier_words.set(cta, offset, False)

    def mbarrier_counted(self, g: Group, i: Instruction, rows, cta: np.ndarray, offset: np.ndarray) -> None:
        c, warps = self.clocks, g.warps[rows]
        self.start.needed(i, warps, cta)
        slot = self.barriers.slots(i.where(), cta, offset)
        self.barriers.ready(i, warps, cta, slot, proxy=False)
        c.signal(cta, slot, c.component("thread", warps), c.now[warps], self.labels.label(i))

    def mbarrier_arrives(self, g: Group, i: Instruction, rows, lanes, cta, offset: np.ndarray, release: bool) -> None:
        """Records arrivals; a relaxed one carries what a fence before it has prepared."""
        c, warps = self.clocks, g.warps[rows]
        self.start.needed(i, warps, cta)
        slot = self.barriers.slots(i.where(), cta, offset)
        self.barriers.ready(i, warps, cta, slot, proxy=False)
        if len(warps) > 1:
            # Lanes of a warp that arrive together arrive with the same clocks.
            new = np.ones(len(warps), bool)
            new[1:] = (warps[1:] != warps[:-1]) | (cta[1:] != cta[:-1]) | (slot[1:] != slot[:-1])
            warps, cta, slot = warps[new], cta[new], slot[new]
        self.foreign.give("gather", warps, cta, slot)
        rows = c.release(warps) if release else c.prepared[warps]
        if (far := warps // c.warps_per_cta != cta).any():
            self._far(i, warps, cta, slot, far, rows, release)
        c.gather(rows, cta, slot)
        c.signal(cta, slot, c.component("thread", warps), c.now[warps] - int(release), self.labels.label(i))

    def _far(self, i: Instruction, warps, cta, slot, far: np.ndarray, rows: np.ndarray, release: bool) -> None:
        """Adjusts what the arrivals ``far`` at mbarriers of other CTAs carry: nothing if their scope is the CTA.

        Most such arrivals have no written scope. By the ISA it is then the CTA (PTX ISA, "mbarrier.arrive"), but
        NVIDIA's kernels rely on the cluster, so it counts as that here.
        """
        c, scope = self.clocks, written_scope(i)
        c.visit(warps, cta, slot)
        if scope == CTA:
            rows[far] = 0
        elif not release:
            rows[far] = c.wide[warps[far]]
        # any arrival tells that its thread has started
        own = c.component("thread", warps[far])
        rows[far, 0, own] = np.maximum(rows[far, 0, own], 1)
        if release and not scope and self.findings.strict:
            k = int(far.argmax())
            self._narrow(i, int(warps[k]), "arrives at an mbarrier of another CTA")

    def _narrow(self, i: Instruction, warp: int, what: str) -> None:
        who = self.reporter.thread(warp, ep.MANY)
        text = f"{self.title}: {who} {what} at {i.where()}, whose scope is the CTA: .cluster would have to be written"
        self.findings.warn("mbarrier-scope", text, i)

    def phase_ended(self, cta: np.ndarray, slot: np.ndarray, phase: np.ndarray) -> None:
        self.clocks.ensure(int(slot.max()))
        if self.foreign.at_barrier:
            for k in zip(cta.tolist(), slot.tolist()):
                if ("gather", *k) in self.foreign.at_barrier:
                    self.foreign.at_barrier[("ended", *k)] = dict(self.foreign.at_barrier[("gather", *k)])
        self.clocks.end_phase(cta, slot, phase)

    def mbarrier_passed(self, g: Group, i: Instruction, mask, done, cta, slot, acquire: bool) -> None:
        """Records that waits have passed; a relaxed wait orders nothing before a fence follows."""
        lanes = np.broadcast_to(done, (g.n, 32)) & (g.lanes() if mask is None else mask)
        if cta.shape[1] == 1:
            rows = np.flatnonzero(lanes.any(axis=1))
            warps, cta, slot = g.warps[rows], cta[rows, 0], slot[rows, 0]
        else:
            rows, cols = np.nonzero(lanes)
            every = np.unique(np.stack([g.warps[rows], cta[rows, cols], slot[rows, cols]], axis=1), axis=0)
            warps, cta, slot = every.T
        if not len(warps):
            return
        self.clocks.ensure(int(slot.max()))
        self.barriers.ready(i, warps, cta, slot, proxy=False)
        self.foreign.take("ended", warps, cta, slot)
        c = self.clocks
        if self.findings.strict and acquire and c.cluster_size > 1 and written_scope(i) < CLUSTER:
            if (far := c.visited_before[cta // c.cluster_size, c.barrier(cta, slot)]).any():
                self._narrow(i, int(warps[int(far.argmax())]), "waits for arrivals of other CTAs")
        c.pass_phase(warps, cta, slot, acquire)

    # fences and groups

    def fenced(self, g: Group, i: Instruction, mask: Mask, *address) -> None:
        warps = self._active(g, mask)
        words = set(i.mods)
        if "mbarrier_init" in words:
            if "init" in self.clocks.kinds:
                self.clocks.fence_init(warps)
        elif "proxy" in words:
            if (space := fenced_space(i)) is not None:
                self.clocks.fence_async(warps, space)
            elif address:
                self.maps.acquired(i, g, mask, *address)
        else:
            scope, takes, gives = scope_of(i), "release" not in words, "acquire" not in words
            self.clocks.fence(warps, scope >= CLUSTER, takes, gives)
            self.foreign.fence(warps, scope, takes, gives)

    def tensor_fenced(self, g: Group, i: Instruction, mask: Mask) -> None:
        self.clocks.fence(self._active(g, mask), True, tensor=True)

    def group_waited(self, g: Group, lanes: np.ndarray, kind: str, until: np.ndarray, read: bool) -> None:
        """Records the end of groups; what one lane has waited for counts for its whole warp."""
        until = np.broadcast_to(until, (g.n, 32))
        clock = np.where(lanes, until, 0).max(axis=1)
        kinds = ("cp_async",) if kind == "cp_async" else ("bulk_read",) if read else ("bulk_read", "bulk_write")
        for name in kinds:
            if name in self.clocks.kinds:
                self.clocks.learn(name, g.warps, clock)

    def copies_arrive(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """Records what the arrival will tell: the end of the thread's copies so far."""
        c, warps = self.clocks, g.warps[rows]
        slot = self.barriers.slots(i.where(), cta, offset)
        self.barriers.ready(i, warps, cta, slot, proxy=False)
        rows_ = c.known[warps].copy()
        component = c.component("cp_async", warps)
        rows_[np.arange(len(warps)), 0, component] = groups(self.wave, "cp_async").committed[warps, lanes] + 1
        c.gather(rows_, cta, slot)

    def tensor_waited(self, g: Group, mask: Mask, kind: str) -> None:
        if kind in self.clocks.kinds:
            self.clocks.wait_all(kind, self._active(g, mask))

    def warpgroup_committed(self, warps: np.ndarray, i: Instruction) -> None:
        self.clocks.commit("wgmma", warps)

    def warpgroup_waited(self, warps: np.ndarray, i: Instruction, pending: int) -> None:
        """Records that a warp that has waited knows the end of the wgmmas of all four warps of its warpgroup."""
        for other in warps.reshape(-1, WARPS).T:
            of = np.repeat(other, WARPS)
            self.clocks.learn("wgmma", warps, self.clocks.open["wgmma"][of] - 1 - pending, of=of)

    def _active(self, g: Group, mask: Mask) -> np.ndarray:
        if mask is None:
            return g.warps
        return g.warps[np.broadcast_to(mask, (g.n, 32)).any(axis=1)]

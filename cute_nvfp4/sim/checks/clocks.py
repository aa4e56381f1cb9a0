"""Vector clocks of the warps of a wave, their asynchronous pipes and their mbarriers.

Each cluster has its own clocks: warps of different clusters can only synchronise through global memory (``foreign``). A
*component* is something whose operations are ordered among themselves, or end together: the thread itself and each
asynchronous pipe of a warp, and each mbarrier, whose clock counts its phases. What a warp knows are rows of clocks, one
clock for each component. ``known[warp, 0]`` says what happened before. The other rows (*layers*) exist because the
asynchronous proxy sees generic writes only after a proxy fence: ``known[warp, 1]`` says what it may read in shared
memory. In global memory that is the same, or ``known[warp, 2]`` where fences name a space (``Layers``).

A thread's clock starts at 2, so that 1 says only that the thread has started, and advances when the thread releases.
``known[warp, 0, own]`` is not that clock but its value when the lanes of the warp last met (bar.warp.sync or a
barrier): what lanes have done since is not ordered among them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from cute_nvfp4.sim.checks.epoch import component_bits
from cute_nvfp4.sim.checks.lane_sets import LaneSets

GENERIC = ("thread",)
"""The kinds of components whose writes the asynchronous proxy sees only after a proxy fence. cp.async is not among
them: in NVIDIA's kernels the tensor core reads what cp.async has copied without such a fence."""
OWN = ("thread", "load")
"""The kinds whose clock is that of the thread itself. Loads from shared memory have the kind "load" in kernels where
wgmma takes A from registers: the end of a wgmma is the end of the loads that its registers came from."""
NAMED_BARRIERS = 16
MOST_BARRIERS = 256
"""The mbarriers of a CTA for which epochs have room, however many clusters a launch has."""


class Layers(NamedTuple):
    """The layers of ``known`` that say what the asynchronous proxy may read of each space.

    0 stands for a space that no fence of the kernel covers: the proxy may read no generic write there.
    """

    shared: int = 1
    global_: int = 1

    @staticmethod
    def of(spaces: Collection[str]) -> Layers:
        """Returns the layers for the ``spaces`` that fences of the kernel name: "shared", "global", or "" for both."""
        if set(spaces) <= {""}:
            return Layers()
        return Layers(1, 0) if set(spaces) == {"shared"} else Layers(1, 2)


def join(target: np.ndarray, index: np.ndarray, rows: np.ndarray) -> None:
    """Joins ``rows`` (k, L) into the rows ``index`` (k,) of ``target`` (N, L) by maximum; indices may repeat."""
    if len(index) > 1 and not (np.diff(index) > 0).all():
        order = np.argsort(index, kind="stable")
        ranked = index[order]
        starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
        index, rows = ranked[starts], np.maximum.reduceat(rows[order], starts, axis=0)
    target[index] = np.maximum(target[index], rows)


class Clocks:
    """The vector clocks of one wave, and the calls that record its synchronisation.

    ``kinds`` names the components that each warp has (``kernel.kinds``). ``slots`` is the number of mbarriers of a CTA
    for which there is room at first. ``lane_sets`` is None if lanes of a warp never meet without the others. ``room``
    is the number of components of a cluster, the last axis of most arrays; ``ensure`` lets it grow. ``launched`` is the
    number of clusters of the launch, and ``bits`` that of a component in an epoch (``epoch.component_bits``).
    """

    def __init__(
        self,
        warps: int,
        warps_per_cta: int,
        cluster_size: int,
        kinds: tuple[str, ...],
        slots: int = 8,
        layers: Layers = Layers(),  # noqa: B008 (it is immutable)
        lane_sets: LaneSets | None = None,
        launched: int = 1,
    ):
        self.layers, depth, self.lane_sets = layers, 1 + max(layers), lane_sets
        self.warps, self.cluster_size, self.warps_per_cta = warps, cluster_size, warps_per_cta
        self.per_cluster = warps_per_cta * cluster_size
        self.clusters, self.ctas = warps // self.per_cluster, warps // warps_per_cta
        self.kinds = {kind: j for j, kind in enumerate(kinds)}
        self.own = [j * self.per_cluster for j, kind in enumerate(kinds) if kind in OWN]
        self.generic = sum(kind in GENERIC for kind in kinds) * self.per_cluster
        self.first_barrier = len(kinds) * self.per_cluster
        self.barriers = slots * cluster_size
        self.room = self.first_barrier + self.barriers
        self.bits = component_bits(launched, self.first_barrier + MOST_BARRIERS * cluster_size)
        # the threads' own clocks
        self.now = np.full(warps, 2, np.int32)
        # whether a warp has waited at the cluster's barrier, so that all CTAs of the cluster have started
        self.met = np.zeros(warps, bool)
        # by kind: the clock of what a warp issues now
        self.open = {kind: np.ones(warps, np.int32) for kind in kinds}
        # the last clock of a warp's mbarrier.init that fence.mbarrier_init has published
        self.published = np.zeros(warps, np.int32)
        # by warp, if some lanes have met since all of them last did: the clock (32, 32) of each lane that a lane knows
        self.met_lanes: dict[int, np.ndarray] = {}
        self.known = np.zeros((warps, depth, self.room), np.int32)
        # relaxed mbarrier operations: what waits have seen, and what fences have prepared for arrivals; ``far`` and
        # ``wide`` are the same where threads of other CTAs take part, for which the fences' scope must be wide enough
        self.seen, self.prepared = np.zeros_like(self.known), np.zeros_like(self.known)
        self.far, self.wide = np.zeros_like(self.known), np.zeros_like(self.known)
        # what arrivals have brought to named barriers, to cluster barriers by parity, and to mbarriers in the phase
        # under way and in the last one
        self.named = np.zeros((self.ctas, NAMED_BARRIERS, depth, self.room), np.int32)
        self.cluster = np.zeros((self.clusters, 2, depth, self.room), np.int32)
        self.gathering = np.zeros((self.clusters, self.barriers, depth, self.room), np.int32)
        self.ended = np.zeros_like(self.gathering)
        # by component: the clock of the last arrival at an mbarrier, and the label of the instruction that sends it
        self.signals = np.zeros((self.clusters, self.barriers, self.room), np.int32)
        self.sender = np.zeros((self.clusters, self.barriers, self.room), np.uint16)
        # the epoch of an mbarrier's initialisation
        self.initialised = np.zeros((self.clusters, self.barriers), np.uint64)
        # whether a thread of another CTA has signalled in the phase under way, and in the last one
        self.visited = np.zeros((self.clusters, self.barriers), bool)
        self.visited_before = np.zeros_like(self.visited)
        # the label of the last instruction that signals an mbarrier
        self.last_use = np.zeros((self.clusters, self.barriers), np.uint16)
        # what the warps of a CTA that have exited knew
        self.exit = np.zeros((self.ctas, self.room), np.int32)
        self.flat = self.known.reshape(-1)

    def ensure(self, slot: int) -> None:
        """Makes room for mbarrier ``slot``."""
        if (slot + 1) * self.cluster_size <= self.barriers:
            return
        more = max(self.barriers, (slot + 1) * self.cluster_size - self.barriers)
        self.barriers += more
        self.room += more
        for name in (
            *("gathering", "ended", "signals", "sender", "initialised", "last_use"),
            *("visited", "visited_before"),
        ):
            a = getattr(self, name)
            setattr(self, name, np.pad(a, [(0, 0), (0, more)] + [(0, 0)] * (a.ndim - 2)))
        for name in (
            "known",
            "seen",
            "prepared",
            "far",
            "wide",
            "named",
            "cluster",
            "gathering",
            "ended",
            "signals",
            "sender",
            "exit",
        ):
            a = getattr(self, name)
            setattr(self, name, np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, more)]))
        self.flat = self.known.reshape(-1)

    # components

    def component(self, kind: str, warps: np.ndarray) -> np.ndarray:
        return self.kinds[kind] * self.per_cluster + warps % self.per_cluster

    def thread_of(self, component: np.ndarray) -> np.ndarray:
        """Returns the component of the thread for components of the kinds ``OWN``, and other components unchanged."""
        return np.where(component < len(self.own) * self.per_cluster, component % self.per_cluster, component)

    def barrier(self, cta: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """Returns the index of an mbarrier among those of its cluster."""
        return slot * self.cluster_size + cta % self.cluster_size

    def base(self, warps: np.ndarray) -> np.ndarray:
        """Returns where a warp's part of ``known`` begins in ``flat``; the next layer is ``room`` further."""
        return warps * (self.known.shape[1] * self.room)

    # what a warp gives and takes

    def snapshot(self, warps: np.ndarray) -> np.ndarray:
        """Returns what the warps know, (k, layers, room), their own clocks included."""
        rows = self.known[warps]
        for first in self.own:
            rows[np.arange(len(warps)), 0, first + warps % self.per_cluster] = self.now[warps]
        return rows

    def release(self, warps: np.ndarray) -> np.ndarray:
        """Returns a :meth:`snapshot`, and advances the warps' clocks: what they do next is no part of it."""
        rows = self.snapshot(warps)
        self.now[warps] += 1
        return rows

    def acquire(self, warps: np.ndarray, rows: np.ndarray) -> None:
        join(self.known.reshape(self.warps, -1), warps, rows.reshape(len(warps), -1))

    def learn(self, kind: str, warps: np.ndarray, clock: np.ndarray, of: np.ndarray | None = None) -> None:
        """Records that the warps have seen the end of their own operations of ``kind``, or of those of the warps
        ``of``, up to ``clock``."""
        at = (warps, 0, self.component(kind, warps if of is None else of))
        self.known[at] = np.maximum(self.known[at], clock)

    # barriers

    def meet_some(self, warp: int, lanes: np.ndarray) -> None:
        """Records a bar.warp.sync of some ``lanes`` (32,) of a warp."""
        known = self.met_lanes.setdefault(warp, np.zeros((32, 32), np.int32))
        known[lanes] = known[lanes].max(axis=0)
        known[np.ix_(lanes, lanes)] = self.now[warp]
        self.now[warp] += 1

    def some_met(self, warp: int, clock: int, earlier: int, later: int) -> bool:
        """Whether lanes of a warp (lane fields) come after what others did at ``clock``, because some lanes have met.

        Lanes that are not known count as having met those that have met any.
        """
        if warp not in self.met_lanes or self.lane_sets is None:
            return False
        known = self.met_lanes[warp] >= clock
        first, last = self.lane_sets.lanes(earlier), self.lane_sets.lanes(later)
        if first.any() and last.any():
            return bool((known | np.eye(32, dtype=bool))[np.ix_(last, first)].all())
        either = first | last
        return bool(known.diagonal()[either].all() if either.any() else known.any())

    def meet(self, warps: np.ndarray) -> None:
        """Records a bar.warp.sync of all lanes."""
        if self.met_lanes:
            for warp in warps.tolist():
                self.met_lanes.pop(warp, None)
        for first in self.own:
            self.known[warps, 0, first + warps % self.per_cluster] = self.now[warps]
        self.now[warps] += 1

    def named_arrive(self, warps: np.ndarray, ident: np.ndarray) -> None:
        """Records that warps arrive at named barriers of their CTAs, whether they wait there or not."""
        at = warps // self.warps_per_cta * NAMED_BARRIERS + ident
        join(self.named.reshape(self.ctas * NAMED_BARRIERS, -1), at, self.release(warps).reshape(len(warps), -1))

    def named_open(self, warps: np.ndarray, ident: np.ndarray) -> None:
        """Records that named barriers open; ``warps`` are all that have waited there."""
        self.acquire(warps, self.named[warps // self.warps_per_cta, ident])

    def named_end(self, cta: np.ndarray, ident: np.ndarray) -> None:
        """Records that phases of named barriers are over; the next phases begin with nothing."""
        self.named[cta, ident] = 0

    def cluster_arrive(self, warps: np.ndarray, parity: np.ndarray, release: bool) -> None:
        """Records barrier.cluster.arrive in a phase of this parity. A relaxed arrival carries what a fence before it
        has prepared, and the mbarrier initialisations that fence.mbarrier_init has published."""
        cluster = warps // self.per_cluster
        if release:
            rows = self.release(warps)
            join(self.cluster.reshape(self.clusters * 2, -1), cluster * 2 + parity, rows.reshape(len(warps), -1))
            return
        join(
            self.cluster.reshape(self.clusters * 2, -1), cluster * 2 + parity, self.wide[warps].reshape(len(warps), -1)
        )
        if "init" in self.kinds:
            at = (cluster, parity, slice(None), self.component("init", warps))
            self.cluster[at] = np.maximum(self.cluster[at], self.published[warps][:, None])

    def cluster_wait(self, warps: np.ndarray, parity: np.ndarray) -> None:
        self.acquire(warps, self.cluster[warps // self.per_cluster, parity])
        first = self.known[warps, 0, : self.per_cluster]
        self.known[warps, 0, : self.per_cluster] = np.maximum(first, 1)
        self.met[warps] = True

    # mbarriers

    def initialise(self, warps: np.ndarray) -> np.ndarray:
        """Records mbarrier.init, and returns the clocks of the initialisations."""
        clock = self.open["init"][warps]
        self.learn("init", warps, clock)
        self.open["init"][warps] += 1
        return clock

    def gather(self, rows: np.ndarray, cta: np.ndarray, slot: np.ndarray) -> None:
        """Adds ``rows`` (k, layers, room) to what the ends of the phases under way will tell."""
        at = cta // self.cluster_size * self.barriers + self.barrier(cta, slot)
        join(self.gathering.reshape(self.clusters * self.barriers, -1), at, rows.reshape(len(at), -1))

    def visit(self, warps: np.ndarray, cta: np.ndarray, slot: np.ndarray) -> None:
        """Records that warps (k,) signal mbarriers (k,); those in other CTAs than the warp's count as visited."""
        far = warps // self.warps_per_cta != cta
        if far.any():
            self.visited[cta[far] // self.cluster_size, self.barrier(cta[far], slot[far])] = True

    def signal(self, cta: np.ndarray, slot: np.ndarray, component: np.ndarray, clock: np.ndarray, label: int) -> None:
        """Records that ``component`` will arrive at the barriers at its ``clock``; their CTAs must not exit before.
        ``label`` is that of the instruction that causes the arrival."""
        at = (cta // self.cluster_size, self.barrier(cta, slot), component)
        np.maximum.at(self.signals, at, clock)
        self.sender[at] = self.last_use[at[:2]] = label

    def end_phase(self, cta: np.ndarray, slot: np.ndarray, phase: np.ndarray) -> None:
        """Records that the barriers, each given once, have now completed ``phase`` phases."""
        cluster, b = cta // self.cluster_size, self.barrier(cta, slot)
        self.gathering[cluster, b, :, self.first_barrier + b] = phase[:, None]
        self.ended[cluster, b] = self.gathering[cluster, b]
        self.visited_before[cluster, b], self.visited[cluster, b] = self.visited[cluster, b], False

    def pass_phase(self, warps: np.ndarray, cta: np.ndarray, slot: np.ndarray, acquire: bool = True) -> None:
        """Records that the warps have seen the last phase end; without ``acquire`` that counts only after a fence."""
        at = cta // self.cluster_size, self.barrier(cta, slot)
        rows = self.ended[at].reshape(len(warps), -1)
        if acquire:
            join(self.known.reshape(self.warps, -1), warps, rows)
            return
        visited = self.visited_before[at]
        for seen, some in ((self.seen, ~visited), (self.far, visited)):
            if some.any():
                join(seen.reshape(self.warps, -1), warps[some], rows[some])

    # fences and groups

    def fence(
        self, warps: np.ndarray, wide: bool, takes: bool = True, gives: bool = True, tensor: bool = False
    ) -> None:
        """Records a fence.

        The scope of a ``wide`` fence includes the whole cluster. If the fence ``takes``, what relaxed waits have seen
        is known now. If it ``gives``, relaxed arrivals carry from now on what is known now. With ``tensor``
        (tcgen05.fence) both apply to operations on tensor memory only.
        """
        rows, seen = self.snapshot(warps), self.seen[warps] if takes else np.zeros_like(self.seen[warps])
        if takes and wide and self.cluster_size > 1:
            seen = np.maximum(seen, self.far[warps])
        if tensor:
            other = np.ones(self.room, bool)
            for kind in self.kinds.keys() & {"tensor", "tmem_load", "tmem_store"}:
                first = self.kinds[kind] * self.per_cluster
                other[first : first + self.per_cluster] = False
            rows[..., other] = seen[..., other] = 0
        if gives:
            ready = np.maximum(rows, seen)
            for prepared in (self.prepared, self.wide) if wide and self.cluster_size > 1 else (self.prepared,):
                prepared[warps] = np.maximum(prepared[warps], ready)
        self.known[warps] = np.maximum(self.known[warps], seen)
        self.now[warps] += 1

    def fence_async(self, warps: np.ndarray, space: str = "") -> None:
        """Records fence.proxy.async: the asynchronous proxy sees what the warps know, in ``space`` or everywhere."""
        seen = self.snapshot(warps)[:, 0]
        for layer in {"shared": {self.layers.shared}, "global": {self.layers.global_}}.get(space, set(self.layers)) - {
            0
        }:
            self.known[warps, layer] = seen
        self.now[warps] += 1

    def fence_init(self, warps: np.ndarray) -> None:
        """Records fence.mbarrier_init: other CTAs and the asynchronous proxy see the warps' initialised mbarriers."""
        clock = self.open["init"][warps] - 1
        self.published[warps] = clock
        self.known[warps, 1, self.component("init", warps)] = clock

    def commit(self, kind: str, warps: np.ndarray) -> None:
        """Records a commit: what the warps issue from now on is no part of it."""
        self.open[kind][warps] += 1

    def wait_all(self, kind: str, warps: np.ndarray) -> None:
        """Records that everything of ``kind`` that the warps have issued is over."""
        self.learn(kind, warps, self.open[kind][warps])
        self.open[kind][warps] += 1

    # the end

    def leave(self, warps: np.ndarray) -> None:
        """Records that the warps exit; what they know counts for their CTA."""
        join(self.exit, warps // self.warps_per_cta, self.snapshot(warps)[:, 0])

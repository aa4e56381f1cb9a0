"""Ordering through memory: releases, acquires, and what warps know of other clusters.

A release leaves the clocks of its warp at an address. An acquire that reads the address takes these clocks over if the
scopes of both include the other thread. Fences turn relaxed and volatile accesses into releases and acquires (PTX ISA,
"Memory Consistency Model": release and acquire patterns); then both scopes count, that of the fence and that of the
access. Within a cluster, an acquire joins vector clocks. Knowledge of other clusters is rare, so dictionaries hold it,
and every later synchronisation of a warp that has some passes it on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.scopes import CLUSTER, CTA, GPU

Knowledge = dict[int, np.ndarray]
"""What is known of other clusters: the number of a cluster in the launch, and the known clocks (room,) of it."""


@dataclass
class Left:
    """What a release left at an address.

    ``cluster`` is the number of the releasing thread's cluster in the launch, ``rank`` the rank of its CTA in it.
    ``scope`` (``scopes``) says who may acquire. ``clocks`` (layers, room) is what the warp knew of its cluster,
    ``foreign`` what it knew of other clusters.
    """

    cluster: int
    rank: int
    scope: int
    clocks: np.ndarray
    foreign: Knowledge = field(default_factory=dict)


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the element-wise maximum of two rows. Their last axes may differ in length."""
    if a.shape[-1] < b.shape[-1]:
        a, b = b, a
    if a is b:
        return a
    out = a.copy()
    out[..., : b.shape[-1]] = np.maximum(a[..., : b.shape[-1]], b)
    return out


def merge(into: Knowledge, more: Knowledge) -> None:
    """Adds the knowledge ``more`` to ``into``, in place."""
    for cluster, row in more.items():
        mine = into.get(cluster)
        if mine is not row:
            into[cluster] = row if mine is None else _larger(mine, row)


class Foreign:
    """Follows ordering through memory in one wave.

    ``left`` maps host addresses to the releases that the launch has left there; all its waves share it.
    ``cluster_of_warp`` (warps,) is the number of each warp's cluster in the launch.
    """

    def __init__(self, clocks: Clocks, left: dict[int, list[Left]], cluster_of_warp: np.ndarray) -> None:
        self.clocks, self.left, self.cluster_of_warp = clocks, left, cluster_of_warp
        self.of_warp: dict[int, Knowledge] = {}
        # by the kind and the place of a barrier
        self.at_barrier: dict[tuple, Knowledge] = {}
        # by warp and scope: what fences give to later relaxed writes; a fence replaces those of no wider scope
        self.fenced: dict[int, dict[int, tuple[np.ndarray, Knowledge]]] = {}
        # by warp: the releases that relaxed reads have met and no fence has acquired yet
        self.seen: dict[int, list[Left]] = {}

    def ordered(self, warps, clusters, components, clocks) -> np.ndarray:
        """Returns whether each warp knows that a component of another cluster has passed a clock; all are (k,)."""
        out = np.zeros(len(warps), bool)
        if self.of_warp:
            for j, (w, c, p, t) in enumerate(
                zip(warps.tolist(), clusters.tolist(), components.tolist(), clocks.tolist())
            ):
                row = self.of_warp.get(w, {}).get(c)
                out[j] = row is not None and p < len(row) and t <= row[p]
        return out

    # memory operations: warps (k,) and host addresses (k,)

    def wrote(self, warps: np.ndarray, addresses: np.ndarray, release: bool, update: bool, scope: int) -> None:
        """Records strong writes.

        A plain write ends the release sequences at its address. An ``update`` (atomic) continues them. ``release``
        says whether the write itself releases, at ``scope``.
        """
        if not (release or self.fenced or (self.left and not update)):
            return
        rows = self.clocks.snapshot(warps) if release else None
        for j, (w, at) in enumerate(zip(warps.tolist(), addresses.tolist())):
            if release:
                gives = [self._left(w, scope, rows[j], self._knowledge(w))]
            else:
                gives = [self._left(w, min(scope, s), *kept) for s, kept in self.fenced.get(w, {}).items()]
            if not update:
                self.left.pop(at, None)
            if gives:
                self.left.setdefault(at, []).extend(gives)
                if len(self.left[at]) > 8:
                    self.left[at] = _compact(self.left[at])
        if release:
            self.clocks.now[warps] += 1

    def _knowledge(self, warp: int) -> Knowledge:
        """Returns what the warp knows of other clusters now: what it learns later is no part of it."""
        return dict(self.of_warp.get(warp, {}))

    def _left(self, warp: int, scope: int, clocks: np.ndarray, foreign: Knowledge) -> Left:
        return Left(int(self.cluster_of_warp[warp]), self._rank(warp), scope, clocks, foreign)

    def _rank(self, warp: int) -> int:
        return warp % self.clocks.per_cluster // self.clocks.warps_per_cta

    def _includes(self, scope: int, warp: int, left: Left) -> bool:
        """Whether ``scope`` includes both the warp and the thread of the release ``left``."""
        if left.cluster != int(self.cluster_of_warp[warp]):
            return scope >= GPU
        return scope >= (CTA if left.rank == self._rank(warp) else CLUSTER)

    def read(self, warps: np.ndarray, addresses: np.ndarray, acquire: bool, scope: int) -> None:
        """Records strong reads. A read without ``acquire`` takes nothing over before a fence follows it."""
        if not self.left:
            return
        for w, at in zip(warps.tolist(), addresses.tolist()):
            for left in self.left.get(at, ()):
                if not self._includes(min(scope, left.scope), w, left):
                    continue
                if acquire:
                    self._take(w, left)
                else:
                    self.seen.setdefault(w, []).append(left)

    def fence(self, warps: np.ndarray, scope: int, takes: bool = True, gives: bool = True) -> None:
        """Records fence.acq_rel, fence.sc or membar. A fence.acquire only ``takes``, a fence.release only ``gives``."""
        if self.seen and takes:
            for w in warps.tolist():
                later = []
                for left in self.seen.pop(w, ()):
                    if self._includes(scope, w, left):
                        self._take(w, left)
                    else:
                        later.append(left)
                if later:
                    self.seen[w] = later
        if not gives:
            return
        rows = self.clocks.release(warps)
        for j, w in enumerate(warps.tolist()):
            wider = {s: kept for s, kept in self.fenced.get(w, {}).items() if s > scope}
            self.fenced[w] = {**wider, scope: (rows[j], self._knowledge(w))}

    def _take(self, warp: int, left: Left) -> None:
        own = int(self.cluster_of_warp[warp])
        if left.cluster == own:
            row = self.clocks.known[warp]
            size = min(row.shape[-1], left.clocks.shape[-1])
            row[:, :size] = np.maximum(row[:, :size], left.clocks[:, :size])
        else:
            merge(self.of_warp.setdefault(warp, {}), {left.cluster: left.clocks[0]})
        if left.foreign:
            others = {c: r for c, r in left.foreign.items() if c != own}
            merge(self.of_warp.setdefault(warp, {}), others)

    def give(self, kind: str, warps: np.ndarray, *key: np.ndarray) -> None:
        """Adds what warps (k,) know of other clusters to the barriers ``kind``, ``key``, with arrays (k,) for a key."""
        if self.of_warp:
            for w, *k in zip(warps.tolist(), *(a.tolist() for a in key)):
                if w in self.of_warp:
                    merge(self.at_barrier.setdefault((kind, *k), {}), self.of_warp[w])

    def take(self, kind: str, warps: np.ndarray, *key: np.ndarray) -> None:
        """Adds what has been given to the barriers ``kind``, ``key`` to what warps (k,) know."""
        if self.at_barrier:
            for w, *k in zip(warps.tolist(), *(a.tolist() for a in key)):
                if (kind, *k) in self.at_barrier:
                    merge(self.of_warp.setdefault(w, {}), self.at_barrier[(kind, *k)])


def _compact(left: list[Left]) -> list[Left]:
    """Returns the releases ``left``, merged into one for each CTA and scope."""
    by: dict[tuple[int, int, int], Left] = {}
    for one in left:
        key = one.cluster, one.rank, one.scope
        have = by.get(key)
        if have is None:
            by[key] = Left(*key, one.clocks, dict(one.foreign))
        else:
            have.clocks = _larger(have.clocks, one.clocks)
            merge(have.foreign, one.foreign)
    return list(by.values())

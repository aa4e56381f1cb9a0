"""Order made through memory: releases and acquires, and what warps know of other clusters.

A release leaves the clocks of the warp at an address; an acquire that reads it takes them, if the scopes of both
include the other thread. Fences turn relaxed and volatile accesses into releases and acquires (PTX ISA, "Memory
Consistency Model": release and acquire patterns); then the scopes of the fence and of the access count, both.
Within a cluster that is a join of clocks. Knowledge of other clusters is rare, so it is kept in dictionaries, which
travel with every later synchronisation of the warps that have some.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.scopes import CLUSTER, CTA, GPU

Knowledge = dict[int, np.ndarray]
"""Clocks (room,) by cluster of the launch."""


@dataclass
class Left:
    """What a release left at an address: the clocks (2, room) of a cluster, and foreign knowledge.

    ``rank`` is that of its CTA in the cluster; ``scope`` says who may take it."""

    cluster: int
    rank: int
    scope: int
    clocks: np.ndarray
    foreign: Knowledge = field(default_factory=dict)


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max of rows whose last axes may differ in length."""
    if a.shape[-1] < b.shape[-1]:
        a, b = b, a
    if a is b:
        return a
    out = a.copy()
    out[..., : b.shape[-1]] = np.maximum(a[..., : b.shape[-1]], b)
    return out


def merge(into: Knowledge, more: Knowledge) -> None:
    """Adds the knowledge ``more`` to ``into``."""
    for cluster, row in more.items():
        mine = into.get(cluster)
        if mine is not row:
            into[cluster] = row if mine is None else _larger(mine, row)


class Foreign:
    """Order through memory in one wave. ``left`` has the releases of the launch by host address; ``cluster_of_warp``
    numbers its clusters. ``fenced`` has for a warp, by scope, what each fence has prepared for relaxed writes, of those
    whose scope is wider than that of all later ones."""

    def __init__(self, clocks: Clocks, left: dict[int, list[Left]], cluster_of_warp: np.ndarray) -> None:
        self.clocks, self.left, self.cluster_of_warp = clocks, left, cluster_of_warp
        self.of_warp: dict[int, Knowledge] = {}
        self.at_barrier: dict[tuple, Knowledge] = {}
        self.fenced: dict[int, dict[int, tuple[np.ndarray, Knowledge]]] = {}
        self.seen: dict[int, list[Left]] = {}

    def ordered(self, warps, clusters, components, clocks) -> np.ndarray:
        """Whether each warp knows that the component of the other cluster has passed the clock."""
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
        """Strong writes. A plain strong write ends what was released before at the address, an ``update`` adds."""
        if not (release or self.fenced or (self.left and not update)):
            return
        rows = self.clocks.snapshot(warps) if release else None
        for j, (w, at) in enumerate(zip(warps.tolist(), addresses.tolist())):
            if release:
                gives = [self._left(w, scope, rows[j], self.of_warp.get(w, {}))]
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

    def _left(self, warp: int, scope: int, clocks: np.ndarray, foreign: Knowledge) -> Left:
        return Left(int(self.cluster_of_warp[warp]) & 0xFFFF, self._rank(warp), scope, clocks, foreign)

    def _rank(self, warp: int) -> int:
        return warp % self.clocks.per_cluster // self.clocks.warps_per_cta

    def _includes(self, scope: int, warp: int, left: Left) -> bool:
        """Whether a scope has both the warp and the thread that left something in it."""
        if left.cluster != int(self.cluster_of_warp[warp]) & 0xFFFF:
            return scope >= GPU
        return scope >= (CTA if left.rank == self._rank(warp) else CLUSTER)

    def read(self, warps: np.ndarray, addresses: np.ndarray, acquire: bool, scope: int) -> None:
        """Strong reads."""
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
        """fence.acq_rel, fence.sc, membar; one of .acquire or .release only ``takes`` or ``gives``."""
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
            self.fenced[w] = {**wider, scope: (rows[j], dict(self.of_warp.get(w, {})))}

    def _take(self, warp: int, left: Left) -> None:
        own = int(self.cluster_of_warp[warp]) & 0xFFFF
        if left.cluster == own:
            row = self.clocks.known[warp]
            size = min(row.shape[-1], left.clocks.shape[-1])
            row[:, :size] = np.maximum(row[:, :size], left.clocks[:, :size])
        else:
            merge(self.of_warp.setdefault(warp, {}), {left.cluster: left.clocks[0]})
        if left.foreign:
            others = {c: r for c, r in left.foreign.items() if c != own}
            merge(self.of_warp.setdefault(warp, {}), others)

    # knowledge travels with synchronisation

    def give(self, kind: str, warps: np.ndarray, *key: np.ndarray) -> None:
        if self.of_warp:
            for w, *k in zip(warps.tolist(), *(a.tolist() for a in key)):
                if w in self.of_warp:
                    merge(self.at_barrier.setdefault((kind, *k), {}), self.of_warp[w])

    def take(self, kind: str, warps: np.ndarray, *key: np.ndarray) -> None:
        if self.at_barrier:
            for w, *k in zip(warps.tolist(), *(a.tolist() for a in key)):
                if (kind, *k) in self.at_barrier:
                    merge(self.of_warp.setdefault(w, {}), self.at_barrier[(kind, *k)])


def _compact(left: list[Left]) -> list[Left]:
    """``left`` with its knowledge merged into one entry for each CTA and scope."""
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

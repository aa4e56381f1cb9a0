"""Order made through memory: releases and acquires, and what warps know of other clusters.

A release leaves the clocks of the warp at an address; an acquire that reads it takes them. Fences turn relaxed and
volatile accesses into releases and acquires (PTX ISA, "Memory Consistency Model": release and acquire patterns).
Within a cluster that is a join of clocks. Knowledge of other clusters is rare, so it is kept in dictionaries, which
travel with every later synchronisation of the warps that have some.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_nvfp4.sim.checks.clocks import Clocks

Knowledge = dict[int, np.ndarray]
"""Clocks (room,) by cluster of the launch."""


@dataclass
class Left:
    """What a release left at an address: the clocks (2, room) of a cluster, and foreign knowledge."""

    cluster: int
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
    numbers its clusters."""

    def __init__(self, clocks: Clocks, left: dict[int, list[Left]], cluster_of_warp: np.ndarray) -> None:
        self.clocks, self.left, self.cluster_of_warp = clocks, left, cluster_of_warp
        self.of_warp: dict[int, Knowledge] = {}
        self.at_barrier: dict[tuple, Knowledge] = {}
        self.fenced: dict[int, tuple[np.ndarray, Knowledge]] = {}
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

    def wrote(self, warps: np.ndarray, addresses: np.ndarray, release: bool, update: bool) -> None:
        """Strong writes. A plain strong write ends what was released before at the address, an ``update`` adds."""
        if not (release or self.fenced or (self.left and not update)):
            return
        rows = self.clocks.snapshot(warps) if release else None
        for j, (w, at) in enumerate(zip(warps.tolist(), addresses.tolist())):
            if release:
                gives = Left(int(self.cluster_of_warp[w]) & 0xFFFF, rows[j], self.of_warp.get(w, {}))
            elif w in self.fenced:
                clocks, foreign = self.fenced[w]
                gives = Left(int(self.cluster_of_warp[w]) & 0xFFFF, clocks, foreign)
            else:
                gives = None
            if not update:
                self.left.pop(at, None)
            if gives is not None:
                self.left.setdefault(at, []).append(gives)
                if len(self.left[at]) > 8:
                    self.left[at] = _compact(self.left[at])
        if release:
            self.clocks.now[warps] += 1

    def read(self, warps: np.ndarray, addresses: np.ndarray, acquire: bool) -> None:
        """Strong reads."""
        if not self.left:
            return
        for w, at in zip(warps.tolist(), addresses.tolist()):
            for left in self.left.get(at, ()):
                if acquire:
                    self._take(w, left)
                else:
                    self.seen.setdefault(w, []).append(left)

    def fence(self, warps: np.ndarray) -> None:
        """fence.acq_rel, fence.sc, membar."""
        if self.seen:
            for w in warps.tolist():
                for left in self.seen.pop(w, ()):
                    self._take(w, left)
        rows = self.clocks.release(warps)
        for j, w in enumerate(warps.tolist()):
            self.fenced[w] = (rows[j], dict(self.of_warp.get(w, {})))

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
    """``left`` with its knowledge merged into one entry a cluster."""
    by: dict[int, Left] = {}
    for one in left:
        have = by.get(one.cluster)
        if have is None:
            by[one.cluster] = Left(one.cluster, one.clocks, dict(one.foreign))
        else:
            have.clocks = _larger(have.clocks, one.clocks)
            merge(have.foreign, one.foreign)
    return list(by.values())

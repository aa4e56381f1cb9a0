"""Clusters: the positions of their CTAs, the rank in a shared address, and the cluster barrier.

Every shared address has the rank of its CTA in bits 24 and up, and not only those that ``mapa`` makes: NVIDIA's code
clears bit 24 of an address of its own CTA to reach the even CTA of a pair.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import LaunchError
from cute_nvfp4.sim.machine.launch import Launch

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
MAX_CLUSTER = 16
"""CTAs of the largest cluster, non-portable sizes included."""


class Clusters:
    """The clusters of a launch: ``count`` clusters of ``size`` CTAs. The grid numbers its clusters, and a cluster ranks
    its CTAs, with x fastest. Raises ``LaunchError`` for a cluster that is too large or does not divide the grid."""

    def __init__(self, launch: Launch) -> None:
        self.grid, self.shape = launch.grid, launch.cluster
        if any(g % c for g, c in zip(self.grid, self.shape)):
            raise LaunchError(
                f"{launch.title}: grid {self.grid} is not a multiple of the cluster {self.shape} in every dimension"
            )
        self.size = int(np.prod(self.shape))
        if self.size > MAX_CLUSTER:
            raise LaunchError(f"{launch.title}: a cluster of {self.shape} has {self.size} CTAs, at most {MAX_CLUSTER}")
        self.grid_of_clusters = tuple(g // c for g, c in zip(self.grid, self.shape))
        self.count = int(np.prod(self.grid_of_clusters))

    def coordinates(self, cluster: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns %ctaid (x, y, z) of the CTAs with these cluster numbers and ranks."""
        return tuple(c * s + r for c, s, r in zip(self.corner(cluster), self.shape, self.place(rank)))

    def corner(self, cluster: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns %clusterid (x, y, z) of the clusters with these numbers."""
        x, y, _ = self.grid_of_clusters
        return cluster % x, cluster // x % y, cluster // (x * y)

    def place(self, rank: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns %cluster_ctaid (x, y, z) of the CTAs with these ranks."""
        x, y, _ = self.shape
        return rank % x, rank // x % y, rank // (x * y)


class ClusterBarrier:
    """The barrier of every cluster of a wave (PTX ISA, "barrier.cluster").

    A phase ends when every thread of the cluster that has not exited has arrived in it. ``phase`` (clusters,) is the
    number of the phase under way; ``waits_for`` (warps, 32) is the phase in which a thread has arrived without having
    waited for it yet, or -1.
    """

    def __init__(self, cluster_of_warp: np.ndarray, clusters: int) -> None:
        self.cluster_of_warp = cluster_of_warp
        self.phase = np.zeros(clusters, np.int64)
        self.waits_for = np.full((len(cluster_of_warp), 32), -1, np.int64)

    def arrive(self, warps: np.ndarray, lanes: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Counts the arrival of the threads ``lanes`` (n, 32) of ``warps`` (n,).

        ``live`` (warps, 32) are the threads that have not exited. Returns the threads (n, 32) that had arrived before
        and not waited since; if there are any, no arrival is counted.
        """
        again = lanes & (self.waits_for[warps] >= 0)
        if not again.any():
            phase = self.phase[self.cluster_of_warp[warps]][:, None]
            self.waits_for[warps] = np.where(lanes, phase, self.waits_for[warps])
            self.settle(live)
        return again

    def settle(self, live: np.ndarray) -> bool:
        """Ends the complete phases; returns whether one ended. ``live`` (warps, 32) are the threads not yet exited."""
        here = self.waits_for == self.phase[self.cluster_of_warp][:, None]
        missing = np.bincount(self.cluster_of_warp, (live & ~here).sum(axis=1), len(self.phase))
        arrived = np.bincount(self.cluster_of_warp, here.sum(axis=1), len(self.phase))
        done = (missing == 0) & (arrived > 0)
        self.phase[done] += 1
        return bool(done.any())

    def passed(self, warps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Returns which of ``warps`` (n,) may go on: the phase in which their ``lanes`` (n, 32) arrived is over."""
        mine = np.where(lanes, self.waits_for[warps], -1).max(axis=1)
        return mine < self.phase[self.cluster_of_warp[warps]]

    def leave(self, warps: np.ndarray, lanes: np.ndarray) -> None:
        """Records that the lanes have waited, so that they may arrive again."""
        self.waits_for[warps] = np.where(lanes, -1, self.waits_for[warps])

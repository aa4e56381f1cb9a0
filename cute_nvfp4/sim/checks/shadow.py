"""Shadow memory: the epochs of the last write to every granule and of the reads since (FastTrack).

A granule has one last write. Reads that nothing orders among themselves stand in *planes*, made when they are needed,
and so do atomics since the last ordinary write. A new read replaces a read that it comes after. The operating system
zeroes arrays when they are touched, so unused planes and memory cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.sparse import zeros

MAX_PLANES = 32
"""The most epochs that a granule keeps side by side; what finds no place among them is dropped."""
RESERVED, RESERVED_SIZE = 8, 1 << 24
"""The number of planes reserved at once, for memories with fewer granules than ``RESERVED_SIZE``."""
UNIFORM = 16
"""The number of columns from which it pays to test whether all epochs of a row are the same."""


@dataclass(frozen=True)
class Actor:
    """Who makes an access: r agents, one a row. All arrays broadcast to the granules (r, m) or (q,) of the access."""

    clocks: Clocks
    instruction: Any
    epoch: np.ndarray  # the epochs to record
    base: np.ndarray  # where the agents' clocks begin in ``Clocks.flat``
    warps: np.ndarray  # the issuing warps
    thread: np.ndarray  # the component of the issuing thread, whose earlier accesses are in order
    lane: np.ndarray | None = None  # the lane of that thread; None if lanes of a warp are not told apart
    own: tuple[np.ndarray, ...] = ()  # components whose accesses are all in order with this one
    cluster: np.ndarray | None = None  # for global memory only: the number of the cluster in the launch
    strong: bool = False  # of two strong accesses neither races, unless one is ``narrow`` and excludes the other thread
    narrow: bool = False  # whether its scope excludes other CTAs (shared memory) or other clusters (global memory)
    proxy: bool = False  # whether the access goes through the asynchronous proxy
    layer: int = 1  # the layer of the clocks that says what this proxy may read
    distinct: bool = True  # whether no granule appears twice
    unchanged: Callable[[], bool] | None = None  # whether memory already holds all that is written
    clash: Callable[[], bool] | None = None  # whether two lanes write different values to one place
    together: bool = False  # whether lanes may clash although no granule appears twice
    # removes from conflicts the reads that the written values depend on (``Exchanges.still_bad``)
    depends: Callable[[Actor, np.ndarray, np.ndarray], np.ndarray | None] | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether the access is recorded under another component than the thread's."""
        epoch = np.ascontiguousarray(self.epoch.flat[:1])
        return bool(ep.components(epoch, self.clocks.bits)[0] != self.thread.flat[0])

    def at(self, shape: tuple[int, ...], where) -> Actor:
        """Returns the agents (q,) of the positions ``where`` among granules of ``shape``."""

        def pick(a):
            return None if a is None else np.broadcast_to(a, shape)[where]

        arrays = {name: pick(getattr(self, name)) for name in ("epoch", "base", "warps", "thread", "lane", "cluster")}
        return replace(self, **arrays, own=tuple(pick(o) for o in self.own))

    def gathered(self, index: np.ndarray) -> tuple[np.ndarray, Actor]:
        """Returns the granules and the agents with one row for all lanes of a warp at a granule."""
        epoch = np.broadcast_to(self.epoch, index.shape).ravel()
        first, lanes = self.clocks.lane_sets.gathered(index.ravel(), epoch)
        who = self.at(index.shape, np.unravel_index(first, index.shape))
        return index.ravel()[first], replace(who, epoch=ep.by_lane(who.epoch, lanes), lane=lanes)

    def unordered(self, found: np.ndarray, foreign: Callable | None = None) -> np.ndarray | None:
        """Returns which of the epochs ``found`` nothing orders before this access, or None if all are in order.

        The answer is (r, 1) if the epochs of each row are the same. ``foreign`` is ``Foreign.ordered``.
        """
        if found.ndim == 2 and found.shape[1] >= UNIFORM and (found == found[:, :1]).all():
            found = np.ascontiguousarray(found[:, :1])
        clocks = ep.clocks(found)
        component = ep.components(found, self.clocks.bits)
        bad = clocks > self.clocks.flat.take(self.base + component)
        if self.cluster is not None:
            bad |= (ep.labels(found, self.clocks.bits) != self.cluster) & (found != 0)
        if not bad.any():
            return None
        return self._excuse(found, clocks, component, bad, foreign)

    def _excuse(self, found, clocks, component, bad, foreign) -> np.ndarray | None:
        """Removes from ``bad`` what is in order for other reasons than the warp's clocks."""
        mine = True if self.cluster is None else ep.labels(found, self.clocks.bits) == self.cluster
        for own in self.own:
            bad = bad & ~((component == own) & mine)
        same = (self.clocks.thread_of(component) == self.thread) & mine
        if self.lane is not None:
            same = same & (ep.lanes(found) == self.lane) & (self.lane < ep.MANY)
        bad = bad & ~same
        if self.clocks.met_lanes and self.lane is not None and bad.any():
            bad = self._met(found, clocks, component, bad, mine)
        if self.strong:
            bad = bad & ~(ep.strong(found) & self._in_scope(found, component))
        if foreign is not None and self.cluster is not None and bad.any():
            number = ep.labels(found, self.clocks.bits)
            where = np.nonzero(bad & (number != self.cluster))
            # ``found`` may have one column, and ``bad`` one for each lane
            each = (np.broadcast_to(x, bad.shape)[where] for x in (self.warps, number, component, clocks))
            bad[where] = ~foreign(*each)
        return bad if bad.any() else None

    def _met(self, found, clocks, component, bad, mine) -> np.ndarray:
        """Removes from ``bad`` the accesses of lanes that have since met this lane at a bar.warp.sync of some lanes."""
        bad = np.array(bad)
        where = np.nonzero(bad & (self.clocks.thread_of(component) == self.thread) & mine)
        parts = (self.warps, clocks, ep.lanes(found), self.lane)
        each = list(zip(*(np.broadcast_to(x, bad.shape)[where].tolist() for x in parts)))
        met = {one: self.clocks.some_met(*one) for one in set(each)}
        bad[where] = [not met[one] for one in each]
        return bad

    def _in_scope(self, found: np.ndarray, component: np.ndarray) -> np.ndarray | bool:
        """Whether this access and those ``found``, if all are strong, name scopes that include the other thread."""
        narrow = ep.narrow(found) | self.narrow
        if not narrow.any():
            return True
        if self.cluster is not None:
            return ~narrow | (ep.labels(found, self.clocks.bits) == self.cluster)
        per = self.clocks.warps_per_cta
        theirs, mine = (x % self.clocks.per_cluster // per for x in (component.astype(np.int64), self.thread))
        # the component of an mbarrier does not say who signals it
        theirs = np.where(component < self.clocks.first_barrier, theirs, ep.lanes(found))
        return ~narrow | (theirs == mine)

    def unseen(self, found: np.ndarray, reads: bool = False) -> np.ndarray | None:
        """Returns which generic writes, or ``reads``, among ``found`` no fence has made visible to the asynchronous
        proxy, or None if all are visible."""
        if found.ndim == 2 and found.shape[1] >= UNIFORM and (found == found[:, :1]).all():
            found = np.ascontiguousarray(found[:, :1])
        component = ep.components(found, self.clocks.bits)
        generic = component < (len(self.clocks.own) * self.clocks.per_cluster if reads else self.clocks.generic)
        if self.cluster is not None:
            generic &= ep.labels(found, self.clocks.bits) == self.cluster
        if not generic.any():
            return None
        seen = self.clocks.flat.take(self.base + self.layer * self.clocks.room + component) if self.layer else 0
        bad = generic & (ep.clocks(found) > seen)
        return bad if bad.any() else None


class Planes:
    """The epochs that stand side by side at each of ``size`` granules; ``mask`` has one bit for each plane in use."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 1
        self.mask = zeros(size, np.uint32)
        # growing copies, and only what is touched takes memory
        self.store = zeros((RESERVED if size < RESERVED_SIZE else 1, size), np.uint64)

    def grow(self, count: int) -> None:
        """Makes room for ``count`` planes; ``count`` is a power of two."""
        if count > len(self.store):
            store = zeros((count, self.size), np.uint64)
            used = np.flatnonzero(self.mask)
            store[: self.count, used] = self.store[: self.count, used]
            self.store = store
        self.count = max(self.count, count)

    def present(self, index: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Returns (plane, epochs of the shape of ``index``, 0 for none) for every plane that holds an epoch there."""
        bits = int(np.bitwise_or.reduce(self.mask.take(index), axis=None))
        return [(p, self.store[p].take(index)) for p in range(self.count) if bits >> p & 1]

    def clear(self, index: np.ndarray) -> None:
        found = self.present(index)
        for p, _ in found:
            self.store[p][index] = 0
        if found:
            self.mask[index] = 0

    def remove(self, plane: int, index: np.ndarray, found: np.ndarray, keep: np.ndarray | None) -> None:
        """Removes the epochs ``found``, but for those marked by ``keep``, which the new access does not come after."""
        gone = found != 0 if keep is None else (found != 0) & ~np.broadcast_to(keep, found.shape)
        self.store[plane][index[gone]] = 0
        self.mask[index[gone]] &= ~np.uint32(1 << plane)

    def place(self, index: np.ndarray, who: Actor) -> None:
        """Records the actor's epochs, in place of epochs that they come after and that are no weaker."""
        strong = who.strong
        if strong:
            # Two atomics do not conflict, but neither comes after the other.
            who = replace(who, strong=False)
        if who.clocks.lane_sets is not None and not who.distinct and who.lane is not None and not who.asynchronous:
            index, who = who.gathered(index)
        epoch = np.broadcast_to(who.epoch, index.shape)
        thread = np.broadcast_to(who.thread, index.shape)
        start = ep.components(np.ascontiguousarray(epoch), who.clocks.bits).astype(np.int64)
        for attempt in range(MAX_PLANES):
            if attempt >= self.count:
                self.grow(min(MAX_PLANES, 2 * self.count))
            plane = (start + attempt) & (self.count - 1)
            at = plane * self.size + index
            old = self.store.reshape(-1).take(at)
            left = self._put(at, index, plane, old, epoch, who, strong)
            if left is None or not left.any():
                return
            index, epoch, thread, start = index[left], epoch[left], thread[left], start[left]
            who = who.at(left.shape, left)

    def _put(self, at, index, plane, old, epoch, who: Actor, strong: bool) -> np.ndarray | None:
        """Puts epochs into ``plane`` where it is free for them; returns which have to try another plane."""
        left = None
        if old.any():
            if (ep.same_agent(old, epoch, who.clocks.bits) if who.cluster is None else old == epoch).all():
                return None
            component = ep.components(np.ascontiguousarray(epoch), who.clocks.bits)
            mine = (ep.components(old, who.clocks.bits) == component) & (old != 0)
            if who.cluster is not None:
                mine &= ep.labels(old, who.clocks.bits) == ep.labels(np.ascontiguousarray(epoch), who.clocks.bits)
            late, weaker = who.unordered(old), None
            if strong:
                weaker = (old != 0) & (ep.strength(old) < ep.strength(np.ascontiguousarray(epoch)))
                mine &= ~weaker
            if late is not None:
                # Lanes of one warp that have not met since share one epoch.
                if who.clocks.lane_sets is None:
                    several = mine & late & (ep.lanes(old) != ep.lanes(np.ascontiguousarray(epoch)))
                    epoch = np.where(several, ep.by_many(epoch), epoch)
                else:
                    epoch, apart = who.clocks.lane_sets.merge(old, epoch, mine & late)
                    mine &= ~apart
                left = np.broadcast_to(late, old.shape) & ~mine
            if weaker is not None and weaker.any():
                left = weaker if left is None else left | weaker
            if left is not None:
                keep = ~left
                at, index, plane, epoch = at[keep], index[keep], plane[keep], epoch[keep]
        self.store.reshape(-1)[at] = epoch
        self.mask[index] |= np.left_shift(np.uint32(1), plane.astype(np.uint32))
        if not who.distinct:
            left = self._collisions(at, epoch, left)
        return left

    def _collisions(self, at, epoch, left) -> np.ndarray | None:
        """Handles rows that wrote one place of a plane: lanes of a warp share one epoch, others try another plane."""
        back = self.store.reshape(-1).take(at)
        lost = back != epoch
        if not lost.any():
            return left
        other = lost & (ep.sources(back) != ep.sources(np.ascontiguousarray(epoch)))
        together = lost & ~other
        if together.any():
            self.store.reshape(-1)[at[together]] = ep.by_many(epoch[together])
        if left is None:
            return other
        out = left.copy()
        out[~left] = other.ravel()
        return out


class Shadow:
    """The shadow of one memory of ``size`` granules.

    ``told(kind, who, index, where, epochs)`` is called for every conflict: ``where`` marks the granules, ``epochs``
    are the earlier accesses, and ``kind`` is "read after write", "write after read", "write after write", "proxy" (a
    missing proxy fence), "proxy read" (one after a read, if ``strict``), "uninitialized" or "same instruction".
    ``foreign`` is ``Foreign.ordered``, for global memory. ``last`` (size,) has the epochs of the last ordinary writes;
    ``readers`` and ``atomics`` have what came since.
    """

    def __init__(self, size: int, told: Callable[..., None], foreign: Callable | None = None) -> None:
        self.size, self.told, self.foreign, self.strict = size, told, foreign, False
        self.last = zeros(size, np.uint64)
        self.readers = Planes(size)
        self.atomics: Planes | None = None

    def report(self, kind: str, who: Actor, index: np.ndarray, bad: np.ndarray, epochs: np.ndarray) -> None:
        self.told(kind, who, index, bad, epochs)

    def access(self, index: np.ndarray, who: Actor, write: bool, flag: bool = False) -> None:
        """Checks and records an access; ``flag`` is ``reads`` for :meth:`write`, ``initialised`` for :meth:`read`."""
        if write:
            self.write(index, who, flag)
        else:
            self.read(index, who, flag)

    def read(self, index: np.ndarray, who: Actor, initialised: bool = False) -> None:
        """Checks and records a read. With ``initialised`` nobody need have written the granules."""
        last = self._check_writes(index, who, "read after write", not initialised)
        if who.proxy:
            self._check_proxy(index, who, last)
        self.readers.place(index, who)

    def write(self, index: np.ndarray, who: Actor, reads: bool = False) -> None:
        """Checks and records a write. With ``reads`` the same operation reads the granules first."""
        for plane, epochs in self.readers.present(index):
            bad = who.unordered(epochs, self.foreign)
            if bad is not None and who.depends is not None:
                bad = who.depends(who, bad, epochs)
            if bad is not None:
                self.report("write after read", who, index, bad, epochs)
            if self.strict and who.proxy and (unseen := who.unseen(epochs, reads=True)) is not None:
                self.report("proxy read", who, index, unseen, epochs)
            if who.strong and who.asynchronous:
                # Who sees the end of the operation need not know of the reads before it.
                later = replace(who, strong=False).unordered(epochs, self.foreign)
                self.readers.remove(plane, index, epochs, later)
        last = self._check_writes(index, who, "write after write", reads)
        if who.proxy:
            self._check_proxy(index, who, last)
        if who.strong:
            if self.atomics is None:
                self.atomics = Planes(self.size)
            self.atomics.place(index, who)
            return
        self.readers.clear(index)
        if self.atomics is not None:
            self.atomics.clear(index)
        self.last[index] = who.epoch
        if who.clash is not None:
            lost = self.last.take(index) != who.epoch
            if (lost.any() or who.together) and who.clash():
                lost = lost if lost.any() else ~lost
                self.report("same instruction", who, index, lost, self.last.take(index))

    def _check_writes(self, index: np.ndarray, who: Actor, kind: str, needed: bool) -> np.ndarray:
        """Reports earlier writes that are not in order, and unwritten granules if they are ``needed``; returns the
        epochs of the last writes."""
        last = self.last.take(index)
        atomics = self.atomics.present(index) if self.atomics is not None else []
        if needed and not last.all():
            empty = last == 0
            for _, epochs in atomics:
                empty &= epochs == 0
            if empty.any():
                self.report("uninitialized", who, index, empty, last)
        bad = who.unordered(last, self.foreign)
        for _, epochs in atomics:
            late = who.unordered(epochs, self.foreign)
            if late is not None:
                self.report(kind, who, index, late, epochs)
            if bad is not None:
                # What comes after an atomic comes after the write before it.
                loose = replace(who, strong=False).unordered(epochs, self.foreign)
                bad = bad & (epochs == 0 if loose is None else (epochs == 0) | loose)
        if bad is not None and bad.any() and not (who.unchanged is not None and who.unchanged()):
            self.report(kind, who, index, bad, last)
        return last

    def _check_proxy(self, index: np.ndarray, who: Actor, last: np.ndarray) -> None:
        """Reports generic writes that the asynchronous proxy does not see."""
        atomics = self.atomics.present(index) if self.atomics is not None else []
        for _, epochs in atomics:
            if (bad := who.unseen(epochs)) is not None:
                self.report("proxy", who, index, bad, epochs)
            last = np.where(epochs != 0, 0, last)
        if (bad := who.unseen(last)) is not None:
            self.report("proxy", who, index, bad, last)

    def forget(self, index: np.ndarray) -> None:
        """Clears the history of the granules, which hold nothing any more."""
        self.last[index] = 0
        self.readers.clear(index)
        if self.atomics is not None:
            self.atomics.clear(index)

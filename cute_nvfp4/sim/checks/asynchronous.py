"""Checks of asynchronous operations: copies, tensor-core operations, loads and stores of tensor memory.

An operation is checked when it is issued, against what the issuing thread knows then. The shadows record its accesses
under a component of the clocks that no warp knows of until it has observed the end of the operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.barrier_use import BarrierUse
from cute_nvfp4.sim.checks.cluster_start import ClusterStart
from cute_nvfp4.sim.checks.memory import Shadows
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.checks.spaces import CHUNK
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.machine.cluster import OFFSET_MASK
from cute_nvfp4.sim.machine.engine import Footprint, Pending
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.numerics.lanes import rounds
from cute_nvfp4.sim.tma.operations import NarrowFootprint
from cute_nvfp4.sim.tma.tensor_copy import TensorStore

_SYNCHRONOUS = ("st", "red")
"""Instructions that complete at an mbarrier but access memory through the generic proxy."""


@dataclass(frozen=True)
class _Agents:
    """Who makes the accesses of a footprint's r rows.

    ``issuer`` (r,) is the index of the issuing thread in the operation. ``component`` and ``clock`` (r,) are those
    that the accesses are recorded with. ``own`` has components (r,) whose accesses are in order with these. ``proxy``
    says whether the accesses go through the asynchronous proxy.
    """

    issuer: np.ndarray
    component: np.ndarray
    clock: np.ndarray
    own: tuple[np.ndarray, ...]
    proxy: bool


class AsynchronousAccesses(Listener):
    """Checks operations when they are issued.

    ``self_completing`` has the identities of tcgen05.ld instructions that count as over at once
    (``kernel.self_completing``).
    """

    def __init__(
        self,
        state: State,
        shadows: Shadows,
        barriers: BarrierUse,
        start: ClusterStart,
        self_completing: frozenset[int],
    ) -> None:
        self.start = start
        self.wave, self.clocks, self.labels = state.wave, state.clocks, state.labels
        self.cluster_of_warp, self.flying, self.flying_at = state.cluster_of_warp, state.flying, state.flying_at
        self.shadows, self.barriers, self.self_completing = shadows, barriers, self_completing
        # by the identity of a tcgen05.commit: the clocks that its arrival carries
        self.carried: dict[int, np.ndarray] = {}
        # by instruction, CTA and coordinates of a tensor store: the offset and the warp of the last one
        self.stored: dict[tuple[int, int, bytes], tuple[int, int]] = {}
        # keeps commits alive, so that their identities stay unique
        self.kept: list[Pending] = []

    def issued(self, pending: Pending, queued: bool) -> None:
        if _is_commit(pending):
            self._committed(pending)
            return
        kind = pending.completion.kind
        if kind == "mbarrier":
            self._signals(pending)
        if kind in self.flying or kind == "bulk_group":
            name = "bulk_read" if kind == "bulk_group" else kind
            clock = pending.group + 1 if kind == "bulk_group" else self.clocks.open[kind][pending.warps]
            np.maximum.at(self.flying[name], pending.warps, clock)
            self.flying_at[name][pending.warps] = self.labels.label(pending.instruction)
        prints = pending.footprints(self.wave)
        done = kind == "tmem_load" and id(pending.instruction) in self.self_completing
        for j, one in enumerate(prints):
            if j and _updates(prints[j - 1], one):
                self._footprint(pending, one, reads=True)
            elif j + 1 == len(prints) or not _updates(one, prints[j + 1]):
                self._footprint(pending, one, reads=False)
        if done:
            self.clocks.wait_all(kind, pending.warps)

    def starts(self, pending: Pending) -> None:
        """Gives the clocks that a commit carries to the mbarriers at which it arrives."""
        rows = self.carried.pop(id(pending), None)
        if rows is not None:
            slot = self.wave.mbarriers.slots(pending.offset)
            if rows.shape[-1] < self.clocks.room:
                rows = np.pad(rows, [(0, 0), (0, 0), (0, self.clocks.room - rows.shape[-1])])
            self.clocks.gather(rows[pending.issuer], pending.target, slot)

    def finished(self) -> None:
        self.carried.clear()
        self.kept.clear()

    def _committed(self, pending: Pending) -> None:
        """Handles tcgen05.commit: its arrival carries what the thread knows, and the end of its operations so far."""
        c, warps = self.clocks, pending.warps
        self.start.needed(pending.instruction, warps[pending.issuer], pending.target)
        slot = self.barriers.slots(pending.instruction.where(), pending.target, pending.offset)
        self.barriers.ready(pending.instruction, warps[pending.issuer], pending.target, slot, proxy=True)
        component, clock = c.component("tensor", warps), c.open["tensor"][warps]
        rows = c.known[warps].copy()
        rows[np.arange(len(warps)), :, component] = clock[:, None]
        self.carried[id(pending)] = rows
        self.kept.append(pending)
        # The commit arrives when the operations so far are over. Who knows that end need not wait for the arrival too.
        flying = self.flying["tensor"][warps]
        over = np.where(flying > 0, flying, clock)
        label = self.labels.label(pending.instruction)
        c.signal(pending.target, slot, component[pending.issuer], over[pending.issuer], label)
        c.commit("tensor", warps)

    def _signals(self, pending: Pending) -> None:
        """Checks the mbarriers at which an operation completes, and records that their CTAs must not exit before."""
        done = pending.completion
        slot = self.barriers.slots(pending.instruction.where(), done.cta, done.offset)
        issuer = issuer_of(pending, None, len(done.cta))
        self.start.needed(pending.instruction, pending.warps[issuer], done.cta)
        generic = pending.instruction.base in _SYNCHRONOUS
        self.barriers.ready(pending.instruction, pending.warps[issuer], done.cta, slot, proxy=not generic)
        if generic:
            self.clocks.visit(pending.warps[issuer], done.cta, slot)
        b = self.clocks.first_barrier + self.clocks.barrier(done.cta, slot)
        label = self.labels.label(pending.instruction)
        self.clocks.signal(done.cta, slot, b, self.wave.mbarriers.phase[done.cta, slot] + 1, label)

    def _agents(self, pending: Pending, one: Footprint) -> _Agents:
        c, kind = self.clocks, pending.completion.kind
        issuer = issuer_of(pending, one, len(one.cta))
        warps = pending.warps[issuer]
        generic = pending.instruction.base in _SYNCHRONOUS
        if kind == "mbarrier":
            done = pending.completion
            at = _completion_rows(pending, one, issuer)
            cta, offset = done.cta[at], done.offset[at]
            slot = self.wave.mbarriers.slots(offset)
            component = c.first_barrier + c.barrier(cta, slot)
            return _Agents(issuer, component, self.wave.mbarriers.phase[cta, slot] + 1, (), not generic)
        if kind == "tensor":
            component = c.component("tensor", warps)
            return _Agents(issuer, component, c.open["tensor"][warps], (component,), True)
        if kind == "bulk_group":
            name = "bulk_write" if one.write else "bulk_read"
            return _Agents(issuer, c.component(name, warps), pending.group[issuer] + 1, (), True)
        if kind == "cp_async":
            component = c.component("cp_async", warps)
            return _Agents(issuer, component, pending.group[issuer] + 1, (component,), False)
        if kind == "wgmma":
            return _Agents(issuer, c.component(kind, warps), c.open[kind][warps], (), True)
        if kind in ("tmem_load", "tmem_store"):
            component = c.component(kind, warps)
            # A store over what the same warp has loaded counts as in order: its values are taken to come from there.
            own = tuple(c.component(k, warps) for k in ("tmem_load", kind) if k in c.kinds)
            return _Agents(issuer, component, c.open[kind][warps], own if one.write else (), False)
        return _Agents(issuer, c.component("thread", warps), c.now[warps], (), False)

    def _footprint(self, pending: Pending, one: Footprint, reads: bool) -> None:
        agents = self._agents(pending, one)
        if pending.completion.kind == "cp_async":
            self._lanes(pending, one, agents)
            return
        for rows, distinct in _batches(one):
            self._touch(pending, one, agents, rows, reads, distinct)

    def _lanes(self, pending: Pending, one: Footprint, agents: _Agents) -> None:
        """Checks a cp.async, by which each lane copies its own few bytes."""
        every = np.arange(len(one.cta))
        if one.space == "global":
            address, length = one.place
            who = replace(self._who(pending, agents, every, True), distinct=False)
            self.shadows.touch_global(address, length, who, one.write, self.labels.label(pending.instruction))
            return
        who = replace(self._who(pending, agents, every, False).at((len(every), 1), (every, 0)), distinct=False)
        byte = one.cta * self.wave.shared_stride + (pending.addresses[0] & OFFSET_MASK) - SHARED_BASE
        self.shadows.barrier_words.touched(byte, pending.size, who, one.write)
        self.shadows.touch_shared(byte, pending.size, who, one.write)

    def _touch(self, pending: Pending, one: Footprint, agents: _Agents, rows, reads: bool, distinct: bool) -> None:
        cta = one.cta[rows]
        who = self._who(pending, agents, rows, one.space == "global")
        who = who if distinct else replace(who, distinct=False)
        if one.space != "global":
            self.start.needed(pending.instruction, who.warps[:, 0], cta)
        if one.space == "tensor":
            lanes, columns = one.place
            granules = self.shadows.tensor.granules(lanes, columns if len(columns) == 1 else columns[rows])
            self.shadows.tensor.cells.tile(cta, granules, who, one.write, one.write and reads)
        elif one.space == "shared":
            offset = (one.place if len(one.place) == 1 else one.place[rows]) - SHARED_BASE
            width = one.width if isinstance(one, NarrowFootprint) else CHUNK
            if one.write and self.shadows.barrier_words.near(offset, width):
                byte = cta[:, None] * self.wave.shared_stride + offset
                self.shadows.barrier_words.touched(byte, width, who, True)
            if width == CHUNK:
                self.shadows.shared.tile(cta, offset // CHUNK, who, one.write)
            else:
                byte = cta[:, None] * self.wave.shared_stride + offset
                self.shadows.touch_shared(byte, width, who, one.write)
        else:
            address, length = one.place
            address = address if len(address) == 1 else address[rows]
            if one.write and isinstance(pending, TensorStore) and pending.update is None:
                repeated = self._repeated(pending, agents.issuer[rows])
                who = replace(who, unchanged=lambda: repeated)
            self.shadows.touch_global(address, length, who, one.write, self.labels.label(pending.instruction))

    def _repeated(self, pending: TensorStore, rows: np.ndarray) -> bool:
        """Whether each of the stores ``rows`` repeats one that another warp of its CTA has issued by the same
        instruction: all warps of a CTA may issue one store, and then they write the same bytes."""
        same = True
        for k in np.atleast_1d(rows).tolist():
            key = (id(pending.instruction), int(pending.ctas[k]), pending.coords[k].tobytes())
            mine = (int(pending.offset[k]), int(pending.warps[k]))
            before = self.stored.get(key)
            same &= before is not None and before[0] == mine[0] and before[1] != mine[1]
            self.stored[key] = mine
        return same

    def _who(self, pending: Pending, agents: _Agents, rows, by_cluster: bool) -> Actor:
        c = self.clocks
        warps = pending.warps[agents.issuer[rows]]
        cluster = self.cluster_of_warp[warps][:, None] if by_cluster else None
        label = self.labels.label(pending.instruction) if cluster is None else cluster
        component, clock = agents.component[rows][:, None], agents.clock[rows][:, None]
        mods, lanes = pending.instruction.mods, getattr(pending, "lanes", None)
        # For a tensor-core operation, "lanes" are those of tensor memory.
        threads = isinstance(lanes, np.ndarray) and pending.engine != "tensor"
        strong = "reduce" in mods or pending.instruction.base == "red"
        issued_by = np.full((1, 1), ep.MANY)
        if strong and pending.completion.kind == "mbarrier":
            issued_by = (warps % c.per_cluster // c.warps_per_cta)[:, None]
        return Actor(
            c,
            pending.instruction,
            ep.pack(label, component, clock, issued_by, strong, bits=c.bits),
            c.base(warps)[:, None],
            warps[:, None],
            c.component("thread", warps)[:, None],
            lane=lanes[agents.issuer[rows]][:, None] if threads else None,
            own=tuple(o[rows][:, None] for o in agents.own),
            cluster=cluster,
            strong=strong,
            proxy=agents.proxy,
            layer=c.layers.global_ if by_cluster else c.layers.shared,
        )


def _is_commit(pending: Pending) -> bool:
    return pending.instruction.base == "tcgen05" and "commit" in pending.instruction.mods


def _updates(read: Footprint, write: Footprint) -> bool:
    """Whether two footprints are one operand in tensor memory, which the operation reads and then writes."""
    if read.space != "tensor" or read.write or not write.write or write.space != "tensor":
        return False
    mine, other = read.place, write.place
    same = mine.lanes is other.lanes or (isinstance(mine.lanes, slice) and mine.lanes == other.lanes)
    return same and np.array_equal(read.cta, write.cta) and np.array_equal(mine.columns, other.columns)


def issuer_of(pending: Pending, one: Footprint | None, count: int) -> np.ndarray:
    """Returns the index of the issuing thread for each of ``count`` rows, of the footprint ``one`` or, where that is
    None, of the completion."""
    if one is not None and one.rows is not None:
        return one.rows
    targets = getattr(pending, "targets", None)
    if one is None and hasattr(targets, "source"):
        return targets.source
    k = len(pending.warps)
    return np.arange(k) if count == k else np.repeat(np.arange(k), count // k)


def _completion_rows(pending: Pending, one: Footprint, issuer: np.ndarray) -> np.ndarray:
    """Returns the row of the completion that observes the end of each row of a footprint: for a multicast, the row of
    the same CTA; for what the operation reads, the first row of its thread."""
    by = issuer_of(pending, None, len(pending.completion.cta))
    if not one.write:
        return np.searchsorted(by, issuer)
    targets = getattr(pending, "targets", None)
    cta = targets.cta if hasattr(targets, "cta") else pending.completion.cta
    size = int(max(cta.max(), one.cta.max())) + 1
    return np.searchsorted(by * size + cta, issuer * size + one.cta)


def _batches(one: Footprint) -> list[tuple[Any, bool]]:
    """Returns groups of rows to check together, each with whether it names no byte twice.

    Reads do not conflict with each other, nor do writes to different bytes. Other rows of one CTA go into different
    groups, so that each is checked against those before it.
    """
    rounds = _rounds(one.cta)
    if len(rounds) > 1 and one.space != "tensor" and not one.write:
        return [(slice(None), False)]
    if len(rounds) > 1 and one.space == "shared" and len(one.place) > 1:
        places = (one.cta[:, None].astype(np.int64) << 32 | one.place).ravel()
        if len(np.unique(places)) == len(places):
            return [(slice(None), True)]
    return [(rows, True) for rows in rounds]


def _rounds(cta: np.ndarray) -> list:
    """Returns the rows in rounds, each with at most one row of a CTA."""
    if len(cta) == 1 or (np.diff(cta) > 0).all():
        return [slice(None)]
    return [np.sort(r) for r in rounds(cta)]

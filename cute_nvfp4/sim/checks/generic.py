"""Checks of ordinary loads, stores and atomics of lanes, and of registers that nobody has written."""

from __future__ import annotations

import ctypes

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.cluster_start import ClusterStart
from cute_nvfp4.sim.checks.exchanges import Exchanges
from cute_nvfp4.sim.checks.memory import Shadows
from cute_nvfp4.sim.checks.scopes import CLUSTER, GPU, scope_of
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.checks.tensor_maps import TensorMaps
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener, Mask, Values
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group

_LANES = np.arange(32)[None, :]
_MATRICES = ("ldmatrix", "stmatrix")
"""Instructions whose rows belong to no single lane: one lane gives the address of a row, others hold its values."""
_STRONG = ("relaxed", "acquire", "release", "volatile", "mmio")


def order(a: Access) -> str:
    """Returns the written memory order; without one, atomics are "relaxed" and other accesses "weak"."""
    words = a.instruction.mods
    found = next((w for w in words if w in (*_STRONG, "acq_rel", "sc")), None)
    return found or ("relaxed" if a.kind == "atomic" else "weak")


class GenericAccesses(Listener):
    """Checks accesses before they are made.

    Engines access memory by the same functions as lanes. Their accesses are checked when they are issued, so this
    listener ignores them while an engine runs (``quiet``).
    """

    def __init__(
        self, state: State, shadows: Shadows, maps: TensorMaps, exchanges: Exchanges | None, start: ClusterStart
    ) -> None:
        self.start = start
        self.depends = exchanges.still_bad if exchanges else None
        self.wave, self.clocks, self.labels, self.foreign = state.wave, state.clocks, state.labels, state.foreign
        self.cluster_of_warp, self.maps, self.findings = state.cluster_of_warp, maps, state.findings
        self.shadows = shadows
        self.quiet = False

    def undefined(self, g: Group, slot: int, i: Instruction) -> None:
        name = list(g.wave.run.kernel.slots)[slot].partition("@")[0]
        who = f"{g.thread()} in {g.wave.run.launch.title}"
        self.findings.hazard("undefined-register", f"{i.where()}: register {name} has never been written; {who}", i)

    def starts(self, pending: Pending) -> None:
        self.quiet = True

    def ended(self, pending: Pending) -> None:
        self.quiet = False

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        if self.quiet:
            return
        if a.instruction.base == "tensormap" and "replace" in a.instruction.mods and space == "global":
            # only the simulator reads the word around a replaced field; warps may replace a field by the same value
            return
        how = order(a)
        if how != "weak":
            who = self._threads(g, host, mask)
            self.foreign.read(*who, how in ("acquire", "acq_rel", "sc"), scope_of(a.instruction))
        self._access(g, a, space, host, mask, write=False, strong=how != "weak")

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        if self.quiet:
            return
        how = order(a)
        self._access(g, a, space, host, mask, write=True, strong=how != "weak", values=values)
        if a.instruction.base == "tensormap" and space == "global":
            self.maps.written(a.instruction, *self._threads(g, host, mask))
        if how != "weak":
            self.foreign.wrote(*self._threads(g, host, mask), how == "release", False, scope_of(a.instruction))

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        how, scope = order(a), scope_of(a.instruction)
        who = self._threads(g, host, mask)
        self.foreign.read(*who, how in ("acquire", "acq_rel", "sc"), scope)
        self._access(g, a, space, host, mask, write=True, strong=True)
        self.foreign.wrote(*who, how in ("release", "acq_rel", "sc"), True, scope)

    def _threads(self, g: Group, host: np.ndarray, mask: Mask) -> tuple[np.ndarray, np.ndarray]:
        """Returns (warps, addresses) of the active lanes, each pair once."""
        rows, cols = np.nonzero(g.lanes(mask))
        pairs = np.stack([g.warps[rows], np.broadcast_to(host, (g.n, 32))[rows, cols]], axis=1)
        pairs = np.unique(pairs, axis=0)
        return pairs[:, 0], pairs[:, 1]

    def _access(self, g, a, space, host, mask, write: bool, strong: bool, values: Values = ()) -> None:
        if space not in ("shared", "cluster", "global"):
            return
        if not strong or scope_of(a.instruction) >= GPU or len(ctas := np.unique(g.ctas())) == 1:
            self._part(g, a, space, host, mask, write, strong, values)
            return
        # CTAs that execute together are checked one after the other, so that each is checked against the others
        for cta in ctas.tolist():
            part = g.lanes(mask) & (g.ctas() == cta)[:, None]
            if part.any():
                self._part(g, a, space, host, part, write, strong, values)

    def _part(self, g, a, space, host, mask, write: bool, strong: bool, values: Values) -> None:
        if space != "global":
            address, who, _ = self._actor(g, a, host, mask, strong, False, values)
            byte = address - self.wave.shared.base
            if space == "cluster":
                self.start.needed(a.instruction, who.warps, byte // self.wave.shared_stride)
            self._shared(a, byte, who, write, a.kind == "atomic")
            return
        for region, where in self.shadows.globals.by_region(host):
            lanes = g.n * host.shape[-1]
            part = mask if where is None else g.lanes(mask) & np.broadcast_to(where, (g.n, 32))
            if part is not None and not part.any():
                continue
            now = self.clocks.now[g.warps]
            enter = self._enter(g, a, host, part, strong, values, now)
            self.shadows.globals.touch(region, write, lanes, enter, a.constant)

    def _enter(self, g, a, host, mask, strong: bool, values, now):
        warps, gmask, n = g.warps, g.mask, g.n

        def enter(watched):
            held = _Held(warps, gmask, n)
            address, who, label = self._actor(held, a, host, mask, strong, True, values, now)
            index, count = watched.granules(address, a.total)
            if count > 1:
                who = who.at(address.shape, np.ones(address.shape, bool))
                where = np.repeat(np.arange(index.size), count)
                who = who.at((index.size,), where)
                index = (index.ravel()[:, None] + np.arange(count)).ravel()
            return index, who, label

        return enter

    def _shared(self, a: Access, byte: np.ndarray, who: Actor, write: bool, atomic: bool) -> None:
        # An atomic, exch excepted, reads what it changes. tensormap.cp_fenceproxy also copies the unused half of a map.
        flag = atomic and "exch" not in a.instruction.mods
        flag = flag or (not write and "cp_fenceproxy" in a.instruction.mods)
        self.shadows.barrier_words.touched(byte, a.total, who, write)
        self.shadows.touch_shared(byte, a.total, who, write, flag)

    def _actor(self, g, a, host, mask, strong: bool, by_cluster: bool, values, now=None):
        """Returns (addresses, actor, label): (n, 1) when each warp has one address, (n, 32), or (q,) under a mask."""
        c, warps, n = self.clocks, g.warps, g.n
        label = self.labels.label(a.instruction)
        lanes, keep = _LANES, mask
        if a.instruction.base in _MATRICES:
            lanes = np.full((1, 1), ep.MANY)
        elif host.shape[-1] == 1:
            lanes, wide = np.full((1, 1), ep.MANY), None
            if mask is not None:
                wide = np.broadcast_to(mask, (n, 32))
                count = wide.sum(axis=1)
                lanes = np.where(count == 1, wide.argmax(axis=1), ep.MANY)[:, None]
                keep = None if count.all() else (count > 0)[:, None]
            if c.lane_sets is not None:
                lanes = c.lane_sets.of(np.ones((1, 32), bool) if wide is None else wide)
        shape = (n, host.shape[-1])
        address = np.broadcast_to(host, shape)
        thread = c.component("thread", warps)[:, None]
        cluster = self.cluster_of_warp[warps][:, None] if by_cluster else None
        clock = (c.now[warps] if now is None else now)[:, None]
        apart = a.kind == "load" and not by_cluster and "load" in c.kinds
        own = c.component("load", warps)[:, None] if apart else thread
        narrow = strong and scope_of(a.instruction) < (GPU if by_cluster else CLUSTER)
        row = ep.pack(label if cluster is None else cluster, own, clock, 0, strong, narrow, c.bits)
        who = Actor(
            c,
            a.instruction,
            row | (lanes.astype(np.uint64) << np.uint64(25)),
            c.base(warps)[:, None],
            warps[:, None],
            thread,
            lane=lanes,
            cluster=cluster,
            strong=strong,
            narrow=narrow,
            distinct=False,
            unchanged=(lambda: self._unchanged(g, a, host, mask, values)) if values else None,
            clash=(lambda: self._clash(g, a, host, mask, values)) if values and not strong else None,
            together=lanes.size == 1 and any(v.shape[-1] > 1 for v in values),
            depends=self.depends if values and not by_cluster else None,
        )
        if keep is not None:
            keep = np.broadcast_to(keep, shape)
            who, address = who.at(shape, keep), address[keep]
        return address, who, label

    def _elements(self, g, host, mask, values) -> tuple[np.ndarray, np.ndarray]:
        """Returns (addresses (q,), values (q, count)) of the active lanes."""
        lanes = np.ones((g.n, 32), bool) if g.mask is None else g.mask
        lanes = lanes if mask is None else np.broadcast_to(mask, (g.n, 32))
        columns = [np.broadcast_to(v, (g.n, 32))[lanes] for v in values]
        return np.broadcast_to(host, (g.n, 32))[lanes], np.stack(columns, axis=-1)

    def _unchanged(self, g, a, host, mask, values) -> bool:
        """Whether memory already holds what the store writes: then the order of the writes does not matter."""
        address, data = self._elements(g, host, mask, values)
        wanted = np.ascontiguousarray(data).view(np.uint8).reshape(len(address), -1)
        for at, row in zip(address.tolist(), wanted):
            there = np.frombuffer((ctypes.c_uint8 * a.total).from_address(at), np.uint8)
            if not np.array_equal(there, row):
                return False
        return True

    def _clash(self, g, a, host, mask, values) -> bool:
        """Whether two lanes store different values at one address."""
        address, data = self._elements(g, host, mask, values)
        order_ = np.argsort(address, kind="stable")
        address, data = address[order_], data[order_]
        same = address[1:] == address[:-1]
        return bool((same & (data[1:] != data[:-1]).any(axis=1)).any())


class _Held:
    """The fields of a group that a noted read needs later, without the group's registers."""

    def __init__(self, warps: np.ndarray, mask: Mask, n: int) -> None:
        self.warps, self.mask, self.n = warps, mask, n

"""Records what the replay needs to know of a launch, while the launch is executed.

For each warp of the sampled CTAs the recorder keeps the blocks that the warp runs, and notes of their instructions with
a variable latency (``Visit.happened``). For all CTAs it keeps which sectors of global memory they have touched.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from cute_nvfp4.sim.clock.flags import Flags, Key
from cute_nvfp4.sim.clock.notes import Arrive, Await, Bar, Commit, Copy, Passes, Product, Request, Transfer, Visit
from cute_nvfp4.sim.clock.sampling import Sample
from cute_nvfp4.sim.clock.sectors import Sectors
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Listener, Mask, Values
from cute_nvfp4.sim.machine.global_memory import SECTOR, GlobalMemory, Region
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group, Wave
from cute_nvfp4.sim.observe import banks
from cute_nvfp4.sim.tcgen05 import transfers
from cute_nvfp4.sim.tcgen05.mma import Mma

CLUSTER = -100
"""The second word of the key (``flags.Key``) of a cluster's barrier."""
_PAST_L1 = {"cg", "cv", "volatile", "relaxed", "acquire", "no_allocate"}
_RAISES, _LOOKS = {"release", "acq_rel", "relaxed", "volatile"}, {"acquire", "relaxed", "volatile"}
"""The qualifiers of stores that may raise flags, and of loads that may look at them."""


class Recorder(Listener):
    """Takes the notes of one launch. ``visits`` has them by warp: (CTA of the grid, warp of the CTA). ``expected`` says
    how many contributions each event needs."""

    def __init__(self, kernel: CompiledKernel, memory: GlobalMemory, sample: Sample, sectors: Sectors) -> None:
        self.visits: dict[tuple[int, int], list[Visit]] = {}
        self.expected: Counter[Key] = Counter()
        self._waves: list[tuple[np.ndarray, np.ndarray]] = []
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.kernel, self._working = kernel, False
        self._index = {id(i): n for n, i in enumerate(kernel.source.code)}
        self._sample, self._memory, self.sectors = sample, memory, sectors
        self.flags = Flags(self.expected)
        self.polls = [b.polls for b in kernel.blocks]

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        self._wave = wave
        taken = np.isin(wave.cta_index, self._sample.ctas)
        self._cta_taken = taken
        warps = np.flatnonzero(taken[wave.cta_of_warp])
        self._slot = np.full(wave.warps, -1)
        self._slot[warps] = np.arange(len(warps))
        self._lists: list[list[Visit]] = []
        for w in warps.tolist():
            key = (int(wave.cta_index[wave.cta_of_warp[w]]), int(wave.warp_in_cta[w]))
            self._lists.append(self.visits.setdefault(key, []))
        self._work = np.zeros(wave.warps)
        self._phase: Counter[tuple[int, int]] = Counter()
        self._round: Counter[tuple[int, int]] = Counter()
        self._cluster: Counter[int] = Counter()
        self._waves.append((wave.cta_index, self._work))
        yield self

    def closed(self) -> None:
        self._wave = None  # a timing keeps this recorder, for replays

    def work(self) -> np.ndarray:
        """Returns PTX instructions (CTAs of the grid, 2): of all warps of a CTA, and of its warp with the most."""
        ctas, each = zip(*((cta, counts.reshape(len(cta), -1)) for cta, counts in self._waves))
        each = np.concatenate(each)
        return np.stack((each.sum(axis=1), each.max(axis=1)), axis=1)[np.argsort(np.concatenate(ctas))]

    # what warps do

    def block(self, g: Group, index: int) -> None:
        block = self.kernel.blocks[index]
        if self.polls[index] is None:  # polls are no work: how many there are is chance
            self._work[g.warps] += len(block.code)
        for k in self._rows(g.warps)[1]:
            self._lists[k].append(Visit(index, {}))

    def _rows(self, warps: np.ndarray) -> tuple[list[int], list[int]]:
        """Returns the rows of the sampled ones among ``warps``, and the numbers of their lists of visits."""
        slots = self._slot[warps]
        rows = np.flatnonzero(slots >= 0)
        return rows.tolist(), slots[rows].tolist()

    def _note(self, warp_slot: int, i: Instruction, what: Any) -> None:
        visits = self._lists[warp_slot]
        if visits:
            visits[-1].happened.setdefault((self._index.get(id(i), -1), type(what)), []).append(what)

    # memory

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._access(g, a, space, host, mask)

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        self._access(g, a, space, host, mask)

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._access(g, a, space, host, mask)

    def _access(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        if space in ("param", "local") or self._working:
            return
        lanes, full = g.lanes(mask), np.broadcast_to(host, (g.n, 32))
        if a.instruction.base == "tensormap":
            if space != "global":  # SASS moves fewer words, each by itself: without a note an access is one pass
                return
            if "cp_fenceproxy" in a.instruction.mods:  # each lane writes a word
                full = full[np.arange(g.n), lanes.argmax(axis=1)][:, None] + 4 * np.arange(32)
                lanes = np.ones_like(lanes)
        if space == "global":
            through = a.kind == "load" and not _PAST_L1 & {word.split("::")[-1] for word in a.instruction.mods}
            self._requests(g.warps, full, lanes, a.instruction, a.kind, through)
            return
        rows, slots = self._rows(g.warps)
        if rows:
            for slot, *passes in zip(slots, *(n.tolist() for n in banks.passes(full[rows], lanes[rows], a.total))):
                self._note(slot, a.instruction, Passes(*passes))

    def _requests(
        self, warps: np.ndarray, address: np.ndarray, lanes: np.ndarray, i: Instruction, kind: str, through: bool
    ) -> None:
        """Notes requests of warps (n,) for addresses (n, 32) of global memory, none of which crosses a sector."""
        held = address[np.arange(len(warps)), lanes.argmax(axis=1)][:, None]
        sectors = np.sort(np.where(lanes, address, held) // SECTOR, axis=1)
        first = np.ones(sectors.shape, bool)
        first[:, 1:] = sectors[:, 1:] != sectors[:, :-1]
        first &= lanes.any(axis=1)[:, None]
        fresh = self._touch(sectors, first, kind)
        keys = self._flag(warps, address, lanes, i, kind)
        for row, slot in zip(*self._rows(warps)):
            mine = sectors[row][first[row]]
            if len(mine):
                lines = tuple(dict.fromkeys(((mine - self._offset(int(mine[0]))) // 4).tolist()))
                new = float(fresh[row][first[row]].sum())
                self._note(slot, i, Request(kind, len(mine), new, lines, through, keys.get(row, ())))

    def _offset(self, sector: int) -> int:
        """Returns how many sectors behind a line's start a tensor begins on this host, where on a GPU a line begins."""
        region = self._memory.find(sector * SECTOR + SECTOR - 1)
        return 0 if region is None else region.base // SECTOR % 4

    def _flag(
        self, warps: np.ndarray, address: np.ndarray, lanes: np.ndarray, i: Instruction, kind: str
    ) -> dict[int, list[Key]]:
        """Returns ``Request.keys`` by row."""
        words, keys = set(i.mods), {}
        looks = kind == "load" and words & _LOOKS and self.flags
        if not looks and (kind == "load" or not words & _RAISES):
            return keys
        taken = self._slot[warps] >= 0
        for row, warp in enumerate(warps.tolist()):
            cta, places = self._name(self._wave.cta_of_warp[warp]), address[row][lanes[row]].tolist()
            if looks:
                keys[row] = self.flags.looked(places, cta, bool(taken[row]))
            else:
                keys[row] = self.flags.raised(places, cta, self._index.get(id(i), -1), bool(taken[row]))
        return keys

    def _touch(self, sectors: np.ndarray, which: np.ndarray, kind: str) -> np.ndarray:
        """Returns what ``Sectors.touch`` says of ``sectors`` where ``which``, else 0. Keeps regions before a write."""
        out = np.zeros(sectors.shape)
        flat = sectors[which]
        if not len(flat):
            return out
        if kind != "load":
            self._keep(flat)
        out[which] = self.sectors.touch(flat, kind)
        return out

    def _keep(self, sectors: np.ndarray) -> None:
        """Copies the regions that ``sectors`` lie in, unless there is a copy already."""
        for region in self._memory.regions:
            inside = (sectors >= region.base // SECTOR) & (sectors < -(-region.end // SECTOR))
            if region.base not in self._kept and inside.any():
                self._kept[region.base] = _bytes(region), _bytes(region).copy()

    def restore(self) -> None:
        """Restores global memory to what it was before the launch."""
        for now, before in self._kept.values():
            now[:] = before

    # asynchronous copies

    def issued(self, pending: Pending, queued: bool) -> None:
        if pending.engine == "copy":
            self._copies(pending)
        if pending.engine == "tensor":
            self._tensor(pending)
        if pending.engine not in ("tma", "store"):
            return
        size, new, alike = self._copied(pending)
        done = pending.completion
        rows, slots = self._rows(pending.warps)
        taken = dict(zip(rows, slots))
        keys: list[list[Key]] = [[] for _ in pending.warps]
        if done.kind == "mbarrier" and done.cta is not None:
            each = len(done.cta) // len(pending.warps)
            for k, (cta, offset) in enumerate(zip(done.cta.tolist(), done.offset.tolist())):
                if self._cta_taken[cta]:
                    key = self._now(cta, int(self._wave.mbarriers.slots(np.array([offset]))[0]))
                    keys[k // max(each, 1) % len(keys)].append(key)
                    self.expected[key] += 1
        for row, slot in taken.items():
            copy = Copy(pending.engine == "store", int(size[row]), float(new[row]), int(alike[row]), tuple(keys[row]))
            self._note(slot, pending.instruction, copy)

    def _tensor(self, pending: Pending) -> None:
        """Notes asynchronous operations of tcgen05. tcgen05.ld and .st need no note: the SASS says all."""
        if isinstance(pending, Mma):
            d = pending.spec.idesc
            a = "tensor" if pending.spec.a is None else "shared"
            notes: list[Any] = [Product(d.m, d.n, pending.spec.cta_group, a)] * len(pending.warps)
        elif isinstance(pending, transfers.Commit):
            notes = [Commit(keys) for keys in self._commits(pending)]
        elif isinstance(pending, transfers.Copy):
            notes = [Transfer(16 * pending.chunks.size, pending.cta_group)] * len(pending.warps)
        elif isinstance(pending, transfers.Shift):
            notes = [Transfer(31 * 32, pending.cta_group)] * len(pending.warps)  # 32 bytes of 31 lanes
        else:
            return
        for row, slot in zip(*self._rows(pending.warps)):
            self._note(slot, pending.instruction, notes[row])

    def _commits(self, pending: transfers.Commit) -> list[tuple[Key, ...]]:
        """Returns the phases at which each issuing warp's commit arrives."""
        keys: list[list[Key]] = [[] for _ in pending.warps]
        slots = self._wave.mbarriers.slots(pending.offset)
        for issuer, cta, slot in zip(pending.issuer.tolist(), pending.target.tolist(), slots.tolist()):
            if self._cta_taken[cta]:
                keys[issuer].append(self._now(cta, slot))
                self.expected[keys[issuer][-1]] += 1
        return [tuple(found) for found in keys]

    def _copies(self, pending: Pending) -> None:
        """Notes cp.async as loads of its threads, at the time of the issue."""
        warps, row = np.unique(pending.warps, return_inverse=True)
        address, lanes = np.zeros((len(warps), 32), np.int64), np.zeros((len(warps), 32), bool)
        address[row, pending.lanes] = pending.addresses[1]
        lanes[row[pending.reads], pending.lanes[pending.reads]] = True
        self._requests(warps, address, lanes, pending.instruction, "load", "ca" in pending.instruction.mods)

    def starts(self, pending: Pending) -> None:
        self._working = True

    def ended(self, pending: Pending) -> None:
        self._working = False

    def _copied(self, pending: Pending) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns, for each operation of a batch: its bytes of global memory, how many of them come from DRAM or go
        there, and how many operations begin at its address."""
        count = len(pending.warps)
        size, new, alike = np.zeros(count), np.zeros(count), np.ones(count, int)
        store = pending.engine == "store"
        for f in pending.footprints(self._wave):
            if f.space != "global" or f.write != store:
                continue
            address, length = f.place
            if not address.size or not length:
                continue
            first = address // SECTOR
            last = (address + length - 1) // SECTOR
            each = first[..., None] + np.arange(int((last - first).max()) + 1)
            inside = each <= last[..., None]
            fresh = self._touch(each, inside, "store" if store else "load")
            rows = np.arange(count) if f.rows is None else f.rows
            _, which, many = np.unique(first.reshape(len(rows), -1)[:, 0], return_inverse=True, return_counts=True)
            alike[rows] = many[which.ravel()]
            np.add.at(size, rows, sectors_of(np.where(inside, each, -1).reshape(len(rows), -1)) * SECTOR)
            np.add.at(new, rows, fresh.reshape(len(rows), -1).sum(axis=1) * SECTOR)
        return size, new, alike

    # barriers

    def barrier_arrived(self, g: Group, i: Instruction, ident: np.ndarray, count: np.ndarray) -> None:
        ctas = self._wave.cta_of_warp[g.warps]
        for row, slot in zip(*self._rows(g.warps)):
            key = (self._name(ctas[row]), -1 - int(ident[row]), self._round[int(ctas[row]), int(ident[row])])
            self._count_at(slot, i, key)

    def barrier_ended(self, cta: np.ndarray, ident: np.ndarray) -> None:
        for key in zip(cta.tolist(), ident.tolist()):
            self._round[key] += 1

    def _count_at(self, slot: int, i: Instruction, key: Key) -> None:
        self.expected[key] += 1
        self._note(slot, i, Bar(key))

    def cluster_arrived(self, g: Group, lanes: np.ndarray, release: bool) -> None:
        for row, slot in zip(*self._rows(g.warps)):
            self._cluster[slot] += 1
            self._count_at(slot, self._last(slot, "arrive"), self._cluster_key(g, row, slot))

    def cluster_waited(self, g: Group, lanes: np.ndarray) -> None:
        for row, slot in zip(*self._rows(g.warps)):
            self._note(slot, self._last(slot, "wait"), Await(self._cluster_key(g, row, slot)))

    def _last(self, slot: int, what: str) -> Instruction:
        """Returns the last ``what`` ("arrive", "wait") at the cluster's barrier in the block that a warp runs."""
        code = self.kernel.blocks[self._lists[slot][-1].block].code
        return next((i for i, _ in reversed(code) if i.base == "barrier" and what in i.mods), code[-1][0])

    def _cluster_key(self, g: Group, row: int, slot: int) -> Key:
        cta = self._wave.cta_of_warp[g.warps[row]]
        first = cta - self._wave.rank[cta]
        return self._name(first), CLUSTER, self._cluster[slot]

    def _name(self, cta: int) -> int:
        return int(self._wave.cta_index[cta])

    def _now(self, cta: int, slot: int) -> Key:
        """Returns the key of an mbarrier's current phase."""
        return self._name(cta), slot, self._phase[cta, slot]

    def mbarrier_arrives(self, g: Group, i: Instruction, rows, lanes, cta, offset: np.ndarray, release: bool) -> None:
        self._arrivals(g, i, rows, cta, offset)

    def _arrivals(self, g: Group, i: Instruction, rows: np.ndarray, cta: np.ndarray, offset: np.ndarray) -> None:
        taken = self._cta_taken[cta]
        if not taken.any():
            return
        slots = self._wave.mbarriers.slots(offset)
        keys: dict[int, list[Key]] = {}
        for k in np.flatnonzero(taken).tolist():
            key = self._now(int(cta[k]), int(slots[k]))
            self.expected[key] += 1
            keys.setdefault(int(rows[k]), []).append(key)
        for row, found in keys.items():
            slot = int(self._slot[g.warps[row]])
            if slot >= 0:
                self._note(slot, i, Arrive(tuple(found)))

    def phase_ended(self, cta: np.ndarray, slot: np.ndarray, phase: np.ndarray) -> None:
        for c, s, p in zip(cta.tolist(), slot.tolist(), phase.tolist()):
            self._phase[c, s] = p

    def mbarrier_passed(self, g: Group, i: Instruction, mask: Mask, done, cta, slot, acquire: bool) -> None:
        yes = np.broadcast_to(done, (g.n, 32)) & g.lanes(mask)
        ctas, slots = np.broadcast_to(cta, (g.n, 32)), np.broadcast_to(slot, (g.n, 32))
        for row, number in zip(*self._rows(g.warps)):
            if yes[row].any():
                lane = int(yes[row].argmax())
                c, s = int(ctas[row, lane]), int(slots[row, lane])
                over = self._phase[c, s] - 1
                self._note(number, i, Await((self._name(c), s, over) if over >= 0 else None))


def sectors_of(sectors: np.ndarray) -> np.ndarray:
    """Returns how many distinct sectors each row (n, m) has, without -1. A box at the edge of a tensor comes in chunks
    of 16 bytes, two of which lie in one sector."""
    ordered = np.sort(sectors, axis=1)
    return (ordered[:, :1] >= 0).sum(axis=1) + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)


def _bytes(region: Region) -> np.ndarray:
    """Returns the live bytes of a region, not a copy."""
    return np.frombuffer((ctypes.c_uint8 * region.size).from_address(region.base), np.uint8)

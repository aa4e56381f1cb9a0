"""Counts what a launch does: instructions, memory requests, asynchronous operations, waits, matrix operations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Footprint, Pending, Wait
from cute_nvfp4.sim.machine.events import Listener, Mask, Values
from cute_nvfp4.sim.machine.global_memory import SECTOR, GlobalMemory
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group, Wave
from cute_nvfp4.sim.observe import banks
from cute_nvfp4.sim.observe.l2 import L2
from cute_nvfp4.sim.observe.result import EngineCounter, MemoryCounter, MmaCounter, Result, WaitCounter
from cute_nvfp4.sim.observe.steps import Steps
from cute_nvfp4.sim.tma.memory import CHUNK
from cute_nvfp4.sim.wgmma.fragments import WARPS
from cute_nvfp4.sim.wgmma.mma import ROWS
from cute_nvfp4.sim.wgmma.mma import Mma as WarpgroupMma


class Instructions(Listener):
    """Counts how often warps execute each basic block of a kernel. Every run has this client."""

    def __init__(self, kernel: CompiledKernel) -> None:
        self.kernel = kernel
        self.executed = [0] * len(kernel.blocks)

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        return (self,)

    def block(self, g: Group, index: int) -> None:
        self.executed[index] += g.n

    def result(self, launch: Launch) -> Result:
        """Returns the instruction counts of a launch that has ended."""
        opcodes: dict[str, int] = {}
        classes: dict[str, int] = {}
        lines: dict[int, int] = {}
        executed: dict[int, int] = {}
        index = {id(i): n for n, i in enumerate(self.kernel.source.code)}
        for block, times in zip(self.kernel.blocks, self.executed):
            for instruction, op in block.code if times else []:
                executed[index[id(instruction)]] = times
                lines[instruction.line] = max(times, lines.get(instruction.line, 0))
                opcodes[instruction.opcode] = opcodes.get(instruction.opcode, 0) + times
                classes[op.klass] = classes.get(op.klass, 0) + times
        warps = int(np.prod(launch.grid)) * -(-int(np.prod(launch.block)) // 32)
        counts = dict(sorted(opcodes.items())), dict(sorted(classes.items()))
        return Result(launch.kernel, warps, *counts, lines=lines, executed=executed)


class Counters(Listener):
    """Counts memory requests, operations of engines, matrix operations and waits. ``steps`` is the logical clock in
    which waits are counted."""

    def __init__(self, kernel: CompiledKernel, memory: GlobalMemory, l2: L2, steps: Steps) -> None:
        self._sizes, self._threads = [len(block.code) for block in kernel.blocks], 0
        self._regions, self._l2, self._steps = memory, l2, steps
        self._memory: dict[tuple[int, str, str], MemoryCounter] = {}
        self._touched: dict[tuple[str, int], np.ndarray] = {}
        self._engines: dict[int, EngineCounter] = {}
        self._mma: dict[str, MmaCounter] = {}
        self._waits: dict[int, WaitCounter] = {}

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """Begins a wave, in which no warp is parked yet."""
        self._parked: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._wave = wave
        return (self,)

    def closed(self) -> None:
        self._wave = None

    def block(self, g: Group, index: int) -> None:
        lanes = 32 * g.n if g.mask is None else int(g.mask.sum())
        self._threads += lanes * self._sizes[index]

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        if a.counted:
            self._request(g, a, space, host, mask)

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        self._request(g, a, space, host, mask)

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._request(g, a, space, host, mask)

    def requested(self, g: Group, a: Access, host: np.ndarray, mask: np.ndarray, size: int) -> None:
        self._request(g, a, "global", host, mask, size)

    def _request(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, size: int | None = None) -> None:
        """Counts one execution of a memory instruction by the lanes in ``mask``. ``size`` is the bytes of all lanes,
        where each lane does not access the full width."""
        key = (id(a.instruction), space, a.kind)
        if key not in self._memory:
            i = a.instruction
            self._memory[key] = MemoryCounter(i.text, i.line, i.loc, space, a.kind, a.total, a.policy)
        counter = self._memory[key]
        lanes = g.lanes(mask)
        takes_part = lanes.any(axis=1)
        counter.requests += int(takes_part.sum())
        counter.bytes += int(lanes.sum()) * a.total if size is None else size
        full = np.broadcast_to(host, (g.n, 32))
        if space in ("shared", "cluster"):
            done, ideal = banks.passes(full, lanes, a.total)
            counter.passes += int(done.sum())
            counter.ideal_passes += int(ideal.sum())
        if space != "global":
            return
        if not lanes.all():
            # Lanes that do not take part repeat the sector of one that does.
            held = full[np.arange(g.n), lanes.argmax(axis=1)][:, None]
            full = np.where(lanes, full, held)[takes_part]
        sectors = np.sort(full // SECTOR, axis=1)
        counter.sectors += len(sectors) + int((sectors[:, 1:] != sectors[:, :-1]).sum())
        self._touch(a.kind, distinct(sectors.ravel()))

    def issued(self, pending: Pending, queued: bool) -> None:
        if not queued:
            self.completed(pending)

    def completed(self, pending: Pending) -> None:
        i = pending.instruction
        counter = self._engines.get(id(i))
        if counter is None:
            counter = self._engines[id(i)] = EngineCounter(i.text, i.line, i.loc, pending.engine)
        operations = len(pending.warps) // (WARPS if i.base == "wgmma" else 1)
        counter.operations += operations
        # cp.async is executed as loads and stores, whose bytes ``complete`` adds
        for f in pending.footprints(self._wave) if pending.engine != "copy" else ():
            name = f"{f.space}_{'written' if f.write else 'read'}"
            setattr(counter, name, getattr(counter, name) + footprint_bytes(f))
            if f.space == "global" and (f.write or "reduce" not in i.mods):
                kind = ("atomic" if "reduce" in i.mods else "store") if f.write else "load"
                self._touch(kind, _sectors(f))
        if (work := mma_work(pending)) is not None:
            self._add_mma(work[0], operations, work[1])

    def _add_mma(self, kind: str, operations: int, each: int) -> None:
        counter = self._mma.setdefault(kind, MmaCounter(kind))
        counter.operations += operations
        counter.multiply_adds += operations * each

    def parked(self, g: Group, i: Instruction, wait: Wait | None) -> None:
        key, warps = id(i), g.warps
        if key not in self._parked:
            self._parked[key] = (np.zeros(self._wave.warps, np.int32), np.zeros(self._wave.warps, np.int64))
            self._waits.setdefault(key, WaitCounter(i.text, i.line, i.loc))
        parts, since = self._parked[key]
        since[warps[parts[warps] == 0]] = self._steps.now
        parts[warps] += 1

    def resumed(self, g: Group, i: Instruction) -> None:
        counter, (parts, since) = self._waits[id(i)], self._parked[id(i)]
        parts[g.warps] -= 1
        steps = self._steps.now - since[g.warps[parts[g.warps] == 0]]
        counter.parked += int((steps > 0).sum())
        counter.steps += int(steps.sum())

    def _touch(self, kind: str, sectors: np.ndarray) -> None:
        """Marks ``sectors`` (m,) as touched: they are distinct and in increasing order."""
        if not len(sectors):
            return
        self._l2.access(kind, sectors)
        low, high = int(sectors[0]), int(sectors[-1])
        for region in self._regions.regions:
            first, last = region.base // SECTOR, (region.end - 1) // SECTOR
            if last < low or first > high:
                continue
            whole = first <= low and high <= last
            inside = sectors if whole else sectors[(sectors >= first) & (sectors <= last)]
            if len(inside):
                key = (kind, region.base)
                if key not in self._touched:
                    self._touched[key] = np.zeros(last - first + 1, bool)
                self._touched[key][inside - first] = True

    def complete(self, base: Result) -> Result:
        """Returns ``base`` with all that was counted here."""
        distinct: dict[str, int] = {}
        for (kind, _), seen in self._touched.items():
            distinct[kind] = distinct.get(kind, 0) + int(seen.sum()) * SECTOR
        for opcode, times in base.opcodes.items():
            if (sync := _mma_sync(opcode)) is not None:
                self._add_mma(sync[0], times, sync[1])
        for (instruction, space, _), m in self._memory.items():
            if (copy := self._engines.get(instruction)) is not None and copy.engine == "copy":
                name = "global_read" if space == "global" else "shared_written"
                setattr(copy, name, getattr(copy, name) + m.bytes)
        return replace(
            base,
            memory=by_line(self._memory),
            distinct_bytes=distinct,
            engines=by_line(self._engines),
            waits=[w for w in by_line(self._waits) if w.parked],
            mma=sorted(self._mma.values(), key=lambda m: m.kind),
            l2=self._l2.traffic(),
            thread_instructions=self._threads,
        )


def by_line(table: dict[Any, Any]) -> list[Any]:
    """Returns the counters of ``table`` in the order of their PTX lines."""
    return sorted(table.values(), key=lambda c: c.line)


def distinct(sectors: np.ndarray) -> np.ndarray:
    """Returns the distinct ``sectors`` (m,), in increasing order."""
    ordered = np.sort(sectors)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def footprint_bytes(f: Footprint) -> int:
    """Returns the bytes of one operand, summed over the operations of a batch."""
    if f.space == "shared":
        return len(f.cta) * f.place.shape[1] * CHUNK
    if f.space == "tensor":
        lanes, columns = f.place
        rows = len(range(*lanes.indices(128))) if isinstance(lanes, slice) else len(lanes)
        return len(f.cta) * rows * columns.shape[1] * 4
    address, length = f.place
    return int(address.size * length)


def _sectors(f: Footprint) -> np.ndarray:
    """Returns the distinct sectors (m,) of a footprint in global memory."""
    address, length = f.place
    if not address.size or not length:
        return np.empty(0, np.int64)
    first, last = address.ravel() // SECTOR, (address.ravel() + length - 1) // SECTOR
    each = np.arange(int((last - first).max()) + 1)
    return np.unique(np.minimum(first[:, None] + each, last[:, None]))


def mma_work(pending: Pending) -> tuple[str, int] | None:
    """Returns the kind of an asynchronous matrix instruction and the multiply-adds of one operation, or None."""
    if isinstance(pending, WarpgroupMma):
        form = pending.form
        return f"wgmma {form.a}", ROWS * form.n * form.k
    if pending.engine != "tensor" or "mma" not in pending.instruction.mods:
        return None
    d = pending.spec.idesc
    return f"tcgen05.mma {d.kind}", d.m * d.n * d.k


def _mma_sync(opcode: str) -> tuple[str, int] | None:
    """Returns the kind (``.kind``, or the type of A) and the multiply-adds of an mma.sync, or None."""
    shape = re.search(r"\.m(\d+)n(\d+)k(\d+)\.", opcode)
    if not opcode.startswith("mma.") or shape is None:
        return None
    m, n, k = (int(x) for x in shape.groups())
    kind = re.search(r"\.kind::(\w+)", opcode) or re.search(r"\.row\.col(?:\.satfinite)?\.\w+\.(\w+)", opcode)
    return f"mma.sync {kind[1]}", m * n * k

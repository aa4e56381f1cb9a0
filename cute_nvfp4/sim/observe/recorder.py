"""The notes that a trace takes while a launch runs. They are cheap; bars are made of them when they are asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cute_nvfp4.sim.frontend.flow import Block
from cute_nvfp4.sim.frontend.model import Imm, Instruction
from cute_nvfp4.sim.machine.engine import Pending, Wait
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.wave import Group, Wave
from cute_nvfp4.sim.observe.steps import Steps

ENGINE_NAMES = {"tma": "TMA loads", "store": "TMA stores", "tensor": "tensor core", "copy": "cp.async"}
EVENTS_OF_OPERATION = 5
"""The events of an operation in the file: a bar, two ends of an arrow, two points of the curve of bytes in flight."""
MOST_ROLES = 3
PAUSE = 32
"""The longest pause, in steps, over which two bars of a warp are joined. A longer one shows that others were chosen."""


class Bar(NamedTuple):
    """A bar of a warp, from step ``begin`` up to but not including step ``end``. ``kind`` is "run" or "wait"."""

    begin: int
    end: int
    kind: str
    name: str
    args: dict[str, Any]


@dataclass
class Operation:
    """An operation of ``engine``, which ``warp`` of ``cta`` issued at step ``begin``. It ended at step ``end``, None if
    never. ``bytes`` are those that it moves from or to global memory."""

    engine: str
    cta: int
    warp: int
    begin: int
    name: str
    bytes: int
    where: str
    end: int | None = None

    def args(self) -> dict[str, Any]:
        out = {"instruction": self.where, "warp": self.warp, "issued": self.begin}
        return {**out, "bytes": self.bytes} if self.bytes else out


@dataclass
class Parked:
    """A wait of a warp, or of some of its lanes, from step ``begin`` to step ``end``, None for a wait without end."""

    begin: int
    name: str
    text: str
    end: int | None = None


@dataclass
class WaveRecord:
    """The events of the traced CTAs of one wave. ``roles`` and ``places`` describe each block of the kernel. ``steps``
    holds (step, warps, block) for each executed block, ``parks`` the waits of each warp."""

    title: str
    ctas: list[str]
    warps_per_cta: int
    begin: int
    roles: list[str]
    places: list[str]
    steps: list[tuple[int, np.ndarray, int]] = field(default_factory=list)
    parks: dict[int, list[Parked]] = field(default_factory=lambda: defaultdict(list))
    operations: list[Operation] = field(default_factory=list)
    end: int = 0
    _by_warp: tuple[int, dict[int, list[tuple[int, int]]]] = (-1, {})

    def timeline(self, warp: int) -> list[tuple[int, int]]:
        """Returns (step, block) for each block that a warp executed, in order."""
        if self._by_warp[0] != len(self.steps):
            out: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for step, warps, block in self.steps:
                for w in warps.tolist():
                    out[w].append((step, block))
            self._by_warp = (len(self.steps), out)
        return self._by_warp[1].get(warp, [])

    def bars(self, warp: int) -> list[Bar]:
        """Returns the bars of one warp. Successive blocks of the same role share a bar. Waits fill only gaps between
        blocks, as other lanes of the warp may go on."""
        out: list[Bar] = []
        waits = sorted(self.parks.get(warp, []), key=lambda p: p.begin)
        last = self.begin
        for step, block in [*self.timeline(warp), (self.end, -1)]:
            gaps = list(self._waits(waits, last, step))
            out += gaps
            if block >= 0:
                role = self.roles[block]
                near = out and not gaps and out[-1].kind == "run" and step - last <= PAUSE
                if near and role in ("", out[-1].name):
                    args = out[-1].args
                    out[-1] = out[-1]._replace(end=step + 1, args={**args, "blocks": args["blocks"] + 1})
                else:
                    args = {"at": self.places[block], "blocks": 1}
                    out.append(Bar(step, step + 1, "run", role or "compute", args))
                last = step + 1
        return out

    def _waits(self, waits: list[Parked], begin: int, end: int) -> Iterator[Bar]:
        for p in waits:
            if p.begin >= end:
                return
            low, high = max(begin, p.begin), end if p.end is None else min(end, p.end)
            if low < high:
                yield Bar(low, high, "wait", p.name, {"for": p.text})
                begin = high


@dataclass
class Room:
    """How many events a trace still takes, over all its launches."""

    events: int


class Recorder(Listener):
    """Takes the notes of one launch, which begins at step ``start`` of the trace. It traces the first ``clusters``
    clusters, while there is ``room``."""

    def __init__(
        self, kernel: CompiledKernel, launch: Launch, steps: Steps, start: int, clusters: int, room: Room
    ) -> None:
        self.kernel, self.start, self.last = kernel, start, start
        self._steps, self._clusters, self._room = steps, clusters, room
        self.title = launch.kernel
        self.waves: list[WaveRecord] = []
        self.untraced_ctas = self.dropped = 0
        self._roles = [role(b) for b in kernel.blocks]
        self._places = [_place(b) for b in kernel.blocks]
        self._record: WaveRecord | None = None
        self._warps = 0
        self._open: dict[tuple[int, int], list[Parked]] = {}
        self._in_flight: dict[int, list[Operation]] = {}

    def listeners(self, wave: Wave) -> Iterator[Listener]:
        """Opens the record of a wave, if any of its clusters are traced."""
        self._wave = wave
        clusters = min(self._clusters, wave.cluster_count)
        self._clusters -= clusters
        ctas = clusters * wave.cluster_size
        self.untraced_ctas += wave.count - ctas
        self._warps = ctas * wave.warps_per_cta
        self._open, self._in_flight, self._record = {}, {}, None
        if ctas:
            names = [wave.cta_name(c) for c in range(ctas)]
            begin = self.start + self._steps.now + 1
            self._record = WaveRecord(
                self.title, names, wave.warps_per_cta, begin, self._roles, self._places, end=begin
            )
            self.waves.append(self._record)
        yield self

    def block(self, g: Group, index: int) -> None:
        self._now()
        warps = self.traced(g.warps)
        if len(warps) and self._take(len(warps)):
            self._record.steps.append((self.last, warps, index))

    def parked(self, g: Group, i: Instruction, wait: Wait | None) -> None:
        for row, warp in enumerate(self.traced(g.warps).tolist()):
            if self._take(1):
                text = i.where() if wait is None else f"{wait.describe(row)}; {i.where()}"
                p = Parked(self._now(), self._wait_name(i, wait, row), text)
                self._record.parks[warp].append(p)
                self._open.setdefault((warp, id(i)), []).append(p)

    def resumed(self, g: Group, i: Instruction) -> None:
        for warp in self.traced(g.warps).tolist():
            if stays := self._open.get((warp, id(i))):
                stays.pop(0).end = self._now() + 1

    def issued(self, pending: Pending, queued: bool) -> None:
        rows = np.flatnonzero(pending.warps < self._warps)
        if not queued or not len(rows):
            return
        size = _global_bytes(pending, self._wave)
        here = self._in_flight[id(pending)] = []
        for row in rows.tolist():
            if self._take(EVENTS_OF_OPERATION):
                warp, i = int(pending.warps[row]), pending.instruction
                cta, inside = divmod(warp, self._wave.warps_per_cta)
                here.append(Operation(pending.engine, cta, inside, self._now(), _short(i), int(size[row]), i.where()))
        self._record.operations += here

    def completed(self, pending: Pending) -> None:
        for operation in self._in_flight.pop(id(pending), []):
            operation.end = self._now()

    def closed(self) -> None:
        self._wave = None  # a trace outlives its launches, and a wave has all their memory

    def _now(self) -> int:
        """Returns the current step of the trace, and notes it as the last one so far of the launch and its wave."""
        self.last = self.start + self._steps.now
        if self._record is not None:
            self._record.end = self.last + 1
        return self.last

    def traced(self, warps: np.ndarray) -> np.ndarray:
        return warps[: int(np.searchsorted(warps, self._warps))] if self._warps else warps[:0]

    def _take(self, events: int) -> bool:
        """Takes room for ``events``, and returns whether there was enough. Once there was not, there is none left."""
        if self._room.events < events:
            self._room.events = 0
            self.dropped += events
            return False
        self._room.events -= events
        return True

    def _wait_name(self, i: Instruction, wait: Wait | None, row: int) -> str:
        slots = getattr(wait, "slot", None)
        if slots is None:
            ident = i.operands[0].value if i.operands and isinstance(i.operands[0], Imm) else ""
            return f"wait {_short(i)} {ident}".rstrip()
        lane = int(wait.group.lanes()[row].argmax()) if slots.shape[1] > 1 else 0
        address = int(wait.group.wave.mbarriers.offset_of[int(slots[row, lane])])
        return f"wait mbarrier {self._variable(address)}"

    def _variable(self, address: int) -> str:
        """Returns ``name[j]`` of the shared variable at ``address``, or the address if it lies in none."""
        for v in self.kernel.source.variables.values():
            start = self.kernel.layout.address[v.name][1]
            if v.space == "shared" and start <= address < start + v.size:
                name = v.name.partition("@")[0]  # without the number of its scope
                return f"{name}[{(address - start) // 8}]" if v.size > 8 else name
        return f"{address:#x}"


def _global_bytes(pending: Pending, wave: Wave) -> np.ndarray:
    """Returns the bytes (k,) of global memory that each operation of a batch reads, or writes if it is a store."""
    out = np.zeros(len(pending.warps), np.int64)
    if pending.engine != "tensor":
        for f in pending.footprints(wave):
            if f.space == "global" and f.write == (pending.engine == "store"):
                rows = np.arange(len(f.cta)) if f.rows is None else f.rows
                np.add.at(out, rows, f.place.address.shape[1] * f.place.length)
    return out


def _short(i: Instruction) -> str:
    """Returns an opcode without the modifiers that tell a reader nothing."""
    dull = ("sync", "aligned", "shared", "global", "mbarrier", "b64", "b32", "cta_group", "L2", "release", "acquire")
    dull += ("tile", "bulk_group", "block_scale", "collector")
    return ".".join([i.base, *(m for m in i.mods if m.split("::")[0] not in dull)])


def _place(block: Block) -> str:
    """Returns the source line, or else the PTX line, of a block's first instruction."""
    first = block.code[0][0] if block.code else None
    return "" if first is None else first.loc or f"PTX line {first.line}"


def role(block: Block) -> str:
    """Returns the role of a block: the operations in it that are more than arithmetic, "" if there are none."""
    found = list(dict.fromkeys(filter(None, (_role(i, op.klass) for i, op in block.code))))
    return " + ".join(found[:MOST_ROLES]) + (" + …" if len(found) > MOST_ROLES else "")


def _role(i: Instruction, klass: str) -> str:
    head, first = i.base, i.mods[0] if i.mods else ""
    if head == "tcgen05":
        quiet = first.startswith(("wait", "fence", "relinquish"))
        return "" if quiet else f"tcgen05.{first}"
    if head == "mbarrier":
        return "" if first in ("test_wait", "try_wait", "pending_count") else f"mbarrier.{first}"
    if head in ("cp", "wgmma"):
        return "" if {"commit_group", "wait_group", "wait_all", "fence"} & set(i.mods) else _short(i)
    if head in ("ld", "st", "atom", "red"):
        space = klass.split(".")[-1]
        return "" if space == "param" else f"{head}.{space}" if head in ("ld", "st") else head
    return head if head in ("mma", "ldmatrix", "stmatrix", "clusterlaunchcontrol") else ""

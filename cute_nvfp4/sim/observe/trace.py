"""The time line of a launch: what each warp does and waits for, and which operations of the engines are in flight.

Time is logical. A step is a block of code that a group of warps executes, or an operation of an engine. Steps order
events; they are no measure of time. Warps at the same instruction run together and share their steps. Waves of CTAs
come one after the other, where a GPU would overlap them.

    trace = Trace()
    run(program, launch, memory, trace=trace)
    trace.write("launch.json")      # open it in https://ui.perfetto.dev
    trace.rows()                    # or draw it
"""

from __future__ import annotations

import functools
import heapq
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from cute_nvfp4.sim.machine.events import Client
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.observe.recorder import ENGINE_NAMES, Operation, Recorder, Room, WaveRecord
from cute_nvfp4.sim.observe.steps import Steps

CLOCK = "logical steps, shown as microseconds: one step is a block executed by a group of warps or an engine operation"
_TRACKS = {name: 1000 * (j + 1) for j, name in enumerate(ENGINE_NAMES)}
"""The thread number of each engine's first track in the file."""


class Row(NamedTuple):
    """One bar of the time line, from step ``begin`` up to but not including step ``end``. ``track`` names a warp or
    an engine ("warp 0", "TMA loads 2"); ``kind`` is "run", "wait" or "engine"."""

    cta: str
    track: str
    name: str
    begin: int
    end: int
    kind: str
    args: dict[str, Any]


class Trace:
    """The time lines of the launches that were run with ``run(..., trace=trace)``, one after the other.

    clusters: how many clusters of each launch are traced, the first ones.
    max_events: about how many events are kept, of all launches together; ``left_out`` says what is missing.
    """

    def __init__(self, clusters: int = 2, max_events: int = 100_000) -> None:
        self._clusters, self._room = clusters, Room(max_events)
        self._recorders: list[Recorder] = []

    def client(self, kernel: CompiledKernel, launch: Launch, steps: Steps) -> Client:
        """Returns a client that records the events of one launch."""
        start = self._recorders[-1].last + 1 if self._recorders else 0
        self._recorders.append(Recorder(kernel, launch, steps, start, self._clusters, self._room))
        return self._recorders[-1]

    @property
    def left_out(self) -> dict[str, int]:
        """How many "ctas" were not traced, and for how many "events" of the others there was no room."""
        return {
            "ctas": sum(r.untraced_ctas for r in self._recorders),
            "events": sum(r.dropped for r in self._recorders),
        }

    def rows(self) -> list[Row]:
        """Returns all bars, ordered by CTA and track. Bars of one track do not overlap."""
        return [row for wave in self._waves() for _, _, row in _wave_rows(wave)]

    def write(self, path: str | Path) -> None:
        """Writes a file that Perfetto and chrome://tracing read."""
        Path(path).write_text(json.dumps(self.json(), separators=(",", ":")))

    def json(self) -> dict[str, Any]:
        """Returns the trace in the Trace Event Format: a process is a CTA, its threads are warps and engines."""
        events: list[dict[str, Any]] = []
        for number, wave in enumerate(self._waves()):
            events += _Events(wave, 1 + 1000 * number).all()
        return {"traceEvents": events, "otherData": {"clock": CLOCK, "left_out": self.left_out}}

    def _waves(self) -> list[WaveRecord]:
        return [w for r in self._recorders for w in r.waves]


class _Placed(NamedTuple):
    """An operation in flight from ``begin`` to ``end``, on the track with thread number ``tid``."""

    tid: int
    operation: Operation
    begin: int
    end: int


def _wave_rows(wave: WaveRecord) -> list[tuple[int, int, Row]]:
    """Returns (CTA, thread number, bar) for each bar of a wave, ordered by CTA; warps come before engines."""
    out = []
    placed: dict[int, list[_Placed]] = defaultdict(list)
    for p in sorted(_place(wave), key=lambda p: (p.tid, p.begin)):
        placed[p.operation.cta].append(p)
    for cta, name in enumerate(wave.ctas):
        for w in range(wave.warps_per_cta):
            for bar in wave.bars(cta * wave.warps_per_cta + w):
                out.append((cta, w + 1, Row(name, f"warp {w}", bar.name, bar.begin, bar.end, bar.kind, bar.args)))
        for p in placed[cta]:
            o = p.operation
            out.append((cta, p.tid, Row(name, _track(p.tid), o.name, p.begin, p.end, "engine", o.args())))
    return out


@functools.cache
def _track(tid: int) -> str:
    name = ENGINE_NAMES[list(_TRACKS)[tid // 1000 - 1]]
    return name + (f" {tid % 1000 + 1}" if tid % 1000 else "")


def _place(wave: WaveRecord) -> list[_Placed]:
    """Places operations, which last from issue to completion, each on the first free track of its engine. The tensor
    core works in order, so its operations begin when the one before has ended."""
    out: list[_Placed] = []
    in_order: dict[int, list[int]] = defaultdict(list)
    tracks: dict[tuple[int, str], _Tracks] = defaultdict(_Tracks)
    for o in sorted(wave.operations, key=lambda o: (o.begin, o.end or wave.end)):
        begin, end = o.begin, o.end or wave.end
        if o.engine == "tensor":
            ends = in_order[o.cta]
            index = next((j for j, busy in enumerate(ends) if busy < end), len(ends))
            begin = max([begin, *ends[index : index + 1]])
            ends[index : index + 1] = [end]
        else:
            index = tracks[o.cta, o.engine].take(begin, end)
        out.append(_Placed(_TRACKS[o.engine] + index, o, begin, end))
    return out


class _Tracks:
    """The tracks of an engine of a CTA. Hundreds of stores may be in flight, so the first free track is not searched
    for."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []  # a heap of (end, track)
        self._free: list[int] = []  # a heap
        self._count = 0

    def take(self, begin: int, end: int) -> int:
        """Returns the first track that is free at ``begin``, which grows from call to call, and takes it up to
        ``end``."""
        while self._busy and self._busy[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            index = heapq.heappop(self._free)
        else:
            index, self._count = self._count, self._count + 1
        heapq.heappush(self._busy, (end, index))
        return index


class _Events:
    """The events of one wave in the file, whose first CTA has the process number ``first``."""

    def __init__(self, wave: WaveRecord, first: int) -> None:
        self.wave, self.first = wave, first

    def all(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        rows = _wave_rows(self.wave)
        for cta, name in enumerate(self.wave.ctas):
            out.append(self._meta("process_name", cta, 0, {"name": f"{name}, {self.wave.title}"}))
            out.append(self._meta("process_sort_index", cta, 0, {"sort_index": self.first + cta}))
        for cta, tid, track in sorted({(c, t, r.track) for c, t, r in rows}):
            out.append(self._meta("thread_name", cta, tid, {"name": track}))
            out.append(self._meta("thread_sort_index", cta, tid, {"sort_index": tid}))
        for cta, tid, r in rows:
            out.append(
                {
                    **{"ph": "X", "name": r.name, "cat": r.kind, "pid": self.first + cta, "tid": tid},
                    **{"ts": r.begin, "dur": r.end - r.begin, "args": r.args},
                }
            )
        return out + self._flows() + self._in_flight()

    def _meta(self, name: str, cta: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self.first + cta, "tid": tid, "args": args}

    def _flows(self) -> list[dict[str, Any]]:
        """Returns an arrow for each operation, from the warp that issues it to its end."""
        out = []
        for number, (tid, o, _, end) in enumerate(_place(self.wave)):
            if o.end is None:
                continue
            both = {"name": "async", "cat": "async", "id": self.first * 1_000_000 + number, "pid": self.first + o.cta}
            out.append({"ph": "s", **both, "tid": o.warp + 1, "ts": o.begin + 0.5})
            out.append({"ph": "f", "bp": "e", **both, "tid": tid, "ts": end - 0.5})
        return out

    def _in_flight(self) -> list[dict[str, Any]]:
        """Returns curves of the bytes in flight (asked for, and not there yet) by CTA and engine."""
        change: dict[tuple[int, str], dict[int, int]] = {}
        for o in self.wave.operations:
            steps = change.setdefault((o.cta, o.engine), {})
            for step, size in ((o.begin, o.bytes), (o.end, -o.bytes)):
                if size and step is not None:
                    steps[step] = steps.get(step, 0) + size
        out = []
        for (cta, engine), steps in change.items():
            level = 0
            for step in sorted(steps):
                level += steps[step]
                name = f"bytes in flight, {ENGINE_NAMES[engine]}"
                out.append({"ph": "C", "name": name, "pid": self.first + cta, "ts": step, "args": {"bytes": level}})
        return out

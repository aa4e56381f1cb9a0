"""The event queue: warps of the sampled SMs issue their instructions in order, and wait for what they must.

Time is in cycles of an SM from the start of the first CTA. Deterministic: of two warps at one time the one that came
first in the queue goes first.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from cute_nvfp4.sim.clock.machine import Machine
from cute_nvfp4.sim.clock.memory import Port, Shared
from cute_nvfp4.sim.clock.recorder import Arrive, Await, Bar, Copy, Key, Passes, Recorder, Request, Visit
from cute_nvfp4.sim.clock.sampling import Place, Sample
from cute_nvfp4.sim.clock.sass import NO_SCOREBOARD, MachineCode
from cute_nvfp4.sim.clock.steps import PIPES, REASONS, Step, stepper
from cute_nvfp4.sim.errors import ClockError
from cute_nvfp4.sim.observe.timing import Wait

SCHEDULERS, BOARDS = 4, 6
_NOTES = {
    **{"shared": (Passes,), "load": (Request, Passes), "store": (Request, Passes), "atomic": (Request, Passes)},
    **{"copy": (Request,), "barrier": (Bar,), "mbarrier": (Arrive, Await), "bulk": (Copy,), "cluster_arrive": (Bar,)},
    **{"cluster_wait": (Await,), "copies_end": (), "copies_wait": (), "wgmma": (), "wgmma_wait": (), "fence": ()},
}
"""What may have happened at an instruction of each kind."""
WORTH_SHOWING = 40
"""Cycles of a wait that a time line shows."""


Happened = dict[tuple[int, type], list[Any]]


class Sm:
    """One SM: what its schedulers, pipes and memory are busy with until when."""

    def __init__(self, machine: Machine, shared: Shared, weight: float, l1_bytes: int) -> None:
        self.free = [0.0] * SCHEDULERS
        self.pipes = [[0.0] * len(PIPES) for _ in range(SCHEDULERS)]
        self.tensor = [0.0] * SCHEDULERS
        self.port, self.weight = Port(machine, shared, weight, l1_bytes), weight
        self.issued = 0


class Warp:
    """One warp: where it is in its program, and what it waits for."""

    __slots__ = (
        *("at", "boards", "cta", "groups", "number", "open", "program", "ready", "reason", "reasons", "sm", "sub"),
        *("tensor", "waits", "warp", "happened", "used"),
    )

    def __init__(self, number: int, cta: int, warp: int, sm: Sm, program: list[tuple[list[Step], Happened]]) -> None:
        self.number, self.cta, self.warp, self.sm, self.sub = number, cta, warp, sm, warp % SCHEDULERS
        self.program, self.at, self.ready = program, (0, 0), 0.0
        self.boards, self.reasons = [0.0] * BOARDS, [""] * BOARDS
        self.groups: list[float] = []
        self.tensor: list[float] = []
        self.open, self.reason = 0.0, "issue"
        self.waits: list[Wait] = []
        self.used: Counter[tuple[int, type]] = Counter()


class Replay:
    """Replays what a recorder has heard; ``run`` returns the cycles until the last sampled warp has ended."""

    def __init__(self, recorder: Recorder, code: MachineCode, sample: Sample, machine: Machine, l1_bytes: int) -> None:
        self.machine, self.code, self.sample, self.recorder = machine, code, sample, recorder
        self.shared = Shared(machine)
        self._step = stepper(machine)
        self._lists = [[self._step(slot) for slot in slots] for slots in code.blocks]
        self._queue: list[tuple[float, int, Warp]] = []
        self._order = 0
        self._left = Counter(recorder.expected)
        self._when: dict[Key, float] = defaultdict(float)
        self._over: dict[Key, float] = {}
        self._barriers: dict[Key, float] = defaultdict(float)
        self._waiting: dict[Key, list[Warp]] = defaultdict(list)
        self._places: list[tuple[Place, list[Sm]]] = []
        self.warps: list[Warp] = []
        self.lost: Counter[str] = Counter()
        self._l1_bytes = l1_bytes
        self._alive: Counter[int] = Counter()
        self._next: dict[int, Iterator[tuple[int, ...]]] = {}
        self._place_of: dict[int, int] = {}
        self._cluster_of: dict[int, tuple[int, ...]] = {}
        self._still: Counter[tuple[int, ...]] = Counter()
        self.end, self.unmatched = 0.0, 0
        self._handlers: dict[str, Callable[[Warp, Step, Any, float], float | None]] = {
            name: getattr(self, f"_{name}")
            for name in (
                *("shared_access", "load", "store", "atomic", "copy", "copies_end", "copies_wait", "barrier"),
                *("mbarrier", "bulk", "cluster_arrive", "cluster_wait", "wgmma", "wgmma_wait", "fence"),
            )
        }
        self._handlers["shared"] = self._handlers.pop("shared_access")

    # CTAs

    def run(self) -> float:
        """Cycles from the start of the first CTA to the end of the last."""
        size = len(self.sample.places[0].clusters[0])
        for number, place in enumerate(self.sample.places):
            sms = [Sm(self.machine, self.shared, place.weight, self._l1_bytes) for _ in range(size)]
            self._places.append((place, sms))
            self._next[number] = iter(place.clusters)
            begin = self.machine["launch.cta_skew"] * place.number / max(1, self.machine.sms // size)
            for k in range(place.together):
                self._start(number, begin + k * self.machine["launch.cta_interval"])
        while self._queue:
            time, _, warp = heapq.heappop(self._queue)
            self._go(warp, time)
        stuck = [w for waiting in self._waiting.values() for w in waiting]
        if stuck:
            raise ClockError.of("the replay", got=f"{len(stuck)} warps that wait for ever", expected="an end")
        return self.end

    def _start(self, number: int, time: float) -> None:
        """Starts the next cluster of a place."""
        cluster = next(self._next[number], None)
        if cluster is None:
            return
        _, sms = self._places[number]
        for rank, cta in enumerate(cluster):
            self._place_of[cta], self._cluster_of[cta] = number, cluster
            for w in self._warps_of(cta):
                program = self._program(self.recorder.visits[cta, w])
                warp = Warp(len(self.warps), cta, w, sms[rank], program)
                warp.ready = time
                self.warps.append(warp)
                self._still[cluster] += 1
                self._push(time, warp)

    def _warps_of(self, cta: int) -> list[int]:
        out, w = [], 0
        while (cta, w) in self.recorder.visits:
            out.append(w)
            w += 1
        return out

    def _program(self, visits: list[Visit]) -> list[tuple[list[Step], Happened]]:
        """The lists of steps that a warp goes through, each with what happened at its instructions."""
        leads, passes = self.code.leads, self.code.passes
        out: list[tuple[list[Step], Happened]] = []
        before, count = -1, 0
        for visit in visits:
            lead = leads[visit.block]
            if visit.block == lead:
                again = lead == before and count % passes[lead]
                count = count + 1 if lead == before else 1
                before = lead
                if not again:
                    out.append((self._lists[lead], {}))
            if not out:
                out.append((self._lists[lead], {}))
            for index, what in visit.happened.items():
                out[-1][1].setdefault(index, []).extend(what)
        return out

    def _push(self, time: float, warp: Warp) -> None:
        self._order += 1
        heapq.heappush(self._queue, (time, self._order, warp))

    # issue

    def _go(self, warp: Warp, time: float) -> None:
        """Lets a warp issue from ``time`` on, as long as no other comes before it."""
        queue = self._queue
        while True:
            part, index = warp.at
            if part >= len(warp.program):
                self._finish(warp, max(time, warp.ready))
                return
            steps, happened = warp.program[part]
            if index >= len(steps):
                self._left_over(warp, happened)
                warp.at = (part + 1, 0)
                warp.used.clear()
                continue
            step = steps[index]
            ready = warp.ready
            begin, reason = ready, "issue"
            for board in step.waits:
                if warp.boards[board] > begin:
                    begin, reason = warp.boards[board], warp.reasons[board]
            sm, sub = warp.sm, warp.sub
            free = sm.free[sub]
            pipes = sm.pipes[sub]
            actual = begin if begin > free else free
            if pipes[step.pipe] > actual:
                actual = pipes[step.pipe]
            if queue and actual > queue[0][0] and actual > time:
                self._push(actual, warp)
                return
            if actual > ready:
                self._lose(warp, ready, begin, actual, reason, step)
            sm.free[sub] = actual + 1.0
            pipes[step.pipe] = actual + step.interval
            sm.issued += 1
            warp.at = (part, index + 1)
            warp.ready = actual + step.stall
            if step.kind == "plain":
                if step.releases != NO_SCOREBOARD:
                    self._release(warp, step, actual + step.latency, PIPES[step.pipe])
            else:
                what = self._what(warp, step, happened)
                if self._handlers[step.kind](warp, step, what, actual) is None:
                    return  # parked
            time = warp.ready
            if queue and queue[0][0] < time:
                self._push(time, warp)
                return

    def _what(self, warp: Warp, step: Step, happened: Happened) -> Any:
        """What happened at this instruction, the first time it is met in this visit and so on."""
        for kind in _NOTES[step.kind]:
            key = (step.source, kind)
            notes = happened.get(key)
            if notes and warp.used[key] < len(notes):
                warp.used[key] += 1
                return notes[warp.used[key] - 1]
        return None

    def _left_over(self, warp: Warp, happened: Happened) -> None:
        """Arrivals and copies of instructions that the machine code has elsewhere: others wait for them."""
        for key, notes in happened.items():
            for what in notes[warp.used[key] :]:
                keys = (what.key,) if isinstance(what, Bar) else what.keys if isinstance(what, (Arrive, Copy)) else ()
                for told in keys:
                    self.unmatched += 1
                    self._contribute(told, warp.ready)

    def _lose(self, warp: Warp, ready: float, begin: float, actual: float, reason: str, step: Step) -> None:
        if begin > ready:
            self.lost[reason] += begin - ready
            if begin - ready >= WORTH_SHOWING:
                warp.waits.append(Wait(ready, begin, reason, step.source))
        if actual > begin:
            self.lost["issue"] += actual - begin

    def _release(self, warp: Warp, step: Step, time: float, reason: str) -> None:
        for board in (step.releases, step.reads):
            if board != NO_SCOREBOARD and time > warp.boards[board]:
                warp.boards[board], warp.reasons[board] = time, REASONS.get(reason, reason)

    def _finish(self, warp: Warp, time: float) -> None:
        self.end = max(self.end, time)
        cluster = self._cluster_of[warp.cta]
        self._still[cluster] -= 1
        if not self._still[cluster]:
            self._start(self._place_of[warp.cta], time + self.machine["launch.cta_gap"])

    # what takes a variable time: each returns something but None, or parks the warp

    def _shared_access(self, warp: Warp, step: Step, what: Passes | None, time: float) -> float:
        done = warp.sm.port.passes(time, what.passes if what is not None else 1)
        self._release(warp, step, done + step.latency, "shared")
        return done

    def _load(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        if isinstance(what, Passes):
            return self._shared_access(warp, step, what, time)
        if what is None:
            return time
        answer = warp.sm.port.load(time, what)
        self._release(warp, step, answer.time, answer.by)
        return time

    def _store(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        if isinstance(what, Request):
            self._release(warp, step, warp.sm.port.store(time, what), "l1")
        elif what is not None:
            return self._shared_access(warp, step, what, time)
        return time

    def _atomic(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        if isinstance(what, Request):
            answer = warp.sm.port.atomic(time, what)
            self._release(warp, step, answer.time + self.machine["atomic.latency"], "atomic")
        return time

    def _copy(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        if isinstance(what, Request):
            answer = warp.sm.port.load(time, what)
            warp.open = max(warp.open, answer.time)
            self._release(warp, step, time + self.machine["l1.cycles_per_request"], "l1")
        return time

    def _copies_end(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        warp.groups.append(warp.open)
        warp.open = 0.0
        return time

    def _copies_wait(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        left = int(step.slot.operands.split(",")[1].strip(), 0) if "," in step.slot.operands else 0
        gone = warp.groups[: len(warp.groups) - left] if left else warp.groups
        if gone:
            self._hold(warp, max(gone), time, "copies", step)
            warp.groups = warp.groups[len(gone) :]
        return time

    def _hold(self, warp: Warp, until: float, time: float, reason: str, step: Step) -> None:
        """The warp issues nothing more until then."""
        if until > warp.ready:
            self._lose(warp, warp.ready, until, until, reason, step)
            warp.ready = until

    def _barrier(self, warp: Warp, step: Step, what: Bar | None, time: float) -> float | None:
        if what is None:
            return time
        done = self._barriers[what.key] = max(self._barriers[what.key], time) + self.machine["barrier.interval"]
        self._contribute(what.key, done)
        return time if "ARV" in step.slot.opcode else self._await(warp, what.key, time, step, "barrier.wake", "barrier")

    def _mbarrier(self, warp: Warp, step: Step, what: Any, time: float) -> float | None:
        self._release(warp, step, time + self.machine["mbarrier.latency"], "mbarrier")
        if isinstance(what, Arrive):
            for key in what.keys:
                far = key[0] != warp.cta
                self._contribute(key, time + self.machine["mbarrier.remote" if far else "mbarrier.arrive"])
        if isinstance(what, Await) and what.key is not None:
            return self._await(warp, what.key, time, step, "mbarrier.wake", "mbarrier")
        return time

    def _cluster_arrive(self, warp: Warp, step: Step, what: Bar | None, time: float) -> float:
        if what is not None:
            self._contribute(what.key, time)
        return time

    def _cluster_wait(self, warp: Warp, step: Step, what: Await | None, time: float) -> float | None:
        if what is None:
            return time
        return self._await(warp, what.key, time, step, "cluster.barrier", "cluster")

    def _bulk(self, warp: Warp, step: Step, what: Copy | None, time: float) -> float:
        if what is None:
            return time
        warp.sm.pipes[warp.sub][step.pipe] = time + self.machine["tma.issue"]
        answer = warp.sm.port.copy(time + self.machine["tma.issue"], what)
        for key in what.keys:
            self._contribute(key, answer.time)
        if what.store:
            warp.open = max(warp.open, answer.time)
        return time

    def _wgmma(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        begin = max(time, warp.sm.tensor[warp.sub])
        warp.sm.tensor[warp.sub] = begin + step.interval
        warp.open = max(warp.open, begin + step.latency)
        if "gsb0" in step.slot.operands:
            warp.tensor.append(warp.open)
            warp.open = 0.0
        return time

    def _wgmma_wait(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        left = int(step.slot.operands.split(",")[1].strip(), 0)
        gone = warp.tensor[: len(warp.tensor) - left] if left else warp.tensor
        if gone:
            self._hold(warp, max(gone), time, "tensor", step)
            warp.tensor = warp.tensor[len(gone) :]
        return time

    def _fence(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        gpu = "GPU" in step.slot.opcode or "SYS" in step.slot.opcode
        self._hold(warp, time + self.machine["fence.gpu" if gpu else "fence.cta"], time, "fence", step)
        return time

    # events

    def _contribute(self, key: Key, time: float) -> None:
        """One of the things that ``key`` waits for is done, at ``time``."""
        self._left[key] -= 1
        self._when[key] = max(self._when[key], time)
        if not self._left[key]:
            self._over[key] = self._when.pop(key)
            for warp in self._waiting.pop(key, ()):
                self._wake(warp, key)

    def _await(self, warp: Warp, key: Key, time: float, step: Step, figure: str, reason: str) -> float | None:
        """Goes on when ``key`` is over; None if that is not known yet."""
        warp.reason = reason
        warp.happened = (figure, step)
        if key in self._over:
            self._resume(warp, key)
            return time
        self._waiting[key].append(warp)
        return None

    def _resume(self, warp: Warp, key: Key) -> None:
        figure, step = warp.happened
        self._hold(warp, self._over[key] + self.machine[figure], warp.ready, warp.reason, step)

    def _wake(self, warp: Warp, key: Key) -> None:
        self._resume(warp, key)
        self._push(warp.ready, warp)
